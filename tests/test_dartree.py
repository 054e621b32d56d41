"""DARTree's builder: the supertree by hand, and its best prefixes against a best-first heap and brute force (C018)."""

import heapq
import itertools
import math

import numpy as np
import pytest
import torch
from helpers import ToyLaw, make_marginals, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import ManyScorers, grow_toy, slots_of, toy_growth

from baselines.dartree import build_depthwise
from tfm.builder import MarginalScorer
from tfm.marginals import Marginals

EVERYTHING = 10**4  # a width that no supertree here reaches


def build_toy(laws, marginals, *, depth, **settings_):
    roots, scorer = torch.arange(len(laws)), ManyScorers(laws, depth)
    hidden = torch.zeros(len(laws), 1)
    tree = build_depthwise(marginals, scorer, roots, target_hidden=hidden, depth=depth, **settings_)
    tree.validate()
    assert tree.tokens[:, 0].tolist() == roots.tolist()
    assert tree.tokens.shape == (len(laws), settings_["budget"] + 1)
    return tree, scorer.parts[0].calls


def supertree_by_hand(law, candidates, *, width, children, depth):
    """Every prefix of the supertree in its order -> (cumulative, local) log-probability, float32."""
    prefixes, live = {}, [((), np.float32(0))]
    for level in range(depth):
        scored = []
        for path, score in live:
            seen, rows = set(), law.levels[level][path][candidates[level]].clone()
            for k, token in enumerate(candidates[level].tolist()):
                if token in seen:
                    rows[k] = -math.inf
                seen.add(token)
            rows = rows.float().log_softmax(-1).numpy()
            best = sorted(range(len(rows)), key=lambda k, rows=rows: (-rows[k], k))[:children]
            scored += [(path + (int(candidates[level][k]),), score + rows[k], rows[k]) for k in best]
        scored = sorted((entry for entry in scored if entry[1] > -math.inf), key=lambda entry: -entry[1])[:width]
        prefixes |= {path: (score, local) for path, score, local in scored}
        live = [(path, score) for path, score, _ in scored]
    return prefixes


def ranked(prefixes, bonus):
    """The prefixes by score with the bonus; a stable sort, so ties keep the supertree's order."""
    score = {path: value + np.float32(bonus) * np.float32(len(path)) for path, (value, _) in prefixes.items()}
    return sorted(score, key=lambda path: -score[path]), score


def popped_by_heap(prefixes, budget, bonus):
    """What a sequential best-first heap pops: a popped prefix pushes its children."""
    _, score = ranked(prefixes, bonus)
    number = {path: count for count, path in enumerate(prefixes)}
    heap, popped = [(-score[path], number[path], path) for path in prefixes if len(path) == 1], []
    heapq.heapify(heap)
    while heap and len(popped) < budget:
        path = heapq.heappop(heap)[2]
        popped.append(path)
        for child in (child for child in prefixes if child[:-1] == path):
            heapq.heappush(heap, (-score[child], number[child], child))
    return popped


@pytest.mark.parametrize("width", [4, EVERYTHING], ids=["four_branches", "every_branch"])
@pytest.mark.parametrize("bonus", [0.0, -0.2])
@pytest.mark.parametrize("seed", range(10))
def test_the_best_prefixes_are_what_a_best_first_heap_pops(seed, bonus, width):
    """C018 (Lemma 1): K = 4, depth 5, B = 16; the same nodes in the same order, from one expansion a depth."""
    laws, marginals = toy_growth(seed, vocab=4, depth=5)
    tree, calls = build_toy(laws, marginals, budget=16, width=width, children=4, depth=5, depth_bonus=bonus)
    prefixes = supertree_by_hand(laws[0], marginals.tokens[0], width=width, children=4, depth=5)
    assert len(prefixes) == (20 if width == 4 else 4 + 4**2 + 4**3 + 4**4 + 4**5)
    assert paths_of(tree)[1:] == popped_by_heap(prefixes, 16, bonus) == ranked(prefixes, bonus)[0][:16]
    assert calls == 5


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 12),
    children=st.integers(1, 4),
    budget=st.integers(1, 30),
    bonus=st.sampled_from([0.0, -0.2]),
    levels=st.sampled_from([1, 2, 3]),
)
def test_ties_are_popped_in_the_order_of_the_supertree(seed, width, children, budget, bonus, levels):
    """Logits of one, two or three values, so that most prefixes tie with others: still the heap's nodes, in order."""
    laws, marginals = toy_growth(seed, vocab=4, depth=4)
    laws = [ToyLaw([(level.sigmoid() * levels).floor() for level in law.levels]) for law in laws]
    limits = {"budget": budget, "width": width, "children": children, "depth": 4}
    tree, _ = build_toy(laws, marginals, **limits, depth_bonus=bonus)
    prefixes = supertree_by_hand(laws[0], marginals.tokens[0], width=width, children=children, depth=4)
    assert len({value for value, _ in prefixes.values()}) < len(prefixes) or len(prefixes) <= 4 * levels
    assert paths_of(tree)[1:] == popped_by_heap(prefixes, budget, bonus)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 4),
    depth=st.integers(1, 4),
    budget=st.integers(1, 40),
    bonus=st.sampled_from([0.0, -0.2, -3.0]),
)
def test_with_every_branch_kept_they_are_the_brute_force_best(seed, vocab, depth, budget, bonus):
    laws, marginals = toy_growth(seed, vocab, depth)
    tree, _ = build_toy(
        laws, marginals, budget=budget, width=EVERYTHING, children=vocab, depth=depth, depth_bonus=bonus
    )
    score = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(vocab), repeat=length):
            rows = [laws[0].levels[level][path[:level]].log_softmax(-1) for level in range(length)]
            score[path] = sum(float(row[token]) for row, token in zip(rows, path, strict=True)) + bonus * length
    chosen = sorted((score[path] for path in paths_of(tree)[1:]), reverse=True)
    assert chosen == pytest.approx(sorted(score.values(), reverse=True)[:budget], abs=1e-5)


