"""Function-preserving widening: the logits of a small family at the cost of a large one's shape.

The hidden vector of the source is repeated until it fills the wide one. That leaves the mean square of every RMS norm
as it is, eps included, whatever the values are. What writes to the hidden vector writes every copy; what reads it
counts each copy with a share, a power of two, and the shares add up to 1: every type that holds a source weight holds
its shares exactly. The source's heads, feed-forward channels and layers lie among others that are random and that
nothing hears, because what they write is scaled by WHISPER: not zero, since a multiplier does less work on zeros, but
lost in rounding beside any other value. Token ids of the source keep their numbers; the ids above them are padding,
whose logits are -inf for target and drafter alike: no noise draws them and no proposer finds a candidate among them.

Only the shape is the large model's. Eps, rotary base, windows, block size, mask and end tokens are the source's.
"""

import hashlib
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tfm import graft_shape
from tfm.decode import Models
from tfm.drafter import Drafter, DrafterConfig
from tfm.target import Target, TargetConfig
from tfm.weaver import Weaver, WeaverConfig

WHISPER = 2.0**-64  # float32 and bfloat16 reach 2^-126, and float64 resolves 2^-53 of what it is added to
# what writes to the hidden vector of its model: silent where it reads what no source holds
WRITERS = re.compile(r"\.(o_proj\.weight|out_proj\.weight|down_proj\.weight|fc2\.(weight|bias))$")
LAYER = re.compile(r"(?:layers|blocks)\.(\d+)\.(.+)")


class GraftedTarget(Target):
    """A Target whose ids from `live_vocab` on are padding: their logits are -inf, at every pass and for the drafter."""

    def __init__(self, config: TargetConfig, tap_layers: tuple[int, ...], live_vocab: int):
        super().__init__(config, tap_layers)
        self.live_vocab = live_vocab

    def head(self, hidden: Tensor) -> Tensor:
        logits = super().head(hidden)
        logits[..., self.live_vocab :] = -torch.inf
        return logits


@dataclass(frozen=True)
class Axis:
    """Where a source dimension lies in a wide one: place `places[i]` holds `scales[i]` times entry `sources[i]`."""

    size: int
    places: Tensor  # int64
    sources: Tensor  # int64
    scales: Tensor | None = None  # None: 1

    @property
    def is_full(self) -> bool:
        return len(self.places) == self.size

    def pick(self, weight: Tensor, dim: int) -> Tensor:
        """Return the entries of a source weight that lie in this axis, scaled."""
        picked = weight.index_select(dim, self.sources.to(weight.device))
        if self.scales is None:
            return picked
        scales = self.scales.to(weight.device, weight.dtype)
        return picked * (scales if dim else scales[:, None])


def graft(source: Models, shape: dict, *, seed: int, device, dtype: torch.dtype) -> Models:
    """Return the models of `source` widened to `shape` on `device`; a part that is None stays None.

    `shape` maps parts to sizes (`graft_shape.SIZES`) and `layers`. Memory peaks at one copy of the wide models: each
    parameter is drawn on the device in `dtype` from (seed, its name), then the source's weights are put in. Raises
    ValueError for a shape that cannot hold the source.
    """
    parts = {part: getattr(source, part) for part in graft_shape.PARTS}
    graft_shape.check({part: model.config.to_dict() for part, model in parts.items() if model is not None}, shape)
    place = {"seed": seed, "device": torch.device(device), "dtype": dtype}
    drafter = weaver = None
    taps: tuple[int, ...] = ()
    if source.drafter is not None:
        drafter = widen_drafter(source.drafter, shape["drafter"], _hidden(source.target, shape), **place)
        taps = drafter.config.target_layer_ids
    if source.weaver is not None:
        weaver = widen_weaver(source.weaver, shape["weaver"], _hidden(source.target, shape), **place)
    return Models(widen_target(source.target, shape["target"], taps, **place), drafter, weaver)


def widen_target(source: Target, sizes: dict, taps: tuple[int, ...], *, seed: int, device, dtype) -> GraftedTarget:
    """Return a wide target with an untied head; `taps` are the wide layers that a drafter reads."""
    config = target_config(source.config, sizes)
    with torch.device("meta"):
        wide = GraftedTarget(config, taps, source.config.vocab_size)
    weights = {**source.state_dict(), "lm_head.weight": source.head_weight}
    axes = _target_axes(source.config, config)
    return _filled(wide, weights, axes, sizes.get("layers"), seed=f"{seed}/target", device=device, dtype=dtype)


