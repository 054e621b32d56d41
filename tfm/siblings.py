"""Siblings drawn without replacement (DySpec, arXiv 2410.11744): children are samples, not the best candidates.

The k-th child of a node is drawn from the node's distribution q over all K candidates, the k - 1 before it left out.
Whether it is drawn at all is decided before: by the probability that its slot is reached, P(path) times the mass that
is left. It never depends on the token that comes out, or the verified law would not be the target's.

A slot never has a higher value than the sibling before it. The whole order of a node is therefore drawn when the node
is expanded, as the order of log q plus Gumbel noise, and the frontier decides how much of it becomes nodes.
"""

import torch
from torch import Tensor

from tfm.sampling import child_keys, root_keys, token_gumbel
from tfm.tree import DraftLaw

_STREAM = 2  # 1 is traversal's


class SampledSiblings:
    """The draws of one tree batch. Noise is addressed by seed, request, root position and path: R does not matter."""

    def __init__(
        self,
        candidates: Tensor,  # [R, D, K] int64
        *,
        seed: int,
        indices: Tensor,  # [R] int64, the request's index in its dataset
        root_positions: Tensor,  # [R] int64, absolute position of the root
        slots: int,
    ):
        self._candidates = candidates
        requests, _, count = candidates.shape
        self._request = torch.arange(requests, device=candidates.device)[:, None]
        self._roots = root_keys(seed, indices, root_positions, _STREAM)
        self._keys = candidates.new_zeros(requests, slots)
        self._tokens = candidates.new_full((requests, slots, count), -1)
        self._log_probs = torch.full(self._tokens.shape, -torch.inf, device=candidates.device)

    def draw(self, slots: Tensor, parents: Tensor, tokens: Tensor, rows: Tensor, log_probs: Tensor) -> tuple:
        """Return reach, local and rank [R, W, K] of the candidates of each node [R, W] in the order of their draws.

        reach: log-probability that the draw is needed, given the node; local: log q of the candidate that is drawn;
        rank: which candidate it is. `rows` are the nodes' rows of the candidates.
        """
        keys = torch.where(slots == 0, self._roots[:, None], child_keys(self._keys.gather(1, parents), tokens))
        self._keys.scatter_(1, slots, keys)
        candidates = self._candidates[self._request, rows].masked_fill(log_probs == -torch.inf, -1)
        self._tokens[self._request, slots] = candidates
        self._log_probs[self._request, slots] = log_probs
        # stable: candidates without mass stay behind those with it, whatever their noise
        ranks = (log_probs + token_gumbel(keys, candidates)).sort(dim=-1, descending=True, stable=True).indices
        local = log_probs.gather(-1, ranks)
        # summed from the end, so that what is left never turns negative and never grows
        left = local.exp().flip(-1).cumsum(-1).flip(-1)
        return (left / left[..., :1]).log(), local, ranks

    def law(self, width: int) -> DraftLaw:
        """Return what the children of the first `width` slots were drawn from; no candidates where none were asked."""
        return DraftLaw(self._tokens[:, :width], self._log_probs[:, :width])
