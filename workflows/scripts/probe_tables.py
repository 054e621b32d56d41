"""The tables of what a suite measures beside its cells: ceiling, its claims, the oracle tree, the GDN kernel."""

import functools
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import yaml

from baselines import probes
from tfm import metrics
from tfm.ceiling import crossover
from tfm.metrics import Estimate

EXPECTED = Path(__file__).resolve().parent.parent / "config/expected.yaml"
# where sums of differences start: at position 1 the marginal is the law itself; 5 is past the paper's crossover
FIRST_POSITIONS = (2, 5)
SENSES = {"given earlier acceptance": ("accepted", "reached"), "on the target's text": ("overlap", "alive")}
QUESTIONS = {
    "oracle_argmax": "its argmax accepts more than the full oracle marginal",
    "weaver": "the Weaver exceeds the oracle marginal",
    "dflash": "DFlash marginals exceed the oracle marginal",
}
MIN_REACHED = 4.0  # paths of anchors, in sum, under which an acceptance given earlier acceptance is not shown
DRAFTERS = {
    "oracle": "oracle marginal",
    "oracle_argmax": "oracle marginal's argmax",
    "dflash": "DFlash marginals",
    "dflash_argmax": "DFlash argmax",
    "weaver": "Weaver",
}


def ceiling(data) -> pd.DataFrame:
    """Return one row a drafter and position: acceptance in three senses, each with its distance from the ceiling."""
    anchors, reason = _anchors(data)
    if reason:
        return pd.DataFrame([{"drafter": "", "reason": reason}])
    rows = []
    above = anchors[anchors["drafter"] == "oracle"].drop(columns=["accepted", "overlap"])
    above = above.rename(columns={"accepted_above": "accepted", "overlap_above": "overlap"})
    for drafter in DRAFTERS:
        mine = anchors[anchors["drafter"] == drafter]
        for position in sorted(mine["position"].unique()):
            here, limit = (frame[frame["position"] == position] for frame in (mine, above))
            row = {
                "drafter": drafter,
                "position": position,
                "setting": data.probes["ceiling"].facts["settings"]["setting"],
            }
            upto = (
                mine[mine["position"] <= position]
                .groupby(["dataset", "id", "anchor"], as_index=False)["accepted"]
                .sum()
            )
            row |= _fields("acceptance", _ratio(here, "accepted", "reached"))
            row |= {"reached": float(here["reached"].sum())}
            row |= _fields("survival", _ratio(here, "accepted"))
            row |= _fields("length", _ratio(upto, "accepted"))
            row |= _fields("on_text", _ratio(here, "overlap", "alive"))
            row |= _fields("over_ceiling", _difference(here, limit, "accepted", "reached"))
            row |= _fields("on_text_over_ceiling", _difference(here, limit, "overlap", "alive"))
            if drafter == "oracle":
                row |= {"acceptance_above": _ratio(limit, "accepted", "reached").value}
                row |= {"on_text_above": _ratio(limit, "overlap", "alive").value}
            row |= {"n": here[["dataset", "id"]].drop_duplicates().shape[0], "anchors": len(here), "reason": ""}
            rows.append(_without_thin_values(row))
    return pd.DataFrame(rows)


def ceiling_claims(data) -> pd.DataFrame:
    """Return the paper's claims of section 3.5 as questions, each with a number, its interval and yes, no or open."""
    anchors, reason = _anchors(data)
    if reason:
        return pd.DataFrame([{"claim": "", "reason": reason}])
    above = anchors[anchors["drafter"] == "oracle"].drop(columns=["accepted", "overlap"])
    above = above.rename(columns={"accepted_above": "accepted", "overlap_above": "overlap"})
    rows = []
    for drafter, claim in QUESTIONS.items():
        for sense, columns in SENSES.items():
            for first in FIRST_POSITIONS:
                mine = anchors[(anchors["drafter"] == drafter) & (anchors["position"] >= first)]
                found = _difference(mine, above[above["position"] >= first], *columns)
                measure = f"difference of acceptance {sense}, positions {first} and later"
                rows.append(_claim(f"{drafter}_{columns[0]}_{first}", claim, measure, found, _sign(found)))
    for name, (measure, curve) in CURVES.items():
        found = _crossing(anchors, curve)
        claim = "the argmax passes the full oracle marginal at a length of 2 to 4"
        rows.append(_claim(f"crossover_{name}", claim, f"crossover of {measure}", found, _inside(found, 2, 4)))
    return pd.DataFrame(rows)


