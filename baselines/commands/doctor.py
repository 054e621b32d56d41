"""`tfm doctor`: what this machine has, whether the kernels are right on it, and which suites can run."""

import argparse
import contextlib
import json
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from baselines.commands.cells import check_checkout
from baselines.diagnosis import DEFAULT_SUITE, Finding, diagnose
from baselines.terminal import Screen
from tfm.manifest import REPOSITORY

DESCRIPTION = (
    "Looks at the machine, packages, weights and results, and runs every GDN backend that is available here on random "
    "trees against float64. Writes nothing. Exit status 0 when the default suite can run, 1 otherwise, with the reason "
    "in the last line. In a pipe: state, section, name, finding, separated by tabs."
)
STYLES = {"good": "green", "bad": "bold red", "note": "yellow", "open": "dim"}
NAME_CELLS = 22


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `tfm doctor` takes."""
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the report")


def run(options: argparse.Namespace) -> int:
    """Report every finding; return 1 when the default suite cannot run."""
    check_checkout()
    screen, findings = Screen(), []
    with contextlib.chdir(REPOSITORY):  # configs name weights from there
        for finding in diagnose():
            if not options.json:
                show(screen, finding, is_first=not findings or findings[-1].section != finding.section)
            findings.append(finding)
    reasons = [f"{finding.section}, {finding.name}: {finding.text}" for finding in findings if finding.blocks]
    if options.json:
        screen.console.file.write(json.dumps(as_json(findings, reasons), indent=2) + "\n")
    else:
        verdict(screen, reasons)
    return 1 if reasons else 0


def show(screen: Screen, finding: Finding, *, is_first: bool) -> None:
    """Write one finding, under its section's name when it is the first there."""
    if not screen.is_terminal:
        screen.line("\t".join([finding.state, finding.section, finding.name, " ".join(finding.text.split())]))
        return
    if is_first:
        screen.line()
        screen.line(Text(finding.section.capitalize(), "bold"))
    style = STYLES[finding.state]
    row = Table.grid(padding=(0, 1))
    row.add_column(width=1)
    row.add_column(width=NAME_CELLS)
    row.add_column(overflow="fold")
    sign = Text(getattr(screen.glyphs, finding.state), style)
    row.add_row(sign, Text(finding.name), Text(finding.text, "" if finding.state == "good" else style))
    screen.console.print(row)


def verdict(screen: Screen, reasons: list[str]) -> None:
    """Write the last line: what to call, or why the default suite cannot run."""
    if screen.is_terminal:
        screen.line()
    if reasons:
        text = Text(f"{screen.glyphs.bad} suite {DEFAULT_SUITE} cannot run: {'; '.join(reasons)}", STYLES["bad"])
    else:
        text = Text(f"{screen.glyphs.good} suite {DEFAULT_SUITE} can run: snakemake --cores all", STYLES["good"])
    screen.line(text, wrap=True)


def as_json(findings: Iterable[Finding], reasons: list[str]) -> dict:
    """Return the report as one object: section -> name -> state, text and facts."""
    sections: dict[str, dict] = {}
    for finding in findings:
        entry = {"state": finding.state, "text": finding.text, **finding.facts}
        sections.setdefault(finding.section, {})[finding.name] = entry
    return {"default_suite": DEFAULT_SUITE, "can_run": not reasons, "reasons": reasons, **sections}
