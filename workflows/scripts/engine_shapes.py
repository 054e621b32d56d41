"""Random models of the paper's shapes, made on the device, and the bytes that a step of each method must read."""

import torch
from torch import nn

from tfm.decode import Models
from tfm.drafter import Drafter, DrafterConfig
from tfm.target import Target
from tfm.target_config import ATTENTION, GDN, TargetConfig
from tfm.weaver import Weaver, WeaverConfig

TAPS = (1, 16, 31, 46, 61)
VOCAB, HIDDEN, FFN = 248_320, 5120, 17_408


def target_config(layers: int, vocab: int = VOCAB) -> TargetConfig:
    """Return Qwen3.6-27B's shape with `layers` layers, every fourth of them attention."""
    return TargetConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        layer_types=tuple(ATTENTION if (i + 1) % 4 == 0 else GDN for i in range(layers)),
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=32_768,
    )


def drafter_config(layers: int) -> DrafterConfig:
    """Return the shape of the public DFlash drafter; taps are spread over `layers` target layers."""
    return DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        layer_types=("sliding_attention",) * 4 + ("full_attention",),
        target_layer_ids=tuple(min(tap * layers // 64, layers - 1) for tap in TAPS),
        mask_token_id=7,
        sliding_window=2048,
    )


def weaver_config() -> WeaverConfig:
    """Return the released weaver's shape."""
    return WeaverConfig(d_model=HIDDEN, d_embed=HIDDEN, d_rank=2048, num_heads=16, mlp_dim=2048)


def random_models(layers: int, device: torch.device, vocab: int = VOCAB) -> Models:
    """Return bf16 models with random weights: the cost of the real ones, drafts that are never right."""
    target = target_config(layers, vocab)
    drafter = drafter_config(layers)
    taps = tuple(dict.fromkeys(drafter.target_layer_ids))
    if len(taps) != len(TAPS):
        raise ValueError(f"layers: {layers} is not allowed (allowed: 5 or more, for five taps); raise it")
    parts = [("target", lambda: Target(target, taps)), ("drafter", lambda: Drafter(drafter))]
    parts.append(("weaver", lambda: Weaver(weaver_config())))
    torch.cuda.manual_seed(0)
    return Models(**{name: _fill(make, device) for name, make in parts})


def _fill(make, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        module = make()
    module = module.to(torch.bfloat16).to_empty(device=device)
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(0.0, 2.0)
        elif parameter.dim() > 1:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
        else:
            # norms: the target's store their weight less one
            is_weight = name.endswith("weight") and not (isinstance(module, Target) and "linear_attn" not in name)
            parameter.data.fill_(1.0 if is_weight else 0.0)
    return module.eval().requires_grad_(False)


def weight_bytes(module: nn.Module, *, without: tuple[str, ...] = ()) -> int:
    """Return the bytes of a module's parameters, those whose name starts with one of `without` left out."""
    named = module.named_parameters()
    return sum(value.numel() * value.element_size() for name, value in named if not name.startswith(without))


def step_bytes(models: Models, method: str, *, context: int) -> dict[str, int]:
    """Return the bytes that one step reads at least: weights, head, keys, values, states; embeddings are a few rows."""
    target, config = models.target, models.target.config
    head = target.head_weight.numel() * target.head_weight.element_size()
    inner = weight_bytes(target, without=("embed_tokens", "lm_head"))
    row = 2 * config.num_key_value_heads * config.head_dim * 2
    states = config.layer_types.count(GDN) * config.linear_num_value_heads * config.linear_key_head_dim
    found = {
        "target": inner,
        "head": head,
        "target_rows": config.layer_types.count(ATTENTION) * row * context,
        # read by verify, read and written by commit
        "states": 3 * states * config.linear_value_head_dim * 4,
    }
    if method != "ar":
        found |= {"drafter": weight_bytes(models.drafter), "draft_head": head}
    if method in ("tfm", "dartree"):
        # once: the block's weights fit the L2 cache that its expansions share; its tables are read by the row
        found["weaver"] = weight_bytes(models.weaver.blocks)
    return found
