"""Gated-DeltaNet layers on static memory: `PlainGdn` with any backend of the op, `MixerGdn` with the CUDA mixer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tfm.cache import GdnScratch, GdnState
from tfm.layers import widen
from tfm.target import GatedDeltaNet, Target, log_decay_gate
from tfm.target_config import GDN
from tfm.tree import DraftTree
from tfm_kernels import conv
from tfm_kernels.gdn import ops, solve

MIXER_BACKEND = "fused_cuda"


@dataclass(frozen=True)
class Projected:
    """What a layer's joined in-projection gives, [N, ...] each: views of one product."""

    mixed: Tensor  # [N, C], before the convolution
    gate: Tensor  # [N, HV * V]
    write: Tensor  # [N, HV], before the sigmoid
    decay: Tensor  # [N, HV]


def project(joined: Tensor, layer: GatedDeltaNet) -> Projected:
    """Split the product [N, sum] of a layer's input with its joined in-projections (qkv, z, b, a)."""
    config = layer.config
    heads, inner = config.linear_num_value_heads, config.linear_num_value_heads * config.linear_value_head_dim
    return Projected(*joined.split([config.conv_channels, inner, heads, heads], dim=-1))


def gdn_layers(target: Target) -> dict[int, GatedDeltaNet]:
    """Return the target's GDN layers by their place among all layers."""
    return {i: layer.linear_attn for i, layer in enumerate(target.layers) if layer.kind == GDN}


class PlainGdn:
    """The layers' own formulas; their states are written in place, so that a CUDA graph may replay the pass."""

    def __init__(self, target: Target, rows: int, backend: str):
        self.layers, self._backend = gdn_layers(target), backend
        empty = target.new_cache(1, 1).layers
        self.states: dict[int, GdnState] = {i: empty[i] for i in self.layers}
        self._scratch: dict[int, GdnScratch] = {}

    def load(self, place: int, state: GdnState) -> None:
        """Take over the state that prefill left in layer `place`."""
        self.states[place].inputs.copy_(state.inputs)
        self.states[place].state.copy_(state.state)

    def reset(self) -> None:
        for state in self.states.values():
            state.inputs.zero_()
            state.state.zero_()

    def start(self, tree: DraftTree, ancestors: Tensor) -> None:
        """Prepare what all layers read of the tree."""
        width = next(iter(self.layers.values())).config.linear_conv_kernel_dim
        self._parents = tree.parents
        self._tree = ops.prepare_tree(tree.parents, ancestors, backend=self._backend)
        self._windows = conv.window_index(tree.parents, width)

    def product(self, place: int) -> None:
        """Return where the in-projections' product must go: anywhere."""

    def mix(self, place: int, rows: Projected) -> Tensor:
        """Return the out-projection's input [N, HV * V] of layer `place`; the layer's state is only read."""
        layer, memory = self.layers[place], self.states[place]
        mixed = rows.mixed[None]
        convolved = conv.tree_conv(mixed, layer.conv1d.weight[:, 0], memory.inputs, self._windows)
        q, k, v = layer._split(convolved)
        log_decay = log_decay_gate(layer.A_log, rows.decay[None], layer.dt_bias)
        beta = widen(rows.write[None]).sigmoid()
        out, writes, path_log_decay = ops.tree_verify(
            q, k, v, log_decay, beta, self._parents, memory.state, backend=self._backend, tree=self._tree
        )
        self._scratch[place] = GdnScratch(mixed, self._windows, k, writes, path_log_decay)
        gate = rows.gate.unflatten(-1, (-1, layer.config.linear_value_head_dim))
        return layer.norm(out.to(mixed.dtype)[0], gate).flatten(1)

    def commit(self, path: Tensor) -> None:
        """Make `path` [1, P] of the last pass permanent in every layer."""
        for place, rows in self._scratch.items():
            memory = self.states[place]
            memory.state.copy_(solve.commit(memory.state, rows.keys, rows.writes, rows.path_log_decay, path))
            memory.inputs.copy_(conv.commit(rows.inputs, memory.inputs, rows.index, path))


