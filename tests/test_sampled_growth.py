"""Drawn siblings as decoding draws them: batched growth against its definition, its noise, the law end to end."""

import itertools
import math

import pytest
import torch
from helpers import ToyLaw, chi_square_tail, paths_of
from test_siblings import grow_by_hand
from test_tree import ManyScorers, slots_of, toy_growth

from tfm.acceptance import _TRAVERSAL_STREAM, accept
from tfm.builder import Growth, MarginalScorer
from tfm.marginals import Marginals
from tfm.sampling import child_keys, next_tokens, root_keys, token_gumbel
from tfm.siblings import _STREAM, SampledSiblings


def grow_drawn(laws, marginals, *, budget, width, children, depth, seed=0, indices=None):
    indices = torch.arange(len(laws)) if indices is None else indices
    draws = SampledSiblings(marginals.tokens, seed=seed, indices=indices, root_positions=10 + indices, slots=budget + 2)
    scorer = ManyScorers(laws, depth)
    scorer.begin(marginals, torch.zeros(len(laws), 1), budget + 1)
    growth = Growth(
        marginals, scorer, indices, budget=budget, width=width, children=children, depth=depth, siblings=draws
    )
    tree = growth.run()
    tree.validate()
    return tree


def noise_of(seed, index, path, token) -> float:
    key = root_keys(seed, torch.tensor([index]), torch.tensor([10 + index]), _STREAM)
    for step in path:
        key = child_keys(key, torch.tensor([step]))
    return float(token_gumbel(key, torch.tensor([[token]])))


