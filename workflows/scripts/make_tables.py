"""Write all tables of a suite from its records: csv (the source), md and tex, and summary.json."""

import argparse
import json
import logging
import math
import sys
from datetime import datetime
from pathlib import Path

import pandas as pd
import tables
from publish import load_published

from tfm.cells import Records, load_cells
from tfm.manifest import write_atomic, write_json

DESCRIPTION = """
Reads plan.json and the records it lists (or, with --records, a published folder), checks every file's SHA-256, and
writes tables/<name>.{csv,md,tex}, tables/captions.json and summary.json to --out. Refuses to mix suites, devices,
types, or source digests of one method. Last line of stdout: one JSON object. Exit 2 on bad input.
"""
TITLES = {
    "headline": "Speed and accepted drafts, macro over prompt sets",
    "per_set": "Speed and accepted drafts by prompt set",
    "latency": "Where a step's time goes",
    "acceptance_by_position": "Acceptance by draft position",
    "sweeps": "Sweeps of budget, width, candidates, children and depth, and the weaver's residual on (1) and off (0)",
    "paired": "Paired differences between methods",
    "audit": "Audit of the acceptance rules",
}
NOTES = {
    "headline": "tok/s: new tokens / wall of the prompt loop, prefill included, first seed; speedup: ratio of macro "
    "tok/s to ar's, slow-downs shown as they are. tau: new tokens a step, the bonus token included (1 for ar by "
    "definition); tau_exact leaves out the token sampled at prefill (1.0 when nothing is accepted); tau_pooled divides "
    "the tokens of all requests by their steps, so that long answers weigh more; accepted: drafts a "
    "step, without the bonus, trimmed to what was emitted. same_as_ar: outputs equal to ar's, of those compared. "
    "flag: other work on the machine may have disturbed a timed cell (its process had less than "
    f"{tables.CPU_SHARE:.0%} of a core's time, or its slowest request's step took over {tables.STEP_SPREAD}x the "
    "fastest one's).",
    "latency": "Microseconds a step, from cells with stage timing; the levels verify and build split those stages. gdn "
    "is the recurrent layers' part of verify plus commit. untimed_decode_us is the same cell without stage timing.",
    "acceptance_by_position": "conditional: accepted at d given accepted at d - 1 and a tree that reaches d; "
    "unconditional: accepted at d, over all steps. n counts steps of the conditional.",
    "sweeps": "One knob at a time, the others as in the headline; a budget's width is ceil(budget / 16) "
    "for tfm, dartree keeps its own, and drafts at most width nodes a depth.",
    "paired": "Same prompts and seeds in both arms, resampled together; n counts prompts present in both.",
    "audit": "expected_accepted is the lossless bound of the same steps; excess is what was accepted over it, steps "
    "pooled; a rule above it is lossy. -sampled draws siblings without replacement: with traversal the law holds on "
    "average over trees, and no step has a bound. Values untrimmed.",
}
ON_THE_SIDE = ("latency", "sweeps", "audit")  # tables of one set, setting and seed
NOTES["per_set"] = NOTES["headline"]


def caption(name: str, data: tables.Suite, *, note: str = "") -> str:
    """Return what a reader has to know of a table: suite, device, sizes, counts, what is left open."""
    config, requests = data.config, data.requests
    devices = " + ".join(sorted(requests["device_name"].unique())) or "no device"
    per_set = requests.groupby("dataset")["id"].nunique()
    counts = ", ".join(f"{dataset} {per_set.get(dataset, 0)}" for dataset in config["datasets"])
    if name in ON_THE_SIDE:
        side = data.side
        counts = f"{side['dataset']} {per_set.get(side['dataset'], 0)}, setting {side['setting']}, seed {side['seed']}"
    budget = config["budget"]
    parts = [
        f"{TITLES[name]}. {NOTES.get(name, '')}".strip(),
        f"Suite {config['suite']} on {devices}, engine {config['engine']}, target {config['family']}, "
        f"{config['dtype']}, protocol {config['protocol']}{_reasoning(config)}; "
        "timed cells decode one request at a time.",
        f"Budget {budget} drafted nodes, {budget + 1} verified rows (the root is extra).",
        f"Prompts: {counts}; up to {config['max_new_tokens']} new tokens; intervals are 95 % bootstrap over prompts.",
    ]
    missing = data.records.missing
    parts += [f"Missing: {len(missing)} of {len(data.plan)} cells."] if missing else []
    parts += [f"MIXED: {note}."] if note else []
    parts += [f"Open: {'; '.join(item['item'] for item in config['open'])}."] if config["open"] else []
    return " ".join(parts)


def _reasoning(config: dict) -> str:
    """Say which settings open a think block; nothing where none does."""
    if True not in config["reasoning"]:
        return ""
    return ", reasoning on (-think)" + (" and off" if False in config["reasoning"] else "")


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
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return f"{text}\n\n{body}\n"


