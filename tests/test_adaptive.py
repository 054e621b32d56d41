"""tfm-adaptive: the budget follows expected tokens over cost, both loops choose alike, and no token changes."""

import math
from dataclasses import replace

import pytest
import torch
from engine_models import assert_same_records, prompts_of, random_family, run_reference, run_static

from baselines.methods import METHODS
from tfm import adaptive
from tfm.adaptive import BudgetPolicy, Costs, expected_gains
from tfm.config import DecodeConfig

# what the smaller trees save makes them worth choosing now and then
MS = {2: 10.0, 6: 11.0, 12: 14.0}


@pytest.fixture
def costs(monkeypatch, tmp_path):
    found = Costs(MS, {"device": "a test"})
    found.write(tmp_path / "costs.json")
    monkeypatch.setattr(Costs, "read", staticmethod(lambda: found))
    monkeypatch.setitem(METHODS, "adaptive", replace(METHODS["adaptive"], costs=f"{tmp_path}/costs.json"))


def config_of(method="adaptive", **more):
    settings = {"budget": 12, "candidates": 20} if method == "adaptive" else {}
    return DecodeConfig(**{"method": method, "max_new_tokens": 24, "seed": 1, **settings, **more})


def test_it_starts_with_the_largest_and_then_takes_the_most_tokens_a_ms():
    policy = BudgetPolicy(MS)
    assert policy.choose() == 12
    # 1.1 / 10, 1.15 / 11, 1.16 / 14 tokens a ms
    policy.observe([0.1, 0.15, 0.16], accepted=0)
    assert policy.choose() == 2
    for _ in range(8):
        policy.observe([1.0, 2.5, 4.5], accepted=4)
    assert policy.choose() == 12
    policy.reset()
    policy.observe([1.0, 2.5, 2.6], accepted=2)
    assert policy.choose() == 6


def test_what_a_smaller_tree_does_not_show_moves_with_what_it_shows():
    policy = BudgetPolicy(MS)
    policy.observe([0.5, 0.9, 1.2], accepted=0)
    assert policy.choose() == 2
    for _ in range(20):
        policy.observe([3.0], accepted=3)
    assert policy.choose() > 2


def test_acceptance_scales_what_the_drafter_expects():
    proud, right = BudgetPolicy(MS), BudgetPolicy(MS)
    for _ in range(20):
        proud.observe([1.0, 2.5, 4.5], accepted=0)
        right.observe([1.0, 2.5, 4.5], accepted=4)
    assert (proud.choose(), right.choose()) == (2, 12)


def test_expected_gains_are_sums_of_path_probabilities():
    half = math.log(0.5)
    # a chain of two and a sibling; the last row is padding
    gains = expected_gains([-1, 0, 1, 0, -1], [0.0, half, half, 2 * half, 0.0], 4, [1, 2, 4, 9])
    assert gains == pytest.approx([0.5, 0.75, 1.0])


def test_both_loops_choose_alike_and_emit_ar_s_tokens(costs):
    """Sizes change from step to step; the same choices whether or not a tree is drafted ahead."""
    models = random_family()
    prompts = prompts_of(models)
    expected = run_reference(models, config_of(), prompts)
    sizes = {step.nodes for trace in expected for step in trace.steps}
    assert len(sizes) > 1 and max(sizes) == 13
    for ahead in (False, True):
        assert_same_records(run_static(models, config_of(), prompts, ahead=ahead), expected)
    plain = run_reference(models, config_of("ar"), prompts)
    assert [trace.output_tokens for trace in expected] == [trace.output_tokens for trace in plain]


def test_one_request_at_a_time_and_a_budget_that_was_measured(costs):
    models = random_family()
    with pytest.raises(ValueError, match="requests: 2 .*adaptive"):
        run_reference(models, config_of(requests=2), prompts_of(models, (5, 5)))
    with pytest.raises(ValueError, match="budget: 1 .*2 or more"):
        run_reference(models, config_of(budget=1), prompts_of(models, (5,)))


def test_the_shipped_costs_are_of_a_named_card_and_grow_with_the_budget():
    found = Costs.read()
    assert found.measured["device"] and sorted(found.ms.values()) == [found.ms[size] for size in sorted(found.ms)]
    assert 64 in found.ms and torch.tensor(list(found.ms.values())).gt(0).all()
    assert adaptive.COSTS.exists()
