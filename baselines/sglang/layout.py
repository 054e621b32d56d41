"""A draft tree in the layouts that SGLang's attention and tree kernels read. One request; no host copy."""

import torch
from torch import Tensor


def links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return (first child, next sibling) of every node, [1, N] int64, -1 for none; padding (parent -1) has neither.

    `parents` [1, N] int64, parents[i] < i, -1 at the root and at padding. Siblings are linked in the order of their
    slots, which is the order in which SGLang's greedy walk tries them.
    """
    row = parents[0]
    count = len(row)
    nodes = torch.arange(count, device=row.device)
    is_child = row >= 0
    # childless nodes and nodes without a later sibling keep `count`, which becomes -1
    first = torch.full((count + 1,), count, dtype=torch.int64, device=row.device)
    first.scatter_reduce_(0, torch.where(is_child, row, count), nodes, "amin")
    is_later = (row[None] == row[:, None]) & (nodes[None] > nodes[:, None]) & is_child[None]
    sibling = torch.where(is_later, nodes[None], count).amin(1)
    first, sibling = (torch.where(found < count, found, -1) for found in (first[:count], sibling))
    return first[None], sibling[None]


def attention_mask(ancestors: Tensor, prefix: int) -> Tensor:
    """Return who sees whom, flat [N * (prefix + N)] bool: all of the prefix, then a node's ancestors and itself.

    `ancestors` [N, N] bool with true diagonal; `prefix` is the number of committed tokens.
    """
    return torch.nn.functional.pad(ancestors, (prefix, 0), value=True).flatten()


def output_tokens(tokens: Tensor, path: Tensor, accepted: Tensor, bonus: Tensor) -> Tensor:
    """Return what a step emits [1, P]: the path's drafts, then the bonus token; what follows is no output.

    `tokens` [1, N], `path` [1, P] padded with -1, `accepted` and `bonus` [1].
    """
    drafts = tokens.gather(1, path.clamp(min=0))
    shifted = torch.cat([drafts[:, 1:], drafts[:, :1]], dim=1)
    return shifted.scatter(1, accepted[:, None], bonus[:, None])


def forced_draws(tokens: Tensor, depths: Tensor, first_child: Tensor, drawn: Tensor, accept: int) -> Tensor:
    """Return `drawn` [1, N] changed so that the walk takes first children down to depth `accept`: for timing only."""
    child = tokens.gather(1, first_child.clamp(min=0))
    return torch.where((first_child >= 0) & (depths < accept), child, drawn)
