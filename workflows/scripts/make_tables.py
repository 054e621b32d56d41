"""Write all tables of a suite from its records: csv (the source), md and tex, and summary.json."""

import argparse
import json
import logging
import math
import sys
from pathlib import Path

import pandas as pd
import sanity
import tables
from captions import caption
from input_errors import told
from input_files import read_plan
from probe_records import load_probes
from publish import load_published
from summary import summary

from tfm.cells import Records, load_cells
from tfm.manifest import write_atomic, write_json

LISTED = 3  # cells that an error names
DESCRIPTION = """
Reads plan.json and the records it lists (or, with --records, a published folder), checks every file's SHA-256, and
writes tables/<name>.{csv,md,tex}, tables/captions.json and summary.json to --out. Refuses to mix suites, devices,
types, source digests of one method, or cells of other settings than the plan's. Last line of stdout: one JSON object.
Exit 2 on bad input.
"""


def readable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame as text: value [low, high] in one column, numbers rounded, empty for missing."""
    shown = {}
    for column in frame.columns:
        if column.endswith(("_low", "_high")):
            continue
        if f"{column}_low" in frame:
            ends = zip(frame[column], frame[f"{column}_low"], frame[f"{column}_high"], strict=True)
            shown[column] = [_number(value) + _interval(low, high) for value, low, high in ends]
        else:
            shown[column] = [_number(value) for value in frame[column]]
    table = pd.DataFrame(shown)
    keep = [column for column in table if column not in ("suite", "device") and (table[column] != "").any()]
    return table[keep]


def to_markdown(frame: pd.DataFrame, text: str) -> str:
    """Return a Markdown table under its caption."""
    rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.values.tolist()]
    # a line break would end the row
    body = "\n".join("| " + " | ".join(" ".join(c.replace("|", "\\|").split("\n")) for c in row) + " |" for row in rows)
    return f"{text}\n\n{body}\n"


def to_latex(frame: pd.DataFrame, text: str, name: str) -> str:
    """Return a LaTeX table (needs the package booktabs) with its caption and the label tab:<name>."""
    head = " & ".join(map(in_latex, frame.columns))
    body = "\n".join(" & ".join(map(in_latex, row)) + r" \\" for row in frame.values.tolist())
    lines = [
        r"\begin{table}",
        rf"\caption{{{in_latex(text)}}}\label{{tab:{name}}}",
        rf"\begin{{tabular}}{{{'l' * len(frame.columns)}}}",
        rf"\toprule {head} \\ \midrule",
        body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def mixed(plan: dict, records: Records) -> str:
    """Return what in these records does not belong into one table, or is not the plan's; empty for nothing.

    Raises ValueError without a cell, and for rows that no table may be made of.
    """
    if not records.cells:
        raise ValueError(f"no cell of suite {plan['config']['suite']} is finished; run snakemake first")
    sanity.check_rows(records)
    sanity.check_prompts(records)
    others = sanity.differing(plan["cells"], records)
    more = [f"and {len(others) - LISTED} more cells"] if len(others) > LISTED else []
    return "; ".join([*tables.check_one_kind(records), *others[:LISTED], *more])


def write_tables(
    plan: dict, records: Records, out: Path, *, probes: dict | None = None, allow_mixed: bool = False
) -> list[str]:
    """Write the suite's tables and summary; return their names. Raises ValueError for records that do not mix."""
    mix = mixed(plan, records)
    if mix and not allow_mixed:
        raise ValueError(
            f"these records do not belong in one table ({mix}); rerun the older cells, or pass --allow-mixed"
        )
    data, captions = tables.Suite.of(plan, records, probes), {}
    frames = tables.frames(data)
    (out / "tables").mkdir(parents=True, exist_ok=True)
    for name in plan["config"]["tables"]:
        frame = frames[name]
        captions[name] = caption(name, data, note=mix)
        shown = readable(frame)
        texts = {
            "csv": frame.to_csv(index=False, lineterminator="\n"),
            "md": to_markdown(shown, captions[name]),
            "tex": to_latex(shown, captions[name], name),
        }
        for form, text in texts.items():
            write_atomic(out / "tables" / f"{name}.{form}", text.encode())
    write_json(out / "tables/captions.json", captions)
    write_json(out / "summary.json", summary(data, frames))
    return list(captions)


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json of the suite")
    parser.add_argument("--records", type=Path, help="published folder to read instead of the cells' folders")
    parser.add_argument("--out", required=True, type=Path, help="the suite's folder")
    parser.add_argument("--allow-missing", action="store_true", help="show cells that are not there as missing")
    parser.add_argument("--allow-mixed", action="store_true", help="mix digests or devices, and print the mix")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    plan = read_plan(options.plan)
    if options.records:
        records = load_published(options.records)
    else:
        records = load_cells([cell["path"] for cell in plan["cells"]], allow_missing=options.allow_missing)
    probes = load_probes(options.records or options.plan.parent)
    names = write_tables(plan, records, options.out, probes=probes, allow_mixed=options.allow_mixed)
    print(json.dumps({"tables": names, "cells": len(records.cells), "missing": len(records.missing)}))
    return 0


def _number(value) -> str:
    if value is None or (not isinstance(value, str) and pd.isna(value)):
        return ""
    if isinstance(value, float) and 0 < abs(value) < 5e-4:
        return f"{value:.1e}"
    if isinstance(value, float) and math.isinf(value):
        return f"{value:g}"
    if isinstance(value, float) and value != int(value):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return str(int(value)) if isinstance(value, float) else str(value)


def _interval(low, high) -> str:
    return "" if pd.isna(low) or pd.isna(high) else f" [{low:.3f}, {high:.3f}]"


# what LaTeX reads as a command, or prints as another character in its default font encoding
_TEX = {mark: f"\\{mark}" for mark in "&%$#_{}"} | {"\n": " ", "<": r"\textless{}", ">": r"\textgreater{}"}
_TEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}"}


def in_latex(text) -> str:
    """Return text that LaTeX prints as it stands."""
    return "".join(_TEX.get(mark, mark) for mark in str(text))


if __name__ == "__main__":
    sys.exit(main())
