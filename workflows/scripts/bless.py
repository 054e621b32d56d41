"""Propose what expected.yaml should say of a suite, from a finished run; a person decides and copies it."""

import argparse
import difflib
import json
import sys
from pathlib import Path

from check import card_of
from expectations import propose
from input_errors import told
from input_files import read_expected, read_plan, read_summary

from tfm.cells import read_cell
from tfm.manifest import write_atomic

DESCRIPTION = """
Reads plan.json, the summary.json beside it, the cells and expected.yaml. Writes --out, the suite's part of `runs` as
this run would have it, and prints on stderr how it differs from what expected.yaml says now. expected.yaml is never
written: read the difference, then copy what you agree with. Last line of stdout: one JSON object. Exit 2 on bad input.
"""


def source_of(plan: dict) -> str:
    """Return which code and card a run's numbers come from; raises ValueError for uncommitted code."""
    commits = set()
    for cell in plan["cells"]:
        git = read_cell(cell["path"])["environment"]["git"]
        if git["dirty"]:
            raise ValueError(f"{cell['path']} was made by uncommitted code; commit it, make it again, then propose")
        commits.add(str(git["commit"])[:10])
    return f"run of commit {', '.join(sorted(commits))} on {card_of(plan)}"


def as_yaml(suite: str, items: dict) -> str:
    """Return {runs: {suite: items}} as YAML, one item a line."""
    lines = ["runs:", f"  {suite}:"]
    for where, entries in items.items():
        lines.append(f"    {json.dumps(where) if where != 'any' else where}:")
        for item, entry in entries.items():
            fields = f"value: {entry['value']}, tolerance: {entry['tolerance']}, source: {json.dumps(entry['source'])}"
            lines.append(f"      {item}: {{{fields}}}")
    return "\n".join(lines) + "\n"


@told
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json in the suite's folder")
    parser.add_argument("--expected", required=True, type=Path, help="workflows/config/expected.yaml, read only")
    parser.add_argument("--out", required=True, type=Path, help="file for the proposal")
    options = parser.parse_args(arguments)
    plan, expected = read_plan(options.plan), read_expected(options.expected)
    summary = read_summary(options.plan.parent / "summary.json")
    suite = plan["config"]["suite"]
    items = propose(expected, plan, summary, card=card_of(plan), source=source_of(plan))
    now, then = as_yaml(suite, (expected.get("runs") or {}).get(suite) or {}), as_yaml(suite, items)
    write_atomic(options.out, then.encode())
    changes = difflib.unified_diff(now.splitlines(), then.splitlines(), str(options.expected), str(options.out), n=1)
    print(
        "\n".join([*changes, f"nothing was written to {options.expected}: copy what you agree with"]), file=sys.stderr
    )
    print(json.dumps({"proposed": str(options.out), "items": sum(map(len, items.values())), "changed": now != then}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
