"""Between DARTree and top-w: grow a tree best first with a wide batch, past the budget, then keep the B best prefixes.

DARTree expands W branches of one depth a call, whatever their scores across depths; top-w expands the w best prefixes
of all depths, but verifies whatever it expanded. Here each of CALLS calls of the head expands the `width` best prefixes
of all depths, and the selection of the budget waits until all are there, as DARTree's does. A batch costs one call
whatever its width, so the tree gets closer to the sequential heap's, the best of its head, for as many calls as top-w.
"""

import torch
from torch import Tensor

from baselines.scored import ScoredProposer, best_prefixes
from tfm.builder import ConditionalScorer, Growth, make_scorer, without_repeats
from tfm.clock import OFF, Clock
from tfm.config import DecodeConfig
from tfm.marginals import Marginals
from tfm.tree import DraftTree

CALLS = 16  # of top-w at its default width, ceil(B / 16)
DEFAULT_WIDTH = 12  # DARTree's


def build_overgrown(
    marginals: Marginals,
    scorer: ConditionalScorer,
    roots: Tensor,  # [R] int64
    *,
    target_hidden: Tensor,  # [R, d]
    budget: int,
    width: int,
    children: int,
    depth: int,
    calls: int = CALLS,
    clock: Clock = OFF,
) -> DraftTree:
    """Return R trees of at most `budget` drafted nodes, best first, none deeper than `depth`.

    At least `budget` nodes are grown, so `calls` is exceeded where width * calls is below the budget, or where the
    frontier holds fewer than `width` prefixes. Raises ValueError for a depth without drafter rows.
    """
    marginals, grown = without_repeats(marginals), max(budget, width * calls)
    with clock.stage("weaver_prefix"):
        scorer.begin(marginals, target_hidden, grown + 1)
    with clock.stage("grow"):
        limits = {"budget": grown, "width": width, "children": children, "depth": depth}
        return keep_best(Growth(marginals, scorer, roots, **limits).run(), budget)


def keep_best(tree: DraftTree, budget: int) -> DraftTree:
    """Return the best `budget` nodes below the root by cumulative log-probability, best first, ties by lowest slot.

    A child never scores above its parent and stands behind it, so what is kept is closed under prefixes.
    """
    total = tree.log_probs.clone()
    for level in range(1, int(tree.depths.max()) + 1):
        above = total.gather(1, tree.parents.clamp(min=0))
        total = torch.where(tree.depths == level, tree.log_probs + above, total)
    total = total.masked_fill(~tree.is_real, -torch.inf)
    # float32 sums: a child of log-probability -0 ties with its parent, which has the lower slot
    return best_prefixes(total, tree.tokens, tree.parents, tree.depths, tree.log_probs, budget=budget)


class OvergrownProposer(ScoredProposer):
    """Drafts the best `budget` prefixes of a tree grown with `width` expansions a call."""

    build = staticmethod(build_overgrown)

    def _options(self) -> dict:
        return {"width": self._config.width or DEFAULT_WIDTH}


def make_proposer(config: DecodeConfig, models) -> OvergrownProposer:
    """Return the proposer of method overgrown; needs models.drafter, and the head unless the residual is off."""
    return OvergrownProposer(config, make_scorer(config, models))
