"""Gated-DeltaNet layers of one running request, verified as a tree and committed by this project's op.

SGLang keeps the state of a request in a slot of its pool, [HV, V, K], and for a tree one more state for every node.
Here a verify reads the committed state and leaves two vectors a node; the commit makes one path permanent. The pool's
slot is read once, after prefill: from then on the state lives here, [HV, K, V].
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tfm.target import log_decay_gate
from tfm_kernels import conv
from tfm_kernels.gdn import ops, solve

WIDTH = 4  # of the convolution
EPS = 1e-6  # under the root of a key's length


@dataclass(frozen=True)
class LayerShape:
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.heads * self.key_dim + self.value_heads * self.value_dim


@dataclass
class LayerMemory:
    """What one layer keeps from step to step and, in `rows`, from a verify to its commit."""

    shape: LayerShape
    state: Tensor  # [1, HV, K, V] float32
    window: Tensor  # [1, 3, C], committed inputs, oldest first
    inputs: Tensor  # [1, N, C], of the last tree
    rows: tuple | None = None  # keys, writes, path log-decays of the last verify


class GdnMemory:
    """All GDN layers of a target for trees of `nodes` rows: `start` a tree, `verify` each layer, `commit` a path."""

    def __init__(self, layers: dict[int, LayerShape], *, nodes: int, backend: str, device, dtype: torch.dtype):
        self.backend, self.nodes = backend, nodes
        self.layers = {
            place: LayerMemory(
                shape,
                torch.zeros(1, shape.value_heads, shape.key_dim, shape.value_dim, device=device),
                torch.zeros(1, WIDTH - 1, shape.channels, dtype=dtype, device=device),
                torch.zeros(1, nodes, shape.channels, dtype=dtype, device=device),
            )
            for place, shape in layers.items()
        }
        # any tree until the first one: a capture may come before it
        self.parents = torch.arange(-1, nodes - 1, device=device)[None]
        self._windows = conv.window_index(self.parents, WIDTH)
        self._tree = ops.prepare_tree(self.parents, ops.ancestor_mask(self.parents), backend=backend)

    @property
    def state_bytes(self) -> int:
        """Bytes of all that is kept beside SGLang's own pool."""
        kept = [tensor for layer in self.layers.values() for tensor in (layer.state, layer.window, layer.inputs)]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def load(self, place: int, state: Tensor, window: Tensor) -> None:
        """Take over what prefill left in SGLang's slot: state [HV, V, K], window [C, 3]."""
        layer = self.layers[place]
        layer.state[0].copy_(state.transpose(-1, -2))
        layer.window[0].copy_(window.transpose(-1, -2))

    def start(self, parents: Tensor, ancestors: Tensor) -> None:
        """Take the next tree: parents [1, N], ancestors [1, N, N]; written in place, so that a graph may replay it."""
        self.parents.copy_(parents)
        self._windows.copy_(conv.window_index(parents, WIDTH))
        self._tree.copy_(ops.prepare_tree(parents, ancestors, backend=self.backend))

    def verify(self, place: int, weights: nn.Module, mixed: Tensor, decay: Tensor, write: Tensor) -> Tensor:
        """Return the layer's output [1, N, HV, V] in the type of `mixed`; the committed state is only read.

        `mixed` [N, C] before the convolution, `decay` and `write` [N, HV] before their gates; `weights` holds
        conv_weights [C, 4], A_log and dt_bias [HV].
        """
        layer = self.layers[place]
        layer.inputs[0].copy_(mixed)
        convolved = conv.tree_conv(layer.inputs, weights.conv_weights, layer.window, self._windows)
        q, k, v = split_heads(convolved, layer.shape)
        log_decay = log_decay_gate(weights.A_log, decay[None], weights.dt_bias)
        beta = write[None].float().sigmoid()
        out, writes, sums = ops.tree_verify(
            q, k, v, log_decay, beta, self.parents, layer.state, backend=self.backend, tree=self._tree
        )
        layer.rows = (k, writes, sums)
        return out.to(mixed.dtype)

    def commit(self, path: Tensor) -> None:
        """Make `path` [1, P] of the last tree permanent; a row of -1 changes nothing."""
        for layer in self.layers.values():
            if layer.rows is not None:
                keys, writes, sums = layer.rows
                layer.state.copy_(solve.commit(layer.state, keys, writes, sums, path))
                layer.window.copy_(conv.commit(layer.inputs, layer.window, self._windows, path))


def split_heads(convolved: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (normalised, scaled), k (normalised) [1, N, H, K] and v [1, N, HV, V] of channels q | k | v."""
    keys = shape.heads * shape.key_dim
    q, k, v = convolved.split([keys, keys, shape.value_heads * shape.value_dim], dim=-1)
    q, k = (x.unflatten(-1, (shape.heads, shape.key_dim)).float() for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k))
    q, k = (q * shape.key_dim**-0.5).to(convolved.dtype), k.to(convolved.dtype)
    return q, k, v.unflatten(-1, (shape.value_heads, shape.value_dim))


def make_memory(layers: dict[int, LayerShape], *, nodes: int, backend: str, device, dtype: torch.dtype) -> GdnMemory:
    """Return the layers' memory for a backend; raises ValueError where the backend does not run on the device."""
    ops.resolve_backend(backend, torch.device(device), torch.float32)
    if backend == "fused_cuda":
        from baselines.sglang.gdn_cuda import CudaGdnMemory  # lazy: needs a CUDA device

        return CudaGdnMemory(layers, nodes=nodes, backend=backend, device=device, dtype=dtype)
    return GdnMemory(layers, nodes=nodes, backend=backend, device=device, dtype=dtype)
