"""Tables and summary of a published run of engines: steps inside SGLang and of this project's engine, memory, tau."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from engine_tables import interval, samples_of
from engine_taus import METHODS as ARMS
from engine_taus import SETTINGS, engine_of, pair_rows, per_engine, tau_rows
from packing import read_packed
from publish import load_published

from tfm.cells import Records
from tfm.manifest import write_atomic

MARK = "engines.json"  # of a published run of engines: what was asked for, and where what is missing stopped
STEPS, CELLS = "steps.json.gz", "cells.json.gz"
RECURRENT = "ddtree-recurrent"  # the same tree, verified by SGLang's own kernel
SERVED_ARMS = (*ARMS, RECURRENT)
KINDS = ("fused", "recurrent")  # of states: this project's op, SGLang's kernel
SEED, RESAMPLES = 20260617, 2000
STATES = {"ssm_state": "committed_state_gib", "conv_state": "committed_window_gib", "plugin": "plugin_gib"}
STATES |= {"intermediate_ssm_state_cache": "node_states_gib", "intermediate_conv_window_cache": "node_windows_gib"}
KEYS = {
    "steps": ["engine", "arm", "attention", "context", "step_ms", "low", "high", "n", "n_of", "steps_each", "accepted"]
    + [
        "over_ar",
        "over_ar_low",
        "over_ar_high",
        "ar_from",
        "over_chain",
        "over_chain_low",
        "over_chain_high",
        "commit",
        "reason",
    ],
    "memory": ["engine", "arm", "card_mib", "weights_gib", "kv_gib", "beside_weights_gib", *STATES.values(), "reason"],
    "tau": ["engine", "method", "setting", "dataset", "tau", "low", "high", "n", "accepted", "accepted_low"]
    + ["accepted_high", "tau_pooled", "ms_a_step", "reason"],
    "pairs": ["setting", "one", "other", "number", "value", "low", "high", "n", "same_tokens", "outputs", "reason"],
    "texts": ["method", "prompt", "verdict", "tokens", "at", "gap", "moved", "ready_s", "reason"],
    "missing": ["part", "what", "reason"],
}


@dataclass(frozen=True)
class Run:
    """One run of engines as it is published."""

    asked: dict  # of MARK
    served: list[dict]  # files of bench_serving.py
    ours: dict | None  # of a file of bench_engine.py
    texts: list[dict]  # files of check_serving.py
    records: Records | None
    stated: dict = field(default_factory=dict)  # engine_steps of expected.yaml

    def stopped(self, part: str) -> str:
        """Return why a part of the run is not there, as the one who published it said."""
        return self.asked["stopped"].get(part, "not run")


def is_engines_run(folder: Path) -> bool:
    """Return whether a published folder holds a run of engines."""
    return (folder / MARK).is_file()


def load_run(folder: Path, expected: dict) -> Run:
    """Return the run in a published folder; raises ValueError naming a file that is missing or damaged."""
    try:
        asked, found = json.loads((folder / MARK).read_text(encoding="utf-8")), read_packed(folder / STEPS)
        parts = {name: found[name] for name in ("served", "ours", "texts")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: damaged ({type(error).__name__}: {error}); restore it from git") from error
    records = load_published(folder) if (folder / CELLS).is_file() else None
    return Run(asked=asked, **parts, records=records, stated=expected.get("engine_steps", {}))


# --- steps


def estimate(values: list[float], base: list[float] | None = None) -> dict:
    """Return the median of requests' steps, or its ratio to that of `base`, with a bootstrap 95 % interval.

    Requests of two servers did not stand beside each other, so both are drawn apart. One request has no interval.
    """
    rows, below = np.asarray(values, dtype=float), np.asarray([1.0] if base is None else base, dtype=float)
    value = float(np.median(rows) / np.median(below))
    found = {"value": value, "low": None, "high": None, "n": len(rows)}
    if min(len(rows), len(below) if base is not None else len(rows)) > 1:
        generator = np.random.default_rng(SEED)
        draws = [np.median(part[generator.integers(0, len(part), (RESAMPLES, len(part)))], 1) for part in (rows, below)]
        found["low"], found["high"] = map(float, np.percentile(draws[0] / draws[1], [2.5, 97.5]))
    return found


def served_rows(run: Run) -> list[dict]:
    """Return a row for each planned or measured arm of SGLang, attention backend and context."""
    found: dict[tuple, tuple[int, pd.DataFrame]] = {}
    for number, record in enumerate(run.served):
        for arm, facts in record["arms"].items():
            for context, part in pd.DataFrame(facts["rows"]).groupby("prompt_tokens"):
                # a later file repeats an arm of an earlier one: it stands
                found[record["options"]["attention"], arm, int(context)] = (number, part)
    rows = []
    for (attention, arm, context), (number, part) in found.items():
        row = {"engine": "sglang", "arm": arm, "attention": attention, "context": context, "n_of": "requests"}
        row |= _named(estimate(part["step_ms"].tolist()), "step_ms", "low", "high")
        row |= {"n": len(part), "steps_each": float(part["steps"].median()), "reason": ""}
        row["commit"] = str(run.served[number]["git"]["commit"])[:7]
        # the first token is prefill's, and each step's last one is no draft
        row["accepted"] = float(((part["new_tokens"] - 1) / part["steps"] - 1).median()) if arm != "ar" else None
        if arm == "ar":
            row |= {"over_ar": 1.0, "ar_from": "itself"}
        elif base := found.get((attention, "ar", context)):
            ratio = estimate(part["step_ms"].tolist(), base[1]["step_ms"].tolist())
            row |= _named(ratio, "over_ar", "over_ar_low", "over_ar_high")
            row["ar_from"] = "the same call" if base[0] == number else "another call"
        else:
            row["reason"] = "no ratio: ar was not timed with this attention and context"
        chain = found.get((attention, "dflash", context))
        if chain and arm not in ("ar", "dflash"):
            ratio = estimate(part["step_ms"].tolist(), chain[1]["step_ms"].tolist())
            row |= _named(ratio, "over_chain", "over_chain_low", "over_chain_high")
        rows.append(row)
    contexts = sorted({context for _, _, context in found} | {run.asked["context"]})
    measured = {(arm, context) for attention, arm, context in found if attention == run.asked["attention"]}
    for arm, context in ((arm, context) for arm in SERVED_ARMS for context in contexts):
        if (arm, context) not in measured:
            row = {"engine": "sglang", "arm": arm, "attention": run.asked["attention"], "context": context}
            rows.append({**row, "n": 0, "reason": why_not_served(run, arm)})
    return sorted(rows, key=lambda row: (row["attention"], row["context"], place_of(row["arm"])))


def why_not_served(run: Run, arm: str) -> str:
    """Return why SGLang has no step of an arm."""
    failed = [record["failed"][arm] for record in run.served if arm in record["failed"]]
    return f"failed: {failed[-1]}" if failed else run.stopped("steps")


def own_rows(run: Run) -> list[dict]:
    """Return a row for each arm and context of this project's engine; whole steps only."""
    rows, known, asked = [], run.ours or {"records": []}, run.asked
    base = samples_of(known, asked["variant"])
    found = {(arm, context): steps for (arm, context), steps in base.items() if arm in ARMS}
    slow = samples_of(known, asked["recurrent_variant"])
    found |= {(f"{arm}-recurrent", context): steps for (arm, context), steps in slow.items() if arm in ARMS}
    for (arm, context), rounds in found.items():
        row = {"engine": "ours", "arm": arm, "attention": "ours", "context": context, "n_of": "steps", "reason": ""}
        row |= dict(zip(("step_ms", "low", "high"), interval(rounds), strict=True))
        row |= {"n": sum(map(len, rounds))}
        ar = base.get(("ar", context))
        if arm == "ar":
            row |= {"over_ar": 1.0, "ar_from": "itself"}
        elif ar is not None and len(ar) == len(rounds):
            row |= dict(zip(("over_ar", "over_ar_low", "over_ar_high"), interval(rounds, ar), strict=True))
            row["ar_from"] = "the same rounds"
        else:
            row["reason"] = "no ratio: ar was not timed beside it"
        chain = base.get(("dflash", context))
        if chain and len(chain) == len(rounds) and arm not in ("ar", "dflash"):
            names = ("over_chain", "over_chain_low", "over_chain_high")
            row |= dict(zip(names, interval(rounds, chain), strict=True))
        rows.append(row)
    for arm in ARMS:
        if (arm, asked["context"]) not in found:
            row = {"engine": "ours", "arm": arm, "attention": "ours", "context": asked["context"]}
            rows.append({**row, "n": 0, "reason": run.stopped("ours")})
    return sorted(rows, key=lambda row: (row["context"], place_of(row["arm"])))


