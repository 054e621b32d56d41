"""Marginals with a shorter search for the candidates: the same tokens and log-probabilities as Marginals.from_logits.

The K best of a row lie in the K chunks with the best maxima (of equal maxima the first chunks): an element outside has
K maxima before it. So only K chunks are searched with the full key of score and id.
"""

import math

import torch
from torch import Tensor

from tfm.marginals import Marginals, top_tokens

SIZES = (8, 64)  # of a chunk, the least and the largest


def chunk_of(vocab: int, count: int) -> int:
    """Return the power of two that makes both searches, of vocab / chunk maxima and of count * chunk scores, small."""
    least, largest = SIZES
    return min(max(2 ** round(math.log2(max(vocab / count, 1.0)) / 2), least), largest)


def marginals_from_logits(logits: Tensor, hidden: Tensor, candidates: int, *, chunk: int | None = None) -> Marginals:
    """Return what Marginals.from_logits returns, for logits [R, D, vocab] and hidden [R, D, hidden]."""
    log_probs = logits.float().log_softmax(-1)
    count, vocab = min(candidates, logits.shape[-1]), logits.shape[-1]
    chunk = chunk or chunk_of(vocab, count)
    chunks = -(-vocab // chunk)
    if count == 1 or chunks <= count:
        tokens = top_tokens(log_probs, count)
        return Marginals(tokens, log_probs.gather(-1, tokens), hidden)
    padded = torch.nn.functional.pad(log_probs, (0, chunks * chunk - vocab), value=-torch.inf)
    rows = padded.unflatten(-1, (chunks, chunk))
    # ascending, so that equal scores keep the order of their ids
    best = top_tokens(rows.amax(-1), count).sort(-1).values
    picked = rows.gather(-2, best[..., None].expand(*best.shape, chunk)).flatten(-2)
    places = top_tokens(picked, count)
    tokens = best.gather(-1, places // chunk) * chunk + places % chunk
    return Marginals(tokens, log_probs.gather(-1, tokens), hidden)
