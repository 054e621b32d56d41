"""DDTree's tree without a host copy: the same nodes in the same order as baselines/ddtree.py, level by level.

A prefix among the best B of all is among the best B of its length, and so is its parent. Of a level's prefixes only the
pairs (a-th best parent, b-th best candidate) with (a + 1)(b + 1) <= B can be among the best B: every pair with smaller
or equal ranks is at least as good and comes before it. The best B of all levels, ordered by score and then by ranks
(lexicographically), are what the heap pops: a node's parent and elder sibling always stand before it in that order.
"""

import importlib

import torch
from torch import Tensor

from tfm.config import DecodeConfig
from tfm.engine.forms import TRITON, Forms
from tfm.marginals import Marginals
from tfm.tree import DraftTree


class StaticDDTreeProposer:
    """Drafts what DDTreeProposer drafts."""

    def __init__(self, budget: int, depth: int | None, forms: Forms):
        self._budget, self._depth = budget, depth
        # lazy: needs Triton
        is_fast = forms.growth == TRITON
        self._heap = importlib.import_module("tfm_kernels.best_first_triton") if is_fast else None
        self._pairs: tuple[Tensor, Tensor] | None = None

    def propose(self, context, clock) -> DraftTree:
        with clock.stage("draft"):
            marginals = context.draft(self._budget)
        with clock.stage("build"):
            depth = self._depth or marginals.tokens.shape[1]
            if self._heap is not None:
                return self._pop(marginals, context.roots, depth)
            if self._pairs is None:
                # made before a capture: a host list cannot be copied in one
                self._pairs = rank_pairs(self._budget, marginals.tokens.shape[2], context.roots.device)
            return build_by_levels(marginals, context.roots, budget=self._budget, depth=depth, pairs=self._pairs)

    def _pop(self, marginals: Marginals, roots: Tensor, depth: int) -> DraftTree:
        rows = (marginals.tokens[0], marginals.log_probs[0])
        *columns, count = self._heap.best_prefixes(*rows, roots, budget=self._budget, depth=depth)
        return DraftTree(*(column[None] for column in columns), num_nodes=count)


def rank_pairs(budget: int, candidates: int, device) -> tuple[Tensor, Tensor]:
    """Return all (a, b) with (a + 1)(b + 1) <= budget and b < candidates, as two tensors of indices."""
    pairs = [(a, b) for a in range(budget) for b in range(min(candidates, budget // (a + 1)))]
    return tuple(torch.tensor(column, device=device) for column in zip(*pairs, strict=True))


def build_by_levels(
    marginals: Marginals, roots: Tensor, *, budget: int, depth: int, pairs: tuple[Tensor, Tensor]
) -> DraftTree:
    """Return one tree (R = 1) of at most `budget` drafted nodes; a row's candidates must be distinct and sorted."""
    levels = _Levels(marginals, budget=budget, depth=depth)
    for level in range(depth):
        levels.extend(level, pairs)
    return levels.tree(roots)


class _Levels:
    """The best prefixes of each length, best first, equal scores in the order of their ranks.

    Ranks are packed into words of 63 bits, most significant level first, a rank r as r + 1: a prefix stands before
    what extends it. Absent prefixes have score -inf.
    """

    def __init__(self, marginals: Marginals, *, budget: int, depth: int):
        self._budget, self._bits = budget, int(budget).bit_length()
        self._each = 63 // self._bits
        self._tokens = marginals.tokens[0]  # [D, K]
        self._log_probs = marginals.log_probs[0].double()
        device = self._tokens.device
        self._score = torch.zeros(1, dtype=torch.float64, device=device)
        self._words = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(-(-depth // self._each))]
        self._columns: list[dict[str, Tensor]] = []

    def extend(self, level: int, pairs: tuple[Tensor, Tensor]) -> None:
        """Append the best `budget` prefixes of length level + 1."""
        above = len(self._score)
        if level == 0:
            rank = torch.arange(min(self._budget, self._tokens.shape[1]), device=self._tokens.device)
            parent = torch.zeros_like(rank)
        else:
            parent, rank = pairs
            if above < self._budget:
                parent = parent.clamp(max=above - 1)
        score = self._score[parent] + self._log_probs[level, rank]
        if level and above < self._budget:
            score = torch.where(pairs[0] < above, score, -torch.inf)
        words = [word[parent] for word in self._words]
        word, place = divmod(level, self._each)
        words[word] = words[word] + ((rank + 1) << (self._bits * (self._each - 1 - place)))
        order = _order(score, words)[: self._budget]
        self._score, self._words = score[order], [word[order] for word in words]
        self._columns.append({"parent": parent[order], "rank": rank[order], "score": self._score, "words": self._words})

    def tree(self, roots: Tensor) -> DraftTree:
        """Return the best `budget` of all levels as a tree, best first."""
        sizes = [len(column["parent"]) for column in self._columns]
        score = torch.cat([column["score"] for column in self._columns])
        words = [torch.cat(word) for word in zip(*(column["words"] for column in self._columns), strict=True)]
        order = _order(score, words)[: self._budget]
        starts = [sum(sizes[:level]) for level in range(len(sizes))]
        # of each node the place of its parent among all; the root's children point past the end
        parent = torch.cat(
            [
                column["parent"] + (starts[level - 1] if level else len(score))
                for level, column in enumerate(self._columns)
            ]
        )
        numbers = torch.arange(1, len(order) + 1, device=order.device)
        number_of = torch.zeros(len(score) + self._budget, dtype=torch.int64, device=order.device)
        number_of.scatter_(0, order, numbers)
        depth = torch.cat([torch.full_like(column["rank"], level) for level, column in enumerate(self._columns)])[order]
        rank = torch.cat([column["rank"] for column in self._columns])[order]
        is_drafted = score[order] > -torch.inf
        local = self._log_probs[depth, rank].float()

        def column(values: Tensor, root: Tensor, empty) -> Tensor:
            row = torch.cat([root, torch.where(is_drafted, values, empty)])
            return torch.nn.functional.pad(row, (0, self._budget + 1 - len(row)), value=empty)[None]

        zero = torch.zeros_like(roots)
        return DraftTree(
            tokens=column(self._tokens[depth, rank], roots, 0),
            parents=column(number_of[parent[order]], zero - 1, -1),
            depths=column(depth + 1, zero, 0),
            log_probs=column(local, zero.float(), 0.0),
            num_nodes=(is_drafted.sum() + 1).view(1),
        )


def _order(score: Tensor, words: list[Tensor]) -> Tensor:
    """Return the places in the order of `score`, highest first, equal scores by `words`, lowest first."""
    order = torch.arange(len(score), device=score.device)
    for word in reversed(words):
        order = order[word[order].sort(stable=True).indices]
    return order[score[order].sort(descending=True, stable=True).indices]


def make_proposer(config: DecodeConfig, models, forms: Forms) -> StaticDDTreeProposer:
    """Return the proposer of method ddtree for the static engine; needs models.drafter."""
    if models.drafter is None:
        raise ValueError("drafter: None is not allowed for method ddtree (allowed: loaded weights); load the drafter")
    return StaticDDTreeProposer(config.budget, config.depth, forms)