def stated_rows(run: Run) -> list[dict]:
    """Return the steps that others stated, which this project did not measure."""
    stated = run.stated
    return [
        {"engine": "sglang, as stated", "arm": arm, "attention": stated["attention"], "step_ms": entry["ms"]}
        | {"over_ar": entry["over_ar"], "reason": f"not measured here: {stated['source']}"}
        for arm, entry in stated.get("arms", {}).items()
    ]


def split_arm(arm: str) -> tuple[str, str, str]:
    """Return an arm's method, the ending of its name, and the plugin's settings that it had beside the defaults."""
    name, _, settings = arm.partition(" ")
    method, _, ending = name.partition("-")
    return method, ending, settings


def place_of(arm: str) -> tuple:
    """Return where an arm stands in a table: methods in the paper's order, then other settings, then other kernels."""
    method, ending, settings = split_arm(arm)
    return (bool(ending), bool(settings), ARMS.index(method) if method in ARMS else len(ARMS), method)


def _named(found: dict, value: str, low: str, high: str) -> dict:
    return {value: found["value"], low: found["low"], high: found["high"]}


# --- memory


def memory_rows(run: Run) -> list[dict]:
    """Return a row for each arm: what its server logged of its states, and what the card and the engine held."""
    found, rows = {}, []
    for record in run.served:
        for arm, facts in record["arms"].items():
            states = {STATES[name]: size for name, size in (facts.get("state_gib") or {}).items() if name in STATES}
            held = (facts["engine"].get("memory_gib") or {}) if isinstance(facts["engine"], dict) else {}
            row = {"engine": "sglang", "arm": arm, "card_mib": facts.get("memory_used_mib"), **states}
            row |= {"weights_gib": held.get("weight"), "kv_gib": held.get("kvcache")}
            found[arm] = row | {"reason": "" if states else "the server logged no size of a state"}
    rows += [
        found.get(arm) or {"engine": "sglang", "arm": arm, "reason": why_not_served(run, arm)} for arm in SERVED_ARMS
    ]
    rows += [row for arm, row in found.items() if arm not in SERVED_ARMS]
    facts = (run.ours or {}).get("arms", {})
    for arm in ARMS:
        row, mine = {"engine": "ours", "arm": arm}, facts.get(f"{arm} {run.asked['variant']}")
        if mine is None:
            rows.append({**row, "reason": run.stopped("ours")})
        else:
            held = {"weights_gib": run.ours.get("weights_gib"), "beside_weights_gib": mine["kept_gib"]}
            rows.append({**row, **held, "reason": "states are not told apart"})
    return rows


