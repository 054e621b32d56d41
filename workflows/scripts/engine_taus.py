"""Tokens a step of the cells that SGLang served, beside those of this project's loop, paired by prompt."""

import pandas as pd

from tfm import metrics
from tfm.cells import Records

METHODS = ("ar", "dflash", "ddtree", "tfm")  # of both engines, and of the summary
SETTINGS = {"t1": "", "t0": "_t0"}  # names of temperature 1 carry no setting
PAIRS = (("tfm", "dflash"), ("tfm", "ddtree"), ("ddtree", "dflash"))


def engine_of(name: str) -> str:
    """Return whose engine a cell's is: sglang, ours, or another one's name."""
    return "sglang" if name.startswith("sglang") else "ours" if name.startswith("torch") else name


def per_engine(records: Records | None) -> dict[tuple[str, str, str], pd.DataFrame]:
    """Return the requests of each (engine, method, setting) of the served cells and this project's beside them."""
    if records is None:
        return {}
    table = metrics.per_request(records.requests, records.steps)
    table["side"] = table["engine"].map(engine_of)
    return dict(list(table.groupby(["side", "method", "setting"])))


def tau_rows(run, found: dict) -> list[dict]:
    """Return a row for each engine, method, setting, and set of prompts, `all` the mean over sets."""
    rows = []
    for engine, setting, method in _planned(found):
        key, row = (engine, method, setting), {"engine": engine, "method": method, "setting": setting}
        if key not in found:
            rows.append({**row, "dataset": "all", "n": 0, "reason": why_no_cells(run, *key)})
            continue
        sets = {"all": found[key], **dict(list(found[key].groupby("dataset")))}
        for dataset, part in sets.items():
            tau, accepted = metrics.mean(part, "tau"), metrics.mean(part, "accepted")
            here = {"dataset": dataset, "tau": tau.value, "low": tau.low, "high": tau.high, "n": tau.n}
            here |= {"accepted": accepted.value, "accepted_low": accepted.low, "accepted_high": accepted.high}
            here |= {"tau_pooled": metrics.mean(part, "tau_pooled").value}
            us = metrics.decode_us_per_step(part)
            reason = why_no_cells(run, *key) if _lacks(run, key) else ""
            rows.append({**row, **here, "ms_a_step": us / 1e3, "reason": reason})
    return rows


def pair_rows(run, found: dict) -> list[dict]:
    """Return rows of pairs of arms over the prompts that both have: engines beside each other, methods in one."""
    rows = []
    for setting in SETTINGS:
        for method in METHODS:
            names = {"setting": setting, "one": f"sglang {method}", "other": f"ours {method}"}
            pair = found.get(("sglang", method, setting)), found.get(("ours", method, setting))
            rows += _pair(run, names, pair, ("tau",), metrics.difference)
        for engine in ("sglang", "ours"):
            for one, other in PAIRS:
                names = {"setting": setting, "one": f"{engine} {one}", "other": f"{engine} {other}"}
                pair = found.get((engine, one, setting)), found.get((engine, other, setting))
                rows += _pair(run, names, pair, ("tau", "accepted"), metrics.ratio)
            for method in METHODS[1:]:
                names = {"setting": setting, "one": f"{engine} {method}", "other": f"{engine} ar"}
                pair = found.get((engine, method, setting)), found.get((engine, "ar", setting))
                rows += _pair(run, names, pair, (), None)
    return rows


def _pair(run, names: dict, pair: tuple, numbers: tuple[str, ...], compare) -> list[dict]:
    one, other = pair
    if one is None or other is None:
        gone = names["one"] if one is None else names["other"]
        reason = f"{gone}: {why_no_cells(run, *gone.split(' '), names['setting'])}"
        return [{**names, "number": numbers[0] if numbers else "same tokens", "n": 0, "reason": reason}]
    same, outputs = metrics.identical_outputs(one, other)
    rows, word = [], "difference" if compare is metrics.difference else "ratio"
    for number in numbers:
        found = compare(one, other, number)
        value = {"value": found.value, "low": found.low, "high": found.high, "n": found.n}
        rows.append({**names, "number": f"{number} {word}", **value, "same_tokens": same, "outputs": outputs})
    return rows or [{**names, "number": "same tokens", "n": outputs, "same_tokens": same, "outputs": outputs}]


def why_no_cells(run, engine: str, method: str, setting: str) -> str:
    """Return why cells of an engine, method and setting are not there."""
    lost = _lacks(run, (engine, method, setting))
    part = "cells" if engine == "sglang" else "cells-ours"
    return f"{len(lost)} of its cells missing: {next(iter(lost.values()))}" if lost else run.stopped(part)


def _lacks(run, key: tuple[str, str, str]) -> dict[str, str]:
    wanted = dict(zip(("engine", "method", "setting"), key, strict=True))
    rows = run.asked["missing_cells"]
    return {row["path"]: row["reason"] for row in rows if all(row[name] == value for name, value in wanted.items())}


def _planned(found: dict) -> list[tuple[str, str, str]]:
    both = ("sglang", "ours")
    methods = (*METHODS, *sorted({method for engine, method, _ in found if engine in both} - set(METHODS)))
    planned = [(engine, setting, method) for engine in both for setting in SETTINGS for method in methods]
    return planned + [(engine, setting, method) for engine, method, setting in found if engine not in both]


def inventory_summary(records: Records | None) -> dict:
    """Return what a published run says in the names of the paper's inventory: ratios of the served cells."""
    found, flat = per_engine(records), {}
    for setting, ending in (("t1", "T1"), ("t0", "T0")):
        for one, other in PAIRS:
            pair = found.get(("sglang", one, setting)), found.get(("sglang", other, setting))
            for number in ("tau", "accepted") if all(part is not None for part in pair) else ():
                ratio = metrics.ratio(*pair, number)
                entry = {"value": ratio.value, "low": ratio.low, "high": ratio.high, "n": ratio.n, "unit": "x"}
                flat[f"ratio_{number}_{one}_{other}_{ending}"] = entry
    return flat
