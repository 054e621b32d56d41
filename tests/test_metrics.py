"""Metrics on traces small enough to check by hand."""

import math

import pandas as pd
import pytest

from tfm import metrics
from tfm.cells import join_records, to_tables
from tfm.trace import RequestTrace, StepTrace


def step(number: int, accepted: int, *, depth: int = 4, nodes: int | None = None, bound: float = 0.0, **fields):
    nodes = depth + 1 if nodes is None else nodes
    values = {"accepted": accepted, "accepted_untrimmed": accepted, "committed": accepted + 1} | fields
    return StepTrace(step=number, context=10, nodes=nodes, depth=depth, expected_accepted=bound, **values)


def request(name: str, accepted: list[int], *, index: int = 0, us: float | None = None, prefill: float = 0.0, **fields):
    """A request whose steps accept the drafts given; the token of the prefill comes first."""
    steps = [step(number, count, **fields) for number, count in enumerate(accepted)]
    tokens = list(range(1 + sum(count + 1 for count in accepted)))
    times = {"prefill_us": None, "decode_us": None} if us is None else {"prefill_us": prefill, "decode_us": us}
    return RequestTrace(name, index, 5, tokens, "stop", steps=steps, **times)


def arm(requests: list[RequestTrace], *, method: str = "tfm", dataset: str = "set", seed: int = 0):
    """Requests and steps of one cell, as the loader would give them."""
    decode = {"method": method, "temperature": 1, "rule": "target_only", "budget": 4, "depth": None, "width": None}
    decode |= {"children": 8, "candidates": 64, "max_new_tokens": 48, "requests": 1, "gdn_backend": "solve"}
    cell = {"suite": "toy", "engine": "torch", "target": "toy", "dataset": dataset, "domain": "math", "variant": method}
    clock = "off" if requests[0].decode_us is None else "wall"
    cell |= {"setting": "t1", "seed": seed, "clock": clock, "traced": False, "device": "cpu", "dtype": "float32"}
    cell |= {"reasoning": False, "template": "paper", "decode": decode}
    manifest = {"cell": cell, "device": {"name": "toy", "torch_threads": 1}, "environment": {"git": {"commit": None}}}
    manifest |= {"source_digest": "s", "cell_digest": "c", "prompts_sha256": "p"}
    tables = to_tables(requests)
    numbered = {kind: table.append_column("cell", [[0] * len(table)]) for kind, table in tables.items()}
    records = join_records([manifest], numbered)
    return metrics.per_request(records.requests, records.steps), records.steps


def both(*parts) -> pd.DataFrame:
    return pd.concat([part[0] for part in parts])


@pytest.mark.parametrize(("accepted", "mal"), [(0, 1.0), (4, 5.0)])
def test_mal_counts_the_bonus_and_accepted_does_not(accepted, mal):  # C024
    table, _ = arm([request("a", [accepted] * 10)])
    assert metrics.mean(table, "tau_exact").value == mal
    assert metrics.mean(table, "accepted").value == accepted


def test_steps_without_a_bound_have_no_excess():
    """Traversal on drawn siblings: acceptance is a number, the bound and what exceeds it are empty, not 0."""
    table, _ = arm([request("a", [3, 1], bound=None), request("b", [2], bound=None)])
    assert metrics.mean(table, "accepted_untrimmed").value == 2
    assert math.isnan(metrics.mean(table, "expected_accepted").value)
    assert metrics.excess_over_bound(table).n == 0


def test_tau_is_new_tokens_over_steps_with_the_prefill_token_in_it():
    table, _ = arm([request("a", [3, 1])])
    assert table["new_tokens"].tolist() == [7]
    assert metrics.mean(table, "tau").value == 7 / 2
    assert metrics.mean(table, "tau_exact").value == 6 / 2


def test_ar_has_tau_one_by_definition():
    table, _ = arm([request("a", [0] * 9, depth=0)], method="ar")
    assert metrics.mean(table, "tau").value == 1
    assert metrics.mean(table, "tau_exact").value == 1
    assert metrics.mean(table, "tau_pooled").value == 1


@pytest.mark.parametrize("method", ["ar", "tfm"])
def test_a_request_without_a_step_has_no_tau(method):
    table, _ = arm([request("a", [], us=3.0, prefill=1e5)], method=method)
    for name in ("tau", "tau_exact", "accepted", "tau_pooled", "decode_tok_s"):
        estimate = metrics.mean(table, name)
        assert math.isnan(estimate.value) and estimate.n == 0, name


