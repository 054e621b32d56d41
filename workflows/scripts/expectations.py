"""What a run has to give again: losslessness on any card, acceptance as expected, times on their own card."""

import re
from dataclasses import dataclass

import pandas as pd
from compare_paper import compare
from controls import FEWEST, holds_one
from kernel_runs import KernelRun, median

from baselines.methods import METHODS
from tfm import metrics
from tfm.cells import Records

DECIDED_BY_CODE = (12, 13, 15, 16, 28)  # rows of the inventory that no model and no card changes
NULL = "null_tok_s_ar"  # ar against ar
SAME_PROMPTS = ["target", "dataset", "variant", "setting", "seed", "id", "max_new_tokens", "dtype", "template"]
PUBLISHED_TOLERANCE = 0.02  # share of tau by which the same requests may differ from the published ones (near ties)
SETTING = r"T[0-9.]+(?:_THINK)?"
TIMES = ("tok_s", "speedup", "kernel_us", "kernel_ratio", "ratio_tok_s", "diff_tok_s")


@dataclass(frozen=True)
class Finding:
    """One item that was checked: what was expected, what came, and the command that makes its cells again."""

    item: str
    status: str  # pass, fail, or not comparable
    expected: str
    got: str
    reason: str = ""
    source: str = ""
    command: str = ""


def check_run(expected: dict, plan: dict, summary: dict, *, card: str) -> list[Finding]:
    """Return the findings of one run of a suite on a card: losslessness, what the code decides, what is expected."""
    suite = plan["config"]["suite"]
    runs = (expected.get("runs") or {}).get(suite) or {}
    findings = [*lossless(plan["config"], summary), *decided_by_code(expected, summary, suite)]
    for name, items in runs.items():
        for item, wanted in items.items():
            findings.append(_compared(item, wanted, summary, where=name, card=card))
    if summary.get(NULL, {}).get("value") is not None:
        findings.append(_null(summary[NULL]))
    return [Finding(**{**vars(found), "command": command_of(found.item, plan)}) for found in findings]


def lossless(config: dict, summary: dict) -> list[Finding]:
    """Return whether every method emitted ar's tokens (float32), and whether no lossless rule exceeded its bound."""
    findings = []
    for name, entry in summary.items():
        if (
            name.startswith("same_as_ar_")
            and name != "same_as_ar_share"
            and entry["n"]
            and config["dtype"] == "float32"
        ):
            is_same = entry["value"] == entry["n"]
            reason = "" if is_same else f"{entry['n'] - entry['value']} outputs are not ar's"
            findings.append(_found(name, is_same, f"{entry['n']} of {entry['n']}", _shown(entry), reason))
        rule = name.removeprefix("excess_")
        if rule != name and "legacy" not in rule and entry["low"] is not None and entry["n"] >= FEWEST:
            reason = "" if entry["low"] <= 0 else "more was accepted than any lossless rule can"
            findings.append(_found(name, entry["low"] <= 0, "interval not above 0", _shown(entry), reason))
    return findings


def decided_by_code(expected: dict, summary: dict, suite: str) -> list[Finding]:
    """Return the items of the paper that neither a model nor a card changes, where the run measured them."""
    rows = compare(expected, summary, suite)
    rows = [row for row in rows if row["row"] in DECIDED_BY_CODE and row["status"] in ("pass", "fail")]
    return [
        _found(
            row["item"], row["status"] == "pass", row["tolerance"], f"{row['ours']:.6g}", row["reason"], row["source"]
        )
        for row in rows
    ]


