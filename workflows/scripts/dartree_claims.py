"""Table `dartree_claims`: what DARTree's authors say of it, and what this suite asks for, beside what was measured."""

from dataclasses import dataclass

import builder_tables
import numpy as np
import pandas as pd

from baselines import suite
from baselines.names import setting_name
from tfm import metrics
from tfm.config import HEADS
from tfm.metrics import EMPTY, Estimate

AUTHORS, SUITE = "DARTree", "this suite"
WIDTH, NEAR_WIDTH = 12, (8, 16)  # where tau saturates, and the sweep's neighbours of it
BUDGETS = (64, 128)  # where the speed peaks
WITHIN = 0.99  # a width is wide enough when its tau is this share of the widest one's
PRINTED_AT = "t0"
# (one, other, metric, set or None for the macro, what the authors print of it at T = 0 with Domino's head on Qwen3)
PRINTED = (
    ("dartree", "headchain", "tau", None, 1.279),
    ("dartree", "headchain", "tau", "gsm8k", 1.279),
    ("dartree", "headchain", "tau", "most", 1.468),
    ("dartree", "headchain", "tok_s", "most", 1.401),
    ("dartree", "dflash", "tau", None, 1.986),
)
ORDER = (("dartree", "ddtree"), ("tfm", "ddtree"), ("ddtree", "dflash"))
EQUAL_TERMS = (("tfm", "dartree"), ("overgrown", "dartree"), ("overgrown", "tfm"), ("dartree", "dartfixed"))
EQUAL_TERMS += (("dartree", "headddtree"),)
NOT_TIMED = "budgets are not timed; run workflows/offline/dense_budgets.sh"


@dataclass(frozen=True)
class Rule:
    """When a measured interval is what was said."""

    kind: str  # gain, least, above, within; none where nothing was said
    at: float = 1.0
    end: float = 1.0

    def words(self) -> str:
        """Return the rule as the table shows it."""
        texts = {"gain": "a gain of {0:g}", "least": "at least {0:g}", "above": "above {0:g}"}
        return (texts | {"within": "{0:g} to {1:g}"}).get(self.kind, "").format(self.at, self.end)

    def verdict(self, found: Estimate, holds: str) -> str:
        """Return `holds`, smaller (a gain below the printed one), refuted, undecided, measured or open.

        Undecided is an interval of which some meets the rule; measured a number of which nothing was said; open no
        number, or none with an interval.
        """
        low, high = found.low, found.high
        if np.isnan(found.value) or (self.kind != "none" and np.isnan([low, high]).any()):
            return "open"
        if self.kind == "none":
            return "measured"
        if self.kind == "gain" and low > 1 and high < self.at:
            return "smaller"
        true, false = {
            "gain": (low > 1, high <= 1),
            "least": (low >= self.at, high < self.at),
            "above": (low > self.at, high <= self.at),
            "within": (self.at <= low and high <= self.end, high < self.at or low > self.end),
        }[self.kind]
        return holds if true else "refuted" if false else "undecided"


NONE = Rule("none")


def dartree_claims(data) -> pd.DataFrame:
    """Return one row a claim and place: the printed number, ours with its interval, and the verdict."""
    if not {"dartree", "headchain"} <= set(data.headline):
        reason = "needs dartree and headchain, the chain of the same head, among the methods"
        return pd.DataFrame([{"claim": "", "reason": reason}])
    rows = [*_printed(data), *_heads(data), *_builds(data), *_widths(data), *_budgets(data), *_ours(data)]
    frame = pd.DataFrame(rows)
    frame.insert(0, "suite", data.config["suite"])
    devices = sorted(data.records.requests["device_name"].unique()) if data.records.cells else []
    frame.insert(1, "device", " + ".join(devices))
    return frame


def values(frame: pd.DataFrame) -> dict[str, dict]:
    """Return how many of the authors' claims came out how: name -> {value, low, high, n, unit}."""
    if "verdict" not in frame:
        return {}
    verdicts = frame.loc[frame["said_by"] == AUTHORS, "verdict"]
    counts = {name: int((verdicts == name).sum()) for name in ("reproduced", "smaller", "refuted", "undecided", "open")}
    empty = {"low": None, "high": None, "n": len(verdicts), "unit": "claims of DARTree's authors"}
    return {f"dartree_claims_{name}": {"value": count, **empty} for name, count in counts.items()}


