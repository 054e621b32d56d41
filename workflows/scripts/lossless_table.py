"""Table `lossless`: outputs of every method and head that equal ar's, token for token, from check_lossless.py."""

import pandas as pd

from baselines import probes
from tfm.config import HEADS

NEAR_TIE = 1e-4  # between ar's two best scores: rounding decides there


def lossless(data) -> pd.DataFrame:
    """Return one row a method, head and temperature."""
    if "lossless" not in data.probes:
        return pd.DataFrame([{"method": "", "reason": probes.why_not("lossless", data.config)}])
    return pd.DataFrame([_row(row) for row in data.probes["lossless"].facts["rows"]])


def is_near_tie(difference: dict) -> bool:
    """Return whether a first difference is one that rounding decides."""
    return difference["gap"] < NEAR_TIE


def notes(data) -> str:
    """Return what the caption says of how it was run."""
    if "lossless" not in data.probes:
        return ""
    facts = data.probes["lossless"].facts
    return (
        f"Run on {facts['device']['name']} ({facts['device']['kind']}): {facts['prompts']} prompts, up to "
        f"{facts['max_new_tokens']} tokens, budget {facts['budget']}, {facts['requests']} decoded together."
    )


def values(frame: pd.DataFrame) -> dict[str, dict]:
    """Return the sums over all rows: name -> {value, low, high, n, unit}."""
    if "same" not in frame:
        return {}
    compared = int(frame["compared"].sum())
    empty = {"low": None, "high": None, "n": compared, "unit": "outputs"}
    return {f"lossless_{name}": {"value": int(frame[name].sum()), **empty} for name in ("same", "near_ties", "wrong")}


def _row(row: dict) -> dict:
    near = sum(map(is_near_tie, row["differences"]))
    gap = max((difference["gap"] for difference in row["differences"]), default=None)
    fields = {"method": row["method"], "head": row["head"] or HEADS[0], "temperature": row["temperature"]}
    fields |= {name: row[name] for name in ("compared", "same", "tokens")}
    return fields | {"near_ties": near, "wrong": len(row["differences"]) - near, "largest_gap": gap, "reason": ""}
