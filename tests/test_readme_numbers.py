"""The numbers of the README that are typed by hand are those of the published tables and records."""

import re
import sys

import pandas as pd
import pytest
from workflow_runs import ROOT

sys.path.insert(0, str(ROOT / "workflows/scripts"))
from publish import load_published

from tfm import metrics

PUBLISHED = ROOT / "results/published"
# without line breaks: a sentence may be wrapped anywhere
TEXT = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))


def shown(row, name: str, *, sign: int = 1) -> str:
    """Return a number with its interval as the README has it."""
    value, *ends = (sign * row[f"{name}{end}"] for end in ("", "_low", "_high"))
    return "{:.2f} [{:.2f}, {:.2f}]".format(value, *sorted(ends))


def rows(suite: str, table: str, **where) -> dict[str, pd.Series]:
    """Return the rows of a published table by method."""
    frame = pd.read_csv(PUBLISHED / suite / f"tables/{table}.csv")
    for column, value in where.items():
        frame = frame[frame[column] == value]
    names = frame["variant"].str.partition("-")[0] if "variant" in frame else frame[frame.columns[0]]
    return dict(zip(names, (row for _, row in frame.iterrows()), strict=True))


@pytest.mark.parametrize("setting", ["t1", "t0"])
def test_speeds_on_a_cpu(setting):
    found = rows("nano", "headline", setting=setting)
    methods = [found[name] for name in ("dflash", "ddtree", "dartree", "tfm")]
    speeds = [shown(row, "speedup") if setting == "t1" else f"{row['speedup']:.2f}" for row in methods]
    words = {"t1": "times ar's {:.0f} tokens a second", "t0": "times {:.0f}."}[setting]
    assert f"{', '.join(speeds[:3])} and {speeds[3]} {words.format(found['ar']['tok_s'])}" in TEXT


@pytest.mark.parametrize(("suite", "settings"), [("nano", ["t1", "t0"]), ("mini", ["t1"])])
def test_tau_and_accepted_of_the_headlines(suite, settings):
    for setting in settings:
        for method, row in rows(suite, "headline", setting=setting).items():
            if method != "ar":
                assert f"| {shown(row, 'tau')} | {shown(row, 'accepted')} |" in TEXT, (suite, setting, method)


@pytest.mark.parametrize(
    "pair", ["tfm - dflash", "tfm - ddtree", "tfm - dartree", "dartree - ddtree", "ddtree - dflash"]
)
def test_paired_numbers(pair):
    frame = pd.read_csv(PUBLISHED / "nano/tables/paired.csv")
    frame = frame[(frame["pair"] == pair) & (frame["setting"] == "t1") & (frame["dataset"] == "macro")]
    accepted, tau = (frame[frame["metric"] == name].iloc[0] for name in ("accepted", "tau"))
    cells = [shown(accepted, "difference"), shown(accepted, "ratio"), shown(tau, "ratio")]
    assert f"| {pair.replace('-', 'over')} | {' | '.join(cells)} |" in TEXT


def test_what_the_weavers_residual_brings_on_one_set():
    records = load_published(PUBLISHED / "nano")
    table = metrics.per_request(records.requests, records.steps)
    table = table[(table["dataset"] == "mtbench") & (table["setting"] == "t1") & (table["seed"] == 0)]
    arms = dict(list(table.groupby("variant")))
    less, more = (
        metrics.difference(arms[one], arms[other], "accepted")
        for one, other in (("ddtree-b64", "tfm-b64-w4-r0"), ("tfm-b64-w4", "tfm-b64-w4-r0"))
    )
    less, more = (shown({"_low": one.low, "_high": one.high, "": one.value}, "") for one in (less, more))
    assert f"accepts {less} drafts a step less than DDTree, with it {more} more than without" in TEXT
    legacy = rows("nano", "audit", rule="legacy_traversal")["tfm"]
    values = [f"{legacy[name]:.2f}" for name in ("accepted_untrimmed", "expected_accepted")]
    assert "reports {} accepted where no lossless rule can pass {}".format(*values) in TEXT
    assert f"{shown(legacy, 'excess')} of it is not real" in TEXT


def test_the_ceiling_of_marginals():
    nano, mini = (
        pd.read_csv(PUBLISHED / f"{name}/tables/ceiling_claims.csv").set_index("key") for name in ("nano", "mini")
    )
    assert f"from position 2 on, by {shown(nano.loc['oracle_argmax_accepted_2'], 'value')}" in TEXT
    text = f"({shown(nano.loc['weaver_overlap_5'], 'value')} from position 5 on)"
    assert text in TEXT and f"({shown(nano.loc['weaver_accepted_5'], 'value')})" in TEXT
    assert f"given earlier acceptance ({shown(mini.loc['weaver_accepted_2'], 'value')}" in TEXT
    # from position 2 on the interval holds 0
    assert (mini.loc["weaver_overlap_2", "answer"], mini.loc["weaver_overlap_5", "answer"]) == ("open", "yes")
    assert (
        f"along the target's own text it does from position 5 on, by {shown(mini.loc['weaver_overlap_5'], 'value')})"
        in TEXT
    )
