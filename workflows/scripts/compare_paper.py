"""Lay a suite's numbers beside the paper's in compare.csv. A difference is reported, never an error."""

import argparse
import csv
import io
import json
import sys
from pathlib import Path

import yaml

from tfm.manifest import write_atomic

DESCRIPTION = """
Reads expected.yaml and the suite's summary.json (in a folder named after the suite). Writes compare.csv: item, paper,
ours, low, high, n, tolerance, status, reason. Last line of stdout: one JSON object.
"""
COLUMNS = ("item", "unit", "paper", "ours", "low", "high", "n", "tolerance", "status", "reason", "source")


def compare(expected: dict, summary: dict, suite: str) -> list[dict]:
    """Return one row an item: pass, fail, open (nothing measured) or not comparable, with the reason."""
    why_not = None
    if suite not in expected["comparable"]:
        why_not = expected["not_comparable"].get(suite, f"suite {suite} is not the paper's configuration")
    rows = []
    for item in expected["items"]:
        ours = summary.get(item["ours"]) or {}
        row = {"item": item["item"], "unit": item["unit"], "paper": item["paper"], "source": item["source"]}
        row |= {"ours": ours.get("value"), "low": ours.get("low"), "high": ours.get("high"), "n": ours.get("n")}
        row["tolerance"] = f"{item['low']} to {item['high']}"
        row["status"], row["reason"] = _status(item, ours.get("value"), why_not)
        rows.append(row)
    return rows


def _status(item: dict, value: float | None, why_not: str | None) -> tuple[str, str]:
    if value is None:
        return "open", f"needs {item.get('needs', 'a run of this item')}"
    if why_not:
        return "not comparable", why_not
    inside = item["low"] <= value <= item["high"]
    return ("pass", "") if inside else ("fail", f"outside {item['low']} to {item['high']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expected", required=True, type=Path, help="workflows/config/expected.yaml")
    parser.add_argument("--summary", required=True, type=Path, help="summary.json of the suite")
    parser.add_argument("--out", required=True, type=Path, help="compare.csv")
    options = parser.parse_args()
    expected, summary = yaml.safe_load(options.expected.read_text()), json.loads(options.summary.read_text())
    rows = compare(expected, summary, options.summary.resolve().parent.name)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(options.out, text.getvalue().encode())
    print(
        json.dumps(
            {status: sum(row["status"] == status for row in rows) for status in sorted({r["status"] for r in rows})}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
