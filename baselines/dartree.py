"""DARTree (arXiv 2608.13524): correct all live branches of a depth in one batch, then keep the B best prefixes of all.

The supertree has W nodes a depth: the best by corrected cumulative log-probability among the C best children of the W
branches above. Its size is fixed, so building takes one expansion a depth whatever the budget is, and the selection of
the B nodes to verify waits until all depths are there. The correction is a ConditionalScorer: the weaver stands where
the authors have Domino's or DSpark's causal head. Their code lets a branch have all K candidates as children.

This is the pruned mode; the fixed one is baselines/dartfixed.py, and baselines/heap.py the sequential build. A depth
bonus <= 0 is added once a level in that selection. A child then never scores above its parent, so the B best are closed
under prefixes and are what a best-first heap over the supertree pops (the authors' Lemma 1).
"""

import torch
from torch import Tensor

from baselines.scored import ScoredProposer, best_prefixes, checked_marginals
from tfm.builder import ConditionalScorer, make_scorer
from tfm.clock import OFF, Clock
from tfm.config import DecodeConfig, check_depth_bonus
from tfm.marginals import Marginals
from tfm.tree import DraftTree

DEFAULT_WIDTH = 12  # the authors' default; their gain saturates there


class Supertree:
    """One run of `build_depthwise` after `scorer.begin`.

    Node n of a supertree stands in depth-major order, best first within a depth; n = 0 is the root. It keeps its number
    as its slot of the scorer. Absent nodes (a depth with fewer than W prefixes) have score -inf.
    """

    def __init__(self, marginals: Marginals, scorer: ConditionalScorer, roots: Tensor, *, width: int, children: int):
        self._scorer, self._candidates = scorer, marginals.tokens
        self._width, self._children, self._count = width, min(children, marginals.tokens.shape[2]), 1
        zero = torch.zeros_like(roots)[:, None]
        # of each level: node numbers, parents' numbers, tokens, cumulative and local log-probs, all [R, nodes]
        self.levels = [(zero, zero - 1, roots[:, None], zero.float(), zero.float())]

    def add_level(self, width: int | None = None) -> None:
        """Expand the last level's nodes in one batch and append the best W children, `width` of them when given."""
        width = self._width if width is None else width
        level, (nodes, parents, tokens, scores, _) = len(self.levels) - 1, self.levels[-1]
        slots = nodes.masked_fill(scores == -torch.inf, -1)
        log_probs = self._scorer.expand(slots, parents, tokens, torch.full_like(nodes, level))
        # stable sorts: topk promises no order among equals
        local, ranks = log_probs.sort(dim=-1, descending=True, stable=True)
        local = local[..., : self._children].masked_fill_(slots[..., None] < 0, -torch.inf)
        best, places = (local + scores[..., None]).flatten(1).sort(dim=-1, descending=True, stable=True)
        best, places = best[:, :width], places[:, :width]
        picks = ranks[..., : self._children].flatten(1).gather(1, places)
        number = self._count + torch.arange(places.shape[1], device=nodes.device)
        self._count += places.shape[1]
        self.levels.append(
            (
                number.expand_as(places),
                nodes.gather(1, places // self._children),
                self._candidates[:, level].gather(1, picks),
                best,
                local.flatten(1).gather(1, places),
            )
        )

    def best_prefixes(self, budget: int, depth_bonus: float) -> DraftTree:
        """Return the best `budget` nodes below the root, best first, ties by the lowest number: parents come first.

        A supertree with fewer nodes gives a smaller tree, padded.
        """
        _, parents, tokens, scores, local = (torch.cat(column, dim=1) for column in zip(*self.levels, strict=True))
        levels = [torch.full_like(level[0], depth) for depth, level in enumerate(self.levels)]
        depths = torch.cat(levels, dim=1)
        # the root is first whatever the bonus: nothing scores above 0, and it has the lowest number
        return best_prefixes(scores + depth_bonus * depths, tokens, parents, depths, local, budget=budget)


def build_depthwise(
    marginals: Marginals,
    scorer: ConditionalScorer,
    roots: Tensor,  # [R] int64
    *,
    target_hidden: Tensor,  # [R, d]
    budget: int,
    width: int,
    children: int,
    depth: int,
    depth_bonus: float = 0.0,
    clock: Clock = OFF,
) -> DraftTree:
    """Return R trees of at most `budget` drafted nodes, none deeper than `depth`, in `depth` expansions.

    Raises ValueError for a depth without drafter rows and for a bonus that would let a child pass its parent.
    """
    check_depth_bonus(depth_bonus)
    marginals = checked_marginals(marginals, depth)
    with clock.stage("weaver_prefix"):
        # the last level is not expanded
        scorer.begin(marginals, target_hidden, 1 + width * (depth - 1))
    with clock.stage("grow"):
        supertree = Supertree(marginals, scorer, roots, width=width, children=children)
        for _ in range(depth):
            supertree.add_level()
        return supertree.best_prefixes(budget, depth_bonus)


class DARTreeProposer(ScoredProposer):
    """Drafts the best `budget` prefixes of a supertree of `width` branches."""

    build = staticmethod(build_depthwise)

    def _options(self) -> dict:
        return {"width": self._config.width or DEFAULT_WIDTH, "depth_bonus": self._config.depth_bonus}


def make_proposer(config: DecodeConfig, models) -> DARTreeProposer:
    """Return the proposer of method dartree; needs models.drafter, and the config's head unless the residual is off."""
    return DARTreeProposer(config, make_scorer(config, models))