class MixerGdn:
    """Three launches a layer and one commit for all layers (tfm_kernels.gdn.mixer_cuda); bf16 on CUDA only."""

    def __init__(self, target: Target, rows: int, backend: str):
        from tfm_kernels.gdn import mixer_cuda  # lazy: needs a CUDA device

        del backend
        self._cuda, self.layers = mixer_cuda, gdn_layers(target)
        empty = target.new_cache(1, 1).layers
        self.states: dict[int, GdnState] = {i: empty[i] for i in self.layers}
        self._weights = {i: self._weights_of(layer) for i, layer in self.layers.items()}
        self._sets: dict[int, dict] = {}  # by number of rows: buffers of each layer and the commit over them
        self._rows = 0

    def _weights_of(self, layer: GatedDeltaNet):
        return self._cuda.MixerWeights(
            conv=layer.conv1d.weight[:, 0].contiguous(),
            a_log=layer.A_log.float(),
            dt_bias=layer.dt_bias.float(),
            norm=layer.norm.weight.contiguous(),
            eps=layer.norm.eps,
        )

    load, reset = PlainGdn.load, PlainGdn.reset

    def start(self, tree: DraftTree, ancestors: Tensor) -> None:
        """Keep the parents; the buffers of a tree of this size are made on first use, which is before a capture."""
        del ancestors
        self._parents, self._rows = tree.parents.contiguous(), tree.parents.shape[1]
        if self._rows not in self._sets:
            self._sets[self._rows] = self._make_set(self._rows)

    def _make_set(self, rows: int) -> dict:
        config, device = next(iter(self.layers.values())).config, self._parents.device
        heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        shared = self._cuda.MixerBuffers.empty(1, rows, heads, value_heads, device)
        width = config.conv_channels + value_heads * (config.linear_value_head_dim + 2)
        buffers, products, commits = {}, {}, []
        for place, state in self.states.items():
            kept = self._cuda.MixerBuffers.empty(1, rows, heads, value_heads, device)
            # only what the commit reads differs from layer to layer
            buffers[place] = self._cuda.MixerBuffers(
                shared.q, kept.k, shared.v, shared.log_decay, shared.beta, shared.out, kept.u, kept.path_log_decay,
                shared.normed,
            )  # fmt: skip
            products[place] = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
            inputs = products[place][None, :, : config.conv_channels]
            commits.append(
                self._cuda.CommitLayer(state.state, kept.k, kept.u, kept.path_log_decay, state.inputs, inputs)
            )
        return {"buffers": buffers, "products": products, "commit": self._cuda.Commit(commits)}

    def product(self, place: int) -> Tensor:
        """Return where the in-projections' product [N, sum] must go: the commit reads it there."""
        return self._sets[self._rows]["products"][place]

    def mix(self, place: int, rows: Projected) -> Tensor:
        """See PlainGdn.mix."""
        layer, state, buffers = self.layers[place], self.states[place], self._sets[self._rows]["buffers"][place]
        gate = rows.gate.unflatten(-1, (-1, layer.config.linear_value_head_dim))
        views = (rows.mixed[None], gate[None], rows.decay[None], rows.write[None])
        inputs = self._cuda.MixerInputs(*views, self._parents, state.inputs, state.state)
        self._cuda.mixer_into(inputs, self._weights[place], buffers)
        return buffers.normed[0].flatten(1)

    def commit(self, path: Tensor) -> None:
        """See PlainGdn.commit."""
        self._sets[self._rows]["commit"](path)


def make_gdn(target: Target, rows: int, backend: str) -> PlainGdn | MixerGdn | None:
    """Return the GDN layers of `target` for passes of at most `rows` rows, or None for a target without any."""
    if not target.has_gdn:
        return None
    if backend == "naive":
        raise ValueError("gdn_backend: 'naive' walks trees on the host (allowed here: any other); use solve")
    return (MixerGdn if backend == MIXER_BACKEND else PlainGdn)(target, rows, backend)
