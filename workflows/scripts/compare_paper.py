"""Lay a suite's numbers beside the paper's: the whole inventory in compare.csv, and readable in compare.md."""

import argparse
import csv
import io
import json
import math
import sys
from pathlib import Path

from input_errors import told
from input_files import read_expected, read_plan, read_summary

from tfm.manifest import write_atomic

DESCRIPTION = """
Reads expected.yaml and the suite's summary.json, in a folder named after the suite; the devices stand in
tables/headline.csv beside it, the type in plan.json. Writes compare.csv, one row an item: row of the inventory, item,
paper, ours, low, high, n, tolerance, status, reason, source; compare.md is the same. status is pass, fail, not
comparable (with the reason) or open (with what it needs). A difference is reported, never an error. Last line of
stdout: one JSON object.
"""
COLUMNS = (
    "row",
    "what",
    "item",
    "unit",
    "paper",
    "ours",
    "low",
    "high",
    "n",
    "tolerance",
    "status",
    "reason",
    "source",
)


def compare(
    expected: dict, summary: dict, suite: str, *, devices: set[str] = frozenset(), dtype: str | None = None
) -> list[dict]:
    """Return one row an item: pass, fail, open (nothing measured) or not comparable, with the reason.

    An absolute number is comparable only when all `devices`, on which the suite ran, are the paper's card; an item of
    one type only where `dtype`, in which the suite decoded, is that type or not known.
    """
    card = expected["card"]
    on_card = bool(devices) and all(card in name for name in devices)
    other_card = f"a time of {', '.join(sorted(devices)) or 'an unknown device'}, not of a {card}"
    why_not = None
    if suite not in expected["comparable"]:
        why_not = expected["not_comparable"].get(suite, f"suite {suite} is not the paper's configuration")
    rows = []
    for item in expected["items"]:
        ours = measured(item, summary)
        if why_not and not ours:  # never in the paper's own suite: its headline is reasoning on
            ours = measured(item, summary, reasoning=False)
        row = {"row": item["row"], "what": expected["rows"][item["row"]], "item": item["item"], "unit": item["unit"]}
        row |= {"paper": item["paper"], "source": item["source"], "tolerance": tolerance(item)}
        row |= {"ours": ours.get("value"), "low": ours.get("low"), "high": ours.get("high"), "n": ours.get("n")}
        elsewhere = other_card if item["per"] == "absolute" and not on_card else None
        row["status"], row["reason"] = _status(item, ours, why_not or elsewhere)
        if ours and not is_of_type(item, dtype):
            row |= {"status": "not comparable", "reason": f"decoded in {dtype}, asked of {item['dtype']}"}
        rows.append(row)
    return rows


def measured(item: dict, summary: dict, *, reasoning: bool = True) -> dict:
    """Return the entry of the summary that an item names, the first one with a value of several; empty for none.

    Without `reasoning`, T1 stands for T1_THINK.
    """
    names = item["ours"] if isinstance(item["ours"], list) else [item["ours"]]
    names = names if reasoning else [name and name.replace("_T1_THINK", "_T1") for name in names]
    entries = [summary[name] for name in names if summary.get(name)]
    return next((entry for entry in entries if entry.get("value") is not None), {})


def is_of_type(item: dict, dtype: str | None) -> bool:
    """Return whether an item is asked of what was decoded in this type; an unknown one counts as the item's."""
    return dtype is None or item.get("dtype", dtype) == dtype


def devices_of(headline: Path) -> set[str]:
    """Return the devices that the headline table names; none where the suite has no such table."""
    if not headline.exists():
        return set()
    with open(headline, newline="", encoding="utf-8") as file:
        return {row["device"] for row in csv.DictReader(file) if row.get("device")}


def tolerance(item: dict) -> str:
    """Return the pass band in words."""
    low, high = item.get("low"), item.get("high")
    if low is None and high is None:
        return ""
    if item.get("test") == "interval":
        return f"interval above {low:g}" if low is not None else f"interval not above {high:g}"
    if low is not None and high is not None:
        return f"{low:g} to {high:g}" if low != high else f"{low:.12g}"
    return f"at least {low:g}" if low is not None else f"at most {high:g}"


def _status(item: dict, ours: dict, why_not: str | None) -> tuple[str, str]:
    if "no_data" in item:
        return "not comparable", item["no_data"]
    if ours.get("value") is None:
        return "open", f"needs {item.get('needs', 'a run of this item')}"
    if item["per"] != "any" and why_not:
        return "not comparable", why_not
    if not tolerance(item):
        return "not comparable", "no value of the paper was read"
    value, (low, high) = ours["value"], (item.get("low", -math.inf), item.get("high", math.inf))
    if item.get("test") == "interval":
        ends = ours.get("low"), ours.get("high")
        if None in ends:
            return "open", "needs more prompts: the number has no interval"
        # a band with a low end asks for all of the interval, one with a high end only allows some of it
        if (ends[0] > low) if "low" in item else (ends[0] <= high):
            return "pass", ""
        if "low" in item and ends[1] >= low:
            return "open", f"needs more prompts: the interval {ends[0]:.3g} to {ends[1]:.3g} holds {low:g}"
        return "fail", f"the interval {ends[0]:.3g} to {ends[1]:.3g} is outside: {tolerance(item)}"
    return ("pass", "") if low <= value <= high else ("fail", f"{value:.3g} is outside: {tolerance(item)}")


def to_markdown(rows: list[dict]) -> str:
    """Return the inventory as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS[:-1]) + " |", "|" + " --- |" * (len(COLUMNS) - 1)]
    for row in rows:
        cells = [shown(row[name]).replace("|", "\\|") for name in COLUMNS[:-1]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write_comparison(rows: list[dict], out: Path) -> None:
    """Write the rows of `compare` as csv, and as Markdown beside it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(out, text.getvalue().encode())
    write_atomic(out.with_suffix(".md"), to_markdown(rows).encode())


def shown(value) -> str:
    """Return a value as a Markdown table shows it: four digits, empty for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expected", required=True, type=Path, help="workflows/config/expected.yaml")
    parser.add_argument("--summary", required=True, type=Path, help="summary.json of the suite")
    parser.add_argument("--out", required=True, type=Path, help="compare.csv; compare.md is written beside it")
    options = parser.parse_args()
    expected, summary = read_expected(options.expected), read_summary(options.summary)
    folder = options.summary.resolve().parent
    plan = folder / "plan.json"
    dtype = read_plan(plan)["config"]["dtype"] if plan.exists() else None
    known = {"devices": devices_of(folder / "tables/headline.csv"), "dtype": dtype}
    rows = compare(expected, summary, folder.name, **known)
    write_comparison(rows, options.out)
    statuses = [row["status"] for row in rows]
    print(json.dumps({status: statuses.count(status) for status in sorted(set(statuses))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
