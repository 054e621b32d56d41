"""What stands between a weaver's products when it scores w nodes: embedding and norm, path attention, candidate scores.

A node attends to the prefix, its ancestors and itself. Keys and values of the prefix and of the expanded nodes lie in
one table; which rows a node's ancestors have is a list a slot, extended by the slot itself when it is expanded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels import pdl_triton
from tfm_kernels.pdl_triton import follow


@triton.jit
def _embed_norm_kernel(
    table_p, positions_p, token_p, depth_p, weight_p, bias_p, row_p, normed_p, WIDTH, last, eps, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # grid (nodes)
    follow(PDL)
    node, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = lane < WIDTH
    depth = tl.minimum(tl.load(depth_p + node), last)
    row = tl.load(table_p + tl.load(token_p + node) * WIDTH + lane, mask=inside, other=0.0)
    row = (row.to(tl.float32) + tl.load(positions_p + depth * WIDTH + lane, mask=inside, other=0.0).to(tl.float32)).to(
        row.dtype
    )
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    weight = tl.load(weight_p + lane, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_p + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(row_p + node * WIDTH + lane, row, mask=inside)
    tl.store(normed_p + node * WIDTH + lane, (wide * scale * weight + bias).to(row.dtype), mask=inside)


def embed_norm(
    table: Tensor,  # [vocab, width]
    positions: Tensor,  # [rows, width]
    tokens: Tensor,  # [w] int64
    depths: Tensor,  # [w] int64; beyond the positions' last row that row is taken
    weight: Tensor,  # [width]
    bias: Tensor,  # [width]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the nodes' rows [w, width] and their norms."""
    nodes, width = tokens.shape[0], table.shape[1]
    row, normed = table.new_empty(nodes, width), table.new_empty(nodes, width)
    _embed_norm_kernel[(nodes,)](
        table, positions, tokens, depths, weight, bias, row, normed, width, positions.shape[0] - 1, eps,
        BLOCK=triton.next_power_of_2(width), num_warps=4, **pdl_triton.options(table.device),
    )  # fmt: skip
    return row, normed


