"""Autoregressive decoding on the common loop: the tree is the root alone, so a step emits one token."""

from tfm.config import DecodeConfig
from tfm.tree import DraftTree


class ArProposer:
    """Drafts nothing."""

    def propose(self, context, clock) -> DraftTree:
        with clock.stage("build"):
            return DraftTree.root_only(context.roots)


def make_proposer(config: DecodeConfig, models) -> ArProposer:
    return ArProposer()
