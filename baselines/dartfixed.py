"""DARTree's fixed mode: the budget is dealt out over the depths and all of it is verified.

Each depth takes ceil(what is left / depths left) nodes, the best by corrected cumulative log-probability among the
children of the nodes above; nothing is built that is not verified, and no selection follows.
"""

from torch import Tensor

from baselines.dartree import Supertree
from baselines.scored import ScoredProposer, checked_marginals
from tfm.builder import ConditionalScorer, make_scorer
from tfm.clock import OFF, Clock
from tfm.config import DecodeConfig
from tfm.marginals import Marginals
from tfm.tree import DraftTree


def fixed_widths(budget: int, depth: int, children: int) -> list[int]:
    """Return the nodes of each depth that `budget` pays for: ceil(left / depths left), as far as there are children."""
    widths, above = [], 1
    for level in range(depth):
        left = budget - sum(widths)
        above = min(-(-left // (depth - level)), above * children)
        if above == 0:
            break
        widths.append(above)
    return widths


def build_fixed(
    marginals: Marginals,
    scorer: ConditionalScorer,
    roots: Tensor,  # [R] int64
    *,
    target_hidden: Tensor,  # [R, d]
    budget: int,
    children: int,
    depth: int,
    clock: Clock = OFF,
) -> DraftTree:
    """Return R trees of at most `budget` drafted nodes, dealt out over `depth` levels, one expansion a level.

    Raises ValueError for a depth without drafter rows.
    """
    marginals = checked_marginals(marginals, depth)
    widths = fixed_widths(budget, depth, min(children, marginals.tokens.shape[2]))
    with clock.stage("weaver_prefix"):
        scorer.begin(marginals, target_hidden, 1 + sum(widths[:-1]))
    with clock.stage("grow"):
        supertree = Supertree(marginals, scorer, roots, width=max(widths), children=children)
        for width in widths:
            supertree.add_level(width)
        return supertree.best_prefixes(budget, 0.0)


class FixedProposer(ScoredProposer):
    """Drafts `budget` nodes dealt out over the depths."""

    build = staticmethod(build_fixed)


def make_proposer(config: DecodeConfig, models) -> FixedProposer:
    """Return the proposer of method dartfixed; needs what method dartree needs."""
    return FixedProposer(config, make_scorer(config, models))