@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("case", range(8))
def test_growth_draws_the_nodes_of_the_definition_in_its_order(case, width):
    """Ragged requests over one noise: slots, local log-probs and draft rows."""
    vocab, depth = 2 + case % 4, 1 + case % 3
    budget, children = (3, 7, 12)[case % 3], (1, 3, 9)[(case // 2) % 3]
    laws, marginals = toy_growth(case, vocab, depth, requests=3)
    tree = grow_drawn(laws, marginals, budget=budget, width=width, children=children, depth=depth, seed=case)
    for request, law in enumerate(laws):

        def q(path, law=law):
            return law.levels[len(path)][path].softmax(-1).tolist()

        def draw(path, weights, request=request):
            keys = {
                token: math.log(mass) + noise_of(case, request, path, token)
                for token, mass in enumerate(weights)
                if mass > 0
            }
            return max(keys, key=keys.get)

        nodes = grow_by_hand(q, budget=budget, width=width, children=children, depth=depth, draw=draw)
        assert paths_of(tree, request) == [(), *nodes]
        expected = [0.0, *(math.log(q(path[:-1])[path[-1]]) for path in nodes)]
        assert [local for _, local in slots_of(tree, request)] == pytest.approx(expected, abs=1e-5)
        inner = {path[:-1]: int(tree.parents[request, place]) for place, path in enumerate(nodes, start=1)}
        for path, place in inner.items():
            row = dict(zip(tree.law.tokens[request, place].tolist(), tree.law.log_probs[request, place], strict=True))
            assert [float(row[token].exp()) for token in range(vocab)] == pytest.approx(q(path), abs=1e-6)


def test_draws_do_not_depend_on_the_batch():
    laws, marginals = toy_growth(3, vocab=5, depth=4, requests=3)
    limits = dict(budget=16, width=4, children=5, depth=4)
    together = grow_drawn(laws, marginals, **limits)
    for request, law in enumerate(laws):
        one = slice(request, request + 1)
        alone = Marginals(marginals.tokens[one], marginals.log_probs[one], marginals.hidden[one])
        tree = grow_drawn([law], alone, **limits, indices=torch.tensor([request]))
        assert slots_of(tree) == slots_of(together, request)


def test_siblings_never_repeat_and_a_dead_candidate_is_never_drawn():
    """A repeated candidate and one of probability 0 have no mass; the tree stays smaller than its budget."""
    tokens = torch.tensor([[[7, 7, 3, 9]] * 2])
    log_probs = torch.tensor([[[-0.5, -math.inf, -0.9, -math.inf]] * 2])
    marginals = Marginals(tokens, log_probs, torch.zeros(1, 2, 1))
    zero = torch.tensor([0])
    draws = SampledSiblings(tokens, seed=0, indices=zero, root_positions=zero, slots=10)
    scorer = MarginalScorer()
    scorer.begin(marginals, None, 9)
    tree = Growth(marginals, scorer, zero, budget=8, width=2, children=4, depth=2, siblings=draws).run()
    tree.validate()
    assert sorted(paths_of(tree)) == [(), (3,), (3, 3), (3, 7), (7,), (7, 3), (7, 7)]
    assert set(tree.law.tokens[0, 0].tolist()) == {7, 3, -1}


def many_draws(requests: int, probs: list[float], seed: int):
    """Orders of one node's draws in many requests, [requests, K]."""
    indices = torch.arange(requests)
    candidates = torch.arange(len(probs)).expand(requests, 1, -1)
    draws = SampledSiblings(candidates, seed=seed, indices=indices, root_positions=torch.full_like(indices, 4), slots=2)
    zero = torch.zeros(requests, 1, dtype=torch.int64)
    log_probs = torch.tensor(probs).log().expand(requests, 1, -1)
    return draws.draw(zero, zero, zero, zero, log_probs)


def test_the_order_of_draws_is_without_replacement():
    """40,000 requests, first two of four tokens: chi-square against q(a) q(b) / (1 - q(a)), p > 1e-4."""
    probs = [0.5, 0.3, 0.15, 0.05]
    reach, _, ranks = many_draws(40_000, probs, seed=3)
    pairs = (4 * ranks[:, 0, 0] + ranks[:, 0, 1]).bincount(minlength=16).double()
    expected = torch.tensor([[a * b / (1 - a) * (i != j) for j, b in enumerate(probs)] for i, a in enumerate(probs)])
    expected = 40_000 * expected.flatten().double()
    kept = expected > 0
    assert pairs[~kept].sum() == 0
    statistic = ((pairs - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square_tail(float(statistic), int(kept.sum()) - 1) > 1e-4
    # a slot's value is the mass that the draws before it left
    left = 1 - torch.tensor(probs)[ranks[:, 0]].cumsum(-1)
    torch.testing.assert_close(reach[:, 0, 1:].exp(), left[:, :-1], rtol=1e-4, atol=1e-5)


def test_the_draws_of_tree_and_rule_come_from_different_streams():
    """A step draws its tree at the position where the step before may have drawn its traversal."""
    assert len({0, _STREAM, _TRAVERSAL_STREAM}) == 3  # 0 is the target's noise


def test_draws_are_independent_of_the_targets_tokens():
    """The same seed, request and position: first draw against the token that target_only draws there."""
    probs = [0.4, 0.3, 0.2, 0.1]
    _, _, ranks = many_draws(40_000, probs, seed=5)
    logits = torch.tensor(probs).log().expand(40_000, 1, -1)
    positions = torch.full((40_000, 1), 5)
    drawn = next_tokens(logits, positions, torch.arange(40_000), seed=5, temperature=1.0)
    counts = (4 * ranks[:, 0, 0] + drawn[:, 0]).bincount(minlength=16).double()
    expected = 40_000 * torch.outer(torch.tensor(probs), torch.tensor(probs)).flatten().double()
    assert chi_square_tail(float(((counts - expected) ** 2 / expected).sum()), 15) > 1e-4


@pytest.mark.parametrize("rule", ["traversal", "target_only"])
def test_the_whole_path_of_code_follows_the_targets_law(rule):
    """Growth and rule as decoding runs them, 6,000 requests: the first two tokens by chi-square, p > 1e-4."""
    requests, vocab = 6_000, 3
    law = ToyLaw.random(vocab, 3, seed=8)
    rows = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    tokens = torch.arange(vocab).expand(requests, 2, vocab)
    marginals = Marginals(tokens, rows.expand(requests, 2, vocab), torch.zeros(requests, 2, 1))
    indices, scorer = torch.arange(requests), MarginalScorer()
    positions = torch.full_like(indices, 6)
    draws = SampledSiblings(tokens, seed=2, indices=indices, root_positions=positions, slots=6)
    scorer.begin(marginals, None, 5)
    growth = Growth(
        marginals, scorer, torch.zeros_like(indices), budget=4, width=2, children=3, depth=2, siblings=draws
    )
    tree = growth.run()
    table = {path: law.levels[len(path)][path] for length in range(3) for path in paths(vocab, length)}
    logits = torch.stack([torch.stack([table[path] for path in paths_of(tree, r)]) for r in range(requests)])
    result = accept(tree, logits.float(), rule=rule, temperature=1.0, seed=2, indices=indices, root_positions=positions)
    joint, counts = law.joint(), torch.zeros(vocab, vocab, dtype=torch.float64)
    for request, path in enumerate(result.path.tolist()):
        emitted = (*(int(tree.tokens[request, node]) for node in path if node > 0), int(result.bonus[request]))
        # one emitted token: the target says the second
        counts[emitted[:2]] += (joint.sum(2) / joint.sum((1, 2))[:, None])[emitted] if len(emitted) == 1 else 1.0
    expected = requests * joint.sum(2)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square_tail(statistic, vocab**2 - 1) > 1e-4


def paths(vocab, length):
    return itertools.product(range(vocab), repeat=length)
