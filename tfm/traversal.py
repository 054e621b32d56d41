"""Traversal verification: leaves first, each accepted with a ratio of target to draft mass, residuals on the way up.

The trees here are deterministic: siblings are the top candidates, not samples. The exact rule gives them a sampling
reading (a Plackett-Luce order of the siblings, drawn when it is needed). Rules see one request and draw from a Chance.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Chance(Protocol):
    """Source of randomness of a rule; a test's oracle implements it to enumerate every branch."""

    def bernoulli(self, probability: float) -> bool:
        """True with `probability`; certain outside (0, 1)."""

    def choose(self, weights: Sequence[float] | Tensor) -> int:
        """An index with probability proportional to its weight; never one of weight 0."""


class HashChance:
    """Chance that spends given uniforms in (0, 1), one a draw."""

    def __init__(self, uniforms: Sequence[float]):
        self._uniforms = iter(uniforms)

    def bernoulli(self, probability: float) -> bool:
        return next(self._uniforms) < probability

    def choose(self, weights: Sequence[float] | Tensor) -> int:
        ends = weights.cumsum(0).tolist() if isinstance(weights, Tensor) else list(itertools.accumulate(weights))
        # the product may round up to the total, which is past the last index
        point = min(next(self._uniforms) * ends[-1], math.nextafter(ends[-1], 0.0))
        index = bisect.bisect_right(ends, point)
        assert index < len(ends), f"choose: {len(ends)} weights add up to {ends[-1]}"
        return index


@dataclass
class NodeState:
    """The target row and the draft row of one node: its alive children, and one factor for the rest of the row."""

    alive: list[int]  # children that are not rejected yet, lowest slot first
    draft: dict[int, float]  # draft mass of every alive child; sums to 1
    target: dict[int, float]  # target mass of every child, rejected ones included
    rest: float  # target mass of all tokens that are no child
    scale: float = 1.0  # what `rest` was multiplied with so far
    acceptance: float = 1.0
    current: int | None = None  # the child being tried


def traverse(
    parents: Sequence[int], target: Sequence[float], rest: Sequence[float], draft: Sequence[float], chance: Chance
) -> tuple[list[int], NodeState]:
    """Return the accepted path (node ids from 0) and the state of its last node, whose row gives the bonus token.

    All four run over the nodes of one tree: `parents`; `target`, the probability of the node's token in its parent's
    target row; `rest`, the mass of the node's own target row outside its children; `draft`, the log-probability of
    the node's token in its parent's draft row, on any scale. Exact (paper.md 6.3): the emitted tokens
    follow the target's law.
    """
    return _run(parents, target, rest, draft, chance, _draw_sibling, _replace_row)


def legacy_traverse(
    parents: Sequence[int], target: Sequence[float], rest: Sequence[float], draft: Sequence[float], chance: Chance
) -> tuple[list[int], NodeState]:
    """As `traverse`, by the rule of the oldest public kernel. LOSSY: it exists to be audited, never to be used.

    Siblings go in slot order, a rejection changes the parent's acceptance and the sibling weights but not its target
    row, and the bonus comes from the original row. It accepts more than any lossless rule can.
    """
    return _run(parents, target, rest, draft, chance, _first_sibling, _keep_row)


def bonus_weights(row: Tensor, leaf: NodeState, tokens: Sequence[int]) -> Tensor:
    """Return the current target row of `leaf` [vocab] from its original `row` [vocab] and the tree's `tokens` [N]."""
    weights = row * leaf.scale
    for child, mass in leaf.target.items():
        weights[tokens[child]] = mass
    return weights


def _run(parents, target, rest, draft, chance: Chance, pick: Callable, reject: Callable):
    states = _states(parents, target, rest, draft)
    path = [0]
    while True:
        while states[path[-1]].alive:
            node = states[path[-1]]
            if node.current is None:
                node.current = pick(node, chance)
            child = node.current
            ratio = node.acceptance * node.target[child] / node.draft[child]
            states[child].acceptance = min(ratio, 1.0)
            path.append(child)
        leaf = states[path[-1]]
        if len(path) == 1 or chance.bernoulli(leaf.acceptance):
            return path, leaf
        reject(states[path[-2]], path.pop())


def _states(parents, target, rest, draft) -> list[NodeState]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    states = []
    for nodes, outside in zip(children, rest, strict=False):
        best = max((draft[node] for node in nodes), default=0.0)
        weights = {node: math.exp(draft[node] - best) for node in nodes}
        # a child without draft mass is never tried; leaving it out keeps every ratio finite and the law exact
        total = sum(weights.values())
        alive = [node for node in nodes if weights[node] / total > 0]
        states.append(
            NodeState(
                alive=alive,
                draft={node: weights[node] / total for node in alive},
                target={node: target[node] for node in nodes},
                rest=outside,
            )
        )
    return states


def _draw_sibling(node: NodeState, chance: Chance) -> int:
    """The next sibling of a Plackett-Luce order: drawn by draft mass among those alive."""
    if len(node.alive) == 1:
        return node.alive[0]
    return node.alive[chance.choose([node.draft[child] for child in node.alive])]


def _first_sibling(node: NodeState, chance: Chance) -> int:
    return node.alive[0]


def _replace_row(node: NodeState, rejected: int) -> None:
    """Make the residual the node's target row, and drop the rejected child from its draft row."""
    residual, factor, mass = _residual(node)
    if mass > 0:
        node.target = {child: value / mass for child, value in residual.items()}
        node.rest *= factor / mass
        node.scale *= factor / mass
    _drop(node, rejected, mass)


def _keep_row(node: NodeState, rejected: int) -> None:
    _, _, mass = _residual(node)
    _drop(node, rejected, mass)


def _residual(node: NodeState) -> tuple[dict[int, float], float, float]:
    """max(acceptance * target - draft, 0) at the children, its factor on the rest of the row, and its total mass."""
    factor = node.acceptance
    residual = {child: max(factor * mass - node.draft.get(child, 0.0), 0.0) for child, mass in node.target.items()}
    return residual, factor, sum(residual.values()) + factor * node.rest


def _drop(node: NodeState, rejected: int, mass: float) -> None:
    room = mass + 1.0 - node.acceptance
    # room is 0 only when both rows agree, where nothing can be rejected but by rounding
    node.acceptance = mass / room if room > 0 else 0.0
    node.alive.remove(rejected)
    node.current = None
    left = sum(node.draft[child] for child in node.alive)
    node.draft = {child: node.draft[child] / left for child in node.alive}