@pytest.mark.parametrize(("flags", "accepted"), [([1, 0, 1], 1), ([0, 1, 1], 0), ([1, 1, 0, 1], 2), ([1, 1, 1], 3)])
def test_acceptance_by_position_stops_at_the_first_refusal(flags, accepted):  # C025
    run = flags.index(0) if 0 in flags else len(flags)
    assert run == accepted
    _, steps = arm([request("a", [run], depth=len(flags))])
    table = metrics.acceptance_by_position(steps)
    assert table["unconditional"].tolist() == [float(d < accepted) for d in range(len(flags))]


def test_chain_of_five_with_two_matches_each_step():  # C029
    _, steps = arm([request("a", [2] * 7, depth=5)])
    table = metrics.acceptance_by_position(steps)
    assert metrics.accept_rate(steps) == 0.4
    assert table["unconditional"].tolist() == [1, 1, 0, 0, 0]
    # nothing survives position 3, so positions 4 and 5 have no conditional at all
    assert table["conditional"].tolist()[:3] == [1, 1, 0] and table["conditional"].iloc[3:].isna().all()
    assert table["n"].tolist() == [7, 7, 7, 0, 0]


def test_trees_of_unknown_depth_say_what_was_accepted_and_nothing_given_their_depth():
    _, steps = arm([request("a", [2, 0, 1], depth=2)])
    known = metrics.acceptance_by_position(steps)
    table = metrics.acceptance_by_position(steps.assign(depth=float("nan")))
    assert table["unconditional"].tolist() == known["unconditional"].tolist()
    assert table["conditional"].isna().all() and table["n"].tolist() == [0, 0]


def test_a_shallow_tree_says_nothing_about_deep_positions():
    deep, shallow = step(0, 3, depth=3), step(1, 1, depth=1)
    trace = RequestTrace("a", 0, 5, [0] * 7, "length", None, None, [deep, shallow])
    table = metrics.acceptance_by_position(arm([trace])[1])
    assert table["conditional"].tolist() == [1, 1, 1] and table["n"].tolist() == [2, 1, 1]
    assert table["unconditional"].tolist() == [1, 0.5, 0.5] and table["unconditional"].sum() == (3 + 1) / 2


def test_pooled_and_per_prompt_means_differ_and_are_both_there():  # C030
    table, steps = arm([request("a", [3, 1]), request("b", [0], index=1), request("c", [2, 2, 2], index=2)])
    assert metrics.mean(table, "tau_exact").value == pytest.approx((3 + 1 + 3) / 3)
    assert (steps["accepted"] + 1).mean() == pytest.approx(2.6667, abs=1e-4)
    # pooled tau is the authors': the tokens of the prefill count, as in tau
    assert metrics.mean(table, "tau_pooled").value == pytest.approx((7 + 2 + 10) / 6)


def test_macro_is_the_mean_over_sets_whatever_their_sizes():
    small, large = arm([request("a", [4])]), arm([request(str(i), [1], index=i) for i in range(9)], dataset="other")
    assert metrics.mean(both(small, large), "accepted").value == (4 + 1) / 2


def test_stages_add_up_to_the_decode_wall_and_other_is_the_rest():  # C033
    stages = {"draft": 5e3, "build": 1e3, "verify": 20e3, "accept": 0.0, "commit": 1e3}
    trace = request("a", [1, 1, 1], us=82.5e3, prefill=100e3)
    for one in trace.steps:
        one.stage_us = {**stages, "target_gdn": 6e3}
    table, steps = arm([trace])
    times = metrics.stage_times(table, steps)
    assert times["decode"] * 3 == pytest.approx(82.5e3) and times["prefill"] == 100e3
    assert sum(times[name] for name in stages) * 3 == pytest.approx(81e3)
    assert times["other"] * 3 == pytest.approx(1.5e3)
    shares = metrics.stage_shares(times)
    assert sum(shares[name] for name in (*stages, "other")) == pytest.approx(1)
    assert shares["gdn"] == pytest.approx((6e3 + 1e3) * 3 / 82.5e3)


def test_slow_downs_are_printed_as_they_are():  # C095
    # ar 10 ms a token; a round of 60 ms yields 5 tokens
    slow, _ = arm([request("a", [0] * 100, depth=0, us=1010e3)], method="ar")
    fast, _ = arm([request("a", [4] * 20, us=20 * 60e3 + 12e3)])
    assert metrics.ratio(fast, slow, "tok_s").value == pytest.approx(0.833, abs=1e-3)