def to_latex(frame: pd.DataFrame, text: str, name: str) -> str:
    """Return a LaTeX table (needs the package booktabs) with its caption and the label tab:<name>."""
    head = " & ".join(map(_tex, frame.columns))
    body = "\n".join(" & ".join(map(_tex, row)) + r" \\" for row in frame.values.tolist())
    lines = [
        r"\begin{table}",
        rf"\caption{{{_tex(text)}}}\label{{tab:{name}}}",
        rf"\begin{{tabular}}{{{'l' * len(frame.columns)}}}",
        rf"\toprule {head} \\ \midrule",
        body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def summary(data: tables.Suite, frames: dict[str, pd.DataFrame]) -> dict:
    """Return the flat numbers people quote: name -> {value, low, high, n, unit}."""
    entries = {}
    for row in frames["headline"].to_dict("records"):
        method, setting = row["variant"].split("-")[0], row["setting"].upper().replace("-", "_")
        for metric, unit in (
            ("tau", "tokens a step"),
            ("accepted", "drafts a step"),
            ("tok_s", "tokens/s"),
            ("speedup", "x"),
        ):
            entries[f"{metric}_{method}_{setting}"] = _entry(row, metric, unit)
        same = {"value": row.get("same_as_ar"), "n": row.get("compared")}
        entries[f"same_as_ar_{method}_{setting}"] = _entry(same, "value", "outputs")
    for row in frames["paired"].to_dict("records"):
        if row["dataset"] == "macro":
            name = f"{row['metric']}_{row['pair'].replace(' - ', '_')}_{row['setting'].upper().replace('-', '_')}"
            unit = "drafts a step" if row["metric"] == "accepted" else "tokens a step"
            entries[f"diff_{name}"] = _entry(row, "difference", unit)
            entries[f"ratio_{name}"] = _entry(row, "ratio", "x")
    count = len(data.records.cells)
    seconds = {"value": busy_seconds(data.records), "n": count}
    entries["suite_seconds"] = _entry(seconds, "value", "s in which at least one cell ran")
    entries["cells"] = _entry({"value": count, "n": count}, "value", "cells")
    return entries


def busy_seconds(records: Records) -> float:
    """Return the seconds in which at least one cell ran: overlaps count once, pauses not at all."""
    spans = sorted((_time(cell["started"]), _time(cell["ended"])) for cell in records.cells)
    total, end = 0.0, -math.inf
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return round(total, 1)


def write_tables(plan: dict, records: Records, out: Path, *, allow_mixed: bool = False) -> list[str]:
    """Write the suite's tables and summary; return their names. Raises ValueError for records that do not mix."""
    if not records.cells:
        raise ValueError(f"no cell of suite {plan['config']['suite']} is finished; run snakemake first")
    mix = "; ".join(tables.check_one_kind(records))
    if mix and not allow_mixed:
        raise ValueError(
            f"these records do not belong in one table ({mix}); rerun the older cells, or pass --allow-mixed"
        )
    data, captions = tables.Suite.of(plan, records), {}
    # the summary quotes these two, whether or not they are among the suite's tables
    names = list(dict.fromkeys([*plan["config"]["tables"], "headline", "paired"]))
    frames = {name: tables.TABLES[name](data) for name in names}
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


def read_plan(path: Path) -> dict:
    """Return a suite's plan.json; raises ValueError with the remedy when it is missing or damaged."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        if {"config", "cells"} <= set(plan):
            return plan
        problem = "lacks config or cells"
    except FileNotFoundError:
        problem = "does not exist"
    except (ValueError, TypeError) as error:
        problem = f"is damaged ({error})"
    raise ValueError(f"plan: {path} {problem}; make it with `snakemake --cores all {path}`, or restore it from git")


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json of the suite")
    parser.add_argument("--records", type=Path, help="published folder to read instead of the cells' folders")
    parser.add_argument("--out", required=True, type=Path, help="the suite's folder")
    parser.add_argument("--allow-missing", action="store_true", help="show cells that are not there as missing")
    parser.add_argument("--allow-mixed", action="store_true", help="mix digests or devices, and print the mix")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    try:
        plan = read_plan(options.plan)
        if options.records:
            records = load_published(options.records)
        else:
            records = load_cells([cell["path"] for cell in plan["cells"]], allow_missing=options.allow_missing)
        names = write_tables(plan, records, options.out, allow_mixed=options.allow_mixed)
    except ValueError as error:
        print(f"make_tables: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"tables": names, "cells": len(records.cells), "missing": len(records.missing)}))
    return 0


def _entry(row: dict, key: str, unit: str) -> dict:
    numbers = {"value": row.get(key), "low": row.get(f"{key}_low"), "high": row.get(f"{key}_high"), "n": row.get("n")}
    return {name: None if pd.isna(value) else value for name, value in numbers.items()} | {"unit": unit}


def _number(value) -> str:
    if value is None or (not isinstance(value, str) and pd.isna(value)):
        return ""
    if isinstance(value, float) and value != int(value):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return str(int(value)) if isinstance(value, float) else str(value)


def _interval(low, high) -> str:
    return "" if pd.isna(low) or pd.isna(high) else f" [{low:.3f}, {high:.3f}]"


def _tex(text: str) -> str:
    return "".join(f"\\{mark}" if mark in "&%$#_{}" else mark for mark in text)


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    sys.exit(main())
