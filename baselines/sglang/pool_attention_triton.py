"""Pool attention in Triton: tree_attention_triton's two launches with keys read through a request's row of places.

    out_i = sum_j softmax_j(scale q_i . k_slot(j)) v_slot(j)        j < committed, or an own row that row i sees

Grid (split, block of query rows, key head). A program reads the slots of a tile of positions, then their keys and
values; length, request and slots are data on the device, so one captured launch serves every context. Products of bf16
rows with float32 sums; the softmax is float32. The fold of a tile and the launch that joins the splits are
tree_attention_triton's. Times: results/published/engines-h200/NOTES.md.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from baselines.sglang.pool_attention import PoolRows
from tfm_kernels import tree_attention_triton
from tfm_kernels.tree_attention_triton import Tiling, choose_tiling, fold_tile


@triton.jit(do_not_specialize=["N", "ROWS", "SPLITS"])
def _split_kernel(
    query_p, keys_p, values_p, places_p, request_p, committed_p, own_p, part_p, stats_p, N, ROWS, SPLITS, query_row,
    query_head, places_row, key_slot, key_head, value_slot, value_head, scale, G: tl.constexpr, D: tl.constexpr,
    WINDOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    split, block, kv = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    committed = tl.load(committed_p).to(tl.int64)
    places = places_p + tl.load(request_p).to(tl.int64) * places_row
    row = block * BM + tl.arange(0, BM)
    node, lane = row // G, tl.arange(0, D)
    is_row = row < ROWS
    head = kv * G + row % G
    query_at = node.to(tl.int64) * query_row + head * query_head
    query = tl.load(query_p + query_at[:, None] + lane[None, :], mask=is_row[:, None], other=0.0)
    first = tl.zeros_like(committed)
    if WINDOW > 0:
        # the first row sees the most
        first = tl.maximum(committed - WINDOW + 1, 0)
    total = committed + N
    chunk = tl.cdiv(tl.cdiv(total - first, SPLITS), BN) * BN
    low = first + split * chunk
    high = tl.minimum(low + chunk, total)
    best = tl.full((BM,), -1.0e30, tl.float32)
    weight_sum = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    keys_p += kv * key_head
    values_p += kv * value_head
    for start in range(low, high, BN):
        position = start + tl.arange(0, BN)
        is_key = position < high
        slot = tl.load(places + position, mask=is_key, other=0).to(tl.int64)
        key_at = keys_p + slot[:, None] * key_slot + lane[None, :]
        value_at = values_p + slot[:, None] * value_slot + lane[None, :]
        best, weight_sum, acc = fold_tile(
            query, key_at, value_at, start, position, is_key, is_row, node, node, committed, own_p, N, scale, best,
            weight_sum, acc, WINDOW,
        )  # fmt: skip
    place = (split * tl.num_programs(2) + kv).to(tl.int64) * ROWS + row
    tl.store(part_p + place[:, None] * D + lane[None, :], acc, mask=is_row[:, None])
    tl.store(stats_p + place * 2, best, mask=is_row)
    tl.store(stats_p + place * 2 + 1, weight_sum, mask=is_row)


def choose(rows: int, kv_heads: int, head_dim: int) -> Tiling:
    """Return the tree attention's tiling with a stage more, in which the slots of a tile are under way."""
    return replace(choose_tiling(rows, kv_heads, head_dim), stages=3)


def attend(
    query: Tensor,  # [N, H, D], last dimension contiguous
    keys: Tensor,  # [slots, KV, D], last dimension contiguous
    values: Tensor,  # [slots, KV, D], last dimension contiguous
    rows: PoolRows,
    scale: float,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return [N, H * D] as pool_attention.attend; nothing waits, and addresses are all that a graph has to keep."""
    (nodes, heads, dim), kv_heads = query.shape, keys.shape[1]
    group = heads // kv_heads
    count, own = group * nodes, rows.own.view(torch.uint8)
    cut = tiling or choose(count, kv_heads, dim)
    parts = torch.empty(cut.splits, kv_heads, count, dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(cut.splits, kv_heads, count, 2, dtype=torch.float32, device=query.device)
    _split_kernel[(cut.splits, triton.cdiv(count, cut.rows), kv_heads)](
        query, keys, values, rows.places, rows.request, rows.committed, own, parts, stats, nodes, count, cut.splits,
        query.stride(0), query.stride(1), rows.places.stride(0), keys.stride(0), keys.stride(1), values.stride(0),
        values.stride(1), scale, G=group, D=dim, WINDOW=rows.window or 0, BM=cut.rows, BN=cut.keys,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    out = query.new_empty(nodes, heads * dim)
    tree_attention_triton._join_kernel[(nodes, heads)](
        parts, stats, query, out, count, 0, 0, G=group, H=heads, D=dim, SPLITS=cut.splits,
        SPLITS_BLOCK=triton.next_power_of_2(cut.splits), HAS_GATE=False, PDL=False, num_warps=4,
    )  # fmt: skip
    return out