def oracle(data) -> pd.DataFrame:
    """Return each method's share of the best lossless tree at the sampled steps, and the entropy of ar's answers.

    One row a variant and set, macro first; ratios of means, resampled over prompts.
    """
    if "oracle" not in data.probes:
        return pd.DataFrame([{"variant": "", "reason": probes.why_not("oracle", data.config) or "no oracle records"}])
    frames, where = data.probes["oracle"].frames, {"setting": data.probes["oracle"].facts["settings"]["setting"]}
    rows = []
    for dataset in ("macro", *data.config["datasets"]):
        answers = _of_set(frames["answers"], dataset)
        row = {"variant": "ar", "dataset": dataset, **where}
        row |= _fields("entropy_nats", metrics.estimate([_macro(answers, "entropy")], lambda a: a))
        rows.append(row | {"n": len(answers), "steps": None, "reason": ""})
        for variant, mine in _of_set(frames["steps"], dataset).groupby("variant", sort=False):
            means = mine.groupby(metrics.KEY, as_index=False)[["expected_accepted", "limit"]].mean()
            own, limit = _macro(means, "expected_accepted"), _macro(means, "limit")
            row = {"variant": variant, "dataset": dataset, **where}
            row |= _fields("share", metrics.estimate([own, limit], lambda a, b: a / b))
            row |= _fields("expected_accepted", metrics.estimate([own], lambda a: a))
            row |= _fields("limit", metrics.estimate([limit], lambda a: a))
            rows.append(row | {"n": len(means), "steps": len(mine), "reason": ""})
    return pd.DataFrame(rows)


