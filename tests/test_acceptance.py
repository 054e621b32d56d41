"""The rules: single rows, greedy walks, batches, randomness, bad input (law and bound: test_acceptance_law.py)."""

import math

import pytest
import torch
from acceptance_cases import (
    EXACT,
    SAMPLED,
    accept_at,
    emitted_tokens,
    first_token_law,
    repeat,
    rows,
)
from helpers import (
    ToyLaw,
    draft_trees,
    enumerate_branches,
    make_tree,
    outcomes_of,
    paths_of,
    stack_trees,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm.acceptance import accept, accept_by_traversal
from tfm.config import RULES
from tfm.traversal import HashChance
from tfm.tree import DraftTree

# --- single rows


def test_a_deterministic_draft_is_accepted_with_the_targets_probability():
    """C056: p = [.6, .3, .1], draft 1: accepted with .30, residual [.857143, 0, .142857], output law p."""
    tree = make_tree([0, 1], [-1, 0], [0.0, -0.2])
    logits = rows([0.6, 0.3, 0.1], [1 / 3] * 3)
    for rule in EXACT:
        first = first_token_law(outcomes_of(tree, logits, rule))
        assert first == pytest.approx({0: 0.6, 1: 0.3, 2: 0.1}, abs=1e-12)
    refused = [branch for branch in outcomes_of(tree, logits, "traversal") if branch[1][0] != 1]
    mass = sum(probability for probability, _ in refused)
    assert mass == pytest.approx(0.7, abs=1e-12)
    residual = {tokens[0]: probability / mass for probability, tokens in refused}
    assert residual == pytest.approx({0: 0.857142857, 2: 0.142857143}, abs=1e-8)


@pytest.mark.parametrize("rule", EXACT)
def test_siblings_share_the_row_without_being_counted_twice(rule):
    """C058: p = [.5, .3, .2], children 0 and 1: P(0) = .5, P(1) = .3, P(2) = .2; 1 given 0 refused is .6."""
    tree = make_tree([0, 0, 1], [-1, 0, 0], [0.0, -0.1, -0.4])
    uniform_row = [1 / 3] * 3
    outcomes = outcomes_of(tree, rows([0.5, 0.3, 0.2], uniform_row, uniform_row), rule)
    first = first_token_law(outcomes)
    assert first == pytest.approx({0: 0.5, 1: 0.3, 2: 0.2}, abs=1e-12)
    assert first[1] / (1 - first[0]) == pytest.approx(0.6, abs=1e-12)
    left_tree = sum(probability for probability, tokens in outcomes if len(tokens) == 1)
    assert left_tree == pytest.approx(0.2, abs=1e-12)


@pytest.mark.parametrize("rule", EXACT)
def test_a_chain_that_the_target_is_sure_of_is_always_accepted(rule):
    """C066: q = p one-hot, chain of 4, 500 rounds: 100 % (target_only is exact match, so only one-hot rows do this)."""
    tree = make_tree([0, 1, 2, 1, 0], [-1, 0, 1, 2, 3], [0.0] * 5)
    logits = torch.full((1, 5, 3), -math.inf)
    logits[0, torch.arange(5), torch.tensor([1, 2, 1, 0, 2])] = 0.0
    result = accept_at(repeat(tree, 500), logits.expand(500, -1, -1), rule)
    assert result.accepted.tolist() == [4] * 500
    assert result.bonus.tolist() == [2] * 500


def test_exact_match_of_a_sampled_like_chain_accepts_its_path_mass_only():
    """C066: with q = p but soft, target_only accepts sum P(path), not 100 %; that is the bound of any rule here."""
    tree = make_tree([0, 1, 1, 1, 1], [-1, 0, 1, 2, 3], [0.0] + [math.log(0.5)] * 4)
    logits = rows(*[[0.5, 0.5]] * 5)
    result = accept_at(repeat(tree, 500), logits.expand(500, -1, -1), "target_only")
    assert float(result.expected_accepted[0]) == pytest.approx(0.5 + 0.25 + 0.125 + 0.0625, abs=1e-12)
    assert result.accepted.double().mean() == pytest.approx(0.9375, abs=0.25)


# --- greedy


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25)
@given(tree=draft_trees(vocab=3, max_nodes=8, max_depth=3), seed=st.integers(0, 999))
def test_every_rule_is_the_greedy_walk_at_temperature_zero(rule, tree, seed):
    logits = ToyLaw.random(vocab=3, length=4, seed=seed).logits(tree)
    result = accept_at(tree, logits, rule, temperature=0.0)
    path, bonus = greedy_by_hand(tree, logits)
    assert result.path[0, : len(path)].tolist() == path
    assert (result.path[0, len(path) :] == -1).all()
    assert (int(result.accepted), int(result.bonus)) == (len(path) - 1, bonus)
    assert float(result.expected_accepted) == len(path) - 1


