"""Traversal verification: leaves first, each accepted with a ratio of target to draft mass, residuals on the way up.

Where siblings were drawn without replacement, the draft row of a node is the law they were drawn from, and they are
tried in the order of their draws. Where they are the top candidates, the exact rule gives them a sampling reading: the
row is their own softmax, and a Plackett-Luce order is drawn when it is needed. Rules see one request and draw from a
Chance.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
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


@dataclass(frozen=True)
class TreeRows:
    """One request's tree of N nodes as the rules see it. C candidates a node; where it has fewer, both masses are 0."""

    parents: list[int]
    columns: list[int]  # of each node: the candidate of its parent that it is
    tokens: np.ndarray  # [N, C] int64, -1 where there is no candidate
    target: np.ndarray  # [N, C] float64, mass of each candidate in the node's target row
    rest: np.ndarray  # [N] float64, mass of all other tokens in the node's target row
    draft: np.ndarray  # [N, C] float64, the node's draft row; sums to 1 where the node has children
    is_drawn: bool  # the siblings were drawn from the draft rows, in slot order


@dataclass
class NodeState:
    """The target row and the draft row of one node: its candidates, and one factor for the rest of the row."""

    alive: list[int]  # children that are not rejected yet, lowest slot first
    columns: dict[int, int]  # of every child
    tokens: np.ndarray  # [C]
    target: np.ndarray  # [C] mass of every candidate, rejected ones included
    draft: np.ndarray  # [C] sums to 1 while a child is alive; 0 at rejected ones
    rest: float  # target mass of all tokens that are no candidate
    scale: float = 1.0  # what `rest` was multiplied with so far
    acceptance: float = 1.0
    current: int | None = None  # the child being tried


def traverse(rows: TreeRows, chance: Chance) -> tuple[list[int], NodeState]:
    """Return the accepted path (node ids from 0) and the state of its last node, whose row gives the bonus token.

    Exact (Traversal Verification, arXiv 2505.12398): the emitted tokens follow the target's law, given the tree where
    siblings are the top candidates, and on average over the draws of the tree where they were drawn.
    """
    return _run(rows, chance, _first_sibling if rows.is_drawn else _draw_sibling, _replace_row)


def legacy_traverse(rows: TreeRows, chance: Chance) -> tuple[list[int], NodeState]:
    """As `traverse`, by the rule of the oldest public kernel. LOSSY: it exists to be audited, never to be used.

    Siblings go in slot order, a rejection changes the parent's acceptance and the sibling weights but not its target
    row, and the bonus comes from the original row. It accepts more than any lossless rule can.
    """
    return _run(rows, chance, _first_sibling, _keep_row)


def bonus_weights(row: Tensor, leaf: NodeState) -> Tensor:
    """Return the current target row of `leaf` [vocab] float64 from its original `row` [vocab]."""
    weights = row * leaf.scale
    is_candidate = leaf.tokens >= 0
    weights[leaf.tokens[is_candidate]] = weights.new_tensor(leaf.target[is_candidate])
    return weights


def _run(rows: TreeRows, chance: Chance, pick: Callable, reject: Callable):
    states = _states(rows)
    path = [0]
    while True:
        while states[path[-1]].alive:
            node = states[path[-1]]
            if node.current is None:
                node.current = pick(node, chance)
            child, column = node.current, node.columns[node.current]
            ratio = node.acceptance * node.target[column] / node.draft[column]
            states[child].acceptance = min(float(ratio), 1.0)
            path.append(child)
        leaf = states[path[-1]]
        if len(path) == 1 or chance.bernoulli(leaf.acceptance):
            return path, leaf
        reject(states[path[-2]], path.pop())


def _states(rows: TreeRows) -> list[NodeState]:
    children: list[dict[int, int]] = [{} for _ in rows.parents]
    for node, parent in enumerate(rows.parents[1:], start=1):
        children[parent][node] = rows.columns[node]
    return [
        NodeState(
            # a child without draft mass is never tried; leaving it out keeps every ratio finite and the law exact
            alive=[node for node, column in columns.items() if rows.draft[place, column] > 0],
            columns=columns,
            tokens=rows.tokens[place],
            target=rows.target[place],
            draft=rows.draft[place],
            rest=float(rows.rest[place]),
        )
        for place, columns in enumerate(children)
    ]


def _draw_sibling(node: NodeState, chance: Chance) -> int:
    """The next sibling of a Plackett-Luce order: drawn by draft mass among those alive."""
    if len(node.alive) == 1:
        return node.alive[0]
    return node.alive[chance.choose([float(node.draft[node.columns[child]]) for child in node.alive])]


def _first_sibling(node: NodeState, chance: Chance) -> int:
    return node.alive[0]


def _replace_row(node: NodeState, rejected: int) -> None:
    """Make the residual the node's target row, and drop the rejected child from its draft row."""
    residual, factor, mass = _residual(node)
    if mass > 0:
        node.target = residual / mass
        node.rest *= factor / mass
        node.scale *= factor / mass
    _drop(node, rejected, mass)


def _keep_row(node: NodeState, rejected: int) -> None:
    _, _, mass = _residual(node)
    _drop(node, rejected, mass)


def _residual(node: NodeState) -> tuple[np.ndarray, float, float]:
    """max(acceptance * target - draft, 0) at the candidates, its factor on the rest of the row, and its total mass."""
    factor = node.acceptance
    residual = np.maximum(factor * node.target - node.draft, 0.0)
    return residual, factor, float(residual.sum()) + factor * node.rest


def _drop(node: NodeState, rejected: int, mass: float) -> None:
    room = mass + 1.0 - node.acceptance
    # room is 0 only when both rows agree, where nothing can be rejected but by rounding
    node.acceptance = mass / room if room > 0 else 0.0
    node.alive.remove(rejected)
    node.current = None
    draft = node.draft.copy()
    draft[node.columns[rejected]] = 0.0
    left = draft.sum()
    node.draft = draft / left if left > 0 else draft
