"""Attention of a block of new rows over SGLang's pool of keys and values, found through a request's row of places.

Position j of a request lies in slot places[request, j] of the pool (page size 1); the new rows' own keys lie there too,
at the positions behind the committed ones. Lengths and places are data on the device, so no shape and no launch depends
on the context. This module is the definition; `pool_attention_triton` is the fast form.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tfm_kernels.tree_attention import TreeMask, dense


@dataclass(frozen=True)
class PoolRows:
    """Where one request's keys lie, and what each of N new rows sees of them."""

    places: Tensor  # [requests, width] integer, the slot of each position of each request
    request: Tensor  # [1] integer, the row of `places`
    committed: Tensor  # [1] integer, positions before the new rows; all are seen, less those outside the window
    own: Tensor  # [N, N] bool, contiguous: own[i, j] says that new row i sees new row j
    window: int | None = None  # N or more: row i, a chain's at committed + i, sees this many positions, itself included


def attend(
    query: Tensor,  # [N, H, D], rotated
    keys: Tensor,  # [slots, KV, D], the new rows included
    values: Tensor,  # [slots, KV, D]
    rows: PoolRows,
    scale: float,
) -> Tensor:
    """Return softmax(scale query . keys) values [N, H * D] over what each row sees; H a multiple of KV."""
    slots = rows.places.index_select(0, rows.request.long())[0].long()
    depths = torch.arange(len(query), device=query.device)
    seen = dense(TreeMask(rows.committed.long(), rows.own, depths, rows.window), len(slots))
    # slots that no row sees may hold anything, and zero times that is not zero
    used = seen.any(0)[:, None, None]
    keys, values = (torch.where(used, x.index_select(0, slots), 0).transpose(0, 1) for x in (keys, values))
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, scale=scale,
        enable_gqa=query.shape[1] != keys.shape[0],
    )  # fmt: skip
    return out[0].transpose(0, 1).flatten(1)