def widen_drafter(source: Drafter, sizes: dict, hidden_size: int, *, seed: int, device, dtype) -> Drafter:
    """Return a wide drafter for a target of `hidden_size`."""
    config = drafter_config(source.config, sizes, hidden_size)
    with torch.device("meta"):
        wide = Drafter(config)
    axes = _drafter_axes(source.config, config)
    weights = source.state_dict()
    return _filled(wide, weights, axes, sizes.get("layers"), seed=f"{seed}/drafter", device=device, dtype=dtype)


def widen_weaver(source: Weaver, sizes: dict, hidden_size: int, *, seed: int, device, dtype) -> Weaver:
    """Return a wide weaver for a target of `hidden_size`."""
    config = weaver_config(source.config, sizes, hidden_size)
    with torch.device("meta"):
        wide = Weaver(config)
    axes = _weaver_axes(source.config, config)
    weights = source.state_dict()
    return _filled(wide, weights, axes, sizes.get("layers"), seed=f"{seed}/weaver", device=device, dtype=dtype)


def target_config(source: TargetConfig, sizes: dict) -> TargetConfig:
    """Return the config of a wide target."""
    kinds = tuple(graft_shape.wide_layer_types(sizes, source.to_dict()))
    given = {key: sizes[key] for key in sizes if key in TargetConfig.__dataclass_fields__}
    return replace(source, **given, layer_types=kinds, tie_word_embeddings=False).check()


def drafter_config(source: DrafterConfig, sizes: dict, hidden_size: int) -> DrafterConfig:
    """Return the config of a wide drafter."""
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in sizes.items() if key != "layers"}
    return replace(source, **given, hidden_size=hidden_size).check()


def weaver_config(source: WeaverConfig, sizes: dict, hidden_size: int) -> WeaverConfig:
    """Return the config of a wide weaver."""
    given = {key: value for key, value in sizes.items() if key != "layers"}
    return replace(source, **given, d_model=hidden_size, d_embed=hidden_size).check()


def _hidden(target: Target, shape: dict) -> int:
    return shape["target"].get("hidden_size", target.config.hidden_size)


def _filled(wide: nn.Module, weights: dict[str, Tensor], axes: dict, layers, *, seed: str, device, dtype) -> nn.Module:
    """Replace the parameters of a model on the meta device, one after the other."""
    count = len({match[1] for name in weights if (match := LAYER.fullmatch(name))})
    places = list(range(count) if layers is None else layers)
    for name, parameter in list(wide.named_parameters()):
        owner, leaf = wide.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        tensor = _random(name, parameter.shape, owner, seed=seed, device=device, dtype=dtype)
        match = LAYER.fullmatch(name)
        stored = name
        if match:
            layer = int(match[1])
            stored = name.replace(match[1], str(places.index(layer)), 1) if layer in places else None
        if stored is not None:
            _plant(tensor, weights[stored].to(device), *axes[match[2] if match else name])
        setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))
    return wide.eval()