def state_entry(run: Run, memory: pd.DataFrame, kind: str) -> dict:
    """Return GiB kept for verification beside the committed states: ours for fused, SGLang's own for recurrent."""
    served, unit = memory[memory["engine"] == "sglang"], "GiB, as the server logs it"
    arms, column = (("tfm", "ddtree"), "plugin_gib") if kind == "fused" else ((RECURRENT,), "node_states_gib")
    for arm in arms:
        known = served[(served["arm"] == arm) & served[column].notna()]
        if len(known):
            return {"value": float(known[column].iloc[0]), "low": None, "high": None, "n": 1, "unit": unit, "arm": arm}
    logged = "the server logged no size" if any(arm in record["arms"] for record in run.served for arm in arms) else ""
    return missing_entry(unit, logged or "; ".join(f"{arm}: {why_not_served(run, arm)}" for arm in arms))


# --- greedy texts


def text_rows(run: Run) -> list[dict]:
    """Return a row for each prompt whose greedy text inside SGLang was laid beside the target's own."""
    rows, failed = {}, {}
    for record in run.texts:
        for method, found in record["arms"].items():
            rows[method] = [{"method": method, "prompt": place, **row} for place, row in enumerate(found)]
        failed |= record["failed"]
    reasons = {
        method: f"failed: {failed[method]}" if method in failed else run.stopped("first") for method in ("tfm", "ar")
    }
    gone = [{"method": method, "reason": reason} for method, reason in reasons.items() if method not in rows]
    return [row for found in rows.values() for row in found] + gone


# --- all of them


def tables_of(run: Run) -> dict[str, pd.DataFrame]:
    """Return every table of a run; what is missing stands in each with its reason, and all of it in `missing`."""
    found = per_engine(run.records)
    rows = {"steps": served_rows(run) + own_rows(run) + stated_rows(run), "memory": memory_rows(run)}
    rows |= {"tau": tau_rows(run, found), "pairs": pair_rows(run, found), "texts": text_rows(run)}
    rows["missing"] = missing_rows(rows, run)
    return {name: pd.DataFrame(rows[name]).reindex(columns=columns) for name, columns in KEYS.items()}


