"""The head's chain: one path that follows the head's first choice at each depth, corrected token by token.

What the heads of Domino and DSpark draft in their own decoders.
"""

import torch
from torch import Tensor

from baselines.scored import checked_marginals
from tfm.builder import ConditionalScorer, TreeProposer, make_scorer
from tfm.clock import OFF, Clock
from tfm.config import DecodeConfig
from tfm.marginals import Marginals
from tfm.tree import DraftTree


def correct_chain(
    marginals: Marginals,
    scorer: ConditionalScorer,
    roots: Tensor,  # [R] int64
    *,
    target_hidden: Tensor,  # [R, d]
    depth: int,
    clock: Clock = OFF,
) -> Marginals:
    """Return marginals of the first `depth` rows given the chain of first choices above, best first, in `depth` calls.

    log_probs are normalised over the candidates; ties go to the lowest index of the given ones. Row 0 of each depth is
    the chain. Raises ValueError for a depth without drafter rows.
    """
    marginals = checked_marginals(marginals, depth)
    with clock.stage("weaver_prefix"):
        scorer.begin(marginals, target_hidden, depth)
    with clock.stage("grow"):
        return _corrected(marginals, scorer, roots, depth)


def _corrected(marginals: Marginals, scorer: ConditionalScorer, roots: Tensor, depth: int) -> Marginals:
    token, laws, chosen = roots[:, None], [], []
    for level in range(depth):
        places = torch.full_like(token, level)
        log_probs = scorer.expand(places, places - 1, token, places)[:, 0]
        law, order = log_probs.sort(dim=-1, descending=True, stable=True)
        chosen.append(marginals.tokens[:, level].gather(1, order))
        laws.append(law)
        token = chosen[-1][:, :1]
    return Marginals(torch.stack(chosen, dim=1), torch.stack(laws, dim=1), marginals.hidden[:, :depth])


def chain_of(corrected: Marginals, roots: Tensor) -> DraftTree:
    """Return the chain of the first choices of corrected marginals."""
    requests, depth, _ = corrected.tokens.shape
    depths = torch.arange(depth + 1, device=roots.device).expand(requests, depth + 1)
    return DraftTree(
        tokens=torch.cat([roots[:, None], corrected.tokens[:, :, 0]], dim=1),
        parents=depths - 1,
        depths=depths,
        log_probs=torch.nn.functional.pad(corrected.log_probs[:, :, 0], (1, 0)),
        num_nodes=torch.full_like(roots, depth + 1),
        is_chain=True,
    )


class HeadChainProposer(TreeProposer):
    """Drafts the chain of `depth` tokens, all the drafter's rows when depth is None."""

    def _build(self, marginals: Marginals, context, clock) -> DraftTree:
        return chain_of(self._correct(marginals, context, clock), context.roots)

    def _correct(self, marginals: Marginals, context, clock) -> Marginals:
        return correct_chain(
            marginals,
            self._scorer,
            context.roots,
            target_hidden=context.target_hidden,
            depth=self._config.depth or marginals.tokens.shape[1],
            clock=clock,
        )


def make_proposer(config: DecodeConfig, models) -> HeadChainProposer:
    """Return the proposer of method headchain; needs models.drafter and the config's head."""
    return HeadChainProposer(config, make_scorer(config, models))
