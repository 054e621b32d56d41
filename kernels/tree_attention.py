"""Attention of a tree's rows over a long memory: committed rows, then the tree's own, which stand right behind them.

The memory is allocated once and a row count on the device says how much of it is real, so no shape depends on the
context. This module is the definition; `tree_attention_triton` is the fast form.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TreeMask:
    """What each of N new rows sees of the memory."""

    committed: Tensor  # [1] int64, rows before the new ones: all of them are seen, less those outside the window
    own: Tensor  # [N, N] bool, own[i, j] says that new row i sees new row j
    depths: Tensor  # [N] int64, new row i stands at position committed + depths[i]
    window: int | None = None  # a row sees this many positions back, itself included


def dense(mask: TreeMask, capacity: int) -> Tensor:
    """Return the mask [N, capacity] bool over every row of a memory of `capacity` rows."""
    nodes = mask.own.shape[0]
    row = torch.arange(capacity, device=mask.own.device)
    seen = (row < mask.committed).expand(nodes, capacity)
    if mask.window is not None:
        seen = seen & (mask.committed + mask.depths[:, None] - row < mask.window)
    behind = row - mask.committed
    is_own = (behind >= 0) & (behind < nodes)
    return seen | (mask.own[:, behind.clamp(0, nodes - 1)] & is_own)


def attend(
    query: Tensor,  # [H, N, D], rotated
    keys: Tensor,  # [KV, capacity, D], the new rows included
    values: Tensor,  # [KV, capacity, D]
    seen: Tensor,  # [N, capacity] bool, from `dense`
    gate: Tensor | None = None,  # [N, H, D]: the output is multiplied by its sigmoid
) -> Tensor:
    """Return softmax(query . keys / sqrt(D)) values [N, H * D] over what each row sees; H a multiple of KV."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=seen, enable_gqa=query.shape[0] != keys.shape[0]
    )
    out = out[0].transpose(0, 1)
    if gate is not None:
        out = out * torch.sigmoid(gate)
    return out.flatten(1)
