"""summary.json: the flat numbers people quote, name -> {value, low, high, n, unit}."""

import math
import re
from datetime import datetime

import builder_tables
import controls
import dartree_claims
import family_tables
import lossless_table
import pandas as pd
import sanity
import tables

from tfm.cells import Records

PAPER_METHODS = ("ar", "dflash", "ddtree", "tfm")  # of the paper's bars, on which tfm is the fastest
UNITS = {"tau": "tokens a step", "accepted": "drafts a step", "tok_s": "tokens/s", "speedup": "x"}


def summary(data: tables.Suite, frames: dict[str, pd.DataFrame]) -> dict:
    """Return the flat numbers people quote: name -> {value, low, high, n, unit}."""
    count = len(data.records.cells)
    seconds = {"value": busy_seconds(data.records), "n": count}
    entries = {
        **_headline(frames["headline"]),
        **_pairs(frames["paired"]),
        **_sets(frames["per_set"]),
        **_shares(frames["latency"]),
        **_sweeps(frames["sweeps"]),
        **_audit(frames["audit"]),
        **_ceiling(frames["ceiling_claims"]),
        **_oracle(frames["oracle"]),
        **_kernels(data, frames["kernels"]),
        **_controls(frames["controls"]),
        **_definitions(data),
        **builder_tables.values(frames["builders"], data.config["budget"]),
        **dartree_claims.values(frames["dartree_claims"]),
        **lossless_table.values(frames["lossless"]),
        **family_tables.values(frames["families"]),
        "suite_seconds": _entry(seconds, "value", "s in which at least one cell ran"),
        "cells": _entry({"value": count, "n": count}, "value", "cells"),
    }
    return entries | _by_budget(entries, data.config["budget"])


def _by_budget(entries: dict, budget: int) -> dict:
    """Return what papers quote again, under names that say the headline's budget."""
    named = {}
    for name, entry in entries.items():
        if found := re.fullmatch(r"ratio_(accepted|tau)_(\w+)_(T[\d.]+)", name):
            named[f"{found[1]}_ratio_{found[2]}_{found[3]}_B{budget}"] = entry
        elif re.fullmatch(r"(tau|oracle_share)_[a-z]+_T[\d.]+", name):
            named[f"{name}_B{budget}"] = entry
    aliases = {"legacy_excess_T1": "excess_legacy_traversal", "crossover_fig6": "ceiling_crossover_acceptance"}
    return named | {name: entries[other] for name, other in aliases.items() if other in entries}


def busy_seconds(records: Records) -> float:
    """Return the seconds in which at least one cell ran: overlaps count once, pauses not at all."""
    spans = sorted((_time(cell["started"]), _time(cell["ended"])) for cell in records.cells)
    total, end = 0.0, -math.inf
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return round(total, 1)


def _headline(frame: pd.DataFrame) -> dict:
    entries, equal, compared = {}, 0, 0
    for row in frame.to_dict("records"):
        name = f"{row['variant'].split('-')[0]}_{_suffix(row['setting'])}"
        entries |= {f"{metric}_{name}": _entry(row, metric, unit) for metric, unit in UNITS.items()}
        same = {"value": row.get("same_as_ar"), "n": row.get("compared")}
        entries[f"same_as_ar_{name}"] = _entry(same, "value", "outputs")
        if not pd.isna(row.get("compared")):
            equal, compared = equal + int(row["same_as_ar"]), compared + int(row["compared"])
    share = {"value": equal / compared if compared else None, "n": compared}
    return entries | {"same_as_ar_share": _entry(share, "value", "share of outputs")}


def _pairs(frame: pd.DataFrame) -> dict:
    entries = {}
    for row in frame[frame["dataset"] == "macro"].to_dict("records") if "pair" in frame else ():
        name = f"{row['metric']}_{row['pair'].replace(' - ', '_')}_{_suffix(row['setting'])}"
        entries[f"diff_{name}"] = _entry(row, "difference", UNITS[row["metric"]])
        entries[f"ratio_{name}"] = _entry(row, "ratio", "x")
    by_set = frame[frame["dataset"] != "macro"] if "pair" in frame else frame
    for (pair, metric, setting), rows in by_set.groupby(["pair", "metric", "setting"]) if "pair" in frame else ():
        name = f"ratio_{metric}_{pair.replace(' - ', '_')}_{_suffix(setting)}"
        for end in ("min", "max"):
            least = {"value": getattr(rows["ratio"], end)(), "n": rows["ratio"].count()}
            entries[f"{name}_{end}_of_sets"] = _entry(least, "value", "x")
    return entries


def _sets(frame: pd.DataFrame) -> dict:
    entries, filled = {}, 0
    for setting, rows in frame.groupby("setting"):
        filled += int(rows["tau"].notna().all()) if "tau" in rows else 0
        speed = rows.dropna(subset=["tok_s"]) if "tok_s" in rows else rows.head(0)
        # split, not partition: of no rows (a suite that is not timed) partition makes no column
        speed = speed.assign(method=speed["variant"].str.split("-").str[0])
        speed = speed[speed["method"].isin(PAPER_METHODS)]
        best = speed.loc[speed.groupby("dataset")["tok_s"].idxmax(), "method"] if len(speed) else ()
        row = {"value": int((best == "tfm").sum()) if len(speed) else None, "n": len(best)}
        entries[f"tfm_fastest_sets_{_suffix(setting)}"] = _entry(row, "value", "prompt sets")
    settings = {"value": filled, "n": frame["setting"].nunique()}
    return entries | {"settings_filled": _entry(settings, "value", "settings")}


