"""Arms around DARTree: its fixed mode, the sequential heap and its equal sets, the head's chain and DDTree on it."""

import itertools
import math

import pytest
import torch
from helpers import ToyLaw, make_marginals, make_tree, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dartree import build_toy, ranked, supertree_by_hand
from test_tree import ManyScorers, grow_toy, slots_of, toy_growth

from baselines.dartfixed import build_fixed, fixed_widths
from baselines.dartree import build_depthwise
from baselines.ddtree import build_best_first
from baselines.dflash import build_chain
from baselines.headchain import chain_of, correct_chain
from baselines.heap import build_sequential
from baselines.overgrown import build_overgrown, keep_best
from tfm.builder import MarginalScorer
from tfm.marginals import Marginals


def grow_by_heap(laws, marginals, *, depth, **settings_):
    """(tree, calls of the scorer) of the sequential build."""
    roots, scorer = torch.arange(len(laws)), ManyScorers(laws, depth)
    hidden = torch.zeros(len(laws), 1)
    tree = build_sequential(marginals, scorer, roots, target_hidden=hidden, depth=depth, **settings_)
    tree.validate()
    return tree, scorer.parts[0].calls


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 5),
    depth=st.integers(1, 4),
    budget=st.integers(1, 24),
    children=st.integers(1, 6),
    bonus=st.sampled_from([0.0, -0.2, -3.0]),
    levels=st.sampled_from([1, 2, 3, None]),
    repeated=st.booleans(),
)
def test_a_width_of_the_budget_gives_the_sequential_heaps_nodes_in_its_order(
    seed, vocab, depth, budget, children, bonus, levels, repeated
):
    """C018, strengthened: the lazy heap never sees the supertree, and ties (levels) and repeats fall alike."""
    laws, marginals = toy_growth(seed, vocab, depth, requests=2)
    if levels is not None:
        laws = [ToyLaw([(level.sigmoid() * levels).floor() for level in law.levels]) for law in laws]
    if repeated:
        drawn = torch.randint(0, vocab, marginals.tokens.shape, generator=torch.Generator().manual_seed(seed))
        marginals = Marginals(drawn, marginals.log_probs, marginals.hidden)
    limits = {"budget": budget, "children": children, "depth": depth, "depth_bonus": bonus}
    tree, calls = grow_by_heap(laws, marginals, **limits)
    other, levels_built = build_toy(laws, marginals, width=budget, **limits)
    for request in range(2):
        assert slots_of(tree, request) == slots_of(other, request)
    assert calls <= budget and levels_built == depth


def test_the_heap_calls_the_head_once_a_node_and_the_supertree_once_a_depth():
    laws, marginals = toy_growth(3, vocab=4, depth=5)
    assert grow_by_heap(laws, marginals, budget=16, children=4, depth=5)[1] == 16
    assert build_toy(laws, marginals, budget=16, width=4, children=4, depth=5)[1] == 5


def test_a_narrow_supertree_may_lose_nodes_of_the_heap():
    """The equality above needs its width: with two branches a depth the best third prefix of a depth is gone."""
    laws, marginals = toy_growth(3, vocab=4, depth=3)
    heap, _ = grow_by_heap(laws, marginals, budget=12, children=4, depth=3)
    narrow, _ = build_toy(laws, marginals, budget=12, width=2, children=4, depth=3)
    assert set(paths_of(narrow)) - {()} != set(paths_of(heap)) - {()} and int(narrow.num_nodes) < int(heap.num_nodes)


@pytest.mark.parametrize("build", [build_sequential, build_fixed, build_depthwise, build_overgrown])
@pytest.mark.parametrize("depth", [0, 5])
def test_a_depth_without_drafter_rows_is_refused(build, depth):
    """C021."""
    _, marginals = toy_growth(6, vocab=3, depth=4)
    limits = {"budget": 4, "children": 2, "depth": depth} | (
        {"width": 1} if build in (build_depthwise, build_overgrown) else {}
    )
    with pytest.raises(ValueError, match=rf"depth: {depth} is not allowed \(allowed: 1 to 4, the drafter's rows\)"):
        build(marginals, MarginalScorer(), torch.tensor([0]), target_hidden=torch.zeros(1, 1), **limits)


def test_a_bonus_above_zero_is_refused_by_the_heap():
    laws, marginals = toy_growth(6, vocab=3, depth=4)
    with pytest.raises(ValueError, match=r"depth_bonus: 0.5 is not allowed"):
        grow_by_heap(laws, marginals, budget=4, children=2, depth=4, depth_bonus=0.5)


# --- the fixed mode


