"""Table `builders`: each builder at the same contexts: time, calls of the head, and share of the oracle tree."""

import numpy as np
import pandas as pd

from baselines import probes
from tfm import metrics

KEY = ["dataset", "id"]
SEQUENTIAL, DEPTHWISE = "heap", "dartree"


def builders(data) -> pd.DataFrame:
    """Return one row a head and variant, the fastest build of equal nodes marked against the sequential heap."""
    probe = data.probes.get("builders")
    if probe is None:
        reason = probes.why_not("builders", data.config) or "no builder records"
        return pd.DataFrame([{"head": "", "variant": "", "reason": reason}])
    samples, rows = probe.frames["samples"], []
    for head, part in samples.groupby("head", sort=False):
        heap = part[part["method"] == SEQUENTIAL]
        for variant, own in part.groupby("variant", sort=False):
            method, width = own["method"].iloc[0], own["width"].iloc[0]
            row = {"head": head, "variant": variant, "method": method, "width": width}
            row |= {"build_us": own["build_us"].median(), "calls": own["calls"].mean(), "nodes": own["nodes"].mean()}
            row |= _fields("accepted", metrics.mean(_prompts(own, "accepted"), "expected_accepted"))
            # a chain has fewer nodes than the tree it is held against
            share = metrics.ratio(_prompts(own, "accepted"), _prompts(own, "limit"), "expected_accepted")
            row |= _fields("oracle_share", share)
            row |= _fields("faster_than_heap", _faster(heap, own)) | {"same_nodes_as_heap": _same(heap, own)}
            row |= {"contexts": len(own), "n": own[KEY].drop_duplicates().shape[0], "reason": ""}
            rows.append(row)
    return pd.DataFrame(rows)


def notes(data) -> str:
    """Return what the caption says of how the builders were measured."""
    probe = data.probes.get("builders")
    if probe is None:
        return ""
    facts, settings = probe.facts, probe.facts["settings"]
    sets = ", ".join(f"{name} {part['id'].nunique()}" for name, part in probe.frames["samples"].groupby("dataset"))
    return (
        f"Measured on {facts['device']['name']} ({facts['device']['kind']}), {settings['dtype']}, one request, every "
        f"{settings['every']}th of {settings['steps']} steps at T = 1 (prompts: {sets}); the same marginals for all, "
        "order turned round at each context. Intervals over prompts."
    )


def values(frame: pd.DataFrame, budget: int) -> dict[str, dict]:
    """Return the numbers that the summary quotes, of the first head: name -> {value, low, high, n, unit}."""
    if "build_us" not in frame:
        return {}
    own = frame[frame["head"] == frame["head"].iloc[0]]
    by = {method: own[own["method"] == method] for method in own["method"].unique()}
    found = {}
    if SEQUENTIAL in by:
        found["build_us_sequential"] = _entry(by[SEQUENTIAL].iloc[0], "build_us", "us")
    equal = by.get(DEPTHWISE, own.head(0))
    # the width of the budget: the nodes are the sequential heap's
    if len(same := equal[equal["width"] == budget]):
        found["build_us_depthwise"] = _entry(same.iloc[0], "build_us", "us")
        found["depthwise_over_sequential"] = _entry(same.iloc[0], "faster_than_heap", "x faster at equal nodes")
    if len(equal):
        found["build_us_depthwise_headline"] = _entry(equal.iloc[0], "build_us", "us")
    for method in ("ddtree", "headddtree", "dartree", "dartfixed", "tfm", "heap", "overgrown"):
        if method in by:
            lead = by[method].sort_values("oracle_share").iloc[-1] if method == "tfm" else by[method].iloc[0]
            found[f"oracle_share_{method}_T1"] = _entry(lead, "oracle_share", "share of the oracle tree")
    best = own.loc[own["oracle_share"].idxmax()]
    return found | {
        "oracle_share_best_T1": _entry(best, "oracle_share", f"share of the oracle tree, {best['variant']}")
    }


def _prompts(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    means = rows.groupby(KEY, as_index=False)[[column]].mean().rename(columns={column: "expected_accepted"})
    return means.assign(seed=0)


def _faster(heap: pd.DataFrame, own: pd.DataFrame) -> metrics.Estimate:
    """Return the ratio of the median times with its interval over prompts, both arms resampled together."""
    if heap.empty:
        return metrics.EMPTY
    pairs = heap.merge(own, on=[*KEY, "step"], suffixes=("", "_own"))
    blocks = [part[["build_us", "build_us_own"]].to_numpy() for _, part in pairs.groupby(KEY)]
    times = np.full((len(blocks), max(map(len, blocks)), 2), np.nan)  # a prompt that ended early has fewer contexts
    for block, row in zip(blocks, times, strict=True):
        row[: len(block)] = block
    generator = np.random.default_rng(metrics.BOOTSTRAP_SEED)
    draws = times[generator.integers(len(blocks), size=(metrics.RESAMPLES, len(blocks)))]
    medians = np.nanmedian(draws.reshape(metrics.RESAMPLES, -1, 2), axis=1)
    ends = np.percentile(medians[:, 0] / medians[:, 1], [2.5, 97.5]) if len(blocks) > 1 else (np.nan, np.nan)
    return metrics.Estimate(heap["build_us"].median() / own["build_us"].median(), *map(float, ends), len(blocks))


def _same(heap: pd.DataFrame, own: pd.DataFrame) -> float | None:
    if not len(heap):
        return None
    pairs = heap.merge(own, on=[*KEY, "step"], suffixes=("", "_own"))
    return float((pairs["nodes_sha256"] == pairs["nodes_sha256_own"]).mean())


def _fields(name: str, estimate: metrics.Estimate) -> dict:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _entry(row: pd.Series, column: str, unit: str) -> dict:
    numbers = {"value": row[column], "low": row.get(f"{column}_low"), "high": row.get(f"{column}_high")}
    numbers = {name: None if pd.isna(value) else float(value) for name, value in numbers.items()}
    return numbers | {"n": int(row["contexts"] if numbers["low"] is None else row["n"]), "unit": unit}