def _shares(frame: pd.DataFrame) -> dict:
    entries = {}
    for method, rows in frame.dropna(subset=["stage"]).groupby("method") if "stage" in frame else ():
        shares, n = rows.set_index("stage")["share"], rows["steps"].iloc[0]
        for name in ("gdn", "verify"):
            entries[f"{name}_share_{method}"] = _entry({"value": shares[name], "n": n}, "value", "share of a step")
        total = {"value": rows.loc[rows["level"] == "stage", "share"].sum(), "n": n}
        entries[f"stages_sum_{method}"] = _entry(total, "value", "share of a step")
    return entries


def _sweeps(frame: pd.DataFrame) -> dict:
    entries = {}
    known = frame.dropna(subset=["tau", "value"]) if "tau" in frame else frame.head(0)
    for (knob, method), rows in known.groupby(["sweep", "method"]) if len(known) else ():
        points = {"value": rows["value"].nunique(), "n": rows["n"].min()}
        entries[f"sweep_points_{knob}_{method}"] = _entry(points, "value", "points")
        first, last = (rows.loc[getattr(rows["value"], f"idx{end}")(), "tau"] for end in ("min", "max"))
        ratio = {"value": last / first, "n": rows["n"].min()}
        entries[f"sweep_tau_{knob}_{method}"] = _entry(ratio, "value", "tau at the largest over tau at the smallest")
    return entries


def _audit(frame: pd.DataFrame) -> dict:
    entries, mine = {}, frame[frame["variant"].str.startswith("tfm")] if "excess" in frame else frame.head(0)
    for row in mine.to_dict("records"):
        siblings = "sampled_" if "-sampled" in row["variant"] else ""
        entries[f"excess_{siblings}{row['rule']}"] = _entry(row, "excess", "drafts a step")
    return entries


def _ceiling(frame: pd.DataFrame) -> dict:
    entries = {}
    for row in frame.to_dict("records") if "key" in frame else ():
        unit = "draft length" if row["key"].startswith("crossover") else "acceptance"
        entries[f"ceiling_{row['key']}"] = _entry(row, "value", unit)
    return entries


def _oracle(frame: pd.DataFrame) -> dict:
    entries = {}
    for row in frame[frame["dataset"] == "macro"].to_dict("records") if "dataset" in frame else ():
        if row["variant"] == "ar":
            entries["target_entropy_nats"] = _entry(row, "entropy_nats", "nats a token of ar's answers")
        else:
            name = f"oracle_share_{row['variant'].split('-')[0]}_{_suffix(row['setting'])}"
            entries[name] = _entry(row, "share", "share of the best lossless tree")
    return entries


def _kernels(data: tables.Suite, frame: pd.DataFrame) -> dict:
    entries = {}
    for row in frame.to_dict("records") if "us" in frame else ():
        if row["shape"] == "mixed":
            name = f"{row['backend']}_{row['rows']}"
            entries[f"kernel_us_{name}"] = _entry(row, "us", "us a layer")
            entries[f"kernel_ratio_{name}"] = _entry(row, "ratio", "x")
    checks = data.probes["kernels"].frames["checks"] if "kernels" in data.probes else pd.DataFrame(columns=["op"])
    # a refused size has no dtype and no error
    known = checks[checks["dtype"] != ""] if len(checks) else checks
    for (op, dtype), rows in known.groupby(["op", "dtype"]) if len(known) else ():
        worst = {"value": rows["error"].max(), "n": len(rows)}
        entries[f"kernel_error_{op}_{dtype}"] = _entry(worst, "value", "relative to the largest value")
    return entries


def _controls(frame: pd.DataFrame) -> dict:
    """Return the controls that were measured; a suite without the null control has no entry of it."""
    names = {controls.RATE: ("null_tok_s_ar", "x"), controls.CLOCKS: ("clock_drift", "x")}
    rows = frame.dropna(subset=["value"]).to_dict("records")
    return {
        names[row["control"]][0]: _entry(row, "value", names[row["control"]][1])
        for row in rows
        if row["control"] in names
    }


def _definitions(data: tables.Suite) -> dict:
    known = data.probes["definitions"].facts["values"] if "definitions" in data.probes else {}
    complete = {"value": sanity.complete_share(data.records.cells), "n": len(data.records.cells)}
    entries = {name: _entry(row, "value", row["unit"]) for name, row in known.items()}
    return entries | {"provenance_complete": _entry(complete, "value", "share of cells")}


def _suffix(setting: str) -> str:
    return setting.upper().replace("-", "_")


def _entry(row: dict, key: str, unit: str) -> dict:
    numbers = {"value": row.get(key), "low": row.get(f"{key}_low"), "high": row.get(f"{key}_high"), "n": row.get("n")}
    plain = {name: getattr(value, "item", lambda value=value: value)() for name, value in numbers.items()}
    return {name: None if pd.isna(value) else value for name, value in plain.items()} | {"unit": unit}


def _time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
