"""Controls of the timing: ar against itself, whose ratio has to hold 1.00, and drift over a cell and of the clock."""

import numpy as np
import pandas as pd

from baselines import suite
from tfm import metrics
from tfm.metrics import Estimate

NULL_VARIANT = f"ar-{suite.AGAIN}"
HOLDS = 0.005  # an interval that comes this close to 1 holds 1.00
FEWEST = 8  # prompts under which a bootstrap over prompts decides nothing
# Student's t at 99 % for 2 to FEWEST - 1 values: a bootstrap over so few prompts excludes the truth far too often
T99 = (63.7, 9.92, 5.84, 4.60, 4.03, 3.71)
DRIFT = 0.05  # by how much a step of the second half of a cell's requests may cost more or less than one of the first
RATE, SAME, STEPS = (
    "ar again over ar, tokens a second",
    "ar again, outputs equal to ar's",
    "step time, second over first half",
)
# of a card's throttle reasons (tfm.gpu_meter), those that a cooler or idler card would not give
SLOWED = {"hardware_slowdown", "thermal", "hardware_thermal", "power_brake"}
CLOCKS = "clock after over before"


def controls(data) -> pd.DataFrame:
    """Return one row a control: its value with interval and n, what it has to be, and whether it held."""
    return pd.DataFrame([_rate(data), _same(data), _drift(data), _clocks(data)])


def holds_one(value: float, low: float | None, high: float | None, n: int) -> tuple[bool, str]:
    """Return whether a ratio over `n` prompts with its bootstrap interval holds 1.00, and what was asked of it.

    Of fewer than FEWEST prompts the bootstrap's spread is scaled to the sample's, sqrt(n / (n - 1)), and Student's.
    """
    wanted = "an interval that holds 1.00"
    if low is None or high is None:
        return False, wanted
    holds = low <= 1 + HOLDS and high >= 1 - HOLDS
    if not holds and 1 < n < FEWEST:
        half = (high - low) / 2 / 1.96 * (n / (n - 1)) ** 0.5 * T99[n - 2]
        holds = abs(value - 1) <= half + HOLDS
        wanted = f"1.00 within {half + HOLDS:.2g} of it (99 % by Student's t for {n} prompts)"
    return holds, wanted


def _rate(data) -> dict:
    row = {"control": RATE, "wanted": "an interval that holds 1.00"}
    again, first = (data.arm(name, **data.side("null")) for name in (NULL_VARIANT, "ar"))
    found = metrics.ratio(again, first, "tok_s")
    if not found.n or np.isnan(found.value):
        return row | _missing("needs null_control and timed cells in the config")
    holds, wanted = holds_one(found.value, found.low, found.high, found.n)
    reason = "" if holds else "the machine was not steady"
    return row | _fields(found) | {"wanted": wanted, "held": _answer(holds), "reason": reason}


def _same(data) -> dict:
    row = {"control": SAME, "wanted": "all of them"}
    equal, compared = metrics.identical_outputs(
        data.arm(NULL_VARIANT, **data.side("null")), data.arm("ar", **data.side("null"))
    )
    if not compared:
        return row | _missing("needs null_control in the config")
    return row | {"value": equal, "n": compared, "held": _answer(equal == compared), "reason": ""}


def _drift(data) -> dict:
    """Compare a step's time in the second half of ar's requests with the first half, the worst cell."""
    row = {"control": STEPS, "wanted": f"within {DRIFT:.0%} of 1"}
    timed = data.requests[(data.requests["clock"] == "wall") & (data.requests["method"] == "ar")]
    timed = timed[timed["steps"] > 0].assign(step_us=lambda rows: rows["decode_us"] / rows["steps"])
    found = [drift_of(rows["step_us"].to_numpy()) for _, rows in timed.groupby("cell") if len(rows) >= 4]
    if not found:
        return row | _missing("needs timed cells of ar with four requests or more")
    worst = max(found, key=lambda one: abs(one.value - 1))
    held = worst.low <= 1 + DRIFT and worst.high >= 1 - DRIFT
    return row | _fields(worst) | {"held": _answer(held), "reason": "" if held else "the clock or the load drifted"}


def drift_of(step_us: np.ndarray) -> Estimate:
    """Return mean of the second half over mean of the first, in the order of decoding, with a bootstrap interval."""
    half = len(step_us) // 2
    first, second = step_us[:half], step_us[-half:]
    picks = np.random.default_rng(metrics.BOOTSTRAP_SEED).integers(half, size=(2, metrics.RESAMPLES, half))
    drawn = second[picks[1]].mean(1) / first[picks[0]].mean(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(float(second.mean() / first.mean()), float(low), float(high), len(step_us))


def _clocks(data) -> dict:
    """Compare the card's clock before and after each timed cell, where the cells recorded it."""
    row = {"control": CLOCKS, "wanted": f"within {DRIFT:.0%} of 1, no throttling"}
    cells = [cell for cell in data.records.cells if clock_ratio(cell) is not None]
    if not cells:
        found = (cell["device"].get("clocks") or {} for cell in data.records.cells)
        why = next(filter(None, (clocks.get("reason") for clocks in found)), "")
        return row | _missing(f"the timed cells' device records no clock{f': {why}' if why else ''}")
    worst = max(map(clock_ratio, cells), key=lambda ratio: abs(ratio - 1))
    doubts = [doubt for cell in cells for doubt in clock_doubts(cell)]
    return row | {"value": worst, "n": len(cells), "held": _answer(not doubts), "reason": "; ".join(doubts[:3])}


def clock_ratio(cell: dict) -> float | None:
    """Return the card's clock after a timed cell over before it; None where the cell is not timed or noted none.

    A card that does not tell its clock, as a part of one may not, says 0.
    """
    clocks = (cell.get("device") or {}).get("clocks") or {}
    before, after = (clocks.get(name, {}).get("sm_mhz") for name in ("before", "after"))
    return after / before if before and after and cell["cell"]["clock"] != "off" else None


def clock_doubts(cell: dict) -> list[str]:
    """Return what the card's clock makes doubtful of a timed cell: it moved, or heat or power held it down."""
    ratio = clock_ratio(cell)
    if ratio is None:
        return []
    before, after = (cell["device"]["clocks"][name] for name in ("before", "after"))
    doubts = [f"clock {before['sm_mhz']} to {after['sm_mhz']} MHz"] if abs(ratio - 1) > DRIFT else []
    slow = sorted((set(before["throttle"]) | set(after["throttle"])) & SLOWED)
    return doubts + ([f"throttled: {', '.join(slow)}"] if slow else [])


def _fields(found: Estimate) -> dict:
    return {"value": found.value, "value_low": found.low, "value_high": found.high, "n": found.n}


def _missing(reason: str) -> dict:
    return {"value": None, "n": None, "held": "", "reason": reason}


def _answer(is_held: bool) -> str:
    return "yes" if is_held else "no"