def test_the_budget_is_dealt_out_as_what_is_left_over_the_depths_left():
    """64 nodes over 15 depths: 4 depths of 5, 11 of 4; the rule of the authors' code."""
    assert fixed_widths(64, 15, 64) == [5] * 4 + [4] * 11
    assert fixed_widths(15, 15, 64) == [1] * 15
    assert fixed_widths(4, 15, 64) == [1] * 4
    assert fixed_widths(64, 2, 3) == [3, 9]  # no more children than there are


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 5),
    depth=st.integers(1, 4),
    budget=st.integers(1, 30),
    children=st.integers(1, 6),
)
def test_the_fixed_tree_is_every_depths_best_nodes_and_fits_the_budget(seed, vocab, depth, budget, children):
    laws, marginals = toy_growth(seed, vocab, depth)
    scorer = ManyScorers(laws, depth)
    limits = {"budget": budget, "children": children, "depth": depth}
    tree = build_fixed(marginals, scorer, torch.tensor([0]), target_hidden=torch.zeros(1, 1), **limits)
    tree.validate()
    widths = fixed_widths(budget, depth, min(children, vocab))
    assert sum(widths) <= budget and scorer.parts[0].calls == len(widths)
    prefixes, live = {}, {()}
    for level, width in enumerate(widths):
        # by hand with room for every branch, then cut to the width and to children of what was kept
        every = supertree_by_hand(laws[0], marginals.tokens[0], width=10**4, children=children, depth=level + 1)
        own = [path for path in every if len(path) == level + 1 and path[:-1] in live]
        kept = sorted(own, key=lambda path, every=every: -every[path][0])[:width]
        prefixes |= {path: every[path] for path in kept}
        live = set(kept)
    assert paths_of(tree)[1:] == ranked(prefixes, 0.0)[0]
    assert torch.bincount(tree.depths[0, : int(tree.num_nodes)])[1:].tolist() == [
        min(width, sum(len(path) == level + 1 for path in prefixes)) for level, width in enumerate(widths)
    ]


# --- between DARTree and top-w


def grown(laws, marginals, *, calls=16, **limits):
    scorer, hidden = ManyScorers(laws, limits["depth"]), torch.zeros(len(laws), 1)
    roots = torch.arange(len(laws))
    tree = build_overgrown(marginals, scorer, roots, target_hidden=hidden, calls=calls, **limits)
    tree.validate()
    return tree, scorer.parts[0].calls


def head_mass(tree, request=0) -> float:
    """Sum over drafted nodes of their paths' probability under the head, which the heap's set makes largest."""
    count, total = int(tree.num_nodes[request]), [0.0]
    for parent, own in zip(*(x[request, 1:count].tolist() for x in (tree.parents, tree.log_probs)), strict=True):
        total.append(total[parent] + own)
    return sum(map(math.exp, total[1:]))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 5),
    depth=st.integers(1, 5),
    budget=st.integers(1, 24),
    width=st.integers(1, 6),
    children=st.integers(1, 5),
    levels=st.sampled_from([2, None]),
)
def test_an_overgrown_tree_is_at_least_top_ws_and_at_most_the_heaps(
    seed, vocab, depth, budget, width, children, levels
):
    """Under the head, with the same width: it holds what top-w grows, and keeps the best of more."""
    laws, marginals = toy_growth(seed, vocab, depth, requests=2)
    if levels is not None:
        laws = [ToyLaw([(level.sigmoid() * levels).floor() for level in law.levels]) for law in laws]
    limits = {"budget": budget, "children": children, "depth": depth}
    tree, _ = grown(laws, marginals, width=width, **limits)
    narrow, _ = grow_toy(laws, marginals, width=width, **limits)
    heap, _ = grow_by_heap(laws, marginals, **limits)
    for request in range(2):
        mass = head_mass(tree, request)
        assert head_mass(narrow, request) - 1e-5 <= mass <= head_mass(heap, request) + 1e-5


@pytest.mark.parametrize("seed", range(5))
def test_grown_wide_enough_it_is_the_heaps_tree_in_a_fraction_of_the_calls(seed):
    laws, marginals = toy_growth(seed, vocab=4, depth=5, requests=2)
    limits = {"budget": 16, "children": 4, "depth": 5}
    tree, calls = grown(laws, marginals, width=4, calls=8, **limits)
    heap, more = grow_by_heap(laws, marginals, **limits)
    for request in range(2):
        assert slots_of(tree, request) == slots_of(heap, request)
    assert calls == 8 and more in (15, 16)  # a node at the depth limit is not expanded


