"""Tree attention in Triton: keys cut into splits, each with its own softmax, then one launch that joins them.

    out_i = sum_j softmax_j(q_i . k_j / sqrt(D)) v_j        j < committed, or an own row that row i sees

Grid (split, block of query rows, key head). The query rows of a key head are its H / KV heads of every node, node by
node, so a block shares each tile of keys. How many keys are real is read from the device: the launch is the same for
every context. Products of bf16 rows with float32 sums; the softmax is float32. Masks are the bytes of `own`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels import pdl_triton
from tfm_kernels.dot_triton import dot
from tfm_kernels.pdl_triton import follow
from tfm_kernels.tree_attention import TreeMask

PROGRAMS = 256  # aimed at: two a multiprocessor of an H200
MAX_SPLITS = 32
NARROWEST = 128  # bytes of a row of shared memory: Triton 3.6 reads past narrower ones (NOTES.md)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def fold_tile(
    query, key_at, value_at, start, position, is_key, is_row, node, ahead, committed, own_p, N, scale, best, weight_sum,
    acc, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return maximum, sum of weights [BM] and weighted values [BM, D] of an online softmax with one more tile of keys.

    `key_at` and `value_at` [BN, D] are addresses of the keys at `position` [BN], the first at `start`. A row is tree
    row `node` and stands `ahead` behind the first own key, of which it sees what its row of `own_p` says. The maximum
    is of scores in powers of two.
    """
    keys = tl.load(key_at, mask=is_key[:, None], other=0.0)
    seen = (position < committed)[None, :] & is_row[:, None]
    if WINDOW > 0:
        seen = seen & (committed + ahead[:, None] - position[None, :] < WINDOW)
    if start + position.shape[0] > committed:
        behind = position - committed
        is_own = (behind >= 0) & is_key
        own = tl.load(own_p + node[:, None] * N + behind[None, :], mask=is_own[None, :] & is_row[:, None], other=0)
        seen = seen | (own != 0)
    seen = seen & is_key[None, :]
    scores = dot(query, tl.trans(keys), tl.zeros((query.shape[0], keys.shape[0]), tl.float32)) * (scale * _LOG2_E)
    scores = tl.where(seen, scores, -1.0e30)
    top = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.where(seen, tl.exp2(scores - top[:, None]), 0.0)
    shrink = tl.exp2(best - top)
    weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
    values = tl.load(value_at, mask=is_key[:, None], other=0.0)
    return top, weight_sum, dot(weights.to(values.dtype), values, acc * shrink[:, None])


