"""A GPU run of the GDN kernels (results/published/kernels-<card>): its samples as entries of a summary, and a table."""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from tfm import metrics

BASELINE = "recurrent_triton"
TREES = "random"  # the trees that stand for an arm where one number is asked for
KEY = re.compile(r"(?P<shape>[a-z]+)-T(?P<rows>[0-9]+)")
REMEDY = "restore it from git, or make the run again with bench.py beside it"


@dataclass(frozen=True)
class KernelRun:
    """One run: its card, and microseconds a layer (every replay) by tree shape, rows T and arm."""

    card: str
    samples: dict[tuple[str, int], dict[str, list[float]]]
    errors: dict[str, list[float]]  # arm -> relative errors of out and u at T = 65, against float64


def is_kernel_run(folder: Path) -> bool:
    """Return whether a folder holds a run of bench.py."""
    return (folder / "samples.json").is_file() and (folder / "summary.json").is_file()


def load_kernel_run(folder: Path) -> KernelRun:
    """Return the run in a folder; raises ValueError naming a file that is missing or damaged."""
    path = folder / "samples.json"
    try:
        samples = json.loads(path.read_text(encoding="utf-8"))
        path = folder / "summary.json"
        facts = json.loads(path.read_text(encoding="utf-8"))
        card, errors = facts["environment"]["gpu"], facts["relative_error_of_out_and_u_T65"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is missing or damaged ({type(error).__name__}: {error}); {REMEDY}") from error
    trees = {
        (found["shape"], int(found["rows"])): arms for key, arms in samples.items() if (found := KEY.fullmatch(key))
    }
    return KernelRun(card, {key: arms for key, arms in trees.items() if key[0] != "mixer"}, errors)


def kernel_summary(run: KernelRun) -> dict:
    """Return name -> {value, low, high, n, unit} in the names of a suite's summary.json: kernel_us_ARM_T and so on."""
    entries = {}
    for (shape, rows), arms in run.samples.items():
        if shape != TREES:
            continue
        for arm, values in arms.items():
            entries[f"kernel_us_{arm}_{rows}"] = _entry(median(values), "us a layer")
            if BASELINE in arms:
                found = ratio_of_medians(arms[BASELINE], values)
                entries[f"kernel_ratio_{arm}_{rows}"] = _entry(found, "x")
    worst = max((max(found) for arm, found in run.errors.items() if arm == "fused_cuda"), default=None)
    if worst is not None:
        entries["kernel_error_verify_float32"] = {"value": worst, "low": None, "high": None, "n": 2, "unit": "relative"}
    return entries


def kernel_table(run: KernelRun) -> pd.DataFrame:
    """Return one row a tree and arm: microseconds a layer and the ratio of the recurrence's time to it."""
    rows = []
    for (shape, count), arms in run.samples.items():
        for arm, values in arms.items():
            us, row = median(values), {"card": run.card, "shape": shape, "rows": count, "arm": arm}
            ratio = ratio_of_medians(arms[BASELINE], values) if BASELINE in arms else metrics.EMPTY
            row |= {"us": us.value, "us_low": us.low, "us_high": us.high}
            rows.append(row | {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high, "n": us.n})
    return pd.DataFrame(rows)


def median(values: list[float]) -> metrics.Estimate:
    """Return the median with a bootstrap interval over replays."""
    drawn = np.median(np.asarray(values)[_picks(len(values))], axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return metrics.Estimate(float(np.median(values)), float(low), float(high), len(values))


def ratio_of_medians(base: list[float], values: list[float]) -> metrics.Estimate:
    """Return median(base) / median(values) with a bootstrap interval over paired replays."""
    count = min(len(base), len(values))
    one, other = np.asarray(base[:count]), np.asarray(values[:count])
    drawn = np.median(one[_picks(count)], axis=1) / np.median(other[_picks(count)], axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return metrics.Estimate(float(np.median(one) / np.median(other)), float(low), float(high), count)


@functools.cache
def _picks(count: int) -> np.ndarray:
    return np.random.default_rng(metrics.BOOTSTRAP_SEED).integers(count, size=(metrics.RESAMPLES, count))


def _entry(found: metrics.Estimate, unit: str) -> dict:
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n, "unit": unit}
