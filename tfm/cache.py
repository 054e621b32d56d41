"""TargetCache: everything the target remembers of its committed tokens, and `commit`, the one place that writes it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tfm_kernels import conv
from tfm_kernels.gdn import ops, solve


@dataclass
class AttentionRows:
    """Keys and values of an attention layer: committed ones in the cache, a tree's own as scratch."""

    keys: Tensor  # [R, kv heads, rows, head_dim], rotated
    values: Tensor  # [R, kv heads, rows, head_dim]


@dataclass
class GdnState:
    """What a GDN layer carries from token to token."""

    inputs: Tensor  # [R, conv width - 1, channels], newest last, before the convolution
    state: Tensor  # [R, HV, K, V] float32 (float64 for a float64 model)


@dataclass
class GdnScratch:
    """What a tree verify leaves for the commit of a GDN layer: 65 rows, not 65 states."""

    inputs: Tensor  # [R, N, channels]
    index: Tensor  # [R, N, conv width], from conv.window_index
    keys: Tensor  # [R, N, H, K]
    writes: Tensor  # [R, N, HV, V]
    path_log_decay: Tensor  # [R, N, HV] float64


class TargetCache:
    """Committed rows of R requests. `lengths` [R] counts committed tokens; the pending root is not among them."""

    def __init__(self, layers: list[AttentionRows | GdnState], requests: int, device: torch.device):
        self.layers = layers
        self.lengths = torch.zeros(requests, dtype=torch.int64, device=device)

    @property
    def max_tokens(self) -> int | None:
        """Rows that the attention layers hold, or None without attention layers."""
        rows = [layer.keys.shape[2] for layer in self.layers if isinstance(layer, AttentionRows)]
        return min(rows) if rows else None

    def commit(self, scratch: list[AttentionRows | GdnScratch], path: Tensor) -> None:
        """Make the nodes of `path` [R, P] permanent in every layer and advance `lengths`.

        `path` holds node indices from the root down, padded with -1; an all -1 row leaves its request untouched.
        Raises ValueError before anything is written when a node is outside the verified tree or the cache is full.
        """
        first = scratch[0]
        nodes = first.keys.shape[2] if isinstance(first, AttentionRows) else first.inputs.shape[1]
        ops.check_path(path, nodes, len(self.lengths))
        counts = (path >= 0).sum(1)
        if self.max_tokens is not None and int((self.lengths + counts).max()) > self.max_tokens:
            raise ValueError(
                f"cache: committing {counts.tolist()} tokens after {self.lengths.tolist()} exceeds {self.max_tokens} "
                "rows; make the cache with a larger max_tokens"
            )
        for layer, rows in zip(self.layers, scratch, strict=True):
            if isinstance(layer, GdnState):
                layer.state = solve.commit(layer.state, rows.keys, rows.writes, rows.path_log_decay, path)
                layer.inputs = conv.commit(rows.inputs, layer.inputs, rows.index, path)
            else:
                self._append(layer, rows, path)
        self.lengths = self.lengths + counts

    def _append(self, layer: AttentionRows, rows: AttentionRows, path: Tensor) -> None:
        request, place = (path >= 0).nonzero(as_tuple=True)
        node, row = path[request, place], self.lengths[request] + place
        layer.keys[request, :, row] = rows.keys[request, :, node]
        layer.values[request, :, row] = rows.values[request, :, node]
