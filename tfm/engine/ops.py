"""The operations that the static engine's layers are made of, in PyTorch; `make_ops` puts fast forms in their place."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tfm.engine.forms import TRITON, Forms
from tfm.layers import RMSNorm, rotate
from tfm.target import Target
from tfm_kernels import tree_attention


@dataclass(frozen=True)
class Heads:
    """How a joined projection [N, sum] splits into heads: queries (each followed by its gate), keys, values."""

    heads: int
    kv_heads: int
    head_dim: int
    has_gate: bool
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x [N, in] times weight [out, in] transposed, written to `out` where that is given."""
    return F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)


def add_norm(x: Tensor, update: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """Return (x + update, its norm), both [N, d] in x's dtype; without an update x itself and its norm."""
    if update is not None:
        x = x + update
    return x, norm(x)


def head(linear: Callable, target: Target, hidden: Tensor) -> Tensor:
    """Return the logits [N, vocab] of rows [N, d] by a form of `linear`, -inf at padded ids of the vocabulary."""
    logits = linear(hidden, target.head_weight)
    live = getattr(target, "live_vocab", logits.shape[-1])  # of a GraftedTarget
    if live < logits.shape[-1]:
        logits[:, live:] = -torch.inf
    return logits


def swiglu(both: Tensor) -> Tensor:
    """Return silu(gate) * up [N, inner] of `both` [N, 2 * inner], gate first."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def split_heads(
    joined: Tensor,  # [N, sum]
    shape: Heads,
    table: tuple[Tensor, Tensor],  # rotary cos, sin [N, rotary_dim]
    keys: Tensor,  # [KV, capacity, D], written at `places`
    values: Tensor,
    places: Tensor,  # [N] int64
) -> tuple[Tensor, Tensor | None]:
    """Norm and rotate queries and keys, put keys and values into the memory; return query [H, N, D], gate [N, H, D].

    `joined` may have more rows of keys and values than queries are wanted for: the caller drops those queries.
    """
    dim, gate = shape.head_dim, None
    width = shape.heads * dim * (2 if shape.has_gate else 1)
    query = joined[:, :width].unflatten(-1, (shape.heads, -1))
    if shape.has_gate:
        query, gate = query.chunk(2, dim=-1)
    key, value = joined[:, width:].unflatten(-1, (2, shape.kv_heads, dim)).unbind(1)
    if shape.query_norm is not None:
        query, key = shape.query_norm(query), shape.key_norm(key)
    table = tuple(part[None] for part in table)
    query, key = (rotate(x.transpose(0, 1)[None], table)[0] for x in (query, key))
    keys.index_copy_(1, places, key)
    values.index_copy_(1, places, value.transpose(0, 1))
    return query, gate


@dataclass(frozen=True)
class Ops:
    """One form of each operation; see the functions of the same names."""

    linear: Callable = linear
    add_norm: Callable = add_norm
    swiglu: Callable = swiglu
    split_heads: Callable = split_heads
    prepare_mask: Callable = tree_attention.dense  # what `attend` reads of a TreeMask, once a pass
    attend: Callable = tree_attention.attend


def make_ops(forms: Forms) -> Ops:
    """Return the operations in the chosen forms; Triton is imported only where it is asked for."""
    chosen: dict[str, Callable] = {}
    if forms.attention == TRITON:
        module = importlib.import_module("tfm_kernels.tree_attention_triton")
        chosen |= {"prepare_mask": module.prepare_mask, "attend": module.attend}
    if forms.rows == TRITON:
        module = importlib.import_module("tfm_kernels.rows_triton")
        chosen |= {"add_norm": _norm_of(module.add_norm), "swiglu": module.swiglu}
        chosen["split_heads"] = _heads_of(module.split_heads)
    if forms.linear == TRITON:
        chosen["linear"] = importlib.import_module("tfm_kernels.linear_triton").linear
    return Ops(**chosen)


def _norm_of(kernel: Callable) -> Callable:
    # kernels know tensors, not modules
    def add_norm(x: Tensor, update: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        return kernel(x, update, norm.weight, norm.eps, norm.offset)

    return add_norm


def _heads_of(kernel: Callable) -> Callable:
    def split_heads(joined, shape: Heads, table, keys, values, places):
        norms = (shape.query_norm, shape.key_norm)
        weights = tuple(norm.weight if norm is not None else None for norm in norms)
        eps, offset = (norms[0].eps, norms[0].offset) if norms[0] is not None else (0.0, 0.0)
        return kernel(
            joined, table, keys, values, places, heads=shape.heads, has_gate=shape.has_gate, weights=weights, eps=eps,
            offset=offset,
        )  # fmt: skip

    return split_heads


def join_rows(*linears: torch.nn.Linear) -> Tensor:
    """Return the weights of layers that read one input as one matrix [sum of outs, in], without keeping a second copy.

    The layers' parameters become views of it. Layers that were joined before give the same matrix again.
    """
    weights = [layer.weight.data for layer in linears]
    rows = [len(weight) for weight in weights]
    if _are_joined(weights):
        return weights[0].as_strided((sum(rows), weights[0].shape[1]), (weights[0].shape[1], 1))
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat(weights)
        for layer, part in zip(linears, joined.split(rows), strict=True):
            layer.weight.data = part
    return joined


def _are_joined(weights: list[Tensor]) -> bool:
    if len({weight.untyped_storage().data_ptr() for weight in weights}) > 1:
        return False
    ends = [weight.storage_offset() + weight.numel() for weight in weights]
    return all(weight.is_contiguous() for weight in weights) and all(
        weight.storage_offset() == end for weight, end in zip(weights[1:], ends[:-1], strict=True)
    )
