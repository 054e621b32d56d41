"""The causal convolution of a GDN layer over a tree: a node's window is itself and its nearest ancestors."""

import torch
from torch import Tensor


def window_index(parents: Tensor, width: int) -> Tensor:
    """Return [R, N, width] int64 rows of cat([conv state, nodes]) that each node's window reads, oldest first.

    `parents` [R, N]; rows 0 to width - 2 are the committed inputs, oldest first, and row width - 1 + i is node i.
    Above the root the window continues into the committed inputs: a root's parent is the newest of them.
    """
    requests, nodes = parents.shape
    offset = width - 1
    before = torch.arange(-1, offset - 1, device=parents.device).clamp(min=0).expand(requests, offset)
    above = torch.cat([before, parents + offset], dim=1)  # parent -1 is row offset - 1, the newest committed input
    row = torch.arange(offset, offset + nodes, device=parents.device).expand(requests, nodes)
    window = [row]
    for _ in range(width - 1):
        row = above.gather(1, row)
        window.append(row)
    return torch.stack(window[::-1], dim=-1)


def tree_conv(x: Tensor, weight: Tensor, state: Tensor, index: Tensor) -> Tensor:
    """Return silu(depthwise convolution) of every node over its window [R, N, C].

    `x` [R, N, C] inputs of the nodes, `weight` [C, width], `state` [R, width - 1, C] committed inputs oldest first
    (read, never written), `index` from `window_index`.
    """
    window = gather_windows(x, state, index)
    return torch.nn.functional.silu((window * weight.T).sum(2))


def gather_windows(x: Tensor, state: Tensor, index: Tensor) -> Tensor:
    """Return each node's inputs [R, N, width, C], oldest first."""
    rows = torch.cat([state, x], dim=1)
    picked = rows.gather(1, index.flatten(1)[..., None].expand(-1, -1, x.shape[2]))
    return picked.unflatten(1, index.shape[1:])


def commit(x: Tensor, state: Tensor, index: Tensor, path: Tensor) -> Tensor:
    """Return the committed inputs after each request's path [R, width - 1, C]: the leaf's window without its oldest.

    `path` [R, P] int64 padded with -1; an all -1 row keeps its state.
    """
    leaf = path.max(dim=1).values  # a path goes down, so its last node has the highest index
    rows = index.gather(1, leaf.clamp(min=0)[:, None, None].expand(-1, 1, index.shape[2]))[:, 0, 1:]
    moved = torch.cat([state, x], dim=1).gather(1, rows[..., None].expand(-1, -1, x.shape[2]))
    return torch.where((leaf >= 0)[:, None, None], moved, state)


def naive_tree_conv(x: Tensor, weight: Tensor, state: Tensor, parents: Tensor) -> Tensor:
    """`tree_conv` by the definition: walk every node's ancestors, then the committed inputs."""
    out = torch.empty_like(x)
    width = weight.shape[1]
    for request, row in enumerate(parents.tolist()):
        for node in range(len(row)):
            inputs, at = [], node
            while at >= 0 and len(inputs) < width:
                inputs.insert(0, x[request, at])
                at = row[at]
            missing = width - len(inputs)
            inputs = [*state[request, width - 1 - missing :], *inputs] if missing else inputs
            out[request, node] = torch.nn.functional.silu((torch.stack(inputs) * weight.T).sum(0))
    return out
