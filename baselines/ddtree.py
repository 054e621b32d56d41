"""DDTree (arXiv 2604.12989): the B most probable prefixes under the product of the drafter's marginals.

A best-first heap on the host. Every popped node pushes its next sibling and its first child, so the popped set is the
best prefix-closed set of its size. A score is the float64 sum of log-probabilities along the path, in path order (the
public code moves from sibling to sibling by a difference, which rounds differently).
"""

import heapq
import math

import torch
from torch import Tensor

from tfm.config import DecodeConfig
from tfm.marginals import Marginals
from tfm.tree import DraftTree


class DDTreeProposer:
    """Drafts the best `budget` prefixes, none longer than `depth`; a row never needs more than `budget` candidates."""

    def __init__(self, budget: int, depth: int | None):
        self._budget, self._depth = budget, depth

    def propose(self, context, clock) -> DraftTree:
        with clock.stage("draft"):
            marginals = context.draft(self._budget)
        with clock.stage("build"):
            depth = self._depth or marginals.tokens.shape[1]
            return build_best_first(marginals, context.roots, budget=self._budget, depth=depth)


def build_best_first(marginals: Marginals, roots: Tensor, *, budget: int, depth: int) -> DraftTree:
    """Return R trees of at most `budget` drafted nodes; ties go to the lexicographically first ranks.

    Costs one device-to-host copy of the marginals. A tree with fewer possible prefixes is smaller and padded.
    """
    if budget < 1:
        raise ValueError(f"budget: {budget} is not allowed (allowed: an integer >= 1); raise budget")
    rows = marginals.tokens.shape[1]
    if not 1 <= depth <= rows:
        raise ValueError(f"depth: {depth} is not allowed (allowed: 1 to {rows}, the drafter's rows); lower depth")
    tokens, log_probs = marginals.tokens[:, :depth].tolist(), marginals.log_probs[:, :depth].tolist()
    nodes = []
    for root, *request in zip(roots.tolist(), tokens, log_probs, strict=True):
        candidates = [_distinct(*row) for row in zip(*request, strict=True)]
        nodes.append([(root, -1, 0, 0.0), *_best_prefixes(candidates, budget)])
    padded = [row + [(0, -1, 0, 0.0)] * (budget + 1 - len(row)) for row in nodes]
    columns = zip(*(zip(*row, strict=True) for row in padded), strict=True)
    token, parent, level, local = (torch.tensor(column, device=roots.device) for column in columns)
    counts = torch.tensor([len(row) for row in nodes], device=roots.device)
    return DraftTree(token, parent, level, local.float(), counts)


def _best_prefixes(rows: list[list[tuple[int, float]]], budget: int) -> list[tuple[int, int, int, float]]:
    """Return (token, parent, depth, log-prob) of up to `budget` nodes, best first; node ids start at 1."""
    nodes: list[tuple[int, int, int, float]] = []
    heap: list[tuple[float, tuple[int, ...], int, float]] = []  # -score, ranks, parent, parent's score

    def push(ranks: tuple[int, ...], parent: int, base: float) -> None:
        depth = len(ranks)
        if depth <= len(rows) and ranks[-1] < len(rows[depth - 1]):
            score = base + rows[depth - 1][ranks[-1]][1]
            if score > -math.inf:
                heapq.heappush(heap, (-score, ranks, parent, base))

    push((0,), 0, 0.0)
    while heap and len(nodes) < budget:
        negative, ranks, parent, base = heapq.heappop(heap)
        token, local = rows[len(ranks) - 1][ranks[-1]]
        nodes.append((token, parent, len(ranks), local))
        push((*ranks[:-1], ranks[-1] + 1), parent, base)
        push((*ranks, 0), len(nodes), -negative)
    return nodes


def _distinct(tokens: list[int], log_probs: list[float]) -> list[tuple[int, float]]:
    """Pair candidates with log-probs, keeping the first of repeated tokens: siblings are distinct."""
    best: dict[int, float] = {}
    for token, log_prob in zip(tokens, log_probs, strict=True):
        best.setdefault(token, log_prob)
    return list(best.items())


def make_proposer(config: DecodeConfig, models) -> DDTreeProposer:
    """Return the proposer of method ddtree; needs models.drafter."""
    if models.drafter is None:
        raise ValueError("drafter: None is not allowed for method ddtree (allowed: loaded weights); load the drafter")
    return DDTreeProposer(config.budget, config.depth)
