"""Check a finished run against what it has to give again; fail by name, with the command that makes the cells again."""

import argparse
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from expectations import Finding, against_published, check_kernels, check_run, points_at
from input_errors import told
from input_files import read_expected, read_plan, read_summary
from kernel_runs import load_kernel_run
from packing import PLAN
from publish import load_published

from tfm.cells import load_cells, read_cell
from tfm.manifest import write_atomic

DESCRIPTION = """
Reads plan.json, the summary.json beside it and the cells, expected.yaml, the published runs and, with --bench, a run of
the kernels' bench.py. Losslessness and acceptance are checked on any card; a time only on the card for which one is
published, elsewhere it is not comparable. Writes junit.xml and summary.md to --out. Prints every failed item with what
was expected, what came with its interval, and the command that makes its cells again. Last line of stdout: one JSON
object. Exit 1 when an item failed, 2 on bad input.
"""
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SIGNS = {"pass": "✓", "fail": "✗", "not comparable": "≠"}


def card_of(plan: dict) -> str:
    """Return the device of the run's cells, one name; several are joined, and match no card."""
    names = {read_cell(cell["path"])["device"]["name"] for cell in plan["cells"]}
    return " + ".join(sorted(names))


def published_runs(published: Path, plan: dict) -> list[Path]:
    """Return the published folders of the plan's suite and family."""
    config = plan["config"]
    found = []
    for path in sorted(published.glob(f"*/{PLAN}")):
        other = read_plan(path)["config"]
        if (other["suite"], other["family"]) == (config["suite"], config["family"]):
            found.append(path.parent)
    return found


def check(plan_file: Path, expected: dict, published: Path, bench: Path | None) -> tuple[str, list[Finding]]:
    """Return the card and all findings of a run; raises ValueError for missing or damaged files."""
    plan = read_plan(plan_file)
    summary = read_summary(plan_file.parent / "summary.json")
    card = card_of(plan)
    findings = check_run(expected, plan, summary, card=card)
    for folder in published_runs(published, plan):
        records = load_cells([cell["path"] for cell in plan["cells"]])
        findings += against_published(records, load_published(folder), plan)
    if bench is not None:
        times = expected["kernel_times"]
        run, reference = load_kernel_run(bench), load_kernel_run(published / times["run"])
        findings += check_kernels(run, reference, tolerance=times["tolerance"])
    return card, findings


def to_junit(suite: str, card: str, findings: list[Finding]) -> bytes:
    """Return the findings as JUnit XML: a test case an item, not comparable ones skipped."""
    counts = {
        "tests": len(findings),
        "failures": _count(findings, "fail"),
        "skipped": _count(findings, "not comparable"),
    }
    top = ElementTree.Element("testsuite", name=f"check {suite} on {card}", **{k: str(v) for k, v in counts.items()})
    for found in findings:
        case = ElementTree.SubElement(top, "testcase", classname=f"check.{suite}", name=found.item)
        if found.status == "fail":
            ElementTree.SubElement(
                case, "failure", message=sentence(found)
            ).text = f"{sentence(found)}\n{found.command}"
        elif found.status == "not comparable":
            ElementTree.SubElement(case, "skipped", message=found.reason)
    for element in top.iter():  # XML has no sign for control characters, so that no reader would take the file
        element.attrib = {name: NOT_XML.sub(" ", text) for name, text in element.attrib.items()}
        element.text = NOT_XML.sub(" ", element.text or "")
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="utf-8", xml_declaration=True) + b"\n"


def to_markdown(suite: str, card: str, findings: list[Finding]) -> str:
    """Return the findings for a person: the failed ones first, each with its command, then all of them."""
    failed = [found for found in findings if found.status == "fail"]
    counts = ", ".join(f"{_count(findings, status)} {status}" for status in SIGNS)
    lines = [f"## check of suite {suite} on {card}: {'FAILED' if failed else 'passed'}", "", f"{counts}.", ""]
    if failed:
        lines += [f"Look first at: {points_at(findings)}.", ""]
    for found in failed:
        lines += [f"- **{found.item}**: {sentence(found)}", "", f"  ```bash\n  {found.command}\n  ```", ""]
    lines += ["| item | status | expected | got | remark | source |", "|" + " --- |" * 6]
    for found in findings:
        cells = [f"`{found.item}`", f"{SIGNS[found.status]} {found.status}", found.expected, found.got, found.reason]
        # a line break would end the row
        cells = [" ".join(cell.replace("|", "\\|").splitlines()) for cell in [*cells, found.source]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def sentence(found: Finding) -> str:
    """Return a finding in one line."""
    source = f" ({found.source})" if found.source else ""
    return f"expected {found.expected}{source}, got {found.got}: {found.reason}"


def _count(findings: list[Finding], status: str) -> int:
    return sum(found.status == status for found in findings)


@told
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json in the suite's folder")
    parser.add_argument("--expected", required=True, type=Path, help="workflows/config/expected.yaml")
    parser.add_argument("--published", required=True, type=Path, help="results/published")
    parser.add_argument("--bench", type=Path, help="folder of a run of bench.py, compared with the published one")
    parser.add_argument("--out", required=True, type=Path, help="folder of junit.xml and summary.md")
    options = parser.parse_args(arguments)
    expected = read_expected(options.expected)
    card, findings = check(options.plan, expected, options.published, options.bench)
    suite = read_plan(options.plan)["config"]["suite"]
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / "junit.xml", to_junit(suite, card, findings))
    write_atomic(options.out / "summary.md", to_markdown(suite, card, findings).encode())
    for found in (found for found in findings if found.status == "fail"):
        print(f"check: {found.item}: {sentence(found)}\n  make its cells again: {found.command}", file=sys.stderr)
    if points_at(findings):
        print(f"check: look first at: {points_at(findings)}", file=sys.stderr)
    print(json.dumps({status: _count(findings, status) for status in SIGNS} | {"card": card}))
    return 1 if _count(findings, "fail") else 0


if __name__ == "__main__":
    sys.exit(main())