def _printed(data) -> list[dict]:
    rows = []
    # what is printed is of T = 0, and stands there as open where only other settings were run
    for setting in dict.fromkeys((PRINTED_AT, *data.settings)):
        for one, other, metric, place, number in PRINTED:
            pair = [data.headline.get(name) for name in (one, other)]
            if None in pair or (place not in (None, "most") and place not in data.config["datasets"]):
                continue
            found, where = _at(data, pair, metric, setting, place)
            reason = _missing(data, pair, setting) if setting in data.settings else f"{_title(setting)} was not run"
            printed = {"rule": Rule("gain", number), "paper": number} if setting == PRINTED_AT else {}
            name = f"{metric.replace('_', '/')} of {one} over {_worded(other)}"
            rows.append(_row(name, found, where=where, reason=reason, **printed))
    return rows


def _at(data, pair: list[str], metric: str, setting: str, place: str | None) -> tuple[Estimate, str]:
    """Return a paired ratio over all sets, of one set, or of the set where it is largest, and where that is."""
    words, sets = _title(setting), data.config["datasets"]
    if place is None:
        return _ratio(data, *pair, metric, setting=setting), f"{words}, mean over {len(sets)} sets"
    if place != "most":
        return _ratio(data, *pair, metric, setting=setting, dataset=place), f"{words}, {place}"
    found = {name: _ratio(data, *pair, metric, setting=setting, dataset=name) for name in sets}
    known = {name: one for name, one in found.items() if not np.isnan(one.value)}
    best = max(known, key=lambda name: known[name].value, default=None)
    return known.get(best, EMPTY), ", ".join(filter(None, [words, best, f"the largest of {len(sets)} sets"]))


def _heads(data) -> list[dict]:
    """Return the gain over the same head's chain, and the tree's tau over the first head's, of each other head."""
    where, rows = data.side("heads"), []
    place = _side_words(where)
    for head in (head for head in HEADS[1:] if head in data.config["heads"]):
        names = [f"{data.headline[method]}-{head}" for method in ("dartree", "headchain")]
        reason = "; ".join(filter(None, (data.missing(name, **where) for name in names)))
        found = _ratio(data, *names, "tau", **where)
        name = "tau of dartree over its head's chain"
        rows.append(_row(name, found, head=head, where=place, rule=Rule("gain", 1.279), paper=1.279, reason=reason))
        found = _ratio(data, names[0], data.headline["dartree"], "tau", **where)
        rows.append(_row(f"tau of dartree over the {HEADS[0]}'s dartree", found, head=head, where=place, reason=reason))
    return rows


def _builds(data) -> list[dict]:
    frame = builder_tables.builders(data)
    claim, said = "build of the sequential heap over depth-wise, equal nodes", {"rule": Rule("least", 2), "paper": 2.5}
    if "faster_than_heap" not in frame:
        return [_row(claim, EMPTY, where="", reason=frame["reason"].iloc[0], **said)]
    rows, budget = [], data.config["budget"]
    # as wide as the budget: the nodes are the heap's
    equal = frame[(frame["method"] == builder_tables.DEPTHWISE) & (frame["width"] == budget)]
    for row in equal.to_dict("records"):
        found = Estimate(row["faster_than_heap"], row["faster_than_heap_low"], row["faster_than_heap_high"], row["n"])
        same = row["same_nodes_as_heap"]
        where = f"T = 1, {row['contexts']} contexts, nodes equal at {same:.0%}"
        reason = "" if same == 1 else "the nodes are not always the heap's"
        rows.append(_row(claim, found, head=row["head"], where=where, unit="x faster", reason=reason, **said))
    return rows or [_row(claim, EMPTY, where="", reason=f"no builder as wide as the budget, {budget}", **said)]


def _widths(data) -> list[dict]:
    """Return where tau stops to grow along the widths, and what the authors' width leaves."""
    points, where = _points(data, "dartree_widths", "width")
    claim = f"smallest width with {WITHIN:.0%} of the widest one's tau"
    said = {"rule": Rule("within", *NEAR_WIDTH), "paper": float(WIDTH), "unit": "width W"}
    place = _side_words(where)
    if len(points) < 2:
        return [_row(claim, EMPTY, where=place, reason="needs dartree_widths in the config", **said)]
    widths = np.array(list(points))

    def saturated(*taus):
        return widths[np.argmax(np.stack(taus) >= WITHIN * taus[-1], axis=0)]

    place = f"{place}, W = {', '.join(map(str, widths))}"
    found = _joint(data, points, where, "tau", saturated)
    reason = f"W = {widths[-1]} is the widest that was run" if found.value == widths[-1] else ""
    rows = [_row(claim, found, where=place, reason=reason, **said)]
    if WIDTH in points and widths[-1] > WIDTH:
        found = _ratio(data, points[widths[-1]], points[WIDTH], "tau", **where)
        rows.append(_row(f"tau of W = {widths[-1]} over W = {WIDTH}", found, where=_side_words(where)))
        found = _ratio(data, points[WIDTH], points[widths[0]], "tau", **where)
        rows.append(_row(f"tau of W = {WIDTH} over W = {widths[0]}", found, where=_side_words(where)))
    return rows


