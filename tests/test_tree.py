"""DraftTree's invariants, and the trees that the builder grows."""

import heapq
import math

import numpy as np
import pytest
import torch
from helpers import ToyLaw, make_marginals, make_tree, parent_arrays, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.ddtree import build_best_first
from tfm.builder import Growth, MarginalScorer, count_expansions, default_width, grow
from tfm.marginals import Marginals, top_tokens
from tfm.tree import DraftTree, ancestor_mask, node_depths, validate_parents

# --- DraftTree


@settings(max_examples=500)
@given(parents=parent_arrays(max_nodes=24))
def test_ancestor_mask_holds_exactly_the_ancestors(parents):
    """C014: mask[i, j] says that j is i or an ancestor of i; nothing above the diagonal."""
    expected = np.zeros((len(parents), len(parents)), dtype=bool)
    for node in range(len(parents)):
        walk = node
        while walk >= 0:
            expected[node, walk] = True
            walk = parents[walk]
    mask = ancestor_mask(torch.tensor([parents]))[0].numpy()
    assert (mask == expected).all()
    assert not np.triu(mask, 1).any()
    assert node_depths(torch.tensor([parents]))[0].tolist() == (expected.sum(1) - 1).tolist()


@settings(max_examples=50)
@given(rows=st.lists(parent_arrays(max_nodes=12), min_size=2, max_size=4))
def test_masks_of_a_ragged_batch_are_those_of_each_request(rows):
    width = max(map(len, rows))
    mask = ancestor_mask(torch.tensor([row + [-1] * (width - len(row)) for row in rows]))
    for request, row in enumerate(rows):
        assert torch.equal(mask[request, : len(row), : len(row)], ancestor_mask(torch.tensor([row]))[0])
        assert not mask[request, len(row) :, : len(row)].any()