def check_kernels(run: KernelRun, published: KernelRun, *, tolerance: float) -> list[Finding]:
    """Return, for every tree and arm that both runs timed, whether it is slower than published by more than tolerance.

    A run on another card gives one finding, not comparable.
    """
    if run.card != published.card:
        reason = f"times of {published.card} are published, this is {run.card}"
        return [Finding("kernel_us", "not comparable", "", "", reason)]
    findings = []
    for (shape, rows), arms in published.samples.items():
        for arm, samples in arms.items():
            here = run.samples.get((shape, rows), {}).get(arm)
            if here is None:
                continue
            was, now = median(samples), median(here)
            limit = was.value * (1 + tolerance)
            reason = "" if now.value <= limit else f"slower by {now.value / was.value - 1:.0%}"
            findings.append(
                _found(
                    f"kernel_us_{arm}_{shape}_T{rows}",
                    now.value <= limit,
                    f"at most {limit:.4g} us (published {was.value:.4g} + {tolerance:.0%})",
                    f"{now.value:.4g} [{now.low:.4g}, {now.high:.4g}] us, n = {now.n}",
                    reason,
                    "results/published",
                    "python results/published/kernels-h200/bench.py --out DIR --commit $(git rev-parse HEAD)",
                )
            )
    return findings or [Finding("kernel_us", "fail", "a time of every published arm", "none", "no arm was timed again")]


def against_published(records: Records, published: Records, plan: dict) -> list[Finding]:
    """Return tau of the requests that a published run decoded too, beside what it was there; none where none is."""
    one, other = (_taus(part) for part in (records, published))
    both = one.merge(other, on=SAME_PROMPTS, suffixes=("", "_published"))
    findings = []
    for (variant, setting), rows in both.groupby(["variant", "setting"]):
        got, was = rows["tau"].mean(), rows["tau_published"].mean()
        is_same = abs(got - was) <= PUBLISHED_TOLERANCE * was
        paths = [c["path"] for c in plan["cells"] if (c["variant"], c["setting"]) == (variant, setting)]
        expected = f"{was:.4g} within {PUBLISHED_TOLERANCE:.0%}"
        reason = "" if is_same else "the same requests were accepted otherwise in the last published run"
        got = f"{got:.4g}, n = {len(rows)}"
        name = f"published_tau_{variant}_{setting}"
        findings.append(_found(name, is_same, expected, got, reason, "results/published", _rerun(paths, plan)))
    return findings


def _taus(records: Records) -> pd.DataFrame:
    table = metrics.per_request(records.requests, records.steps)
    return table[[*SAME_PROMPTS, "tau"]].dropna(subset=["tau"])


def _compared(item: str, wanted: dict, summary: dict, *, where: str, card: str) -> Finding:
    entry = summary.get(item) or {}
    value, tolerance = wanted["value"], wanted["tolerance"]
    text, source = (
        f"{value:.6g} within {tolerance:.3g} ({where} card)".replace("(any card)", "on any card"),
        wanted["source"],
    )
    if where != "any" and where != card:
        return Finding(item, "not comparable", text, _shown(entry), f"a number of {where}, this is {card}", source)
    if entry.get("value") is None:
        return Finding(item, "fail", text, "nothing", "the run did not measure it", source)
    is_close = abs(entry["value"] - value) <= tolerance
    off = "" if is_close else f"off by {entry['value'] - value:+.4g}"
    return Finding(item, "pass" if is_close else "fail", text, _shown(entry), off, source)


def _null(entry: dict) -> Finding:
    holds, wanted = holds_one(*(entry[key] for key in ("value", "low", "high", "n")))
    reason = ""
    if not holds:
        reason = "ar against ar is not 1.00: the times of this run were disturbed, no ratio of it counts"
    return _found(NULL, holds, wanted, _shown(entry), reason)


def command_of(item: str, plan: dict) -> str:
    """Return the command that makes the cells of an item again and checks them."""
    if item.startswith("kernel_") or item in ("gdn_error_float32", "gdn_error_float64", "commit_error_float32"):
        return _call(plan) + f" -R results/{plan['config']['suite']}/kernels/kernels.json"
    setting = re.search(rf"_({SETTING})(?:_|$)", item)
    methods = [
        method for method in METHODS if re.search(rf"(?:^|_){method}(?:_|$)", item.replace("same_as_ar", "same"))
    ]
    cells = plan["cells"]
    if item.startswith("excess_"):
        rule = item.removeprefix("excess_").removeprefix("sampled_")
        cells = [c for c in cells if c["decode"]["method"] == "tfm" and c["decode"]["rule"] == rule]
        return _rerun([c["path"] for c in cells], plan)
    if item == NULL:
        return _rerun([c["path"] for c in cells if c["part"] == "null"], plan)
    if setting is None or not methods:
        return _call(plan) + " --forceall"
    name = setting[1].lower().replace("_", "-")
    picked = [c for c in cells if c["part"] == "headline" and c["setting"] == name and c["decode"]["method"] in methods]
    return _rerun([c["path"] for c in picked], plan)