def _budgets(data) -> list[dict]:
    points, where = _points(data, "budgets", "budget")
    claim, place = "budget of the highest tokens a second", _side_words(where)
    said = {"rule": Rule("within", *BUDGETS), "paper": float(BUDGETS[0]), "unit": "budget B"}
    timed = {budget: name for budget, name in points.items() if data.arm(name, clock="wall", **where).size}
    if len(timed) < max(2, len(points)):
        return [_row(claim, EMPTY, where=place, reason=NOT_TIMED, **said)]
    budgets = np.array(list(points))
    found = _joint(data, points, where, "tok_s", lambda *speeds: budgets[np.argmax(np.stack(speeds), axis=0)])
    rows = [_row(claim, found, where=f"{place}, B = {', '.join(map(str, budgets))}", **said)]
    for budget in budgets[budgets != data.config["budget"]]:
        ratio = _ratio(data, points[budget], data.headline["dartree"], "tok_s", **where)
        rows.append(_row(f"tokens/s of B = {budget} over B = {data.config['budget']}", ratio, where=place))
    return rows


def _ours(data) -> list[dict]:
    """Return what this suite asks for: the order of the methods, an aim, and the builders on equal terms."""
    rows = []
    for setting in data.settings:
        pairs = [(*pair, Rule("above", 1)) for pair in ORDER] + [(*pair, NONE) for pair in EQUAL_TERMS]
        if setting == "t0":
            pairs.append(("dartree", "dflash", Rule("least", 1.3)))
        for one, other, rule in (pair for pair in pairs if {*pair[:2]} <= set(data.headline)):
            names = [data.headline[one], data.headline[other]]
            found, where = _at(data, names, "tau", setting, None)
            said = {"rule": rule, "said_by": SUITE, "reason": _missing(data, names, setting)}
            rows.append(_row(f"tau of {one} over {_worded(other)}", found, where=where, **said))
    return rows


def _row(claim, found: Estimate, *, where, rule=NONE, head=HEADS[0], said_by=AUTHORS, paper=None, unit="x", reason=""):
    holds = "reproduced" if said_by == AUTHORS else "holds"
    row = {"claim": claim, "head": head, "where": where, "said_by": said_by if rule.kind != "none" else ""}
    row |= {"paper": paper, "rule": rule.words()}
    row |= {"value": found.value, "value_low": found.low, "value_high": found.high, "n": found.n, "unit": unit}
    verdict = "open" if reason else rule.verdict(found, holds)
    if verdict == "open":
        reason = reason or "no number with an interval"
    return row | {"verdict": verdict, "reason": reason}


def _points(data, key: str, knob: str) -> tuple[dict[int, str], dict]:
    """Return value -> variant of dartree along a sweep, the headline's own point among them, and its place."""
    names = [cell["variant"] for cell in data.plan if cell["part"] == key and cell["decode"]["method"] == "dartree"]
    points = {getattr(suite.parse_variant(name, data.config), knob): name for name in names}
    points[getattr(suite.parse_variant(data.headline["dartree"], data.config), knob)] = data.headline["dartree"]
    where = data.side(key)
    known = {value: name for value, name in sorted(points.items()) if len(data.arm(name, **where))}
    return (known if names else {}), where


def _joint(data, points: dict[int, str], where: dict, metric: str, combine) -> Estimate:
    """Return combine(macro of each point) over the prompts that all points have, resampled together."""
    arms = [metrics.sums(data.arm(name, **where), metric) for name in points.values()]
    shared = arms[0].index
    for arm in arms[1:]:
        shared = shared.intersection(arm.index)
    return metrics.estimate([arm.loc[shared] for arm in arms], combine)


def _ratio(data, one: str, other: str, metric: str, **where) -> Estimate:
    return metrics.ratio(data.arm(one, **where), data.arm(other, **where), metric)


def _missing(data, names: list[str], setting: str) -> str:
    return "; ".join(filter(None, (data.missing(name, setting=setting) for name in names)))


def _side_words(where: dict) -> str:
    return f"{_title(where['setting'])}, {where.get('dataset', 'all sets')}"


def _title(setting: str) -> str:
    temperature, reasoning = suite.parse_setting(setting)
    return f"T = {setting_name(temperature)[1:]}" + (", reasoning on" if reasoning else "")


def _worded(method: str) -> str:
    return "its head's chain" if method == "headchain" else method