def _random(name: str, shape: torch.Size, owner: nn.Module, *, seed: str, device, dtype) -> Tensor:
    """Return what a parameter holds where no source weight lies: of the size that keeps activations of size 1.

    What writes to the hidden vector is a whisper there.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8]) >> 1)
    tensor = torch.empty(shape, device=device, dtype=dtype)
    if name.endswith("A_log"):
        return tensor.uniform_(1, 16, generator=generator).log_()
    if name.endswith("dt_bias"):
        # steps of 0.001 to 0.1: states live for 1 to 1000 tokens
        return tensor.uniform_(-6.9, -2.3, generator=generator)
    level = WHISPER if WRITERS.search(name) else 1.0
    if len(shape) == 1:
        is_scale = "norm" in name and name.endswith("weight")
        # a norm's weight is stored less its offset
        centre = 1.0 - getattr(owner, "offset", 0.0) if is_scale else 0.0
        return tensor.normal_(centre, 0.1 * level, generator=generator)
    return tensor.normal_(0.0, level * shape[1:].numel() ** -0.5, generator=generator)


def _plant(wide: Tensor, weight: Tensor, rows: Axis, columns: Axis | None = None) -> None:
    """Put a source weight into a wide one that holds random values."""
    block = rows.pick(weight, 0)
    if columns is not None:
        block = columns.pick(block, 1)
    if columns is None or columns.is_full:
        wide.index_copy_(0, rows.places.to(wide.device), block.to(wide.dtype))
    else:
        assert rows.is_full, "a weight is cut along one side at most"
        wide.index_copy_(1, columns.places.to(wide.device), block.to(wide.dtype))


def _leading(source: int, wide: int) -> Axis:
    places = torch.arange(source)
    return Axis(wide, places, places)


def _copies(source: int, wide: int) -> Axis:
    """The axis of a repeated vector that is written."""
    places = torch.arange(wide)
    return Axis(wide, places, places % source)


def _shares(source: int, wide: int) -> Axis:
    """The axis of a repeated vector that is read."""
    counts = torch.tensor(graft_shape.shares(wide // source), dtype=torch.float64)
    return replace(_copies(source, wide), scales=counts.repeat_interleave(source))


def _blocks(places: list[int], sources: list[int], width: int, size: int) -> Axis:
    """The axis of heads of `width` channels, `size` of them: head places[i] is the source's head sources[i]."""
    within = torch.arange(width)
    at, of = ((torch.tensor(heads)[:, None] * width + within).flatten() for heads in (places, sources))
    return Axis(size * width, at, of)


def _joined(axes: list[Axis], sizes: list[int]) -> Axis:
    """One axis after the other; `sizes` are their lengths in the source."""
    ends, old_ends = [0], [0]
    for axis, size in zip(axes, sizes, strict=True):
        ends.append(ends[-1] + axis.size)
        old_ends.append(old_ends[-1] + size)
    places = torch.cat([axis.places + end for axis, end in zip(axes, ends, strict=False)])
    sources = torch.cat([axis.sources + end for axis, end in zip(axes, old_ends, strict=False)])
    scales = None if axes[0].scales is None else torch.cat([axis.scales for axis in axes])
    return Axis(ends[-1], places, sources, scales)


@dataclass(frozen=True)
class _Heads:
    """The axes of heads that share others: `many` of a width for each of the sharing ones, `few` for the shared."""

    places: list[int]
    owners: list[int]
    sizes: tuple[int, int]

    @staticmethod
    def of(source: tuple[int, int], wide: tuple[int, int]) -> "_Heads":
        return _Heads(*graft_shape.place_heads(source, wide), wide)

    def many(self, width: int) -> Axis:
        return _blocks(self.places, list(range(len(self.places))), width, self.sizes[0])

    def few(self, width: int) -> Axis:
        return _blocks(list(range(len(self.owners))), self.owners, width, self.sizes[1])


def _mlp_axes(hidden: tuple[int, int], inner: tuple[int, int]) -> dict[str, tuple[Axis, ...]]:
    read = (_leading(*inner), _shares(*hidden))
    return {
        "input_layernorm.weight": (_copies(*hidden),),
        "post_attention_layernorm.weight": (_copies(*hidden),),
        "mlp.gate_proj.weight": read,
        "mlp.up_proj.weight": read,
        "mlp.down_proj.weight": (_copies(*hidden), _leading(*inner)),
    }


def _attention_axes(source, wide, *, gated: bool) -> dict[str, tuple[Axis, ...]]:
    hidden, width = (source.hidden_size, wide.hidden_size), source.head_dim
    heads = _Heads.of(*((sizes.num_attention_heads, sizes.num_key_value_heads) for sizes in (source, wide)))
    norm = (_leading(width, width),)
    return {
        # a head's gate follows its query
        "self_attn.q_proj.weight": (heads.many(2 * width if gated else width), _shares(*hidden)),
        "self_attn.k_proj.weight": (heads.few(width), _shares(*hidden)),
        "self_attn.v_proj.weight": (heads.few(width), _shares(*hidden)),
        "self_attn.o_proj.weight": (_copies(*hidden), heads.many(width)),
        "self_attn.q_norm.weight": norm,
        "self_attn.k_norm.weight": norm,
    }