def _rerun(paths: list[str], plan: dict) -> str:
    return " ".join([_call(plan), "-R", *(f"{path}/requests.parquet" for path in paths)])


def _call(plan: dict) -> str:
    config = plan["config"]
    name = config["suite"].removesuffix("-real")
    file = f" --configfile workflows/config/{name}.yaml" if name != "nano" else ""
    data = " --config data=DIR" if config.get("data") else ""
    return f"snakemake check --cores all{file}{data}"


def points_at(findings: list[Finding]) -> str:
    """Return where to look first, from which items failed together; empty when none did."""
    failed = {found.item for found in findings if found.status == "fail"}
    same = [name for name in failed if name.startswith("same_as_ar_")]
    taus = [name for name in failed if name.startswith(("tau_", "published_tau_"))]
    if (same or any(name.startswith("excess_") for name in failed)) and not any("_T0" in name for name in same):
        return "greedy outputs are ar's, sampled ones are not: the acceptance rule or its noise (tfm/acceptance.py)"
    if same and any("dflash" in name for name in same):
        return "a chain does not give ar's tokens either: the target's pass, its cache or its commit (tfm/target.py)"
    if same:
        return "chains give ar's tokens, trees do not: tree verification (kernels/conv.py, kernels/gdn)"
    if taus and any("dflash" in name for name in taus):
        return "tokens are ar's, every drafted method accepts otherwise: the drafter's rows or the prompt template"
    if taus:
        return "tokens are ar's, trees are accepted otherwise: the proposer (tfm/builder.py, tfm/weaver.py, baselines)"
    if any(name.startswith("kernel_us") for name in failed):
        return "a kernel is slower than published on this card (kernels/gdn)"
    return "read the items" if failed else ""


def propose(expected: dict, plan: dict, summary: dict, *, card: str, source: str) -> dict:
    """Return {any: items, card: items} that this run would have expected.yaml say of its suite.

    Items that are there keep their tolerance; a suite without any gets tau of every drafting method, with 1 %, and, for
    timed methods, tokens a second on this card with 10 %.
    """
    known = (expected.get("runs") or {}).get(plan["config"]["suite"]) or {}
    old = {(where, item): entry for where, items in known.items() for item, entry in items.items()}
    wanted = dict.fromkeys([key for key in old if key[0] in ("any", card)])
    for name, entry in summary.items():
        if entry.get("value") is None:
            continue
        if re.fullmatch(rf"tau_(?:{'|'.join(METHODS)})_{SETTING}", name) and not name.startswith("tau_ar_"):
            wanted.setdefault(("any", name))
        if re.fullmatch(rf"tok_s_(?:{'|'.join(METHODS)})_{SETTING}", name):
            wanted.setdefault((card, name))
    proposal: dict[str, dict] = {}
    for where, item in wanted:
        entry = summary.get(item) or {}
        if entry.get("value") is None:
            continue
        share = 0.1 if item.startswith(TIMES) else 0.01
        tolerance = old.get((where, item), {}).get("tolerance", float(f"{share * abs(entry['value']):.2g}"))
        proposal.setdefault(where, {})[item] = {
            "value": float(f"{entry['value']:.6g}"),
            "tolerance": tolerance,
            "source": source,
        }
    return proposal


def _found(item, is_good: bool, expected: str, got: str, reason: str, source: str = "", command: str = "") -> Finding:
    return Finding(item, "pass" if is_good else "fail", expected, got, reason, source, command)


def _shown(entry: dict) -> str:
    if entry.get("value") is None:
        return "nothing"
    ends = (entry.get("low"), entry.get("high"))
    interval = "" if None in ends else f" [{ends[0]:.4g}, {ends[1]:.4g}]"
    return f"{entry['value']:.6g}{interval}, n = {entry['n']}"
