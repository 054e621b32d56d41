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
    is_later = (row[None] == row[:, None]) & (nodes[None] > nodes[:, None]) & is_child[None]
    found = torch.stack([row[None] == nodes[:, None], is_later])
    # the lowest of them; nodes without any get `count`, which becomes -1
    lowest = torch.where(found, nodes, count).amin(2)
    first, sibling = torch.where(lowest < count, lowest, -1)
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
