"""DFlash: the chain of the drafter's most likely token at each position, whatever stands before it."""

import torch

from tfm.config import DecodeConfig
from tfm.marginals import Marginals
from tfm.tree import DraftTree


class DFlashProposer:
    """Drafts one chain of `depth` tokens, all the drafter's rows when depth is None."""

    def __init__(self, depth: int | None):
        self._depth = depth

    def propose(self, context, clock) -> DraftTree:
        with clock.stage("draft"):
            marginals = context.draft(1)
        with clock.stage("build"):
            return build_chain(marginals, context.roots, depth=self._depth or marginals.tokens.shape[1])


def build_chain(marginals: Marginals, roots: torch.Tensor, *, depth: int) -> DraftTree:
    """Return the chain roots [R] -> best token of row 0 -> ... -> best token of row depth - 1."""
    requests, rows, _ = marginals.tokens.shape
    if not 1 <= depth <= rows:
        raise ValueError(f"depth: {depth} is not allowed (allowed: 1 to {rows}, the drafter's rows); lower depth")
    depths = torch.arange(depth + 1, device=roots.device).expand(requests, depth + 1)
    return DraftTree(
        tokens=torch.cat([roots[:, None], marginals.tokens[:, :depth, 0]], dim=1),
        parents=depths - 1,
        depths=depths,
        log_probs=torch.nn.functional.pad(marginals.log_probs[:, :depth, 0], (1, 0)),
        num_nodes=torch.full_like(roots, depth + 1),
        is_chain=True,
    )


def make_proposer(config: DecodeConfig, models) -> DFlashProposer:
    """Return the proposer of method dflash; needs models.drafter."""
    if models.drafter is None:
        raise ValueError("drafter: None is not allowed for method dflash (allowed: loaded weights); load the drafter")
    return DFlashProposer(config.depth)
