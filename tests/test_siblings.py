"""Siblings drawn without replacement: the naive growth, its exact law with both rules, and the batched form."""

import math
from dataclasses import dataclass

import pytest
import torch
from helpers import (
    ToyLaw,
    emitted_law,
    enumerate_branches,
    outcomes_of,
    paths_of,
    total_variation,
)

from tfm.acceptance import accept
from tfm.tree import DraftLaw, DraftTree

# --- the definition


@dataclass
class Slot:
    """Room for one more child of a node: its value is the probability that the draw is reached."""

    value: float
    path: tuple[int, ...]
    law: list[float]  # what is left of q at this node, 0 at tokens drawn before
    drawn: int


def grow_by_hand(q, *, budget, width, children, depth, draw) -> list[tuple[int, ...]]:
    """DySpec's growth with w slots a batch; `q(path)` are probabilities, `draw(path, weights)` a token."""
    nodes, heap = [], [Slot(1.0, (), q(()), 0)]
    while heap and len(nodes) < budget:
        fresh = []
        for _ in range(min(width, budget - len(nodes))):
            slot = max(heap, key=lambda slot: slot.value, default=None)
            if slot is None:
                break
            heap.remove(slot)
            token = draw(slot.path, slot.law)
            share = slot.law[token] / sum(slot.law)
            nodes.append((*slot.path, token))
            if len(nodes[-1]) < depth:
                fresh.append(Slot(slot.value * share, nodes[-1], q(nodes[-1]), 0))
            left = [0.0 if other == token else mass for other, mass in enumerate(slot.law)]
            if slot.drawn + 1 < children and sum(left) > 0:
                heap.append(Slot(slot.value * (1 - share), slot.path, left, slot.drawn + 1))
        heap += fresh
    return nodes


def tree_of(nodes, q, *, depth) -> DraftTree:
    """The drawn tree over float64 draft rows; a node at the depth limit has no draft row."""
    places = {(): 0} | {path: place for place, path in enumerate(nodes, start=1)}
    vocab = len(q(()))
    rows = [q(path) if len(path) < depth else None for path in places]
    none = [-1] * vocab
    law = DraftLaw(
        torch.tensor([[none if row is None else list(range(vocab)) for row in rows]]),
        torch.tensor([[[0.0] * vocab if row is None else row for row in rows]], dtype=torch.float64).log(),
    )
    return DraftTree(
        tokens=torch.tensor([[0, *(path[-1] for path in nodes)]]),
        parents=torch.tensor([[-1, *(places[path[:-1]] for path in nodes)]]),
        depths=torch.tensor([[0, *map(len, nodes)]]),
        log_probs=torch.tensor([[0.0, *(math.log(q(path[:-1])[path[-1]]) for path in nodes)]], dtype=torch.float64),
        num_nodes=torch.tensor([len(nodes) + 1]),
        law=law,
    )


def drafter_of(law: ToyLaw, noise: float, seed: int):
    """q(path): the target's row plus log-noise, as probabilities."""
    other = ToyLaw.random(law.levels[0].shape[0], len(law.levels), seed=1000 + seed, scale=noise)
    rows = [(level + error).softmax(-1) for level, error in zip(law.levels, other.levels, strict=True)]
    return lambda path: rows[len(path)][path].tolist()


def drawn_trees(q, **limits) -> list[tuple[float, tuple]]:
    """Every (probability, nodes in slot order) of the growth, by enumeration."""

    def run(chance):
        return tuple(grow_by_hand(q, draw=lambda path, weights: chance.choose(weights), **limits))

    return enumerate_branches(run)


def law_over_trees(trees, law: ToyLaw, rule: str):
    """The emitted law and the mean accepted over trees [(probability, DraftTree)] and over the rule's own draws."""
    emitted, accepted = torch.zeros_like(law.joint()), 0.0
    for probability, tree in trees:
        outcomes = outcomes_of(tree, law.logits(tree), rule)
        emitted += probability * emitted_law(outcomes, law)
        accepted += probability * sum(share * (len(tokens) - 1) for share, tokens in outcomes)
    return emitted, accepted