def test_keeping_the_best_of_a_tree_is_sorting_its_paths():
    tree = make_tree([0, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 2, 4], [0.0, -0.5, -0.2, -0.1, -0.9, -0.0])
    kept = keep_best(tree, 3)
    kept.validate()
    # -0.2; -0.5; -0.6 of (1, 3); -1.1 of (2, 4) and of its certain child
    assert paths_of(kept) == [(), (2,), (1,), (1, 3)] and int(kept.num_nodes) == 4
    assert paths_of(keep_best(tree, 4)) == [(), (2,), (1,), (1, 3), (2, 4)]
    assert paths_of(keep_best(tree, 9))[1:] == [(2,), (1,), (1, 3), (2, 4), (2, 4, 5)]
    assert keep_best(tree, 9).tokens.shape == (1, 10)


# --- the head's chain and DDTree on it


def corrected(laws, marginals, depth):
    scorer = ManyScorers(laws, depth)
    hidden = torch.zeros(len(laws), 1)
    return correct_chain(marginals, scorer, torch.arange(len(laws)), target_hidden=hidden, depth=depth), scorer


@pytest.mark.parametrize("seed", range(5))
def test_the_chain_follows_the_heads_first_choice(seed):
    laws, marginals = toy_growth(seed, vocab=5, depth=4, requests=3)
    found, scorer = corrected(laws, marginals, 4)
    tree = chain_of(found, torch.arange(3))
    tree.validate()
    assert tree.is_chain and scorer.parts[0].calls == 4
    for request, law in enumerate(laws):
        path = []
        for level in range(4):
            row = law.levels[level][tuple(path)].log_softmax(-1)
            best = int(row.argmax())
            assert float(tree.log_probs[request, level + 1]) == pytest.approx(float(row[best]), abs=1e-5)
            path.append(best)
        assert tree.tokens[request, 1:].tolist() == path


def test_the_chain_is_dartrees_with_one_branch():
    laws, marginals = toy_growth(9, vocab=5, depth=4, requests=2)
    tree = chain_of(corrected(laws, marginals, 4)[0], torch.arange(2))
    other, _ = build_toy(laws, marginals, budget=4, width=1, children=3, depth=4)
    for request in range(2):
        assert slots_of(tree, request) == slots_of(other, request)


@pytest.mark.parametrize("seed", range(5))
def test_ddtree_on_the_chain_is_the_brute_force_best_of_the_laws_along_it(seed):
    """C017 for this arm: products of the corrected rows, whatever the path."""
    laws, marginals = toy_growth(seed, vocab=4, depth=3)
    found, _ = corrected(laws, marginals, 3)
    tree = build_best_first(found, torch.tensor([0]), budget=12, depth=3)
    tree.validate()
    path, rows = [], []
    for level in range(3):
        rows.append(laws[0].levels[level][tuple(path)].log_softmax(-1))
        path.append(int(rows[-1].argmax()))
    score = {
        way: sum(float(row[token]) for row, token in zip(rows, way, strict=False))
        for length in (1, 2, 3)
        for way in itertools.product(range(4), repeat=length)
    }
    chosen = sorted((score[way] for way in paths_of(tree)[1:]), reverse=True)
    assert chosen == pytest.approx(sorted(score.values(), reverse=True)[:12], abs=1e-5)


def test_without_a_correction_the_arms_are_dflash_and_ddtree():
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(2))
    marginals, roots = Marginals.from_logits(logits, torch.zeros(2, 4, 1), 5), torch.tensor([1, 2])
    found = correct_chain(marginals, MarginalScorer(), roots, target_hidden=torch.zeros(2, 1), depth=4)
    chain, plain = chain_of(found, roots), build_chain(marginals, roots, depth=4)
    assert torch.equal(chain.tokens, plain.tokens)
    tree, other = (build_best_first(m, roots, budget=10, depth=4) for m in (found, marginals))
    assert [paths_of(tree, r) for r in range(2)] == [paths_of(other, r) for r in range(2)]


def test_a_repeated_candidate_is_drafted_once_by_every_arm():
    """C016: ids [7, 7, 3] at one depth."""
    marginals = make_marginals(torch.tensor([[-0.1, -0.1, -2.0]]), torch.tensor([[7, 7, 3]]))
    roots, hidden = torch.tensor([0]), torch.zeros(1, 1)
    given_ = {"target_hidden": hidden, "depth": 1}
    found = correct_chain(marginals, MarginalScorer(), roots, **given_)
    trees = [
        build_best_first(found, roots, budget=3, depth=1),
        build_sequential(marginals, MarginalScorer(), roots, budget=3, children=3, **given_),
        build_fixed(marginals, MarginalScorer(), roots, budget=3, children=3, **given_),
        build_overgrown(marginals, MarginalScorer(), roots, budget=3, width=2, children=3, **given_),
    ]
    for tree in trees:
        tree.validate()
        assert paths_of(tree) == [(), (7,), (3,)]
        assert float(tree.log_probs[0, 1:3].exp().sum()) == pytest.approx(1.0)
    assert math.isinf(float(found.log_probs[0, 0, 2]))
