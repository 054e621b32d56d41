"""The per-depth distributions of one drafter pass: what every proposer starts from."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Marginals:
    """K candidates for each of D depths. Row d (0-based) is the marginal of the token at tree depth d + 1."""

    tokens: Tensor  # [R, D, K] int64, best first; ties go to the lowest token id
    log_probs: Tensor  # [R, D, K] float32, normalised over the whole vocabulary at temperature 1
    hidden: Tensor  # [R, D, hidden], the drafter's rows after its final norm: what the weaver conditions on

    @staticmethod
    def from_logits(logits: Tensor, hidden: Tensor, candidates: int) -> "Marginals":
        """Return the top `candidates` of `logits` [R, D, vocab] a depth; `candidates` is clamped to the vocabulary.

        The temperature is 1 whatever the request's temperature: the tree does not depend on it.
        """
        log_probs = logits.float().log_softmax(-1)
        # a stable sort keeps the lowest id first among equals; topk promises no order there
        kept = min(candidates, logits.shape[-1])
        if kept == 1:
            tokens = log_probs.argmax(-1, keepdim=True)
            best = log_probs.gather(-1, tokens)
        else:
            best, tokens = torch.sort(log_probs, dim=-1, descending=True, stable=True)
        return Marginals(tokens[..., :kept].contiguous(), best[..., :kept].contiguous(), hidden)