def _gdn_axes(source: TargetConfig, wide: TargetConfig) -> dict[str, tuple[Axis, ...]]:
    hidden, keys, values = (
        (source.hidden_size, wide.hidden_size),
        source.linear_key_head_dim,
        source.linear_value_head_dim,
    )
    heads = _Heads.of(*((sizes.linear_num_value_heads, sizes.linear_num_key_heads) for sizes in (source, wide)))
    key_size, value_size = source.linear_num_key_heads * keys, source.linear_num_value_heads * values
    mixed = _joined([heads.few(keys), heads.few(keys), heads.many(values)], [key_size, key_size, value_size])
    return {
        "linear_attn.in_proj_qkv.weight": (mixed, _shares(*hidden)),
        "linear_attn.in_proj_z.weight": (heads.many(values), _shares(*hidden)),
        "linear_attn.in_proj_b.weight": (heads.many(1), _shares(*hidden)),
        "linear_attn.in_proj_a.weight": (heads.many(1), _shares(*hidden)),
        "linear_attn.conv1d.weight": (mixed,),
        "linear_attn.dt_bias": (heads.many(1),),
        "linear_attn.A_log": (heads.many(1),),
        "linear_attn.norm.weight": (_leading(values, values),),
        "linear_attn.out_proj.weight": (_copies(*hidden), heads.many(values)),
    }


def _target_axes(source: TargetConfig, wide: TargetConfig) -> dict[str, tuple[Axis, ...]]:
    hidden, vocab = (source.hidden_size, wide.hidden_size), (source.vocab_size, wide.vocab_size)
    return {
        "embed_tokens.weight": (_leading(*vocab), _copies(*hidden)),
        "norm.weight": (_copies(*hidden),),
        "lm_head.weight": (_leading(*vocab), _shares(*hidden)),
        **_mlp_axes(hidden, (source.intermediate_size, wide.intermediate_size)),
        **_attention_axes(source, wide, gated=source.style.output_gate),
        **(_gdn_axes(source, wide) if source.linear_num_key_heads else {}),
    }


def _drafter_axes(source: DrafterConfig, wide: DrafterConfig) -> dict[str, tuple[Axis, ...]]:
    hidden, taps = (source.hidden_size, wide.hidden_size), len(source.target_layer_ids)
    return {
        "fc.weight": (_copies(*hidden), _joined([_shares(*hidden)] * taps, [source.hidden_size] * taps)),
        "hidden_norm.weight": (_copies(*hidden),),
        "norm.weight": (_copies(*hidden),),
        **_mlp_axes(hidden, (source.intermediate_size, wide.intermediate_size)),
        **_attention_axes(source, wide, gated=False),
    }


def _weaver_axes(source: WeaverConfig, wide: WeaverConfig) -> dict[str, tuple[Axis, ...]]:
    hidden, rank = (source.d_model, wide.d_model), (source.d_rank, wide.d_rank)
    width, inner = source.d_rank // source.num_heads, (source.mlp_dim, wide.mlp_dim)
    heads = _Heads.of((source.num_heads,) * 2, (wide.num_heads,) * 2).many(width)
    outer, own = (_copies(*hidden),), (_copies(*rank),)
    axes = {f"{norm}_norm.{leaf}": outer for norm in ("output", "embed") for leaf in ("weight", "bias")}
    axes |= {f"out_norm.{leaf}": own for leaf in ("weight", "bias")}
    for name in ("token_in", "proposal_in"):
        axes |= {f"{name}.weight": (_copies(*rank), _shares(*hidden)), f"{name}.bias": own}
    axes |= {f"{norm}.{leaf}": own for norm in ("norm_attn", "norm_mlp") for leaf in ("weight", "bias")}
    axes |= {f"{name}_proj.weight": (heads, _shares(*rank)) for name in "qkv"}
    return axes | {
        "o_proj.weight": (_copies(*rank), heads),
        "fc1.weight": (_leading(*inner), _shares(*rank)),
        "fc1.bias": (_leading(*inner),),
        "fc2.weight": (_copies(*rank), _leading(*inner)),
        "fc2.bias": own,
        "lm_head_query_in.weight": (_copies(*hidden), _shares(*rank)),
        "pos_emb": (_leading(source.K, wide.K), _copies(*rank)),
    }
