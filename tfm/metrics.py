"""The numbers of the tables, each defined once, as functions of the records alone.

Every number is a ratio of two sums over prompts: a mean over requests is (sum of values, number of values), a
throughput is (tokens, seconds). Prompts are the clusters: the seeds of one prompt stay together when intervals are
drawn, and comparisons use the ids present in both arms. No step, no token or no clock gives an empty number.
"""

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import pandas as pd

from tfm.trace import STAGES, SUBSTAGES

RESAMPLES = 2000
BOOTSTRAP_SEED = 20260617
KEY = ["dataset", "id"]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval and the number of prompts behind it; NaN is empty, never 0."""

    value: float
    low: float
    high: float
    n: int


EMPTY = Estimate(float("nan"), float("nan"), float("nan"), 0)


def per_request(requests: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Return `requests` with tau, tau_exact, accepted, accepted_untrimmed and expected_accepted of each.

    tau is the authors': new tokens / steps, and 1 for ar, whose every token is a pass; tau_exact leaves out the token
    sampled at prefill, which is no step's. A request without a step has none of them, and no speed of decoding.
    """
    means = steps.groupby(["cell", "request"])[["accepted", "accepted_untrimmed", "expected_accepted"]].mean()
    table = requests.merge(means, left_on=["cell", "request"], right_index=True, how="left")
    count = table["steps"].where(table["steps"] > 0)
    table["tau"] = (table["new_tokens"] / count).where(table["method"] != "ar", count / count)
    table["counted_steps"] = count.where(table["method"] != "ar", table["new_tokens"].where(count.notna()))
    table["tau_exact"] = (table["new_tokens"] - 1) / count
    table["excess"] = (table["accepted_untrimmed"] - table["expected_accepted"]) * count
    table["seconds"] = table["wall_us"] / 1e6
    table["decode_seconds"] = (table["decode_us"] / 1e6).where(table["steps"] > 0)
    table["decoded_tokens"] = table["new_tokens"] - 1
    return table


# name -> (numerator, denominator); None as denominator means the mean over requests
METRICS = {
    "tau": ("tau", None),
    "tau_exact": ("tau_exact", None),
    "accepted": ("accepted", None),
    "accepted_untrimmed": ("accepted_untrimmed", None),
    "expected_accepted": ("expected_accepted", None),
    "excess": ("excess", "steps"),
    "tau_pooled": ("new_tokens", "counted_steps"),
    "tok_s": ("new_tokens", "seconds"),
    "decode_tok_s": ("decoded_tokens", "decode_seconds"),
}