def test_the_mask_of_a_chain_is_its_causal_mask():
    parents = torch.arange(-1, 8)[None]
    chain = DraftTree.build(torch.arange(9)[None], parents)
    assert chain.is_chain
    assert torch.equal(chain.ancestor_mask(), ancestor_mask(parents))


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        pytest.param([-1, 0, 5, 1], r"node 2 has parent 5, expected 0 to 1", id="forward_reference"),
        pytest.param([-1, 1], r"node 1 has parent 1, expected 0 to 0", id="self_reference"),
        pytest.param([0, 0], r"node 0 has parent 0; node 0 is the root", id="no_root"),
        pytest.param([-1, -1], r"node 1 has parent -1", id="two_roots"),
        pytest.param([], r"has 0 nodes, expected at least 1 \(the root counts\)", id="empty"),
        pytest.param([-1, 0, -1], r"node 2 has parent -1", id="late_root"),
        pytest.param([-1, 0, -2], r"node 2 has parent -2", id="below_minus_one"),
    ],
)
def test_malformed_parents_are_refused_by_node(parents, message):
    """C015."""
    with pytest.raises(ValueError, match=message):
        validate_parents(torch.tensor([parents], dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        DraftTree.build(torch.arange(len(parents))[None], torch.tensor([parents], dtype=torch.int64))


@pytest.mark.parametrize("key", ["tokens", "parents", "num_nodes"])
def test_numbers_that_are_no_integers_are_refused_by_name(key):
    given = {"tokens": torch.tensor([[5, 6]]), "parents": torch.tensor([[-1, 0]]), "num_nodes": torch.tensor([2])}
    with pytest.raises(ValueError, match=f"{key}: torch.float32"):
        DraftTree.build(**given | {key: given[key].float()})


def test_padding_must_carry_no_parent():
    validate_parents(torch.tensor([[-1, 0, -1]]), torch.tensor([2]))
    with pytest.raises(ValueError, match="request 0: padding past node 1 must carry parent -1"):
        validate_parents(torch.tensor([[-1, 0, 0]]), torch.tensor([2]))


def test_equal_siblings_are_refused():
    """C016."""
    with pytest.raises(ValueError, match=r"nodes 1 and 3 are siblings with token 7"):
        make_tree([1, 7, 7, 7], [-1, 0, 1, 0])


def test_depths_that_disagree_with_parents_are_refused():
    tree = make_tree([1, 2, 3], [-1, 0, 1])
    broken = DraftTree(tree.tokens, tree.parents, tree.depths * 0, tree.log_probs, tree.num_nodes)
    with pytest.raises(ValueError, match="depths: they do not follow from parents"):
        broken.validate()


# --- marginals


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_candidates_are_a_stable_sort_ties_to_the_lowest_id_also_at_the_cut(seed, count):
    scores = torch.randint(-3, 3, (2, 3, 40), generator=torch.Generator().manual_seed(seed)).float() / 2
    scores[0, 0, seed % 40] = -0.0
    scores[1, 1, seed % 7 :] = float("-inf")
    expected = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    assert torch.equal(top_tokens(scores, count), expected)


# --- growth


class TableScorer:
    """ConditionalScorer over a ToyLaw; checks what it is called with and counts calls."""

    def __init__(self, law, depth):
        self.law, self.depth, self.calls = law, depth, 0

    def begin(self, marginals, target_hidden, slots):
        self.marginals, self.slots = marginals, slots
        self.paths = [{} for _ in marginals.tokens]

    def expand(self, slots, parent_slots, tokens, depths):
        self.calls += 1
        rows = torch.full((*slots.shape, self.marginals.tokens.shape[2]), math.nan)
        for request, column in np.ndindex(*slots.shape):
            slot = int(slots[request, column])
            if slot < 0:
                continue
            assert slot < self.slots and slot not in self.paths[request]
            level = int(depths[request, column])
            assert level < self.depth
            parent = self.paths[request][int(parent_slots[request, column])] if level else ()
            path = parent + ((int(tokens[request, column]),) if level else ())
            assert len(path) == level
            self.paths[request][slot] = path
            candidates = self.marginals.tokens[request, level]
            scores = self.law.levels[level][path][candidates]
            hidden = self.marginals.log_probs[request, level] == -math.inf
            rows[request, column] = scores.masked_fill(hidden, -math.inf).float().log_softmax(-1)
        return rows


def test_candidates_of_another_type_than_float32_are_no_answer():
    with pytest.raises(AssertionError, match="top_tokens: torch.float64"):
        top_tokens(torch.zeros(1, 4, dtype=torch.float64), 2)


def grow_by_hand(law, candidates, *, budget, width, children, depth):
    """The paper's construction (its Appendix A) of one tree: (path, local log-prob) by slot, and the expansions."""
    slots, frontier, expansions = [((), 0.0)], [], 0  # frontier: [score, path, local] or None once taken

    def expand(path, score):
        scores = law.levels[len(path)][path][candidates[len(path)]].float().log_softmax(-1)
        order = sorted(range(len(scores)), key=lambda k: (-float(scores[k]), k))[:children]
        for k in order:
            frontier.append((np.float32(score) + scores[k].numpy(), path + (int(candidates[len(path)][k]),), scores[k]))

    batch = [((), np.float32(0))]
    while True:
        for path, score in batch:
            if len(path) < depth:
                expand(path, score)
        expansions += 1
        present = [index for index, entry in enumerate(frontier) if entry is not None]
        best = sorted(present, key=lambda index: (-frontier[index][0], index))[: min(width, budget + 1 - len(slots))]
        batch = []
        for index in best:
            score, path, local = frontier[index]
            slots.append((path, float(local)))
            batch.append((path, score))
            frontier[index] = None
        if (
            len(slots) == budget + 1
            or all(entry is None for entry in frontier)
            and not any(len(path) < depth for path, _ in batch)
        ):
            return slots, expansions


def toy_growth(seed, vocab, depth, requests=1):
    laws = [ToyLaw.random(vocab, depth, seed=seed + request) for request in range(requests)]
    generator = torch.Generator().manual_seed(seed)
    orders = [[torch.randperm(vocab, generator=generator) for _ in range(depth)] for _ in range(requests)]
    tokens = torch.stack([torch.stack(order) for order in orders])
    marginals = Marginals(tokens, torch.zeros(tokens.shape), torch.zeros(requests, depth, 1))
    return laws, marginals


class ManyScorers:
    """One TableScorer a request behind the protocol of a batch."""

    def __init__(self, laws, depth):
        self.parts = [TableScorer(law, depth) for law in laws]

    def begin(self, marginals, target_hidden, slots):
        for request, part in enumerate(self.parts):
            one = slice(request, request + 1)
            part.begin(
                Marginals(marginals.tokens[one], marginals.log_probs[one], marginals.hidden[one]), target_hidden, slots
            )

    def expand(self, *columns):
        return torch.cat([part.expand(*(c[r : r + 1] for c in columns)) for r, part in enumerate(self.parts)])


def grow_toy(laws, marginals, *, depth, **settings_):
    roots = torch.arange(len(laws))
    scorer = ManyScorers(laws, depth)
    tree = grow(marginals, scorer, roots, target_hidden=torch.zeros(len(laws), 1), depth=depth, **settings_)
    tree.validate()
    assert tree.tokens[:, 0].tolist() == roots.tolist()
    return tree, scorer.parts[0].calls


def slots_of(tree, request=0):
    count = int(tree.num_nodes[request])
    return list(zip(paths_of(tree, request), tree.log_probs[request, :count].tolist(), strict=True))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 5),
    depth=st.integers(1, 4),
    budget=st.integers(1, 20),
    width=st.integers(1, 9),
    children=st.integers(1, 6),
)
def test_growth_follows_the_published_pseudo_code(seed, vocab, depth, budget, width, children):
    """Every slot, its parent, token and local log-prob, for ragged batches and frontiers that run dry."""
    laws, marginals = toy_growth(seed, vocab, depth, requests=3)
    tree, _ = grow_toy(laws, marginals, budget=budget, width=width, children=children, depth=depth)
    for request, law in enumerate(laws):
        by_hand, _ = grow_by_hand(
            law, marginals.tokens[request], budget=budget, width=width, children=children, depth=depth
        )
        assert slots_of(tree, request) == by_hand
        assert int(tree.num_nodes[request]) == len(by_hand)
    assert not tree.tokens[~tree.is_real].any() and not tree.log_probs[~tree.is_real].any()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_width_fills_the_budget_in_ceil_budget_over_width_expansions(width):
    """C022: B = 16; the root's expansion is the first of ceil(B / w), the last batch of nodes is not expanded."""
    laws, marginals = toy_growth(1, vocab=8, depth=4)
    tree, calls = grow_toy(laws, marginals, budget=16, width=width, children=8, depth=4)
    assert tree.num_nodes.tolist() == [17]
    assert calls == count_expansions(16, width, 8) == -(-16 // width)


def test_width_one_is_best_first_order():
    """C022: w = 1 pops one node at a time by cumulative log-prob, as DySpec's greedy growth; wider sets may differ."""
    laws, marginals = toy_growth(2, vocab=5, depth=4)
    heap, order, score = [(0.0, ())], [], {(): np.float32(0)}
    while len(order) < 17:
        _, path = heapq.heappop(heap)
        order.append(path)
        if len(path) == 4:
            continue
        for token, log_prob in enumerate(laws[0].levels[len(path)][path].float().log_softmax(-1).numpy()):
            score[path + (token,)] = score[path] + log_prob
            heapq.heappush(heap, (-score[path + (token,)], path + (token,)))
    tree, _ = grow_toy(laws, marginals, budget=16, width=1, children=5, depth=4)
    assert paths_of(tree) == order


def test_a_batch_wider_than_the_first_frontier_takes_more_expansions():
    """w = 16 over C = 2: the frontier holds 2, then 4, then 8 entries."""
    laws, marginals = toy_growth(3, vocab=4, depth=4)
    tree, calls = grow_toy(laws, marginals, budget=14, width=16, children=2, depth=4)
    assert tree.num_nodes.tolist() == [15]
    assert calls == count_expansions(14, 16, 2) == 3


def test_one_child_a_node_grows_a_chain():
    laws, marginals = toy_growth(4, vocab=5, depth=4)
    tree, _ = grow_toy(laws, marginals, budget=3, width=4, children=1, depth=4)
    assert tree.parents.tolist() == [[-1, 0, 1, 2]]


def test_a_vocabulary_too_small_for_the_budget_gives_the_whole_tree():
    laws, marginals = toy_growth(5, vocab=2, depth=2)
    tree, _ = grow_toy(laws, marginals, budget=16, width=4, children=8, depth=2)
    assert tree.num_nodes.tolist() == [7]
    assert sorted(paths_of(tree)) == [(), (0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert tree.tokens.shape == (1, 17)


def test_equal_scores_go_to_the_lowest_frontier_index():
    """Uniform rows: breadth first, and within a node in candidate order."""
    law = ToyLaw([torch.zeros((3,) * (level + 1), dtype=torch.float64) for level in range(3)])
    marginals = make_marginals(torch.zeros(3, 3), torch.tensor([[2, 0, 1]] * 3))
    tree, _ = grow_toy([law], marginals, budget=8, width=2, children=3, depth=3)
    assert paths_of(tree) == [(), (2,), (0,), (1,), (2, 2), (2, 0), (2, 1), (0, 2), (0, 0)]


def test_a_repeated_candidate_is_drafted_once():
    """C016: ids [7, 7, 3] with log-probs [-.1, -.1, -2]: one node 7, one node 3 a parent."""
    marginals = make_marginals(torch.tensor([[-0.1, -0.1, -2.0]] * 2), torch.tensor([[7, 7, 3]] * 2))
    roots, hidden = torch.tensor([1]), torch.zeros(1, 1)
    tree = grow(marginals, MarginalScorer(), roots, target_hidden=hidden, budget=16, width=4, children=8, depth=2)
    tree.validate()
    best_first = build_best_first(marginals, roots, budget=16, depth=2)
    best_first.validate()
    for grown in (tree, best_first):
        assert sorted(paths_of(grown)) == [(), (3,), (3, 3), (3, 7), (7,), (7, 3), (7, 7)]


def test_unconditional_growth_of_width_one_is_ddtree():
    """With all candidates as children, the same marginals and w = 1, both pop the same prefixes in the same order."""
    marginals = make_marginals((2 * torch.randn(5, 12)).log_softmax(-1))
    roots, hidden = torch.tensor([0]), torch.zeros(1, 1)
    tree = grow(marginals, MarginalScorer(), roots, target_hidden=hidden, budget=32, width=1, children=12, depth=5)
    assert paths_of(tree) == paths_of(build_best_first(marginals, roots, budget=32, depth=5))


@pytest.mark.parametrize("depth", [0, 5])
def test_a_depth_without_drafter_rows_is_refused(depth):
    laws, marginals = toy_growth(6, vocab=3, depth=4)
    with pytest.raises(ValueError, match=rf"depth: {depth} is not allowed \(allowed: 1 to 4, the drafter's rows\)"):
        Growth(marginals, MarginalScorer(), torch.tensor([0]), budget=4, width=1, children=2, depth=depth)


@pytest.mark.parametrize(("budget", "width"), [(1, 1), (8, 1), (16, 1), (17, 2), (64, 4), (128, 8)])
def test_the_default_width_is_a_sixteenth_of_the_budget_rounded_up(budget, width):
    assert default_width(budget) == width
