"""Draw one token a row in one pass over the logits: argmax of logits / T + Gumbel noise, and the log-sum of logits / T.

The noise is that of tfm/sampling.py, made from the same hash where it is used: no noise is ever stored. Grid (chunk of
the vocabulary, row), then one program a row joins the chunks. A NaN wins its row, so that it is seen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels import pdl_triton
from tfm_kernels.pdl_triton import follow

CHUNK, BLOCK = 8192, 1024
# splitmix64; as signed words
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))
_LARGEST_BELOW_ONE = tl.constexpr(1 - 2**-24)


@triton.jit
def _shift_right(value, BITS: tl.constexpr):
    # int64 shifts copy the sign bit: mask the copies off
    return (value >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(value):
    value = (value ^ _shift_right(value, 30)) * _MIX_1
    value = (value ^ _shift_right(value, 27)) * _MIX_2
    return value ^ _shift_right(value, 31)


@triton.jit
def _log1p(z):
    # log(u) z / (u - 1) with u = 1 + z rounded: the rounding of u cancels
    u = 1.0 + z
    return tl.where(u == 1.0, z, tl.log(u) * z / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit
def _gumbel(key, token):
    bits = _shift_right(_mix(key + (token + 1).to(tl.int64) * _GOLDEN), 32)
    below_one = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _LARGEST_BELOW_ONE)
    return -tl.log(-_log1p(-below_one))


@triton.jit
def _chunk_kernel(
    logits_p, keys_p, value_p, token_p, top_p, sum_p, VOCAB, temperature, CHUNKS, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NOISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key = tl.load(keys_p + row)
    best, best_token = -float("inf"), chunk * CHUNK
    top, total = -1.0e30, 0.0
    for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < VOCAB
        scores = tl.load(logits_p + row * VOCAB + token, mask=inside, other=-float("inf")).to(tl.float32)
        if HAS_NOISE:
            scores = tl.div_rn(scores, temperature)
            peak = tl.maximum(top, tl.max(tl.where(inside, scores, -1.0e30), axis=0))
            total = total * tl.exp(top - peak) + tl.sum(tl.where(inside, tl.exp(scores - peak), 0.0), axis=0)
            top = peak
            scores = scores + _gumbel(key, token)
        scores = tl.where(scores == scores, scores, float("inf"))
        scores = tl.where(inside, scores, -float("inf"))
        here, place = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
        best_token = tl.where(here > best, start + place, best_token)
        best = tl.maximum(best, here)
    at = row * CHUNKS + chunk
    tl.store(value_p + at, best)
    tl.store(token_p + at, best_token.to(tl.int64))
    tl.store(top_p + at, top)
    tl.store(sum_p + at, total)


@triton.jit
def _row_kernel(
    logits_p,
    value_p,
    token_p,
    top_p,
    sum_p,
    drawn_p,
    logit_p,
    log_sum_p,
    VOCAB,
    CHUNKS,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = chunk < CHUNKS
    at = row * CHUNKS + chunk
    value = tl.load(value_p + at, mask=inside, other=-float("inf"))
    _, place = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(token_p + row * CHUNKS + place)
    tl.store(drawn_p + row, token)
    tl.store(logit_p + row, tl.load(logits_p + row * VOCAB + token).to(tl.float32))
    top = tl.load(top_p + at, mask=inside, other=-1.0e30)
    total = tl.load(sum_p + at, mask=inside, other=0.0)
    peak = tl.max(top, axis=0)
    tl.store(log_sum_p + row, peak + tl.log(tl.sum(total * tl.exp(top - peak), axis=0)))


def draw(logits: Tensor, keys: Tensor, temperature: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return token [N] int64, its logit [N] and the log-sum of logits / T [N] of each row of logits [N, vocab].

    `keys` [N] int64 are the noise keys of the rows' positions; temperature None draws greedily, then the log-sums mean
    nothing. Ties go to the lowest id.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    value, top, total = (torch.empty(rows, chunks, dtype=torch.float32, device=logits.device) for _ in range(3))
    token = torch.empty(rows, chunks, dtype=torch.int64, device=logits.device)
    _chunk_kernel[(chunks, rows)](
        logits, keys, value, token, top, total, vocab, temperature or 1.0, chunks, CHUNK=CHUNK, BLOCK=BLOCK,
        HAS_NOISE=temperature is not None, num_warps=4, **pdl_triton.options(logits.device),
    )  # fmt: skip
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logit, log_sum = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _row_kernel[(rows,)](
        logits, value, token, top, total, drawn, logit, log_sum, vocab, chunks, BLOCK=triton.next_power_of_2(chunks),
        num_warps=1, **pdl_triton.options(logits.device),
    )  # fmt: skip
    return drawn, logit, log_sum
