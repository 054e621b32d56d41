"""What stands between the products of a layer, one launch each: residual and norm, gated product, heads and memory.

Every value is rounded where the PyTorch forms round it (tfm/engine/ops.py), so both agree to the last place or two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels import pdl_triton
from tfm_kernels.pdl_triton import follow


@triton.jit
def _add_norm_kernel(
    x_p, update_p, update_bias_p, weight_p, bias_p, sum_p, normed_p, WIDTH, eps, offset, x_stride, update_stride,
    HAS_UPDATE: tl.constexpr, HAS_UPDATE_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # grid (rows): a program owns a row; sums in float32
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_p + row * x_stride + column, mask=inside, other=0.0)
    if HAS_UPDATE:
        update = tl.load(update_p + row * update_stride + column, mask=inside, other=0.0)
        if HAS_UPDATE_BIAS:
            more = tl.load(update_bias_p + column, mask=inside, other=0.0)
            update = (update.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x.dtype)
        tl.store(sum_p + row * WIDTH + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    weight = tl.load(weight_p + column, mask=inside, other=0.0).to(tl.float32) + offset
    normed = wide * scale * weight
    if HAS_BIAS:
        normed += tl.load(bias_p + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_p + row * WIDTH + column, normed.to(x.dtype), mask=inside)


def add_norm(
    x: Tensor,  # [N, d]
    update: Tensor | None,  # [N, d]
    weight: Tensor,  # [d]
    eps: float,
    offset: float,
    bias: Tensor | None = None,  # [d]
    update_bias: Tensor | None = None,  # [d], added to the update
) -> tuple[Tensor, Tensor]:
    """Return (x + update, rms-norm(x + update) (weight + offset) + bias), both [N, d] in x's dtype."""
    rows, width = x.shape
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(normed) if update is not None else x
    _add_norm_kernel[(rows,)](
        x, x if update is None else update, weight if update_bias is None else update_bias, weight,
        weight if bias is None else bias, total, normed, width, eps, offset, x.stride(0),
        0 if update is None else update.stride(0), HAS_UPDATE=update is not None,
        HAS_UPDATE_BIAS=update_bias is not None, HAS_BIAS=bias is not None, BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width > 2048 else 4,
        **pdl_triton.options(x.device),
    )  # fmt: skip
    return total, normed


@triton.jit
def _swiglu_kernel(both_p, out_p, INNER, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # grid (rows, blocks of the inner width)
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    gate = tl.load(both_p + row * 2 * INNER + column, mask=inside, other=0.0)
    up = tl.load(both_p + row * 2 * INNER + INNER + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_p + row * INNER + column, (gated * up).to(gate.dtype), mask=inside)


def swiglu(both: Tensor) -> Tensor:
    """Return silu(gate) * up [N, inner] of `both` [N, 2 * inner], contiguous, gate first."""
    rows, inner = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, inner)
    block = 1024
    grid = (rows, triton.cdiv(inner, block))
    _swiglu_kernel[grid](both, out, inner, BLOCK=block, num_warps=4, **pdl_triton.options(both.device))
    return out


@triton.jit
def _bias_gelu_kernel(x_p, bias_p, out_p, WIDTH, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # grid (rows, blocks of the width)
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_p + row * WIDTH + column, mask=inside, other=0.0)
    bias = tl.load(bias_p + column, mask=inside, other=0.0).to(tl.float32)
    wide = (x.to(tl.float32) + bias).to(x.dtype).to(tl.float32)
    gelu = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    tl.store(out_p + row * WIDTH + column, gelu.to(x.dtype), mask=inside)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(x + bias) (exact) [N, d] of x [N, d], contiguous, and bias [d]."""
    rows, width = x.shape
    out, block = torch.empty_like(x), 512
    grid = (rows, triton.cdiv(width, block))
    _bias_gelu_kernel[grid](x, bias, out, width, BLOCK=block, num_warps=4, **pdl_triton.options(x.device))
    return out


@triton.jit
def _split_heads_kernel(
    joined_p, cos_p, sin_p, query_weight_p, key_weight_p, places_p, query_p, keys_p, values_p, NODES, row_stride,
    memory_stride, eps, offset, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # grid (rows, H + 2 KV): a program owns one head of one row
    follow(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, D)
    step = 2 * D if HAS_GATE else D
    is_query, is_value = head < H, head >= H + KV
    at = tl.where(is_query, head * step, H * step + (head - H) * D)
    base = joined_p + row * row_stride + at
    x = tl.load(base + lane)
    if is_value:
        place = tl.load(places_p + row)
        tl.store(values_p + (head - H - KV).to(tl.int64) * memory_stride + place * D + lane, x)
        return
    half = ROTARY // 2
    is_low, turns = lane < half, lane < ROTARY
    other_lane = tl.where(turns, tl.where(is_low, lane + half, lane - half), lane)
    other = tl.load(base + other_lane)
    if HAS_NORM:
        weight_p = query_weight_p if is_query else key_weight_p
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)
        weight = tl.load(weight_p + lane).to(tl.float32) + offset
        other_weight = tl.load(weight_p + other_lane).to(tl.float32) + offset
        other = (other.to(tl.float32) * scale * other_weight).to(x.dtype)
        x = (wide * scale * weight).to(x.dtype)
    cos = tl.load(cos_p + row * ROTARY + lane, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_p + row * ROTARY + lane, mask=turns, other=0.0).to(tl.float32)
    turned = tl.where(is_low, -other.to(tl.float32), other.to(tl.float32))
    # rounded like the three operations of the definition
    first = (x.to(tl.float32) * cos).to(x.dtype).to(tl.float32)
    second = (turned * sin).to(x.dtype).to(tl.float32)
    x = tl.where(turns, (first + second).to(x.dtype), x)
    if is_query:
        tl.store(query_p + (head.to(tl.int64) * NODES + row) * D + lane, x)
    else:
        place = tl.load(places_p + row)
        tl.store(keys_p + (head - H).to(tl.int64) * memory_stride + place * D + lane, x)


def split_heads(
    joined: Tensor,  # [N, sum], contiguous
    table: tuple[Tensor, Tensor],  # cos, sin [N, rotary]
    keys: Tensor,  # [KV, capacity, D], written at `places`
    values: Tensor,
    places: Tensor,  # [N] int64
    *,
    heads: int,
    has_gate: bool,
    weights: tuple[Tensor | None, Tensor | None],
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor | None]:
    """Return query [H, N, D] and gate [N, H, D] or None, as tfm.engine.ops.split_heads; keys and values are stored."""
    nodes, (kv_heads, _, dim) = joined.shape[0], keys.shape
    query = joined.new_empty(heads, nodes, dim)
    query_weight, key_weight = (joined if weight is None else weight for weight in weights)
    _split_heads_kernel[(nodes, heads + 2 * kv_heads)](
        joined, table[0], table[1], query_weight, key_weight, places, query, keys, values, nodes, joined.stride(0),
        keys.stride(0), eps, offset, H=heads, KV=kv_heads, D=dim, ROTARY=table[0].shape[1], HAS_GATE=has_gate,
        HAS_NORM=weights[0] is not None, num_warps=1 if dim <= 128 else 2, **pdl_triton.options(joined.device),
    )  # fmt: skip
    gate = joined[:, : 2 * heads * dim].unflatten(-1, (heads, 2 * dim))[..., dim:] if has_gate else None
    return query, gate
