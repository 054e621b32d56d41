"""TargetConfig: a target's sizes and architecture, read from the config.json of a Hugging Face checkpoint.

Three families are built from the same layers: Qwen3.5/3.6 (gated DeltaNet and gated attention), Qwen3 and Llama
(attention alone). A field that asks for anything else is refused by name, never ignored.
"""

import math
from dataclasses import dataclass, field, fields

from tfm.layers import Llama3Rope

GDN, ATTENTION = "linear_attention", "full_attention"
REMEDY = "take the config.json that belongs to the weights"


@dataclass(frozen=True)
class Family:
    """What one architecture does differently; `architecture` is the name that a saved checkpoint carries."""

    architecture: str
    model_type: str
    names: tuple[str, ...]  # architectures and model types of config.json that mean this family
    kinds: tuple[str, ...]  # of layers
    output_gate: bool  # the attention's output is multiplied by sigmoid of half of q_proj
    qk_norm: bool
    norm_offset: float  # 1 where a norm's weight is stored less one
    rope_types: tuple[str, ...]
    rope_theta: float  # where config.json gives none
    partial_rotary_factor: float  # where config.json gives none; dense families rotate the whole head


FAMILIES = {
    "qwen3_5": Family(
        architecture="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        names=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "qwen3_5_text", "qwen3_5"),
        kinds=(GDN, ATTENTION),
        output_gate=True,
        qk_norm=True,
        norm_offset=1.0,
        rope_types=("default",),
        rope_theta=1e4,
        partial_rotary_factor=0.25,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        names=("Qwen3ForCausalLM", "qwen3"),
        kinds=(ATTENTION,),
        output_gate=False,
        qk_norm=True,
        norm_offset=0.0,
        rope_types=("default", "llama3"),
        rope_theta=1e4,
        partial_rotary_factor=1.0,
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        names=("LlamaForCausalLM", "llama"),
        kinds=(ATTENTION,),
        output_gate=False,
        qk_norm=False,
        norm_offset=0.0,
        rope_types=("default", "llama3"),
        rope_theta=1e4,
        partial_rotary_factor=1.0,
    ),
}
FAMILY_OF = {name: family for family, entry in FAMILIES.items() for name in entry.names}
ALWAYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
OF_GDN = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
# fields that change the computation: the one value that this implementation computes. Null counts as absent
NEUTRAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "quantization_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_multiplier": None,
    "embedding_multiplier": None,
    "residual_multiplier": None,
    "logits_scaling": None,
    "no_rope_layers": None,
    "num_experts": None,
    "num_local_experts": None,
}
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# mrope_*: sections of image positions, which text gives three equal values
ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class TargetConfig:
    """Sizes of the target, with Hugging Face's field names. The `linear_` sizes are those of GDN layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    rope_scaling: Llama3Rope | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    eos_token_id: tuple[int, ...] = field(default=())
    family: str = "qwen3_5"  # a key of FAMILIES

    @staticmethod
    def from_dict(raw: dict) -> "TargetConfig":
        """Return the config in a Hugging Face config.json; a multimodal one's text_config is taken.

        Without `architectures` and `model_type` the family is Qwen3.5, the one that is trained here. Raises ValueError
        for another architecture, a missing size, sizes that do not fit, and for every field of NEUTRAL, rotary type or
        layer type that this implementation does not compute.
        """
        if not isinstance(raw, dict):
            raise ValueError(f"config.json: {type(raw).__name__} is not an object; take the file of the checkpoint")
        text = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else dict(raw)
        # of a multimodal model the outer entry decides, as in transformers
        text["tie_word_embeddings"] = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        text["family"] = _family_name(raw, text)
        family = FAMILIES[text["family"]]
        _refuse_unsupported(text, family)
        text |= _rope_fields(text, family)
        text["layer_types"] = _layer_types(text, family)
        if text["family"] == "llama":  # as transformers: old files leave both out
            text = _llama_defaults(text)
        eos = text.get("eos_token_id")
        text["eos_token_id"] = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        given = {entry.name: text[entry.name] for entry in fields(TargetConfig) if text.get(entry.name) is not None}
        needed = (*ALWAYS, *(OF_GDN if GDN in text["layer_types"] else ()))
        missing = [name for name in needed if name not in given or given[name] == ()]
        if missing:
            raise ValueError(f"config.json: missing {', '.join(missing)}; take the file of the checkpoint")
        return TargetConfig(**given).check(text.get("num_hidden_layers"))

    def check(self, layers: int | None = None) -> "TargetConfig":
        """Return self, or raise ValueError naming the size that does not fit and what is allowed."""
        has_gdn = GDN in self.layer_types
        for key in (*ALWAYS, "linear_conv_kernel_dim", "max_position_embeddings", *(OF_GDN if has_gdn else ())):
            value = getattr(self, key)
            if key != "layer_types" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"config.json: {key} {value!r} is not allowed (allowed: an integer >= 1); {REMEDY}")
        for key in ("rms_norm_eps", "rope_theta"):
            _positive(key, getattr(self, key))
        pairs = [("num_attention_heads", "num_key_value_heads")]
        pairs += [("linear_num_value_heads", "linear_num_key_heads")] if has_gdn else []
        for many, few in pairs:
            if getattr(self, many) % getattr(self, few):
                raise ValueError(
                    f"config.json: {few} {getattr(self, few)} is not allowed (allowed: a divisor of {many}, "
                    f"{getattr(self, many)}); {REMEDY}"
                )
        if layers is not None and layers != len(self.layer_types):
            raise ValueError(
                f"config.json: num_hidden_layers {layers}, but layer_types names {len(self.layer_types)}; {REMEDY}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"config.json: head_dim {self.head_dim} times partial_rotary_factor {self.partial_rotary_factor} gives "
                f"{self.rotary_dim} rotated channels (allowed: an even number up to head_dim); {REMEDY}"
            )
        return self

    @property
    def style(self) -> Family:
        return FAMILIES[self.family]

    @property
    def conv_channels(self) -> int:
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def to_dict(self) -> dict:
        """Return the Hugging Face config.json that `from_dict` reads back."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.style.partial_rotary_factor != 1:
            rope["partial_rotary_factor"] = self.partial_rotary_factor
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3", **vars(self.rope_scaling)}
        left = {"family", "rope_theta", "partial_rotary_factor", "rope_scaling"}
        left |= set() if GDN in self.style.kinds else {*OF_GDN, "linear_conv_kernel_dim"}
        # Llama's config knows no layer types: all its layers are alike
        left |= {"layer_types"} if self.family == "llama" else set()
        return {
            **{name: value for name, value in vars(self).items() if name not in left},
            **({} if "layer_types" in left else {"layer_types": list(self.layer_types)}),
            "architectures": [self.style.architecture],
            "model_type": self.style.model_type,
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "attention_bias": False,
            "num_hidden_layers": len(self.layer_types),
            "eos_token_id": list(self.eos_token_id),
            "rope_parameters": rope,
        }