def _macro(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    return pd.DataFrame({"num": rows[column].to_numpy(), "den": 1.0}, pd.MultiIndex.from_frame(rows[metrics.KEY]))


def _of_set(frame: pd.DataFrame, dataset: str) -> pd.DataFrame:
    return frame if dataset == "macro" else frame[frame["dataset"] == dataset]


# the three readings of figure 6's axis: curves from (accepted, reached) sums a position
CURVES = {
    "acceptance": ("acceptance given earlier acceptance", lambda accepted, reached: accepted / reached),
    "survival": ("the probability that all drafts up to the length are accepted", lambda accepted, reached: accepted),
    "length": ("accepted drafts up to the length", lambda accepted, reached: accepted.cumsum(0)),
}


def _crossing(anchors: pd.DataFrame, curve) -> Estimate:
    """Return where the oracle's argmax first passes its full marginal along a curve; one past the end means nowhere."""
    arms, rows = [], int(anchors["position"].max())
    for drafter in ("oracle", "oracle_argmax"):
        mine = anchors[anchors["drafter"] == drafter]
        for column in ("accepted", "reached"):
            arms += [_arm(mine[mine["position"] == position], column) for position in range(1, rows + 1)]

    def combine(*values):
        values = np.stack(values).reshape(2, 2, rows, -1)
        one, other = (torch.from_numpy(curve(accepted, reached)).T for accepted, reached in values)
        found = crossover(one.nan_to_num(), other.nan_to_num()).numpy()
        return found if found.size > 1 else float(found[0])

    return _estimate(arms, combine)


def kernels(data) -> pd.DataFrame:
    """Return one row a tree and backend: microseconds a layer, ratio of the baseline's time to it, and the paper's.

    A backend that the device lacks has one row, with the reason.
    """
    probe = data.probes.get("kernels")
    if probe is None:
        return pd.DataFrame([{"backend": "", "reason": probes.why_not("kernels", data.config) or "no kernel records"}])
    facts, samples, checks = probe.facts, probe.frames["samples"], probe.frames["checks"]
    paper, rows = paper_kernels(), []
    for (shape, count), part in _trees(facts["settings"], samples):
        for backend in (name for name, why_not in facts["backends"].items() if not why_not):
            times = _rounds(part[part["backend"] == backend])
            row = {
                "shape": shape,
                "rows": count,
                "backend": backend,
                "baseline": "yes" if backend == facts["baseline"] else "",
            }
            row |= _fields("us", _median(times))
            row |= _fields("ratio", _median(_rounds(part[part["backend"] == facts["baseline"]]) / times))
            kind = "recurrent" if row["baseline"] else "fused"
            row |= {"paper_us": paper.get(count, {}).get(kind), "n": len(times)}
            row |= {"paper_ratio": None if row["baseline"] else paper.get(count, {}).get("ratio")}
            mine = checks[checks["backend"] == backend]
            row |= {"error": mine.loc[mine["dtype"] == "float32", "error"].max()}
            wrong = "; ".join(mine.loc[~mine["passed"], "reason"].unique())
            untimed = "" if len(times) else "not timed on this device"
            rows.append(row | {"reason": wrong or untimed})
    absent = [{"backend": name, "reason": why_not} for name, why_not in facts["backends"].items() if why_not]
    frame = pd.DataFrame([*rows, *absent])
    return frame.assign(rows=frame["rows"].astype("Int64"))  # whole, also beside a row without a tree


@functools.cache
def paper_kernels() -> dict[int, dict[str, float]]:
    """Return the paper's kernel table: rows T -> recurrent, fused (microseconds a layer) and ratio."""
    return yaml.safe_load(EXPECTED.read_text(encoding="utf-8"))["kernel_table"]["rows"]


def notes(name: str, data) -> str:
    """Return what a caption has to say of a probe's table: sizes, how conditioning was handled, what is timed."""
    probe = data.probes.get("kernels" if name == "kernels" else "ceiling")
    if probe is None:
        return ""
    settings = probe.facts["settings"]
    if name == "kernels":
        device = probe.facts["device"]
        return (
            f"Measured on {device['name']} ({device['kind']}), {settings['threads']} thread(s), float32, one request, "
            f"{settings['key_heads']} key heads, {settings['value_heads']} value heads, dims {settings['head_dim']} "
            f"(the paper's layer: 16, 48, 128 on a B200), {settings['rounds']} paired rounds, each backend forward and "
            f"backward a round (ABBA), intervals over rounds. rows counts the root."
        )
    anchors = probe.frames["anchors"]
    sets = ", ".join(f"{dataset} {part['id'].nunique()}" for dataset, part in anchors.groupby("dataset", sort=False))
    return (
        f"{probe.facts['anchors']} anchors, {settings['anchors']} an answer, places by hash, in ar's answers "
        f"(setting {settings['setting']}, seed {settings['seed']}; prompts: {sets}); {settings['continuations']} "
        f"continuations an anchor at T = {settings['temperature']}, float32. All sets together; intervals over prompts."
    )


def _anchors(data) -> tuple[pd.DataFrame, str]:
    if "ceiling" in data.probes:
        found = data.probes["ceiling"].frames["anchors"]
        return found, "" if len(found) else "no anchor: no answer of ar is long enough to draft at"
    return pd.DataFrame(), probes.why_not("ceiling", data.config) or "no ceiling records"


def _arm(rows: pd.DataFrame, column: str, weight: str | None = None) -> pd.DataFrame:
    frame = pd.DataFrame({"num": rows[column], "den": rows[weight] if weight else 1.0})
    names = rows["dataset"].astype(str) + "/" + rows["id"].astype(str)
    frame.index = pd.MultiIndex.from_arrays([np.zeros(len(rows), int), names], names=metrics.KEY)
    return frame


def _estimate(arms: list[pd.DataFrame], combine) -> Estimate:
    with np.errstate(divide="ignore", invalid="ignore"):
        return metrics.estimate(arms, combine)


def _ratio(rows: pd.DataFrame, column: str, weight: str | None = None) -> Estimate:
    return _estimate([_arm(rows, column, weight)], lambda a: a)


def _difference(one: pd.DataFrame, other: pd.DataFrame, column: str, weight: str) -> Estimate:
    return _estimate([_arm(one, column, weight), _arm(other, column, weight)], lambda a, b: a - b)


def _without_thin_values(row: dict) -> dict:
    if row["reached"] >= MIN_REACHED:
        return row
    empty = {name: None for name in row if name.startswith(("acceptance", "over_ceiling"))}
    return row | empty | {"reason": f"fewer than {MIN_REACHED:g} anchors' worth of paths reach this position"}


def _claim(key: str, claim: str, measure: str, found: Estimate, answer: str) -> dict:
    return {"key": key, "claim": claim, "measure": measure, **_fields("value", found), "n": found.n, "answer": answer}


def _sign(found: Estimate) -> str:
    return "yes" if found.low > 0 else "no" if found.high < 0 else "open"


def _inside(found: Estimate, low: float, high: float) -> str:
    if low <= found.value <= high:
        return "yes"
    return "open" if found.low <= high and found.high >= low else "no"


def _fields(name: str, found: Estimate) -> dict:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _trees(settings: dict, samples: pd.DataFrame):
    for shape in settings["shapes"]:
        for count in settings["rows"]:
            yield (shape, count), samples[(samples["shape"] == shape) & (samples["rows"] == count)]


def _rounds(samples: pd.DataFrame) -> pd.Series:
    """Return the mean of a round's two samples, by round."""
    return samples.groupby("round")["us"].mean()


def _median(rounds: pd.Series) -> Estimate:
    values = rounds.dropna().to_numpy()
    if not len(values):
        return metrics.EMPTY
    generator = np.random.default_rng(metrics.BOOTSTRAP_SEED)
    picks = generator.integers(len(values), size=(metrics.RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return Estimate(float(np.median(values)), float(low), float(high), len(values))