def sums(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return num and den of a metric per prompt, index (dataset, id, seed); rows without a value are left out."""
    numerator, denominator = METRICS[metric]
    num = table[numerator].astype(float)
    den = pd.Series(1.0, index=table.index) if denominator is None else table[denominator].astype(float)
    frame = pd.DataFrame({"num": num, "den": den}).set_index(pd.MultiIndex.from_frame(table[[*KEY, "seed"]]))
    if frame.index.has_duplicates:
        raise ValueError(f"{metric}: one arm holds a prompt twice at one seed; choose one variant and one setting")
    return frame[frame["num"].notna() & (frame["den"] > 0)]


def mean(table: pd.DataFrame, metric: str) -> Estimate:
    """Return the macro value: the plain mean over datasets of each dataset's value."""
    return estimate([sums(table, metric)], lambda a: a)


def difference(one: pd.DataFrame, other: pd.DataFrame, metric: str) -> Estimate:
    """Return macro(one) - macro(other) over the prompts and seeds that both have, resampled together."""
    return estimate(_paired(sums(one, metric), sums(other, metric)), lambda a, b: a - b)


def ratio(one: pd.DataFrame, other: pd.DataFrame, metric: str) -> Estimate:
    """Return macro(one) / macro(other), paired as in `difference`. For tok_s over ar's this is the speedup."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return estimate(_paired(sums(one, metric), sums(other, metric)), lambda a, b: a / b)


def excess_over_bound(table: pd.DataFrame) -> Estimate:
    """Return accepted_untrimmed - expected_accepted a step, the lossless bound of the same steps; above 0 is lossy.

    Steps are pooled: their differences are a martingale, so that their sum is 0 on average whenever a request ends. A
    mean of requests' means is not: a lucky request reaches its cap in fewer steps, which then weigh more.
    """
    return mean(table, "excess")


def acceptance_by_position(steps: pd.DataFrame) -> pd.DataFrame:
    """Return, for each draft position d, how often the rule accepts it.

    conditional: P(accepted_untrimmed >= d | accepted_untrimmed >= d - 1 and the tree reaches depth d);
    unconditional: P(accepted_untrimmed >= d) over all steps, so that its sum over d is the mean accepted_untrimmed.
    n counts the steps of the conditional. All steps of all prompts together; intervals over prompts.
    """
    rows, table = [], steps[[*KEY, "depth", "accepted_untrimmed"]]
    # a served tree's depth is not recorded
    deepest = table[["depth", "accepted_untrimmed"]].max().max() if len(table) else 0
    for position in range(1, int(deepest) + 1):
        hit = table["accepted_untrimmed"] >= position
        alive = (table["depth"] >= position) & (table["accepted_untrimmed"] >= position - 1)
        conditional, unconditional = _share(table[alive], hit[alive]), _share(table, hit)
        rows.append(
            {
                "position": position,
                "conditional": conditional.value,
                "conditional_low": conditional.low,
                "conditional_high": conditional.high,
                "unconditional": unconditional.value,
                "unconditional_low": unconditional.low,
                "unconditional_high": unconditional.high,
                "n": int(alive.sum()),
                "n_unconditional": len(table),
            }
        )
    return pd.DataFrame(rows)


def accept_rate(steps: pd.DataFrame) -> float:
    """Return accepted drafts / deepest draft, summed over steps: for a chain, the share of its drafts accepted."""
    drafted = steps["depth"].sum()
    return float(steps["accepted_untrimmed"].sum() / drafted) if drafted else float("nan")


def stage_times(requests: pd.DataFrame, steps: pd.DataFrame) -> dict[str, float]:
    """Return microseconds a step of each stage and substage, and `decode`, their wall; `prefill` is a request's.

    `other` is what the named stages leave of the decode wall, so that the stages add up to it. Empty without steps.
    """
    count, decode = len(steps), float(requests["decode_us"].sum())
    if not count or not decode:
        return {}
    totals = {name: float(steps[f"{name}_us"].sum()) for name in (*STAGES, *SUBSTAGES)}
    totals["other"] = decode - sum(totals[name] for name in STAGES if name != "other")
    times = {name: total / count for name, total in totals.items()}
    return {**times, "decode": decode / count, "prefill": float(requests["prefill_us"].mean())}


def decode_us_per_step(requests: pd.DataFrame) -> float:
    """Return the decode wall a step of timed requests; NaN without steps or without a clock."""
    timed = requests[requests["decode_us"].notna()]
    steps = timed["steps"].sum()
    return float(timed["decode_us"].sum() / steps) if steps else float("nan")


def stage_shares(times: dict[str, float]) -> dict[str, float]:
    """Return each stage's share of the decode wall, and gdn: the recurrent layers' part of a step with the commit."""
    shares = {name: times[name] / times["decode"] for name in (*STAGES, *SUBSTAGES)}
    return {**shares, "gdn": shares["target_gdn"] + shares["commit"]}


def identical_outputs(table: pd.DataFrame, reference: pd.DataFrame) -> tuple[int, int]:
    """Return (prompts whose tokens equal the reference's, prompts present in both), a prompt at a seed each."""
    key = [*KEY, "seed"]
    both = table[[*key, "output_sha256"]].merge(reference[[*key, "output_sha256"]], on=key)
    return int((both["output_sha256_x"] == both["output_sha256_y"]).sum()), len(both)


def _share(steps: pd.DataFrame, hit: pd.Series) -> Estimate:
    frame = pd.DataFrame({"num": hit.astype(float), "den": 1.0})
    frame.index = pd.MultiIndex.from_arrays(
        [np.zeros(len(steps), int), steps["dataset"].astype(str) + "/" + steps["id"].astype(str)], names=KEY
    )
    return estimate([frame], lambda a: a)


def _paired(one: pd.DataFrame, other: pd.DataFrame) -> list[pd.DataFrame]:
    shared = one.index.intersection(other.index)
    return [one.loc[shared], other.loc[shared]]


def estimate(arms: list[pd.DataFrame], combine) -> Estimate:
    """Return combine(macro of each arm) with a percentile interval; all arms hold the same prompts.

    An arm has columns num and den and the index levels dataset and id; its macro is the mean over datasets of
    sum(num) / sum(den). `combine` takes numbers, and arrays of resampled ones. The interval is empty where a dataset
    has one prompt only.
    """
    arms = [arm.groupby(level=KEY, sort=True)[["num", "den"]].sum() for arm in arms]
    if arms[0].empty:
        return EMPTY
    values, draws = [], []
    for dataset, rows in arms[0].groupby(level="dataset"):
        weights = _resampling_weights(len(rows), str(dataset))
        parts = [arm.loc[rows.index].to_numpy() for arm in arms]
        values.append([part[:, 0].sum() / part[:, 1].sum() for part in parts])
        draws.append([(weights @ part[:, 0]) / (weights @ part[:, 1]) for part in parts])
    value = float(combine(*np.mean(values, axis=0)))
    # a set of one prompt is always drawn as it is, and would pass for one without spread
    known = arms[0].groupby(level="dataset").size().min() > 1
    low, high = np.percentile(combine(*np.mean(draws, axis=0)), [2.5, 97.5]) if known else (np.nan, np.nan)
    # a ratio over nothing is empty, and so is an interval that reaches one
    return Estimate(*(float(end) if np.isfinite(end) else float("nan") for end in (value, low, high)), len(arms[0]))


@functools.cache
def _resampling_weights(count: int, name: str) -> np.ndarray:
    """Return how often each of `count` prompts is drawn, [RESAMPLES, count]; the same for every metric and arm."""
    stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    generator = np.random.default_rng([BOOTSTRAP_SEED, stream])
    return generator.multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(float)