@triton.jit(do_not_specialize=["N", "ROWS", "SPLITS"])
def _split_kernel(
    query_p, keys_p, values_p, committed_p, own_p, depths_p, part_p, stats_p, N, ROWS, SPLITS, memory_stride, scale,
    G: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    split, block, kv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    committed = tl.load(committed_p)
    row = block * BM + tl.arange(0, BM)
    node, lane = row // G, tl.arange(0, D)
    is_row = row < ROWS
    head = kv * G + row % G
    query = tl.load(
        query_p + (head.to(tl.int64) * N + node)[:, None] * D + lane[None, :], mask=is_row[:, None], other=0.0
    )
    depth = tl.load(depths_p + node, mask=is_row, other=0)
    first = tl.zeros_like(committed)
    if WINDOW > 0:
        # the shallowest row sees the most
        first = tl.maximum(committed - WINDOW + 1, 0)
    total = committed + N
    chunk = tl.cdiv(tl.cdiv(total - first, SPLITS), BN) * BN
    low = first + split * chunk
    high = tl.minimum(low + chunk, total)
    best = tl.full((BM,), -1.0e30, tl.float32)
    weight_sum = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    memory = kv.to(tl.int64) * memory_stride
    for start in range(low, high, BN):
        key_row = start + tl.arange(0, BN)
        is_key = key_row < high
        at = memory + key_row[:, None].to(tl.int64) * D + lane[None, :]
        best, weight_sum, acc = fold_tile(
            query, keys_p + at, values_p + at, start, key_row, is_key, is_row, node, depth, committed, own_p, N, scale,
            best, weight_sum, acc, WINDOW,
        )  # fmt: skip
    place = (split * tl.num_programs(2) + kv).to(tl.int64) * ROWS + row
    tl.store(part_p + place[:, None] * D + lane[None, :], acc, mask=is_row[:, None])
    tl.store(stats_p + place * 2, best, mask=is_row)
    tl.store(stats_p + place * 2 + 1, weight_sum, mask=is_row)


@triton.jit
def _join_kernel(
    part_p, stats_p, gate_p, out_p, ROWS, gate_row, gate_head, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # grid (nodes, heads)
    follow(PDL)
    node, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv, lane, split = head // G, tl.arange(0, D), tl.arange(0, SPLITS_BLOCK)
    is_split = split < SPLITS
    place = (split * (H // G) + kv).to(tl.int64) * ROWS + node * G + head % G
    best = tl.load(stats_p + place * 2, mask=is_split, other=-1.0e30)
    weight_sum = tl.load(stats_p + place * 2 + 1, mask=is_split, other=0.0)
    shrink = tl.exp2(best - tl.max(best, axis=0))
    parts = tl.load(part_p + place[:, None] * D + lane[None, :], mask=is_split[:, None], other=0.0)
    out = tl.sum(parts * shrink[:, None], axis=0) / tl.sum(weight_sum * shrink, axis=0)
    out = out.to(out_p.dtype.element_ty)
    if HAS_GATE:
        gate = tl.load(gate_p + node * gate_row + head * gate_head + lane).to(tl.float32)
        gate = (1.0 / (1.0 + tl.exp(-gate))).to(out.dtype).to(tl.float32)
        out = (out.to(tl.float32) * gate).to(out.dtype)
    tl.store(out_p + (node * H + head) * D + lane, out)


@dataclass(frozen=True)
class PreparedMask:
    """A TreeMask as the kernel reads it."""

    committed: Tensor  # [1] int64
    own: Tensor  # [N, N] uint8, contiguous
    depths: Tensor  # [N] int64
    window: int  # 0: none


def prepare_mask(mask: TreeMask, capacity: int) -> PreparedMask:
    """Return what `attend` reads, once a pass; `capacity` does not matter to this form."""
    del capacity
    own = mask.own.contiguous().view(torch.uint8)
    return PreparedMask(mask.committed, own, mask.depths.contiguous(), mask.window or 0)


@dataclass(frozen=True)
class Tiling:
    """How a launch is cut: query rows and keys of a tile, splits of the keys, warps, stages of loads in flight."""

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def choose_tiling(rows: int, kv_heads: int, head_dim: int) -> Tiling:
    """Return the tiling for `rows` query rows a key head."""
    block = min(max(16, triton.next_power_of_2(rows)), 128 if head_dim <= 128 else 64)
    blocks = triton.cdiv(rows, block)
    splits = min(max(PROGRAMS // (blocks * kv_heads), 1), MAX_SPLITS)
    return Tiling(block, 64 if block <= 32 else 32, splits, 4 if block <= 64 else 8, 2)


def attend(
    query: Tensor,  # [H, N, D]
    keys: Tensor,  # [KV, capacity, D]
    values: Tensor,  # [KV, capacity, D]
    mask: PreparedMask,
    gate: Tensor | None = None,  # [N, H, D], last dimension contiguous
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return [N, H * D] as tfm_kernels.tree_attention.attend. Raises ValueError for heads that a GPU cannot take."""
    (heads, nodes, dim), kv_heads = query.shape, keys.shape[0]
    if query.is_cuda and query.dtype != torch.float32 and dim * query.element_size() < NARROWEST:
        least = NARROWEST // query.element_size()
        raise ValueError(
            f"head_dim: {dim} is not allowed for {query.dtype} on a GPU (allowed: {least} or more); use attention torch"
        )
    group = heads // kv_heads
    rows, query = group * nodes, query.contiguous()
    cut = tiling or choose_tiling(rows, kv_heads, dim)
    parts = torch.empty(cut.splits, kv_heads, rows, dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(cut.splits, kv_heads, rows, 2, dtype=torch.float32, device=query.device)
    _split_kernel[(cut.splits, triton.cdiv(rows, cut.rows), kv_heads)](
        query, keys, values, mask.committed, mask.own, mask.depths, parts, stats, nodes, rows, cut.splits,
        keys.stride(0), dim**-0.5, G=group, D=dim, WINDOW=mask.window, BM=cut.rows, BN=cut.keys, num_warps=cut.warps,
        num_stages=cut.stages, **pdl_triton.options(query.device),
    )  # fmt: skip
    out = query.new_empty(nodes, heads * dim)
    strides = (gate.stride(0), gate.stride(1)) if gate is not None else (0, 0)
    _join_kernel[(nodes, heads)](
        parts, stats, query if gate is None else gate, out, rows, *strides, G=group, H=heads, D=dim, SPLITS=cut.splits,
        SPLITS_BLOCK=triton.next_power_of_2(cut.splits), HAS_GATE=gate is not None, num_warps=4,
        **pdl_triton.options(query.device),
    )  # fmt: skip
    return out