LIMITS = {  # what makes growth differ: one slot at a time, batches, a cap on siblings, three levels
    "sequential": dict(vocab=3, budget=4, width=1, children=3, depth=2),
    "two_at_once": dict(vocab=3, budget=4, width=2, children=3, depth=2),
    "three_at_once": dict(vocab=3, budget=4, width=3, children=3, depth=2),
    "two_children": dict(vocab=3, budget=4, width=2, children=2, depth=2),
    "chain": dict(vocab=3, budget=3, width=1, children=1, depth=3),
    "four_tokens": dict(vocab=4, budget=3, width=2, children=4, depth=2),
}


def toy(case: str, noise: float = 1.0, seed: int = 0):
    limits = dict(LIMITS[case])
    law = ToyLaw.random(limits.pop("vocab"), limits["depth"] + 1, seed=seed)
    q = drafter_of(law, noise, seed)
    trees = [(share, tree_of(nodes, q, depth=limits["depth"])) for share, nodes in drawn_trees(q, **limits)]
    assert sum(share for share, _ in trees) == pytest.approx(1, abs=1e-12)
    return trees, law


@pytest.mark.parametrize("rule", ["traversal", "target_only"])
@pytest.mark.parametrize("case", LIMITS)
def test_the_law_is_the_targets_over_the_draws_of_tree_and_rule(case, rule):
    """Every draw of the tree and every draw of the rule, enumerated: total variation to the target below 1e-12."""
    trees, law = toy(case)
    emitted, _ = law_over_trees(trees, law, rule)
    assert total_variation(emitted, law.joint()) < 1e-12


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_the_law_is_the_targets_for_near_and_far_drafters(noise, seed):
    trees, law = toy("two_at_once", noise, seed)
    emitted, _ = law_over_trees(trees, law, "traversal")
    assert total_variation(emitted, law.joint()) < 1e-12


def test_a_drafter_that_knows_nothing_changes_acceptance_and_not_the_law():
    """vllm#56724 (C055): draft mass spread evenly over the whole vocabulary."""
    limits = dict(budget=4, width=2, children=3, depth=2)
    law, accepted = ToyLaw.random(3, 3, seed=0), {}
    for name, q in (("spread", lambda path: [1 / 3] * 3), ("near", drafter_of(law, 0.3, 0))):
        trees = [(share, tree_of(nodes, q, depth=2)) for share, nodes in drawn_trees(q, **limits)]
        emitted, accepted[name] = law_over_trees(trees, law, "traversal")
        assert total_variation(emitted, law.joint()) < 1e-12
    assert accepted["spread"] < accepted["near"] - 0.1


def test_on_one_drawn_tree_the_law_is_not_the_targets():
    """It holds on average over trees only: the enumeration above is no tautology."""
    trees, law = toy("two_at_once")
    apart = [total_variation(law_over_trees([(1.0, tree)], law, "traversal")[0], law.joint()) for _, tree in trees]
    assert max(apart) > 0.1


def test_a_drafter_that_equals_the_target_is_accepted_whole():
    """With q = p the ratio test accepts a drawn chain to its end; exact match accepts its path mass."""
    trees, law = toy("chain", noise=0.0)
    assert law_over_trees(trees, law, "traversal")[1] == pytest.approx(3, abs=1e-12)
    mass = sum(share * law.path_mass(tree) for share, tree in trees)
    assert law_over_trees(trees, law, "target_only")[1] == pytest.approx(mass, abs=1e-12) and mass < 2


def test_traversal_may_accept_more_than_the_path_mass_of_drawn_trees():
    """Why no step of it has a bound: its mean over trees exceeds the mean path mass, and the law is exact."""
    trees, law = toy("two_at_once", noise=0.3)
    mass = sum(share * law.path_mass(tree) for share, tree in trees)
    assert law_over_trees(trees, law, "traversal")[1] > mass + 0.03
    tree = trees[0][1]
    bounds = {
        rule: accept(
            tree, law.logits(tree), rule=rule, temperature=1.0, seed=0,
            indices=torch.tensor([0]), root_positions=torch.tensor([5]),
        ).expected_accepted.item()
        for rule in ("traversal", "target_only")
    }  # fmt: skip
    assert math.isnan(bounds["traversal"]) and bounds["target_only"] == pytest.approx(law.path_mass(tree), abs=1e-6)