@pytest.mark.parametrize("children", [2, 4])
def test_with_every_branch_kept_they_are_the_nodes_of_tfm_with_width_one(children):
    """Width 1 is sequential best-first growth, one expansion a node."""
    laws, marginals = toy_growth(11, vocab=4, depth=5, requests=3)
    tree, calls = build_toy(laws, marginals, budget=16, width=EVERYTHING, children=children, depth=5)
    grown, more = grow_toy(laws, marginals, budget=16, width=1, children=children, depth=5)
    for request in range(3):
        assert slots_of(tree, request) == slots_of(grown, request)
    assert (calls, more) == (5, 16)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 5),
    depth=st.integers(1, 4),
    budget=st.integers(1, 20),
    width=st.integers(1, 9),
    children=st.integers(1, 6),
    bonus=st.sampled_from([0.0, -0.2]),
)
def test_ragged_requests_equal_each_request_alone_and_the_supertree_by_hand(
    seed, vocab, depth, budget, width, children, bonus
):
    """Repeated candidates leave fewer prefixes to some requests than to others: nodes, parents, local log-probs."""
    laws, marginals = toy_growth(seed, vocab, depth, requests=3)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, vocab, marginals.tokens.shape, generator=generator)
    marginals = Marginals(drawn, marginals.log_probs, marginals.hidden)
    limits = {"budget": budget, "width": width, "children": children, "depth": depth, "depth_bonus": bonus}
    together, calls = build_toy(laws, marginals, **limits)
    assert calls == depth
    for request, law in enumerate(laws):
        prefixes = supertree_by_hand(law, drawn[request], width=width, children=children, depth=depth)
        best = ranked(prefixes, bonus)[0][:budget]
        assert slots_of(together, request) == [((), 0.0), *((path, float(prefixes[path][1])) for path in best)]
        one = slice(request, request + 1)
        alone = Marginals(drawn[one], marginals.log_probs[one], marginals.hidden[one])
        tree, _ = build_toy([law], alone, **limits)
        assert slots_of(tree) == slots_of(together, request)
    assert not together.tokens[~together.is_real].any() and not together.log_probs[~together.is_real].any()


def test_equal_scores_go_to_the_lowest_index():
    """Uniform rows: breadth first, and within a node in candidate order."""
    law = ToyLaw([torch.zeros((3,) * (level + 1), dtype=torch.float64) for level in range(3)])
    marginals = make_marginals(torch.zeros(3, 3), torch.tensor([[2, 0, 1]] * 3))
    tree, _ = build_toy([law], marginals, budget=8, width=9, children=3, depth=3)
    assert paths_of(tree) == [(), (2,), (0,), (1,), (2, 2), (2, 0), (2, 1), (0, 2), (0, 0)]


def test_a_certain_child_stands_behind_its_parent():
    """One candidate a depth has log-probability 0: parent and child tie at every depth, the root among them."""
    marginals = make_marginals(torch.zeros(4, 1), torch.tensor([[7]] * 4))
    tree, _ = build_toy([ToyLaw.random(8, 4, seed=0)], marginals, budget=3, width=2, children=2, depth=4)
    assert tree.parents.tolist() == [[-1, 0, 1, 2]]


def test_one_branch_is_a_chain():
    laws, marginals = toy_growth(4, vocab=5, depth=4)
    tree, _ = build_toy(laws, marginals, budget=6, width=1, children=3, depth=4)
    assert tree.num_nodes.tolist() == [5] and tree.parents[0, :5].tolist() == [-1, 0, 1, 2, 3]


def test_a_negative_bonus_prefers_shallow_prefixes():
    laws, marginals = toy_growth(5, vocab=4, depth=5)
    depths = [
        build_toy(laws, marginals, budget=16, width=8, children=4, depth=5, depth_bonus=bonus)[0].depths.sum()
        for bonus in (0.0, -0.2, -3.0)
    ]
    assert depths[0] >= depths[1] > depths[2]


@pytest.mark.parametrize("bonus", [0.5, 1e-9, math.nan, math.inf])
def test_a_bonus_above_zero_is_refused(bonus):
    """C018 (the condition of Lemma 1): a child could pass its parent, and the best prefixes would be no tree."""
    laws, marginals = toy_growth(6, vocab=3, depth=4)
    with pytest.raises(ValueError, match=r"depth_bonus: .* is not allowed \(allowed: a finite number <= 0\).*parent"):
        build_toy(laws, marginals, budget=4, width=2, children=2, depth=4, depth_bonus=bonus)


@pytest.mark.parametrize("depth", [0, 5])
def test_a_depth_without_drafter_rows_is_refused(depth):
    _, marginals = toy_growth(6, vocab=3, depth=4)
    limits = {"budget": 4, "width": 1, "children": 2, "depth": depth}
    with pytest.raises(ValueError, match=rf"depth: {depth} is not allowed \(allowed: 1 to 4, the drafter's rows\)"):
        build_depthwise(marginals, MarginalScorer(), torch.tensor([0]), target_hidden=torch.zeros(1, 1), **limits)
