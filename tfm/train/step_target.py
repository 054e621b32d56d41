"""The target as the sampler asks for it: one token a step over a static batch, states updated in place."""

import torch
from torch import Tensor

from tfm.cache import AttentionRows, GdnState, TargetCache
from tfm.layers import rotary_table, rotate
from tfm.target import GDN, Attention, GatedDeltaNet, Target, log_decay_gate
from tfm_kernels.gdn.step import step


class StepTarget:
    """A frozen target behind `tfm.train.sampler.StepModel`."""

    def __init__(self, target: Target):
        self.target = target

    @property
    def device(self) -> torch.device:
        return self.target.embed_weight.device

    def new_cache(self, requests: int, rows: int) -> TargetCache:
        return self.target.new_cache(requests, rows)

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: TargetCache, requests: slice) -> Tensor:
        own = self.target.new_cache(*tokens.shape)
        hidden = self.target.prefill(tokens, lengths, own).hidden[:, 0]
        for filled, layer in zip(own.layers, cache.layers, strict=True):
            if isinstance(layer, GdnState):
                layer.inputs[requests], layer.state[requests] = filled.inputs, filled.state
            else:
                layer.keys[requests, :, : tokens.shape[1]] = filled.keys
                layer.values[requests, :, : tokens.shape[1]] = filled.values
        return hidden

    def step(self, tokens: Tensor, positions: Tensor, cache: TargetCache, rows: int) -> Tensor:
        target, x = self.target, self.target.embed(tokens[:, None])
        config = target.config
        table = rotary_table(
            positions[:, None], config.rotary_dim, config.rope_theta, x.dtype, scaling=config.rope_scaling
        )
        mask = (torch.arange(rows, device=x.device) <= positions[:, None])[:, None, None]  # [R, 1, 1, rows]
        for layer, memory in zip(target.layers, cache.layers, strict=True):
            normed = layer.input_layernorm(x)
            if layer.kind == GDN:
                x = x + _step_gdn(layer.linear_attn, normed, memory)
            else:
                x = x + _step_attention(layer.self_attn, normed, memory, table, mask, positions)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return target.norm(x)[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.head(hidden)


def _step_gdn(layer: GatedDeltaNet, x: Tensor, memory: GdnState) -> Tensor:
    mixed, gate = layer.in_proj_qkv(x), layer.in_proj_z(x).unflatten(-1, (-1, layer.config.linear_value_head_dim))
    window = torch.cat([memory.inputs, mixed], dim=1)  # [R, conv width, channels]
    convolved = (window * layer.conv1d.weight[:, 0].T).sum(1, keepdim=True)
    memory.inputs.copy_(window[:, 1:])
    q, k, v = layer._split(torch.nn.functional.silu(convolved))
    log_decay = log_decay_gate(layer.A_log, layer.in_proj_a(x), layer.dt_bias)
    beta = layer.in_proj_b(x).float().sigmoid()
    out = step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], beta[:, 0], memory.state)
    return layer.out_proj(layer.norm(out[:, None].to(x.dtype), gate).flatten(2))


def _step_attention(
    layer: Attention, x: Tensor, memory: AttentionRows, table: tuple[Tensor, Tensor], mask: Tensor, positions: Tensor
) -> Tensor:
    config, gate = layer.config, None
    groups = config.num_attention_heads // config.num_key_value_heads
    query = layer.q_proj(x).unflatten(-1, (config.num_attention_heads, -1))
    if layer.style.output_gate:
        query, gate = query.chunk(2, dim=-1)
    key, value = (proj(x).unflatten(-1, (-1, config.head_dim)) for proj in (layer.k_proj, layer.v_proj))
    if layer.style.qk_norm:
        query, key = layer.q_norm(query), layer.k_norm(key)
    query, key = rotate(query.transpose(1, 2), table), rotate(key.transpose(1, 2), table)
    place = positions[:, None, None, None].expand_as(key)
    memory.keys.scatter_(2, place, key)
    memory.values.scatter_(2, place, value.transpose(1, 2))
    rows = mask.shape[-1]
    # the query heads of one key head stand side by side as rows, so that keys are not copied for each of them
    out = torch.nn.functional.scaled_dot_product_attention(
        query.unflatten(1, (-1, groups)).flatten(2, 3),
        memory.keys[:, :, :rows],
        memory.values[:, :, :rows],
        attn_mask=mask.expand(-1, config.num_key_value_heads, groups, -1),
    )
    out = out.unflatten(2, (groups, 1)).flatten(1, 2).transpose(1, 2).flatten(2)
    if gate is not None:
        out = out * torch.sigmoid(gate.flatten(2))
    return layer.o_proj(out)