@pytest.mark.parametrize("rule", RULES)
def test_greedy_ties_go_to_the_lowest_id_inside_a_tree(rule):
    """C039: logits [1, 3, 3, 0] at every node: token 1, whatever the order of the children."""
    tree = make_tree([0, 2, 1, 2, 1], [-1, 0, 0, 2, 2], [0.0, -0.1, -0.2, -0.1, -0.2])
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0]).expand(1, 5, 4)
    result = accept_at(tree, logits, rule, temperature=0.0)
    assert result.path.tolist() == [[0, 2, 4]]
    assert result.bonus.tolist() == [1]


def test_a_wrong_draft_of_one_token_yields_the_targets_token():
    """C040: nothing accepted, the bonus is the target's argmax."""
    tree = make_tree([0, 2], [-1, 0])
    result = accept_at(tree, torch.tensor([[[0.0, 5.0, 1.0], [9.0, 0.0, 0.0]]]), "greedy", temperature=0.0)
    assert (result.accepted.tolist(), result.bonus.tolist(), result.path.tolist()) == ([0], [1], [[0, -1]])


def test_greedy_follows_the_target_not_the_drafter():
    """C041: drafter a = .20; target a = .30, b = .50, at temperature 0: b."""
    tree = make_tree([0, 0], [-1, 0], [0.0, math.log(0.2)])
    result = accept_at(tree, rows([0.3, 0.5, 0.2], [1 / 3] * 3), "greedy", temperature=0.0)
    assert (result.accepted.tolist(), result.bonus.tolist()) == ([0], [1])


@pytest.mark.parametrize(
    ("flags", "accepted"),
    [([1, 0, 1], 1), ([0, 1, 1], 0), ([1, 1, 0, 1], 2), ([1, 1, 1], 3)],
    ids=["miss_in_the_middle", "miss_first", "miss_third", "all_match"],
)
def test_accepted_counts_the_leading_matches_only(flags, accepted):
    """C025: a later match behind a miss does not count."""
    tree, logits = flagged_chain(flags)
    assert accept_at(tree, logits, "greedy", temperature=0.0).accepted.tolist() == [accepted]


@pytest.mark.parametrize(("flags", "accepted"), [([0] * 4, 0), ([1] * 4, 4)], ids=["all_rejected", "all_accepted"])
def test_accepted_counts_drafts_and_leaves_the_bonus_out(flags, accepted):
    """C024: ten steps of four drafts: 0 or 4 accepted each; with the bonus 1 or 5 tokens a step."""
    tree, logits = flagged_chain(flags)
    result = accept_at(repeat(tree, 10), logits.expand(10, -1, -1), "target_only", temperature=0.0)
    assert result.accepted.tolist() == [accepted] * 10
    assert ((result.path >= 0).sum(1) == accepted + 1).all()


# --- batches and shapes


