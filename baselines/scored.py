"""What the builders with a conditional head share: the check of a depth, the selection of prefixes, the proposer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tfm.builder import TreeProposer, without_repeats
from tfm.marginals import Marginals
from tfm.tree import DraftTree


def checked_marginals(marginals: Marginals, depth: int) -> Marginals:
    """Return marginals without repeats; raises ValueError for a depth without drafter rows."""
    rows = marginals.tokens.shape[1]
    if not 1 <= depth <= rows:
        raise ValueError(f"depth: {depth} is not allowed (allowed: 1 to {rows}, the drafter's rows); lower depth")
    return without_repeats(marginals)


def best_prefixes(
    scores: Tensor,  # [R, N] float32, the root's first; -inf: an absent node
    tokens: Tensor,  # [R, N] int64, as are parents and depths
    parents: Tensor,
    depths: Tensor,
    log_probs: Tensor,  # [R, N] float32, given the parent
    *,
    budget: int,
) -> DraftTree:
    """Return the `budget` nodes below the root with the best scores, best first, ties by the lowest number.

    Closed under prefixes where parents stand before their children and no child scores above its parent, nor any node
    above the root. Fewer nodes give a smaller tree, padded.
    """
    best, nodes = scores.sort(dim=-1, descending=True, stable=True)
    best, nodes = best[:, : budget + 1], nodes[:, : budget + 1]
    places = torch.zeros_like(parents)
    places.scatter_(1, nodes, torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes))
    is_drafted = best > -torch.inf
    is_drafted[:, 0] = False

    def column(values: Tensor, empty, root=None) -> Tensor:
        values = torch.where(is_drafted, values.gather(1, nodes), empty)
        if root is not None:
            values[:, 0] = root
        return F.pad(values, (0, budget + 1 - values.shape[1]), value=empty)

    return DraftTree(
        tokens=column(tokens, 0, root=tokens[:, 0]),
        parents=column(places.gather(1, parents.clamp(min=0)), -1),
        depths=column(depths, 0),
        log_probs=column(log_probs, 0.0),
        num_nodes=is_drafted.sum(1) + 1,
    )


class ScoredProposer(TreeProposer):
    """Builds by `build`, a function of (marginals, scorer, roots) that takes limits and a clock by name."""

    build: Callable[..., DraftTree]

    def _build(self, marginals: Marginals, context, clock) -> DraftTree:
        config = self._config
        return self.build(
            marginals,
            self._scorer,
            context.roots,
            target_hidden=context.target_hidden,
            budget=config.budget,
            children=config.children,
            depth=config.depth or marginals.tokens.shape[1],
            clock=clock,
            **self._options(),
        )

    def _options(self) -> dict:
        """Return what `build` takes beyond that."""
        return {}
