"""StaticTarget: tfm/target.py's verify and tfm/cache.py's commit on memory that never moves or changes its shape.

New rows are written right behind the committed ones, so attention reads one memory; commit closes the gaps between the
accepted ones. Layers that read one input are multiplied together. Nothing here waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tfm.cache import AttentionRows, GdnState, TargetCache
from tfm.clock import Clock
from tfm.engine.gdn import make_gdn, project
from tfm.engine.ops import Heads, Ops, head, join_rows
from tfm.layers import rotary_table
from tfm.target import Layer, Target, TargetOutput
from tfm.target_config import GDN
from tfm.tree import DraftTree
from tfm_kernels.tree_attention import TreeMask


@dataclass(frozen=True)
class _Weights:
    # of one layer, joined where layers read the same input
    into: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class _Pass:
    # what the layers of one pass share
    table: tuple[Tensor, Tensor]
    places: Tensor
    mask: object
    clock: Clock


class StaticTarget:
    """`length` [1] int64 counts committed tokens. One request; passes of at most `rows` rows.

    `capacity` is the number of tokens that may be committed.
    """

    def __init__(self, target: Target, *, capacity: int, rows: int, ops: Ops, gdn_backend: str):
        config, weight = target.config, target.embed_weight
        self.target, self.capacity, self.rows, self._ops = target, capacity, rows, ops
        places = [i for i, layer in enumerate(target.layers) if layer.kind != GDN]
        self._slot = {place: slot for slot, place in enumerate(places)}
        shape = (len(places), config.num_key_value_heads, capacity + rows, config.head_dim)
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)
        self.length = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._gdn = make_gdn(target, rows, gdn_backend)
        self._weights = [_join(layer) for layer in target.layers]
        self._offsets = torch.arange(rows, device=weight.device)
        every = torch.arange(capacity + rows, device=weight.device)
        self._table = rotary_table(
            every, config.rotary_dim, config.rope_theta, weight.dtype, scaling=config.rope_scaling
        )

    def states(self) -> list[GdnState]:
        """Return the GDN layers' states; they are written in place."""
        return list(self._gdn.states.values()) if self._gdn is not None else []

    def reset(self) -> None:
        """Forget the request: nothing is committed."""
        if self._gdn is not None:
            self._gdn.reset()
        self.length.zero_()

    def load(self, cache: TargetCache) -> None:
        """Take over the committed rows of one prefilled request."""
        if self._gdn is not None:
            self._gdn.reset()
        for place, layer in enumerate(cache.layers):
            if isinstance(layer, GdnState):
                self._gdn.load(place, layer)
            else:
                self._load_rows(self._slot[place], layer)
        self.length.copy_(cache.lengths)

    def _load_rows(self, slot: int, layer: AttentionRows) -> None:
        count = min(layer.keys.shape[2], self.keys.shape[2])
        self.keys[slot, :, :count] = layer.keys[0, :, :count]
        self.values[slot, :, :count] = layer.values[0, :, :count]

    def verify(self, tree: DraftTree, clock: Clock) -> TargetOutput:
        """Return logits, hidden and taps of every node of one tree [1, N]; its rows are kept for `commit`."""
        nodes = tree.tokens.shape[1]
        if nodes > self.rows:
            raise ValueError(f"tree: {nodes} rows are not allowed (allowed: {self.rows}); make room for more rows")
        ancestors = tree.ancestor_mask()
        mask = TreeMask(self.length, ancestors[0], tree.depths[0])
        positions = self.length + tree.depths[0]
        shared = _Pass(
            table=tuple(part.index_select(0, positions) for part in self._table),
            places=self.length + self._offsets[:nodes],
            mask=self._ops.prepare_mask(mask, self.keys.shape[2]) if self._slot else None,
            clock=clock,
        )
        if self._gdn is not None:
            self._gdn.start(tree, ancestors)
        return self._run(tree.tokens[0], shared)

    def _run(self, tokens: Tensor, shared: _Pass) -> TargetOutput:
        target, ops, taps, update = self.target, self._ops, {}, None
        x = torch.nn.functional.embedding(tokens, target.embed_weight)
        for place, (layer, weights) in enumerate(zip(target.layers, self._weights, strict=True)):
            x, normed = ops.add_norm(x, update, layer.input_layernorm)
            if place - 1 in target.tap_layers:
                taps[place - 1] = x
            mix = self._mix_gdn if layer.kind == GDN else self._mix_attention
            x, normed = ops.add_norm(x, mix(place, layer, weights, normed, shared), layer.post_attention_layernorm)
            with shared.clock.stage("target_gemm"):
                both = ops.linear(normed, weights.gate_up)
                update = ops.linear(ops.swiglu(both), weights.down)
        x, hidden = ops.add_norm(x, update, target.norm)
        taps[len(target.layers) - 1] = x
        with shared.clock.stage("target_head"):
            logits = head(ops.linear, target, hidden)
        side = torch.cat([x.new_zeros(len(x), 0), *(taps[i] for i in target.tap_layers)], dim=-1)
        return TargetOutput(logits[None], hidden[None], side[None])

    def _mix_gdn(self, place: int, layer: Layer, weights: _Weights, normed: Tensor, shared: _Pass) -> Tensor:
        with shared.clock.stage("target_gemm"):
            joined = self._ops.linear(normed, weights.into, self._gdn.product(place))
        with shared.clock.stage("target_gdn"):
            out = self._gdn.mix(place, project(joined, layer.linear_attn))
        with shared.clock.stage("target_gemm"):
            return self._ops.linear(out, weights.out)

    def _mix_attention(self, place: int, layer: Layer, weights: _Weights, normed: Tensor, shared: _Pass) -> Tensor:
        with shared.clock.stage("target_gemm"):
            joined = self._ops.linear(normed, weights.into)
        with shared.clock.stage("target_attention"):
            keys, values = self.keys[self._slot[place]], self.values[self._slot[place]]
            query, gate = self._ops.split_heads(
                joined, _heads(layer.self_attn), shared.table, keys, values, shared.places
            )
            out = self._ops.attend(query, keys, values, shared.mask, gate)
        with shared.clock.stage("target_gemm"):
            return self._ops.linear(out, weights.out)

    def commit(self, path: Tensor) -> None:
        """Make the nodes of `path` [1, P] of the last pass permanent and advance `length`; padding is -1."""
        is_node, step = path[0] >= 0, self._offsets[: path.shape[1]]
        # a padded place copies onto itself; a node never stands before its depth, so reading first is safe
        source = self.length + torch.where(is_node, path[0], step)
        for memory in (self.keys, self.values):
            memory.index_copy_(2, self.length + step, memory.index_select(2, source))
        if self._gdn is not None:
            self._gdn.commit(path)
        self.length.add_(is_node.sum())


def _join(layer: Layer) -> _Weights:
    if layer.kind == GDN:
        part = layer.linear_attn
        into, out = join_rows(part.in_proj_qkv, part.in_proj_z, part.in_proj_b, part.in_proj_a), part.out_proj
    else:
        part = layer.self_attn
        into, out = join_rows(part.q_proj, part.k_proj, part.v_proj), part.o_proj
    mlp = layer.mlp
    return _Weights(into, out.weight.data, join_rows(mlp.gate_proj, mlp.up_proj), mlp.down_proj.weight.data)


def _heads(attention) -> Heads:
    config, style = attention.config, attention.style
    norms = (attention.q_norm, attention.k_norm) if style.qk_norm else (None, None)
    return Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, style.output_gate, *norms)
