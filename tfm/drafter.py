"""DFlash drafter: one block-diffusion pass gives the marginals of the next `draft_rows` tokens.

The block is [root, MASK x draft_rows] at the root's true position onwards. Committed tokens enter through the target's
hidden states (taps): `fc` and `hidden_norm` turn them into context features, of which every layer keeps keys and
values. The embeddings and the head are the target's.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfm.layers import MLP, RMSNorm, rotary_table, rotate

LAYER_TYPES = ("sliding_attention", "full_attention")
DFLASH_ONLY = ("mask_token_id", "target_layer_ids", "swa_causal")  # keys that stand in dflash_config alone
REQUIRED = ("mask_token_id", "target_layer_ids", "hidden_size", "intermediate_size", "num_attention_heads")
LEAST = {
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "mask_token_id": 0,
    "block_size": 2,  # the root and at least one mask
}
REMEDY = "take the config.json that belongs to the weights"


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter. `hidden_size` is the target's, since embeddings, taps and head are the target's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    sliding_window: int | None = None  # a sliding layer sees this many positions, itself included
    swa_causal: bool = True  # sliding layers are causal inside the block; False: window to both sides
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e7
    initializer_range: float = 0.02

    @staticmethod
    def from_dict(config: dict) -> "DrafterConfig":
        """Read a drafter's config.json; a null counts as absent.

        Raises ValueError naming the key, its value and what is allowed, also for what this implementation does not do
        (scaled rotary positions, biased attention, another activation).
        """
        special = config.get("dflash_config", {})
        if not isinstance(special, dict):
            raise ValueError(
                f"dflash_config: {special!r} is not allowed (allowed: an object with mask_token_id and "
                f"target_layer_ids); {REMEDY}"
            )
        _refuse_unsupported(config)
        rope = config.get("rope_parameters") or {}
        flat = {"rope_theta": rope.get("rope_theta")} | {key: config[key] for key in config if key not in DFLASH_ONLY}
        flat |= {key: special[key] for key in (*DFLASH_ONLY, "block_size") if key in special}
        flat = {key: value for key, value in flat.items() if value is not None}
        missing = [key for key in REQUIRED if key not in flat]
        if missing:
            raise ValueError(
                f"drafter config: no {', '.join(missing)}; a DFlash config.json holds the sizes of a Qwen3 model and "
                "dflash_config with mask_token_id and target_layer_ids"
            )
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
            _require_integer(key, flat.get(key, 1), 1)
        flat.setdefault("num_key_value_heads", flat["num_attention_heads"])
        flat.setdefault("head_dim", flat["hidden_size"] // flat["num_attention_heads"])
        flat.setdefault("layer_types", ["full_attention"] * flat.get("num_hidden_layers", 0))
        given = {field.name: flat[field.name] for field in fields(DrafterConfig) if field.name in flat}
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        return DrafterConfig(**given).check(flat.get("num_hidden_layers"))

    def check(self, layers: int | None = None) -> "DrafterConfig":
        """Return self, or raise ValueError naming the key, its value and what is allowed."""
        for key, least in LEAST.items():
            _require_integer(key, getattr(self, key), least)
        for key in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{key}: {value!r} is not allowed (allowed: a number > 0); {REMEDY}")
        if not isinstance(self.swa_causal, bool):
            raise ValueError(f"swa_causal: {self.swa_causal!r} is not allowed (allowed: true, false); {REMEDY}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: {self.num_key_value_heads} does not divide the {self.num_attention_heads} heads "
                f"(allowed: a divisor of num_attention_heads); {REMEDY}"
            )
        self._check_layers(layers)
        return self

    def _check_layers(self, layers: int | None) -> None:
        for key in ("layer_types", "target_layer_ids"):
            value = getattr(self, key)
            if not isinstance(value, tuple) or not value:
                raise ValueError(f"{key}: {value!r} is not allowed (allowed: a list of at least one layer); {REMEDY}")
        for index, layer in enumerate(self.target_layer_ids):
            _require_integer(f"target_layer_ids[{index}]", layer, 0)
        for index, kind in enumerate(self.layer_types):
            if kind not in LAYER_TYPES:
                allowed = ", ".join(LAYER_TYPES)
                raise ValueError(f"layer_types[{index}]: {kind!r} is not allowed (allowed: {allowed}); {REMEDY}")
        if layers is not None and layers != len(self.layer_types):
            raise ValueError(
                f"num_hidden_layers: {layers}, but layer_types names {len(self.layer_types)} layers; {REMEDY}"
            )
        if "sliding_attention" in self.layer_types:
            _require_integer("sliding_window", self.sliding_window, 1)

    def to_dict(self) -> dict:
        """Return the config.json that `from_dict` reads back."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": len(self.layer_types),
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": "sliding_attention" in self.layer_types,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "initializer_range": self.initializer_range,
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "swa_causal": self.swa_causal,
            },
        }


