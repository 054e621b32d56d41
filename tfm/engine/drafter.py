"""StaticDrafter: tfm/drafter.py's append and draft in one pass over static memory.

The tokens that the last step committed become context in the pass that drafts next: each layer multiplies their
features and its block by the key and value weights together, which reads those weights once.
"""

import torch
from torch import Tensor

from tfm.drafter import Drafter, DrafterCache, DrafterLayer
from tfm.engine.ops import Heads, Ops, head, join_rows
from tfm.layers import rotary_table
from tfm.target import Target
from tfm_kernels.tree_attention import TreeMask


class StaticDrafter:
    """`length` [1] is the target's count of committed tokens, the pending ones included. One request.

    `pending` [P, taps * hidden] holds the taps of the last committed path and `pending_count` [1] its length.
    """

    def __init__(self, drafter: Drafter, target: Target, *, length: Tensor, capacity: int, path_rows: int, ops: Ops):
        config, weight = drafter.config, drafter.fc.weight
        self.drafter, self._target, self._ops, self._length = drafter, target, ops, length
        self.block_size, self.path_rows = config.block_size, path_rows
        # the block stands behind the committed rows, and ahead of a request's end behind those of a whole path that the
        # cap cuts; the last row is where pending places that hold nothing are written
        self._spare = capacity + path_rows + config.block_size
        shape = (len(config.layer_types), config.num_key_value_heads, self._spare + 1, config.head_dim)
        self.keys, self.values = weight.new_zeros(shape), weight.new_zeros(shape)
        self.pending = weight.new_zeros(path_rows, drafter.fc.in_features)
        self.pending_count = torch.zeros_like(length)
        device = weight.device
        self._table = rotary_table(
            torch.arange(self._spare, device=device), config.head_dim, config.rope_theta, weight.dtype
        )
        self._steps = torch.arange(max(self.block_size, path_rows), device=device)
        self._ids = torch.full((self.block_size,), config.mask_token_id, device=device)
        self._own = {kind: self._own_mask(kind) for kind in dict.fromkeys(config.layer_types)}
        self._joined = [_join(layer) for layer in drafter.layers]

    def _own_mask(self, kind: str) -> Tensor:
        # which rows of the block a row of the block sees
        config, step = self.drafter.config, torch.arange(self.block_size, device=self._length.device)
        distance = step[:, None] - step
        if kind != "sliding_attention":
            return torch.ones_like(distance, dtype=torch.bool)
        own = distance.abs() < config.sliding_window
        return own & (distance >= 0) if config.swa_causal else own

    def load(self, cache: DrafterCache) -> None:
        """Take over the context rows of one prefilled request; nothing is pending then."""
        count = min(cache.keys.shape[3], self._spare)
        self.keys[:, :, :count] = cache.keys[:, 0, :, :count]
        self.values[:, :, :count] = cache.values[:, 0, :, :count]
        self.pending_count.zero_()

    def draft(self, root: Tensor) -> tuple[Tensor, Tensor]:
        """Append what is pending, then return logits [1, D, vocab] and hidden [1, D, hidden] for the root [1]."""
        drafter, ops, block = self.drafter, self._ops, self.block_size
        ids = torch.cat([root, self._ids[1:]])
        step, before = self._steps[: self.path_rows], self._length - self.pending_count
        places = torch.where(step < self.pending_count, before + step, self._spare)
        positions = torch.cat([before + step, self._length + self._steps[:block]])
        places = torch.cat([places, self._length + self._steps[:block]])
        table = tuple(part.index_select(0, positions) for part in self._table)
        features = drafter.hidden_norm(ops.linear(self.pending, drafter.fc.weight))
        masks = {kind: self._prepare(kind) for kind in self._own}
        x, update = torch.nn.functional.embedding(ids, self._target.embed_weight), None
        for index, layer in enumerate(drafter.layers):
            x, normed = ops.add_norm(x, update, layer.input_layernorm)
            mixed = self._attend(index, layer, torch.cat([features, normed]), table, places, masks[layer.kind])
            x, normed = ops.add_norm(x, mixed, layer.post_attention_layernorm)
            both = ops.linear(normed, self._joined[index][1])
            update = ops.linear(ops.swiglu(both), layer.mlp.down_proj.weight)
        _, hidden = ops.add_norm(x, update, drafter.norm)
        hidden = hidden[1:]
        self.pending_count.zero_()
        return head(ops.linear, self._target, hidden)[None], hidden[None]

    def _prepare(self, kind: str):
        window = self.drafter.config.sliding_window if kind == "sliding_attention" else None
        mask = TreeMask(self._length, self._own[kind], self._steps[: self.block_size], window)
        return self._ops.prepare_mask(mask, self._spare + 1)

    def _attend(self, index: int, layer: DrafterLayer, rows: Tensor, table, places: Tensor, mask) -> Tensor:
        # the queries of the pending rows are computed along and dropped: their weights are read for the block anyway
        attention, keys, values = layer.self_attn, self.keys[index], self.values[index]
        shape = Heads(
            attention.heads, attention.kv_heads, attention.head_dim, False, attention.q_norm, attention.k_norm
        )
        joined = self._ops.linear(rows, self._joined[index][0])
        query, _ = self._ops.split_heads(joined, shape, table, keys, values, places)
        out = self._ops.attend(query[:, self.path_rows :], keys, values, mask, None)
        return self._ops.linear(out, attention.o_proj.weight)


def _join(layer: DrafterLayer) -> tuple[Tensor, Tensor]:
    part, mlp = layer.self_attn, layer.mlp
    return join_rows(part.q_proj, part.k_proj, part.v_proj), join_rows(mlp.gate_proj, mlp.up_proj)
