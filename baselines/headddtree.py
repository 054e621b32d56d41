"""Correct the chain first, then DDTree: the head's laws along its own chain stand where DDTree has the marginals.

The law of each depth given the chain above it serves every branch, so that branches off the chain are scored by laws
that belong to another path: what DARTree corrects.
"""

from baselines.ddtree import build_best_first
from baselines.headchain import HeadChainProposer
from tfm.builder import make_scorer
from tfm.config import DecodeConfig
from tfm.marginals import Marginals
from tfm.tree import DraftTree


class HeadDDTreeProposer(HeadChainProposer):
    """Drafts the best `budget` prefixes under the product of the laws along the chain."""

    def _build(self, marginals: Marginals, context, clock) -> DraftTree:
        # a candidate listed twice has no mass left, and DDTree keeps the first of a token
        laws = self._correct(marginals, context, clock)
        return build_best_first(laws, context.roots, budget=self._config.budget, depth=laws.tokens.shape[1])


def make_proposer(config: DecodeConfig, models) -> HeadDDTreeProposer:
    """Return the proposer of method headddtree; needs models.drafter and the config's head."""
    return HeadDDTreeProposer(config, make_scorer(config, models))