@pytest.mark.parametrize("rule", SAMPLED)
@settings(max_examples=20)
@given(trees=st.lists(draft_trees(vocab=4, max_nodes=8, max_depth=3), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_ragged_requests_decide_as_they_do_alone(rule, trees, seed):
    """A request's path and bonus depend on its own index, not on its neighbours, the padding or the order."""
    logits = [ToyLaw.random(vocab=4, length=4, seed=seed + i).logits(tree) for i, tree in enumerate(trees)]
    width = max(tree.tokens.shape[1] for tree in trees)
    padded = [torch.nn.functional.pad(row, (0, 0, 0, width - row.shape[1])) for row in logits]
    together = accept_at(stack_trees(trees), torch.cat(padded), rule)
    for request, (tree, row) in enumerate(zip(trees, logits, strict=True)):
        alone = accept_at(tree, row, rule, indices=torch.tensor([request]))
        assert together.path[request, : alone.path.shape[1]].tolist() == alone.path[0].tolist()
        assert (together.path[request, alone.path.shape[1] :] == -1).all()
        assert together.bonus[request] == alone.bonus[0]
        assert float(together.expected_accepted[request]) == pytest.approx(float(alone.expected_accepted), abs=1e-12)


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_root_alone_accepts_nothing_and_draws_one_token(rule, temperature):
    tree = DraftTree.root_only(torch.tensor([3, 1]))
    result = accept_at(tree, torch.randn(2, 1, 9), rule, temperature=temperature)
    assert (result.path.tolist(), result.accepted.tolist()) == ([[0], [0]], [0, 0])
    assert result.expected_accepted.tolist() == [0.0, 0.0]
    assert result.bonus.shape == (2,)


@pytest.mark.parametrize("rule", SAMPLED)
def test_impossible_tokens_are_never_emitted(rule):
    """C064 spirit: -inf and 6e4 logits, half precision, a drafted token of probability 0."""
    tree = make_tree([0, 1, 2], [-1, 0, 0], [0.0, -0.1, -math.inf])
    logits = torch.tensor([6e4, -math.inf, 0.0, -math.inf]).half().expand(1, 3, 4)
    result = accept_at(repeat(tree, 200), logits.expand(200, -1, -1), rule)
    assert set(result.bonus.tolist()) == {0}
    assert result.accepted.sum() == 0
    assert result.expected_accepted.isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", ["traversal", "legacy_traversal"])
@pytest.mark.parametrize("node", [0, 1, 3])
def test_a_row_without_a_law_is_refused_and_is_no_rejection(rule, node, value):
    """C064: ratios of NaN are all refused. The root's row ended in an assertion, an inner row's in other text."""
    tree = make_tree([0, 1, 2, 3], [-1, 0, 0, 1], [0.0, -0.1, -3.0, -0.1])
    logits = torch.full((1, 4, 4), -20.0)
    logits[0, torch.arange(4), torch.tensor([1, 3, 0, 2])] = 0.0  # the path 0, 1, 3 is all but certain
    assert accept_at(tree, logits, rule).path.tolist() == [[0, 1, 3]]
    logits[0, node] = value
    with pytest.raises(ValueError, match=f"logits: NaN or infinite .request 0, node {node} .*check them"):
        accept_at(tree, logits, rule)


def test_target_only_emits_what_one_row_decoding_emits():
    """The bonus and the path are the tokens that autoregressive decoding draws at the same positions."""
    law = ToyLaw.random(vocab=4, length=4, seed=2)
    tree = make_tree([0, 1, 2, 0, 3, 1, 2], [-1, 0, 0, 1, 1, 2, 4], [0.0] * 7)
    requests = 200
    result = accept_at(repeat(tree, requests), law.logits(tree).expand(requests, -1, -1), "target_only")
    for request, emitted in enumerate(emitted_tokens(repeat(tree, requests), result)):
        prefix: tuple[int, ...] = ()
        for step, token in enumerate(emitted):
            root = DraftTree.root_only(torch.tensor([0]))
            alone = accept(
                root,
                law.levels[len(prefix)][prefix][None, None],
                rule="target_only",
                temperature=1.0,
                seed=0,
                indices=torch.tensor([request]),
                root_positions=torch.tensor([7 + step]),
            )
            assert int(alone.bonus) == token
            prefix += (token,)


# --- randomness


def test_hash_chance_never_chooses_a_weight_of_zero():
    for value in (2.0**-53, 0.5, 1 - 2.0**-53):
        assert HashChance([value]).choose([0.0, 0.3, 0.0, 0.7, 0.0]) in (1, 3)
        assert HashChance([value]).choose(torch.tensor([0.0, 1e-300, 0.0], dtype=torch.float64)) == 1


def test_traversal_needs_no_more_uniforms_than_it_is_given():
    """Worst case: every sibling drawn and refused, then the bonus."""
    tree = make_tree([0, *range(8)], [-1] + [0] * 8, [0.0] * 9)
    logits = torch.full((1, 9, 9), -math.inf)
    logits[..., 8] = 0.0
    assert accept_at(tree, logits, "traversal").bonus.tolist() == [8]


def test_traversal_is_one_certain_branch_when_the_drafter_is_right():
    tree = make_tree([0, 1], [-1, 0], [0.0, 0.0])
    branches = enumerate_branches(
        lambda chance: accept_by_traversal(
            tree, rows([0.0, 1.0], [1.0, 0.0]), [chance], rule="traversal", temperature=1.0
        )
    )
    assert [probability for probability, _ in branches] == [1.0]


# --- bad input


def test_unknown_rule_is_refused_by_name():
    with pytest.raises(ValueError, match=r"rule: 'typical' is not allowed \(allowed: greedy, target_only"):
        accept_at(make_tree([0], [-1]), torch.zeros(1, 1, 3), "typical")


def test_greedy_above_temperature_zero_is_refused():
    with pytest.raises(ValueError, match=r"rule: 'greedy' is not allowed at temperature 0.6 .*use target_only"):
        accept_at(make_tree([0], [-1]), torch.zeros(1, 1, 3), "greedy", temperature=0.6)


# --- helpers of this file


def greedy_by_hand(tree, logits):
    choices = logits[0].argmax(-1).tolist()
    tokens = paths_of(tree)
    path = [0]
    while True:
        wanted = tokens[path[-1]] + (choices[path[-1]],)
        if wanted not in tokens:
            return path, choices[path[-1]]
        path.append(tokens.index(wanted))


def flagged_chain(flags):
    """A chain whose draft i matches the target's argmax where flags[i] is 1; token 1 is what the target wants."""
    tokens = [0] + [1 if flag else 2 for flag in flags]
    logits = torch.tensor([0.0, 5.0, 1.0]).expand(1, len(tokens), 3)
    return make_tree(tokens, list(range(-1, len(flags)))), logits


@pytest.mark.parametrize("rule", ["traversal", "legacy_traversal"])
def test_a_draft_weight_too_small_to_divide_is_never_tried(rule):
    """exp(-744.4) is subnormal, and nothing after division by the siblings' sum."""
    tree = make_tree([0, 1, 2, 3, 4], [-1, 0, 0, 0, 0], [0.0, -744.4, 0.0, 0.0, 0.0])
    for seed in range(20):
        result = accept(
            tree,
            torch.zeros(1, 5, 6),
            rule=rule,
            temperature=1.0,
            seed=seed,
            indices=torch.tensor([0]),
            root_positions=torch.tensor([3]),
        )
        assert result.path[0, 1:].tolist() != [1]
