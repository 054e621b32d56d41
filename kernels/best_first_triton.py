"""DDTree's heap on the device: one program pops the best prefix `budget` times, one warp up to 127 nodes.

The frontier is a vector of budget + 1 entries: a popped entry's next sibling takes its place, its first child the next
free one. The order is that of baselines/ddtree.py: float64 score, then ranks, which are packed into three words of five
levels (a rank r as r + 1, twelve bits), so that a prefix stands before what extends it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels import pdl_triton
from tfm_kernels.pdl_triton import follow

LEVELS = 15
MAX_BUDGET = 512
_BITS = tl.constexpr(12)
_PER_WORD = tl.constexpr(5)
_LAST = tl.constexpr(2**62)


@triton.jit
def _place(level, WORD: tl.constexpr):
    # 1 at the level's place in word WORD, 0 where the level belongs to another word
    within = level - WORD * _PER_WORD
    shift = (_PER_WORD - 1 - within) * _BITS
    one = tl.full((), 1, tl.int64)
    return tl.where((within >= 0) & (within < _PER_WORD), one << tl.maximum(shift, 0).to(tl.int64), 0)


@triton.jit
def _pick(is_best, values):
    return tl.sum(tl.where(is_best, values, 0), axis=0)


@triton.jit
def _heap_kernel(
    log_probs_p, tokens_p, token_p, parent_p, depth_p, local_p, count_p, budget, K, D, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    entry = tl.arange(0, BLOCK)
    is_first = entry == 0
    score = tl.where(is_first, tl.load(log_probs_p).to(tl.float64), -float("inf"))
    base = tl.zeros((BLOCK,), tl.float64)
    level = tl.zeros((BLOCK,), tl.int64)  # depth - 1
    rank, parent = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    word0 = tl.where(is_first, _place(level, 0), 0)
    word1, word2 = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    count = 1
    for number in range(1, budget + 1):
        top = tl.max(score, axis=0)
        # nothing is left: no entry is best, and what is picked is not used
        is_best = (score == top) & (score > -float("inf"))
        is_best = is_best & (word0 == tl.min(tl.where(is_best, word0, _LAST), axis=0))
        is_best = is_best & (word1 == tl.min(tl.where(is_best, word1, _LAST), axis=0))
        is_best = is_best & (word2 == tl.min(tl.where(is_best, word2, _LAST), axis=0))
        is_node = tl.max(is_best.to(tl.int32), axis=0) > 0
        at, up, place = _pick(is_best, level), _pick(is_best, parent), _pick(is_best, rank)
        under = tl.sum(tl.where(is_best, base, 0.0), axis=0)
        words0, words1, words2 = _pick(is_best, word0), _pick(is_best, word1), _pick(is_best, word2)
        tl.store(token_p + number, tl.load(tokens_p + at * K + place), mask=is_node)
        tl.store(local_p + number, tl.load(log_probs_p + at * K + place), mask=is_node)
        tl.store(parent_p + number, up, mask=is_node)
        tl.store(depth_p + number, at + 1, mask=is_node)
        count += is_node.to(tl.int32)
        # the next sibling, where the popped entry stood
        has_next = place + 1 < K
        following = tl.load(log_probs_p + at * K + place + 1, mask=has_next, other=-float("inf")).to(tl.float64)
        score = tl.where(is_best, under + following, score)
        rank = tl.where(is_best, place + 1, rank)
        word0 = tl.where(is_best, words0 + _place(at, 0), word0)
        word1 = tl.where(is_best, words1 + _place(at, 1), word1)
        word2 = tl.where(is_best, words2 + _place(at, 2), word2)
        # the first child, behind all entries so far
        is_child = (entry == number) & is_node & (at + 1 < D)
        first = tl.load(log_probs_p + (at + 1) * K, mask=at + 1 < D, other=-float("inf")).to(tl.float64)
        score = tl.where(is_child, top + first, score)
        base = tl.where(is_child, top, base)
        level = tl.where(is_child, at + 1, level)
        rank = tl.where(is_child, 0, rank)
        parent = tl.where(is_child, number, parent)
        word0 = tl.where(is_child, words0 + _place(at + 1, 0), word0)
        word1 = tl.where(is_child, words1 + _place(at + 1, 1), word1)
        word2 = tl.where(is_child, words2 + _place(at + 1, 2), word2)
    tl.store(count_p, count.to(tl.int64))


def best_prefixes(
    tokens: Tensor,  # [D, K] int64, distinct in a row
    log_probs: Tensor,  # [D, K] float32, best first
    root: Tensor,  # [1] int64
    *,
    budget: int,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, parents, depths, log-probs [budget + 1] and the number of nodes [1], the root first.

    Nodes that do not exist have token 0, parent -1, depth 0, log-prob 0. Raises ValueError beyond the packed ranks.
    """
    if not 1 <= budget <= MAX_BUDGET or not 1 <= depth <= LEVELS:
        raise ValueError(
            f"budget, depth: {budget}, {depth} are not allowed (allowed: 1 to {MAX_BUDGET}, 1 to {LEVELS}); use the "
            "torch form"
        )
    device, size = tokens.device, budget + 1
    token, depths = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
    parents, local = torch.full_like(token, -1), torch.zeros(size, dtype=torch.float32, device=device)
    count = torch.empty(1, dtype=torch.int64, device=device)
    token[:1].copy_(root)
    _heap_kernel[(1,)](
        log_probs.contiguous(), tokens.contiguous(), token, parents, depths, local, count, budget, tokens.shape[1],
        depth, BLOCK=triton.next_power_of_2(size), num_warps=1 if size <= 128 else 4,
        **pdl_triton.options(device),
    )  # fmt: skip
    return token, parents, depths, local, count