def _require_integer(key: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key}: {value!r} is not allowed (allowed: an integer >= {least}); {REMEDY}")


def _refuse_unsupported(config: dict) -> None:
    wanted = {
        "attention_bias": (config.get("attention_bias") or False, False),
        "hidden_act": (config.get("hidden_act") or "silu", "silu"),
    }
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        if not isinstance(rope, dict):
            raise ValueError(f"{key}: {rope!r} is not allowed (allowed: an object or null); {REMEDY}")
        wanted[f"{key}.rope_type"] = (rope.get("rope_type", rope.get("type", "default")), "default")
        wanted[f"{key}.partial_rotary_factor"] = (rope.get("partial_rotary_factor", 1.0), 1.0)
        # one entry a layer type, which some models have, would leave rope_theta at its default
        wanted[f"keys of {key}"] = (sorted(set(rope) & set(LAYER_TYPES)), [])
    for key, (value, allowed) in wanted.items():
        if value != allowed:
            raise ValueError(f"{key}: {value!r} is not supported (allowed: {allowed!r}); use another drafter")


class DrafterAttention(nn.Module):
    """Grouped-query attention whose keys and values come from context features and from the block itself."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, features: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return k, v [R, KV, n, head_dim] of features [R, n, hidden]; k is normed, then rotated by `table`."""
        keys = self.k_norm(self.k_proj(features).unflatten(-1, (self.kv_heads, self.head_dim)))
        values = self.v_proj(features).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(keys.transpose(1, 2), table), values.transpose(1, 2)

    def forward(self, block: Tensor, table: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor):
        """Return [R, Q, hidden] for block rows [R, Q, hidden]; mask [R, 1, Q, context + Q] bool, True = visible."""
        queries = self.q_norm(self.q_proj(block).unflatten(-1, (self.heads, self.head_dim)))
        own_keys, own_values = self.keys_values(block, table)
        groups = self.heads // self.kv_heads
        out = F.scaled_dot_product_attention(
            rotate(queries.transpose(1, 2), table),
            torch.cat([context[0], own_keys], dim=2).repeat_interleave(groups, dim=1),
            torch.cat([context[1], own_values], dim=2).repeat_interleave(groups, dim=1),
            attn_mask=mask,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP. Context features are not passed through `input_layernorm`; the block is."""

    def __init__(self, config: DrafterConfig, kind: str):
        super().__init__()
        self.kind = kind
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, block: Tensor, table: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], mask: Tensor):
        block = block + self.self_attn(self.input_layernorm(block), table, context, mask)
        return block + self.mlp(self.post_attention_layernorm(block))


class DrafterCache:
    """Keys and values of the context features of committed positions. `lengths` [R] int64 = committed tokens."""

    def __init__(self, config: DrafterConfig, requests: int, max_tokens: int, *, device, dtype):
        shape = (len(config.layer_types), requests, config.num_key_value_heads, max_tokens, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(requests, dtype=torch.int64, device=device)
        self.filled = 0  # host copy of the longest length: rows past it are not read

    def context(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return k, v [R, KV, filled, head_dim] of one layer."""
        return self.keys[layer, :, :, : self.filled], self.values[layer, :, :, : self.filled]


class Drafter(nn.Module):
    """See the module. Parameter names are those of the public DFlash checkpoints."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def draft_rows(self) -> int:
        """Number of positions drafted by one pass: the block without its root."""
        return self.config.block_size - 1

    def new_cache(self, requests: int, max_tokens: int) -> DrafterCache:
        """Return an empty cache for `max_tokens` committed tokens a request, on the model's device and dtype."""
        weight = self.fc.weight
        return DrafterCache(self.config, requests, max_tokens, device=weight.device, dtype=weight.dtype)

    def append(self, taps: Tensor, counts: Tensor, cache: DrafterCache) -> None:
        """Commit the first counts[r] rows of taps [R, n, taps * hidden] at positions cache.lengths[r] onwards.

        A count of 0 leaves that request untouched. Raises ValueError when a request would outgrow the cache.
        """
        capacity = cache.keys.shape[3]
        grown = cache.lengths + counts
        longest = int(grown.max())  # the drafter's one device-to-host copy a step
        if longest > capacity:
            raise ValueError(
                f"max_tokens: the drafter cache holds {capacity} tokens, {longest} are committed; raise it"
            )
        offsets = torch.arange(taps.shape[1], device=taps.device)
        positions = cache.lengths[:, None] + offsets
        request, row = (offsets < counts[:, None]).nonzero(as_tuple=True)
        target_rows = positions[request, row]
        features, table = self.context_features(taps), self._table(positions)
        for index, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(features, table)
            cache.keys[index, request, :, target_rows] = keys[request, :, row]
            cache.values[index, request, :, target_rows] = values[request, :, row]
        cache.lengths = grown
        cache.filled = longest

    def block_input(self, roots: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids [..., S] = [root, MASK x draft_rows] and positions [..., S] = lengths + 0 .. draft_rows."""
        ids = roots[..., None].repeat(*[1] * roots.dim(), self.config.block_size)
        ids[..., 1:] = self.config.mask_token_id
        return ids, lengths[..., None] + torch.arange(self.config.block_size, device=roots.device)

    def draft(self, roots: Tensor, cache: DrafterCache, target) -> tuple[Tensor, Tensor]:
        """Return logits [R, D, vocab] and hidden [R, D, hidden] (after the final norm) for roots [R].

        The root of request r stands at position cache.lengths[r]; row d is the marginal of the token d + 1 after it.
        `target` lends its embedding and head. The cache is only read.
        """
        ids, positions = self.block_input(roots, cache.lengths)
        blocks = torch.zeros_like(ids)
        contexts = [cache.context(index) for index in range(len(self.layers))]
        hidden = self._run(target.embed(ids), positions, positions[:, :1].expand_as(positions), blocks, contexts)
        hidden = hidden[:, 1:]
        return target.head(hidden), hidden

    def forward_blocks(self, taps: Tensor, anchors: Tensor, roots: Tensor, target) -> Tensor:
        """Return hidden [R, A, D, hidden] of `draft` at many anchors of known sequences (differentiable).

        taps [R, L, taps * hidden] of the whole sequence; the block of anchor a has its root, roots[r, a], at position
        anchors[r, a] and sees context positions before it only.
        """
        ids, positions = self.block_input(roots, anchors)
        requests, count, size = ids.shape
        blocks = torch.arange(count, device=ids.device)[:, None].expand(requests, count, size).flatten(1)
        starts = anchors[..., None].expand_as(positions).flatten(1)
        places = torch.arange(taps.shape[1], device=taps.device).expand(requests, -1)
        features, table = self.context_features(taps), self._table(places)
        contexts = [layer.self_attn.keys_values(features, table) for layer in self.layers]
        hidden = self._run(target.embed(ids).flatten(1, 2), positions.flatten(1), starts, blocks, contexts)
        return hidden.unflatten(1, (count, size))[:, :, 1:]

    def context_features(self, taps: Tensor) -> Tensor:
        """Return [..., hidden] from taps [..., taps * hidden]: what keys and values of committed tokens are made of."""
        return self.hidden_norm(self.fc(taps))

    def _table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(positions, self.config.head_dim, self.config.rope_theta, self.fc.weight.dtype)

    def _run(self, embeds: Tensor, positions: Tensor, starts: Tensor, blocks: Tensor, contexts: list) -> Tensor:
        masks = {
            kind: self._mask(kind, positions, starts, blocks, contexts[0][0].shape[2])
            for kind in dict.fromkeys(self.config.layer_types)
        }
        rows, table = embeds, self._table(positions)
        for layer, context in zip(self.layers, contexts, strict=True):
            rows = layer(rows, table, context, masks[layer.kind])
        return self.norm(rows)

    def _mask(self, kind: str, positions: Tensor, starts: Tensor, blocks: Tensor, context: int) -> Tensor:
        """Return [R, 1, Q, context + Q] bool: context before the row's root, and the rows of its own block."""
        places = torch.arange(context, device=positions.device)
        committed = places < starts[..., None]
        own = blocks[..., None] == blocks[:, None, :]
        if kind == "sliding_attention":
            committed &= positions[..., None] - places < self.config.sliding_window
            distance = positions[..., None] - positions[:, None, :]
            own &= distance.abs() < self.config.sliding_window
            if self.config.swa_causal:
                own &= distance >= 0
        return torch.cat([committed, own], dim=-1)[:, None]


def init_drafter(drafter: Drafter, seed: int) -> None:
    """Fill every matrix with normal(0, initializer_range) and every norm with 1, from `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator) * drafter.config.initializer_range
                parameter.copy_(noise)
            else:
                parameter.fill_(1.0)