def missing_rows(rows: dict[str, list[dict]], run: Run) -> list[dict]:
    """Return what was planned and is not in the tables, each with its reason."""
    steps = [
        (f"step of {row['engine']} {row['arm']} at {row['context']}", row) for row in rows["steps"] if row.get("n") == 0
    ]
    texts = [(f"greedy text of {row['method']}", row) for row in rows["texts"] if "verdict" not in row]
    taus = [
        (f"tau of {row['engine']} {row['method']}, {row['setting']}", row)
        for row in rows["tau"]
        if row["dataset"] == "all" and row["reason"]
    ]
    parts = {"steps": steps, "texts": texts, "tau": taus}
    found = [
        {"part": part, "what": what, "reason": row["reason"]} for part, all_ in parts.items() for what, row in all_
    ]
    memory = pd.DataFrame(rows["memory"]).reindex(columns=KEYS["memory"])
    states = {kind: state_entry(run, memory, kind) for kind in KINDS}
    for kind, entry in states.items():
        if entry["value"] is None:
            found.append({"part": "memory", "what": f"states of the {kind} kernel", "reason": entry["reason"]})
    left_out = [{"part": "left out", "what": what, "reason": why} for what, why in run.asked["left_out"].items()]
    return found + left_out


def summary_of(run: Run, tables: dict[str, pd.DataFrame]) -> dict:
    """Return the flat summary: name -> {value, low, high, n, unit}; what is missing has no value and a reason."""
    flat, steps, asked = {}, tables["steps"], run.asked
    chosen = steps[(steps["context"] == asked["context"]) & steps["attention"].isin([asked["attention"], "ours"])]
    for row in chosen.to_dict("records"):
        name = f"{row['engine']}_{row['arm'].replace('-', '_')}"
        if split_arm(row["arm"])[2]:
            continue  # another form of an arm stands in the tables
        if not row["n"]:
            flat[f"step_ms_{name}"] = missing_entry("ms", row["reason"])
            continue
        flat[f"step_ms_{name}"] = _entry(row, ("step_ms", "low", "high"), "ms")
        ratio = _entry(row, ("over_ar", "over_ar_low", "over_ar_high"), "ratio of medians")
        flat[f"step_over_ar_{name}"] = ratio if ratio["value"] is not None else missing_entry("ratio", row["reason"])
    taus = tables["tau"]
    for row in taus[taus["dataset"] == "all"].to_dict("records"):
        name, unit = f"tau_{row['engine']}_{row['method']}{SETTINGS[row['setting']]}", "tokens a step"
        flat[name] = _entry(row, ("tau", "low", "high"), unit) if row["n"] else missing_entry(unit, row["reason"])
    for row in tables["pairs"].to_dict("records"):
        engines = [row[side].split(" ")[0] for side in ("one", "other")]
        if engines == ["sglang", "ours"]:
            name = f"tau_sglang_minus_ours_{row['one'].split(' ')[1]}{SETTINGS[row['setting']]}"
            flat[name] = _entry(row, ("value", "low", "high"), "tokens a step")
            flat[name] |= {"reason": row["reason"]} if not row["n"] else {}
    for kind in KINDS:
        flat[f"state_gib_{kind}"] = state_entry(run, tables["memory"], kind)
    texts = tables["texts"][tables["texts"]["verdict"].notna()]
    for method in ("tfm", "ar"):
        mine = texts[texts["method"] == method]
        good = {
            "value": int(mine["verdict"].isin(["equal", "near tie"]).sum()),
            "low": None,
            "high": None,
            "n": len(mine),
        }
        unit = "greedy texts equal to the target's up to a near tie"
        flat[f"texts_{method}"] = {**good, "unit": unit} if len(mine) else missing_entry(unit, "no text was compared")
    return flat


def devices_in(run: Run) -> set[str]:
    """Return the names of the cards that SGLang served on."""
    cells = [] if run.records is None else run.records.cells
    served = {cell["device"]["name"] for cell in cells if engine_of(cell["cell"]["engine"]) == "sglang"}
    return {record["device"]["name"] for record in run.served} | served


def write_tables(run: Run, out: Path) -> dict:
    """Write tables/*.csv to `out`; return the summary."""
    tables = tables_of(run)
    (out / "tables").mkdir(parents=True, exist_ok=True)
    for name, frame in tables.items():
        write_atomic(out / f"tables/{name}.csv", frame.to_csv(index=False, lineterminator="\n").encode())
    return summary_of(run, tables)


def missing_entry(unit: str, reason: str) -> dict:
    """Return the entry of a number that was not measured."""
    return {"value": None, "low": None, "high": None, "n": 0, "unit": unit, "reason": reason}


def _entry(row: dict, columns: tuple[str, str, str], unit: str) -> dict:
    numbers = [None if row[name] is None or pd.isna(row[name]) else float(row[name]) for name in columns]
    return dict(zip(("value", "low", "high"), numbers, strict=True)) | {"n": int(row["n"]), "unit": unit}
