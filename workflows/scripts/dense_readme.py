"""Text of suite dense: its folder's README.md and the table in the project's, all from the tables' numbers."""

import json
from pathlib import Path

import pandas as pd
from dartree_claims import AUTHORS
from input_files import read_plan
from make_figures import LABELS
from packing import PLAN, read_packed

HEAD = "weaver"  # of the builders' rows in the text; the table has all heads
VERDICTS = ("reproduced", "smaller", "refuted", "undecided", "open")


def readme_text(tables: dict[str, pd.DataFrame], summary: dict) -> str:
    """Return the project's section: methods at both temperatures, then what became of the authors' claims."""
    claims = tables["dartree_claims"]
    said = claims[(claims["said_by"] == AUTHORS) & (claims["head"] == HEAD)]
    return "\n\n".join([_methods(tables, summary), _claims(said), _counted(claims), _note(tables, summary)])


def folder_text(folder: Path, tables: dict[str, pd.DataFrame], summary: dict, planned: int) -> str:
    """Return README.md of the published folder."""
    config, packed = read_plan(folder / PLAN)["config"], read_packed(folder / "cells.json.gz")
    commits = sorted({str(cell["environment"]["git"]["commit"])[:7] for cell in packed["cells"]})
    days = sorted({cell["ended"][:10] for cell in packed["cells"]})
    card = tables["headline"]["device"].iloc[0]
    claims, sets = tables["dartree_claims"], ", ".join(config["datasets"])
    number = summary["cells"]["value"]
    parts = [
        f"# DARTree's comparison on a pretrained target: suite {config['suite']} on {card}",
        f"{config['caption']}. {number} of {planned} cells; {sets}; {config['prompts']} prompts of each, up to "
        f"{config['max_new_tokens']} new tokens, {config['dtype']}, budget {config['budget']}, W = "
        f"{config['dartree_width']}, depth bonus {config['depth_bonus']:g}. Commit {', '.join(commits)}, "
        f"{' to '.join(days)}. This file is written by `workflows/scripts/publish_dense.py` from the tables beside it, "
        "which `snakemake rebuild_published` makes again from the records; notes by hand stand in NOTES.md.",
        _methods(tables, summary),
        "## What DARTree's authors say, and what was measured",
        _claims(claims[claims["said_by"] == AUTHORS]),
        _counted(claims),
        "## What this suite asks for",
        _claims(claims[~claims["said_by"].isin([AUTHORS]) & claims["said_by"].notna()]),
        "## Measured beside them",
        _claims(claims[claims["verdict"] == "measured"], verdicts=False),
        "## Builders at the same contexts",
        _builders(tables["builders"]),
        "## Losslessness",
        _lossless(tables["lossless"]),
        *map(_lossless_elsewhere, sorted((folder / "lossless").glob("lossless-*.json"))),
        *_open(config, claims),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _methods(tables: dict[str, pd.DataFrame], summary: dict) -> str:
    frame = tables["headline"]
    settings = sorted(frame["setting"].unique())
    head = ["method", *(f"{name}, T = {one[1:]}" for one in settings for name in ("tau", "speed over ar"))]
    lines = [[*head, "share of the oracle tree", "same tokens as ar"]]
    by = frame.assign(method=frame["variant"].str.partition("-")[0]).set_index(["method", "setting"])
    for method in dict.fromkeys(by.index.get_level_values("method")):
        rows = [by.loc[(method, one)] if (method, one) in by.index else {} for one in settings]
        cells = [_interval(row, name) for row in rows for name in ("tau", "speedup")]
        same = [row for row in rows if len(row) and not pd.isna(row["same_as_ar"])]
        equal = f"{sum(row['same_as_ar'] for row in same):.0f} of {sum(row['compared'] for row in same):.0f}"
        share = _interval(_entry(summary, f"oracle_share_{method}_T1"), "value")
        lines.append([LABELS[method], *cells, share, equal if same else ""])
    return _table(lines)


def _claims(rows: pd.DataFrame, *, verdicts: bool = True) -> str:
    lines = [["claim", "head", "where", *(["printed", "rule"] if verdicts else []), "measured", "n"]]
    lines[0] += ["verdict"] if verdicts else []
    for row in rows.to_dict("records"):
        said = [_number(row["paper"]), _text(row["rule"])] if verdicts else []
        reason = f" ({row['reason']})" if _text(row["reason"]) else ""
        verdict = [f"**{row['verdict']}**{reason}"] if verdicts else []
        place = [row["claim"], row["head"], _text(row["where"])]
        # a width or a budget is one of the sweep's
        measured = _interval(row, "value") if row["unit"].startswith("x") else _whole(row)
        lines.append([*place, *said, measured, f"{row['n']:.0f}", *verdict])
    return _table(lines) if len(lines) > 1 else ""


def _counted(claims: pd.DataFrame) -> str:
    own = claims.loc[claims["said_by"] == AUTHORS, "verdict"]
    counts = ", ".join(f"{(own == name).sum()} {name}" for name in VERDICTS if (own == name).any())
    return (
        f"Of {len(own)} rows with a claim of the authors: {counts}. Smaller is a gain whose interval ends below the "
        "printed one; undecided an interval of which only a part meets the rule."
    )


def _builders(frame: pd.DataFrame) -> str:
    lines = [
        ["builder", "head", "build, us", "calls of the head", "accepted", "share of the oracle tree", "heap / this"]
    ]
    for row in frame.to_dict("records") if "build_us" in frame else ():
        cells = [f"{row['build_us']:.0f}", f"{row['calls']:.1f}", _interval(row, "accepted")]
        cells += [_interval(row, "oracle_share"), _interval(row, "faster_than_heap")]
        lines.append([f"`{row['variant']}`", row["head"], *cells])
    return _table(lines) if len(lines) > 1 else ""


def _lossless(frame: pd.DataFrame) -> str:
    sums = {name: int(frame[name].sum()) for name in ("compared", "same", "near_ties", "wrong")}
    heads, methods = ", ".join(dict.fromkeys(frame["head"])), frame["method"].nunique()
    temperatures = " and ".join(f"{one:g}" for one in sorted(frame["temperature"].unique()))
    return (
        f"{sums['same']} of {sums['compared']} outputs are ar's, token for token, in float32 ({methods} methods, heads "
        f"{heads}, T = {temperatures}); {sums['near_ties']} part at a near tie, {sums['wrong']} are wrong."
    )


def _lossless_elsewhere(path: Path) -> str:
    facts = json.loads(path.read_text(encoding="utf-8"))
    methods = sorted({row["method"] for row in facts["rows"]})
    return (
        f"On {facts['device']['name']} ({facts['device']['kind']}; `lossless/{path.name}`): {facts['same']} of "
        f"{facts['compared']} outputs, {facts['prompts']} prompts, up to {facts['max_new_tokens']} tokens, budget "
        f"{facts['budget']}, {', '.join(methods)}; {facts['near_ties']} part at a near tie, {facts['wrong']} are wrong."
    )


def _note(tables: dict[str, pd.DataFrame], summary: dict) -> str:
    card = tables["headline"]["device"].iloc[0]
    lossless = _lossless(tables["lossless"])
    return (
        f"*{summary['cells']['value']} cells on {card}, one request at a time where timed; 95 % intervals over "
        f"prompts. {lossless}*"
    )


def _open(config: dict, claims: pd.DataFrame) -> list[str]:
    lines = [f"- {one['item']}: needs {one['needs']}." for one in config["open"]]
    own = claims[claims["verdict"] == "open"]
    lines += [f"- {row['claim']}, {row['where']}: {row['reason']}." for row in own.to_dict("records")]
    return ["## Open", "\n".join(lines)] if lines else []


def _table(lines: list[list[str]]) -> str:
    body = ["| " + " | ".join(line) + " |" for line in lines]
    body.insert(1, "|---" * len(lines[0]) + "|")
    return "\n".join(body)


def _entry(summary: dict, name: str) -> dict:
    entry = summary.get(name, {"value": None, "low": None, "high": None})
    return {"value": entry["value"], "value_low": entry["low"], "value_high": entry["high"]}


def _interval(row, name: str) -> str:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    ends = "" if low is None or high is None or pd.isna(low) or pd.isna(high) else f" [{_number(low)}, {_number(high)}]"
    return _number(row.get(name)) + ends


def _whole(row) -> str:
    ends = (row["value"], row["value_low"], row["value_high"])
    return "" if any(map(pd.isna, ends)) else "{:.0f} [{:.0f}, {:.0f}]".format(*ends)


def _number(value) -> str:
    if value is None or pd.isna(value):
        return ""
    return f"{value:.0f}" if value >= 8 and value == int(value) else f"{value:.2f}"


def _text(value) -> str:
    return "" if value is None or pd.isna(value) else str(value)
