"""Table `families`: what families trained from other seeds, or with another weaver, accept beside the shipped one."""

import pandas as pd

from baselines import probes
from tfm import metrics

METHODS = ("dflash", "ddtree", "dartree", "tfm")
PAIRS = (("tfm", "dflash"), ("tfm", "ddtree"))
FACTS = ("seed", "answers", "d_rank", "weaver_steps", "drafter_chain", "weaver_alpha")
SHIPPED = "shipped"


def families(data) -> pd.DataFrame:
    """Return one row a family and number (tau of a method, ratio of accepted drafts), each beside the shipped family's.

    `over_shipped` is the ratio to the shipped family's number over the same prompts, resampled together; `inside` says
    whether the number lies in the shipped one's interval.
    """
    probe = data.probes.get("families")
    if probe is None:
        reason = probes.why_not("families", data.config)
        return pd.DataFrame([{"family": "", "metric": "", "reason": reason}])
    facts, rows = probe.facts["families"], probe.frames["requests"]
    rows = rows.assign(tau=rows["new_tokens"] / rows["steps"].where(rows["steps"] > 0))
    arms = {(name, method): part for (name, method), part in rows.groupby(["family", "method"])}
    where = {"setting": probe.facts["setting"], "seed": probe.facts["seed"]}
    arms |= {(SHIPPED, method): data.arm(data.headline[method], **where) for method in METHODS}
    found = []
    for name in (SHIPPED, *facts):
        said = {key: facts[name][key] for key in FACTS} if name in facts else {}
        for metric, parts in _numbers(name, arms, facts).items():
            mine, theirs = _estimate(parts), _estimate([arms[SHIPPED, method] for method in _methods(metric)])
            row = {"family": name, **said, "metric": metric} | _fields("value", mine)
            if name != SHIPPED:
                # of a ratio the four arms would have to be resampled together: the two intervals stand side by side
                over = metrics.ratio(parts[0], arms[SHIPPED, _methods(metric)[0]], "tau") if len(parts) == 1 else None
                row |= _fields("over_shipped", over) if over else {"over_shipped": mine.value / theirs.value}
                known = pd.notna([theirs.low, mine.value, theirs.high]).all()
                row |= {"inside": ("yes" if theirs.low <= mine.value <= theirs.high else "no") if known else ""}
            found.append(row | {"n": mine.n, "reason": ""})
    return pd.DataFrame(found)


def notes(data) -> str:
    """Return what the caption says of where the other families come from."""
    probe = data.probes.get("families")
    if probe is None:
        return ""
    setting, budget = probe.facts["setting"], data.config["budget"]
    return f"Untimed cells, {setting}, budget {budget}; one training run each. Intervals over prompts, not over runs."


def values(frame: pd.DataFrame) -> dict[str, dict]:
    """Return the numbers that the summary quotes: <metric>_family_<name> -> {value, low, high, n, unit}."""
    if "value" not in frame:
        return {}
    found = {}
    for _, row in frame[frame["family"] != SHIPPED].iterrows():
        unit = "tokens a step" if row["metric"].startswith("tau") else "x"
        entry = {"value": float(row["value"]), "low": float(row["value_low"]), "high": float(row["value_high"])}
        found[f"{row['metric']}_family_{row['family']}"] = entry | {"n": int(row["n"]), "unit": unit}
    return found


def _numbers(name: str, arms: dict, facts: dict) -> dict[str, list[pd.DataFrame]]:
    """Return metric -> its arm, or its two; a chain or tree of marginals may be another family's, of equal weights."""
    found = {f"tau_{method}": [arms[name, method]] for method in METHODS if (name, method) in arms}
    for pair in PAIRS:
        parts = [arms.get((_holder(name, method, arms, facts), method)) for method in pair]
        if parts[0] is not None and parts[1] is not None:
            found[f"accepted_ratio_{pair[0]}_{pair[1]}"] = parts
    return found


def _holder(name: str, method: str, arms: dict, facts: dict) -> str:
    """Return the family that has this method's records for `name`: itself, or one of the same target and drafter."""
    if (name, method) in arms or method == "tfm":
        return name
    same = [other for other in facts if _marginals(facts[other]) == _marginals(facts[name])]
    return next((other for other in same if (other, method) in arms), name)


def _marginals(family: dict) -> tuple[str, str]:
    return family["weights_sha256"]["target"], family["weights_sha256"]["drafter"]


def _methods(metric: str) -> list[str]:
    return metric.removeprefix("accepted_ratio_").removeprefix("tau_").split("_")


def _estimate(parts: list[pd.DataFrame]) -> metrics.Estimate:
    return metrics.mean(parts[0], "tau") if len(parts) == 1 else metrics.ratio(*parts, "accepted")


def _fields(name: str, estimate: metrics.Estimate) -> dict:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
