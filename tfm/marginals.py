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
        tokens = top_tokens(log_probs, min(candidates, logits.shape[-1]))
        return Marginals(tokens, log_probs.gather(-1, tokens), hidden)


def top_tokens(scores: Tensor, count: int) -> Tensor:
    """Return the ids [..., count] int64 of the highest `scores` [..., vocab] float32, best first.

    Equal scores come in the order of their ids, also at the cut, which torch.topk does not promise: the selection runs
    on integers that hold the score's order above and the id below.
    """
    assert scores.dtype == torch.float32, f"top_tokens: {scores.dtype}, and the order is read from float32 bits"
    if count == 1:
        return scores.max(-1, keepdim=True).indices
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    vocab = scores.shape[-1]
    key = (ordered.long() << 32) | torch.arange(vocab - 1, -1, -1, device=scores.device)
    return vocab - 1 - (key.topk(count, dim=-1).values & 0xFFFFFFFF)