def _family_name(raw: dict, text: dict) -> str:
    names = [*(raw.get("architectures") or ()), *([text["model_type"]] if text.get("model_type") else ())]
    known = ", ".join(entry.architecture for entry in FAMILIES.values())
    for name in names:
        if name not in FAMILY_OF:
            raise ValueError(
                f"config.json: architecture {name!r} is not supported (allowed: {known}, "
                "Qwen3_5ForConditionalGeneration); use another target"
            )
    if len(found := sorted({FAMILY_OF[name] for name in names})) > 1:
        raise ValueError(f"config.json: architectures and model_type name {' and '.join(found)}; {REMEDY}")
    return found[0] if found else "qwen3_5"


def _refuse_unsupported(text: dict, family: Family) -> None:
    neutral = NEUTRAL | {"attn_output_gate": family.output_gate}
    wanted = {key: (text[key], allowed) for key, allowed in neutral.items() if text.get(key) is not None}
    # Qwen3 names a window that use_sliding_window switches off; elsewhere a window would be used
    if family.model_type != "qwen3" and text.get("sliding_window") is not None:
        wanted["sliding_window"] = (text["sliding_window"], None)
    kinds = set(text.get("layer_types") or ()) - set(family.kinds)
    wanted["layer_types"] = (sorted(map(str, kinds)), [])
    for key, (value, allowed) in wanted.items():
        if value != allowed:
            raise ValueError(
                f"config.json: {key} {value!r} is not supported (allowed: {allowed!r}); use another target"
            )