# --- what breaks it


def with_law(tree, change):
    tokens, log_probs = change(tree, tree.law.tokens.clone(), tree.law.log_probs.clone())
    return DraftTree(
        tree.tokens, tree.parents, tree.depths, tree.log_probs, tree.num_nodes, law=DraftLaw(tokens, log_probs)
    )


def children_only(tree, tokens, log_probs):
    for node in range(tokens.shape[1]):
        children = tree.tokens[0][tree.parents[0] == node]
        tokens[0, node][~torch.isin(tokens[0, node], children)] = -1
    return tokens, log_probs.masked_fill(tokens < 0, -math.inf)


def by_score(q, *, budget, children, depth, vocab):
    """Draws every child first, then keeps the best by their own cumulative probability: decided after the draw."""

    def run(chance):
        level, drawn = [()], {}
        for _ in range(depth):
            following = []
            for path in level:
                left = list(q(path))
                for _ in range(children):
                    token = chance.choose(left)
                    left[token] = 0.0
                    drawn[(*path, token)] = drawn.get(path, 1.0) * q(path)[token]
                    following.append((*path, token))
            level = following
        order = {path: place for place, path in enumerate(drawn)}
        best = sorted(drawn, key=lambda path: (-drawn[path], order[path]))[:budget]
        return tuple(sorted(best, key=lambda path: (len(path), order[path])))

    return enumerate_branches(run)


def broken_trees(fault):
    trees, law = toy("two_at_once")
    q = drafter_of(law, 1.0, 0)
    if fault == "the_row_of_the_children_alone":
        trees = [(share, with_law(tree, children_only)) for share, tree in trees]
    elif fault == "siblings_in_another_order":
        orders = [(share, paths_of(tree)[1:]) for share, tree in trees]
        trees = [(share, tree_of(sorted(nodes, key=lambda p: (len(p), p)), q, depth=2)) for share, nodes in orders]
    elif fault == "the_best_instead_of_draws":
        nodes = grow_by_hand(
            q, budget=4, width=2, children=3, depth=2, draw=lambda path, weights: weights.index(max(weights))
        )
        trees = [(1.0, tree_of(nodes, q, depth=2))]
    elif fault == "kept_by_the_score_of_what_was_drawn":
        drawn = by_score(q, budget=3, children=2, depth=2, vocab=3)
        trees = [(share, tree_of(nodes, q, depth=2)) for share, nodes in drawn]
    return trees, law


@pytest.mark.parametrize(
    "fault",
    [
        "the_row_of_the_children_alone",
        "siblings_in_another_order",
        "the_best_instead_of_draws",
        "kept_by_the_score_of_what_was_drawn",
    ],
)
def test_a_wrong_reading_of_drawn_siblings_changes_the_law(fault):
    trees, law = broken_trees(fault)
    emitted, _ = law_over_trees(trees, law, "traversal")
    assert float(emitted.sum()) == pytest.approx(1, abs=1e-12)
    assert total_variation(emitted, law.joint()) > 0.005


# --- bad input


def test_a_law_without_a_drafted_token_is_refused():
    trees, law = toy("chain")
    broken = with_law(trees[0][1], lambda tree, tokens, log_probs: (tokens.masked_fill(tokens >= 0, 99), log_probs))
    with pytest.raises(ValueError, match="law: a drafted token is no candidate of its parent"):
        outcomes_of(broken, law.logits(broken), "traversal")


def test_the_audited_rule_is_refused_on_drawn_siblings():
    trees, law = toy("chain")
    with pytest.raises(ValueError, match=r"rule: 'legacy_traversal' is not allowed on drawn siblings"):
        accept(
            trees[0][1], law.logits(trees[0][1]), rule="legacy_traversal", temperature=1.0, seed=0,
            indices=torch.tensor([0]), root_positions=torch.tensor([5]),
        )  # fmt: skip