@triton.jit
def _path_attention_kernel(
    mixed_p, keys_p, values_p, lists_p, slot_p, parent_p, depth_p, out_p, bin_slot, scale, H: tl.constexpr,
    HEAD: tl.constexpr, D: tl.constexpr, PREFIX: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # grid (nodes, heads): rows of the table are the prefix, then slots
    follow(PDL)
    node, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, at = tl.arange(0, D), tl.arange(0, ROWS)
    in_head = lane < HEAD
    slot, depth = tl.load(slot_p + node), tl.load(depth_p + node)
    parent = tl.where(depth > 0, tl.load(parent_p + node), bin_slot)
    mixed = mixed_p + node * 3 * H * HEAD + head * HEAD + lane
    query = tl.load(mixed, mask=in_head, other=0.0)
    key = tl.load(mixed + H * HEAD, mask=in_head, other=0.0)
    value = tl.load(mixed + 2 * H * HEAD, mask=in_head, other=0.0)
    place = head * HEAD + lane
    tl.store(keys_p + (PREFIX + slot) * H * HEAD + place, key, mask=in_head)
    tl.store(values_p + (PREFIX + slot) * H * HEAD + place, value, mask=in_head)
    is_above = (at >= PREFIX) & (at < PREFIX + depth) & (at < PREFIX + LEVELS)
    ancestor = tl.load(lists_p + parent * LEVELS + at - PREFIX, mask=is_above, other=0)
    row = tl.where(is_above, PREFIX + ancestor, at.to(tl.int64))
    is_seen = is_above | (at < PREFIX)
    tile = row[:, None] * H * HEAD + place[None, :]
    mask = is_seen[:, None] & in_head[None, :]
    keys = tl.load(keys_p + tile, mask=mask, other=0.0).to(tl.float32)
    wide = query.to(tl.float32)
    scores = tl.where(is_seen, tl.sum(keys * wide[None, :], axis=1) * scale, -1.0e30)
    own = tl.sum(wide * key.to(tl.float32), axis=0) * scale
    top = tl.maximum(tl.max(scores, axis=0), own)
    weights = tl.where(is_seen, tl.exp(scores - top), 0.0)
    own_weight = tl.exp(own - top)
    values = tl.load(values_p + tile, mask=mask, other=0.0).to(tl.float32)
    out = tl.sum(values * weights[:, None], axis=0) + own_weight * value.to(tl.float32)
    out = out / (tl.sum(weights, axis=0) + own_weight)
    tl.store(out_p + node * H * HEAD + place, out.to(query.dtype), mask=in_head)
    if head == 0:
        # the node's own list: its parent's, then itself; of absent nodes in the bin, which nobody reads
        tl.store(lists_p + slot * LEVELS + at - PREFIX, ancestor, mask=is_above)
        tl.store(lists_p + slot * LEVELS + depth, slot, mask=depth < LEVELS)


def path_attention(
    mixed: Tensor,  # [w, 3 * H * D]: queries, keys, values
    keys: Tensor,  # [prefix + slots, H, D], written at the nodes' slots
    values: Tensor,
    lists: Tensor,  # [slots, levels] int64, written at the nodes' slots
    slots: Tensor,  # [w] int64
    parents: Tensor,  # [w] int64
    depths: Tensor,  # [w] int64
    *,
    prefix: int,
) -> Tensor:
    """Return the attention's output [w, H * D] of each node; the last slot is where absent nodes are written."""
    (_, heads, dim), nodes, levels = keys.shape, slots.shape[0], lists.shape[1]
    out = mixed.new_empty(nodes, heads * dim)
    _path_attention_kernel[(nodes, heads)](
        mixed, keys, values, lists, slots, parents, depths, out, lists.shape[0] - 1, dim**-0.5, H=heads, HEAD=dim,
        D=triton.next_power_of_2(dim), PREFIX=prefix, LEVELS=levels, ROWS=triton.next_power_of_2(prefix + levels),
        num_warps=4, **pdl_triton.options(mixed.device),
    )  # fmt: skip
    return out


@triton.jit
def _candidate_kernel(
    row_p, table_p, candidates_p, base_p, depth_p, out_p, K, WIDTH, last, BK: tl.constexpr, BW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # grid (nodes, blocks of candidates)
    follow(PDL)
    node, candidate = tl.program_id(0).to(tl.int64), tl.program_id(1) * BK + tl.arange(0, BK)
    inside = candidate < K
    at = tl.minimum(tl.load(depth_p + node), last) * K + candidate
    token = tl.load(candidates_p + at, mask=inside, other=0)
    total = tl.zeros((BK,), tl.float32)
    for start in range(0, WIDTH, BW):
        lane = start + tl.arange(0, BW)
        row = tl.load(row_p + node * WIDTH + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        tile = tl.load(
            table_p + token[:, None] * WIDTH + lane[None, :], mask=inside[:, None] & (lane < WIDTH)[None, :], other=0.0
        )
        total += tl.sum(tile.to(tl.float32) * row[None, :], axis=1)
    # the residual is rounded to the weaver's dtype before it is added
    total = total.to(table_p.dtype.element_ty).to(tl.float32)
    base = tl.load(base_p + at, mask=inside, other=-float("inf"))
    tl.store(out_p + node * K + candidate, base + total, mask=inside)


def candidate_logits(
    rows: Tensor,  # [w, width], after the weaver's last norm
    table: Tensor,  # [vocab, width], head rows times the query projection
    candidates: Tensor,  # [D, K] int64, ids >= 0
    base: Tensor,  # [D, K] float32, the drafter's log-probs; -inf: not drafted
    depths: Tensor,  # [w] int64; beyond the last row that row is taken
) -> Tensor:
    """Return base + residual [w, K] float32 of the children's candidates of each node."""
    nodes, (levels, count) = rows.shape[0], candidates.shape
    out = torch.empty(nodes, count, dtype=torch.float32, device=rows.device)
    block = min(32, triton.next_power_of_2(count))
    _candidate_kernel[(nodes, triton.cdiv(count, block))](
        rows, table, candidates, base, depths, out, count, table.shape[1], levels - 1, BK=block,
        BW=min(256, triton.next_power_of_2(table.shape[1])), num_warps=4, **pdl_triton.options(rows.device),
    )  # fmt: skip
    return out