def _rope_fields(text: dict, family: Family) -> dict:
    new, old = (text.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, rope in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(rope, dict):
            raise ValueError(f"config.json: {key} {rope!r} is not allowed (allowed: an object or null); {REMEDY}")
    if new and old and new != old:
        raise ValueError(f"config.json: rope_parameters {new} and rope_scaling {old} differ; remove one of them")
    rope = new or old
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in family.rope_types:
        allowed = ", ".join(family.rope_types)
        raise ValueError(
            f"config.json: rope_type {kind!r} is not supported (allowed for {family.architecture}: {allowed}); "
            "use another target"
        )
    unknown = sorted(set(rope) - {*ROPE_KEYS, *(LLAMA3_KEYS if kind == "llama3" else ())})
    if unknown:
        raise ValueError(
            f"config.json: rotary keys {', '.join(unknown)} are not supported with rope_type {kind}; use another target"
        )
    part = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    part = family.partial_rotary_factor if part is None else part
    _positive("partial_rotary_factor", part)
    if family.partial_rotary_factor == 1 and part != 1:
        raise ValueError(
            f"config.json: partial_rotary_factor {part!r} is not supported (allowed for {family.architecture}: 1); "
            "use another target"
        )
    theta = rope.get("rope_theta", text.get("rope_theta"))
    return {
        "rope_theta": family.rope_theta if theta is None else theta,
        "partial_rotary_factor": part,
        "rope_scaling": _llama3(rope, text) if kind == "llama3" else None,
    }


def _llama3(rope: dict, text: dict) -> Llama3Rope:
    # transformers takes the model's own length where the original one is not given
    values = {"original_max_position_embeddings": text.get("max_position_embeddings"), **rope}
    missing = [key for key in LLAMA3_KEYS if values.get(key) is None]
    if missing:
        raise ValueError(f"config.json: rope_type llama3 lacks {', '.join(missing)}; {REMEDY}")
    for key in LLAMA3_KEYS:
        _positive(key, values[key])
    if values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ValueError(
            f"config.json: low_freq_factor {values['low_freq_factor']} is not allowed (allowed: below high_freq_factor "
            f"{values['high_freq_factor']}); {REMEDY}"
        )
    return Llama3Rope(**{key: values[key] for key in LLAMA3_KEYS})


def _layer_types(text: dict, family: Family) -> tuple[str, ...]:
    if text.get("layer_types"):
        return tuple(text["layer_types"])
    count = text.get("num_hidden_layers") or 0
    if GDN not in family.kinds:
        return (ATTENTION,) * count
    every = text.get("full_attention_interval", 4)
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"config.json: full_attention_interval {every!r} is not allowed (allowed: 1 or more)")
    return tuple(ATTENTION if (i + 1) % every == 0 else GDN for i in range(count))


def _llama_defaults(text: dict) -> dict:
    heads, width = text.get("num_attention_heads"), text.get("hidden_size")
    if not heads or not width:
        return text  # named as missing
    given = {key: value for key, value in text.items() if value is not None}
    return {"num_key_value_heads": heads, "head_dim": width // heads, **given}


def _positive(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"config.json: {key} {value!r} is not allowed (allowed: a number > 0); {REMEDY}")