def test_speedup_is_the_ratio_of_macros():
    one = both(
        arm([request("a", [0] * 9, us=1e6)], method="ar"),
        arm([request("b", [0] * 9, us=4e6)], method="ar", dataset="z"),
    )
    other = both(arm([request("a", [0] * 9, us=0.5e6)]), arm([request("b", [0] * 9, us=4e6)], dataset="z"))
    # 10 and 2.5 tokens a second against 20 and 2.5: the mean of ratios would be 1.5
    assert metrics.ratio(other, one, "tok_s").value == pytest.approx(22.5 / 12.5)


def test_requests_without_a_clock_give_no_throughput():
    table, _ = arm([request("a", [1, 1])])
    assert math.isnan(metrics.mean(table, "tok_s").value)


def test_pairs_use_the_prompts_of_both_arms():  # C098
    one, _ = arm([request("a", [1]), request("b", [2], index=1), request("c", [9], index=2)])
    other, _ = arm([request("a", [0]), request("b", [0], index=1)])
    estimate = metrics.difference(one, other, "accepted")
    assert estimate.value == 1.5 and estimate.n == 2


def test_seeds_of_a_prompt_stay_together():
    # two prompts, eight seeds each, no spread inside a prompt: more seeds must not narrow the interval
    few = both(*(arm([request("a", [0]), request("b", [4], index=1)], seed=seed) for seed in range(2)))
    many = both(*(arm([request("a", [0]), request("b", [4], index=1)], seed=seed) for seed in range(8)))
    assert metrics.mean(few, "accepted") == metrics.mean(many, "accepted")
    assert metrics.mean(many, "accepted").n == 2 and metrics.mean(many, "accepted").low == 0


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    import numpy as np

    generator, hits = np.random.default_rng(0), 0
    for _ in range(60):
        table, _ = arm([request(str(i), [int(k)], index=i) for i, k in enumerate(generator.poisson(3, size=40))])
        estimate = metrics.mean(table, "accepted")
        hits += estimate.low <= 3 <= estimate.high
    assert 52 <= hits <= 60


def test_the_interval_is_the_same_every_time_and_paired_intervals_are_narrow():
    base = [0, 3, 1, 5, 2, 4, 0, 6]
    one, _ = arm([request(str(i), [k + 1], index=i) for i, k in enumerate(base)])
    other, _ = arm([request(str(i), [k], index=i) for i, k in enumerate(base)])
    estimate = metrics.difference(one, other, "accepted")
    assert estimate == metrics.difference(one, other, "accepted")
    assert estimate.low == estimate.high == estimate.value == 1


def test_an_arm_holds_a_prompt_once_a_seed():
    table, _ = arm([request("a", [1])])
    with pytest.raises(ValueError, match="twice at one seed"):
        metrics.mean(pd.concat([table, table]), "accepted")


def test_a_lossy_rule_shows_as_an_excess_over_the_bound():
    table, _ = arm([request(str(i), [2, 2], index=i, bound=1.25) for i in range(4)])
    assert metrics.excess_over_bound(table).value == 0.75


def test_identical_outputs_are_counted_on_shared_prompts():
    one, _ = arm([request("a", [1]), request("b", [2], index=1)])
    other, _ = arm([request("a", [0, 0]), request("b", [1], index=1), request("c", [1], index=2)], method="ar")
    assert metrics.identical_outputs(one, other) == (1, 2)


def test_verified_rows_are_the_budget_and_the_root():  # C019
    _, steps = arm([request("a", [1], nodes=65)])
    assert steps["nodes"].tolist() == [64 + 1]


def test_a_ratio_over_nothing_is_empty():
    one, _ = arm([request("a", [1]), request("b", [2], index=1)])
    none, _ = arm([request("a", [0]), request("b", [0], index=1)])
    estimate = metrics.ratio(one, none, "accepted")
    assert all(math.isnan(number) for number in (estimate.value, estimate.low, estimate.high)) and estimate.n == 2


@pytest.mark.parametrize("counts", [(1,), (1, 1), (3, 1)])
def test_a_set_of_one_prompt_gives_no_interval(counts):
    """Resampled it is itself: two such sets had an interval of width 0, as if nothing was left to chance."""
    sets = [
        arm([request(f"{number}-{i}", [i, 2], index=i) for i in range(count)], dataset=f"set{number}")
        for number, count in enumerate(counts)
    ]
    for estimate in (metrics.mean(both(*sets), "tau"), metrics.ratio(both(*sets), both(*sets), "tau")):
        assert estimate.n == sum(counts) and estimate.value > 0
        assert math.isnan(estimate.low) and math.isnan(estimate.high)
