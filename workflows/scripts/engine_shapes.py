"""Random models of the paper's shapes, made on the device, and the bytes that a step of each method must read."""

from dataclasses import dataclass

import torch
from torch import nn

from tfm.decode import Models
from tfm.drafter import Drafter, DrafterConfig
from tfm.target import Target
from tfm.target_config import ATTENTION, GDN, TargetConfig
from tfm.weaver import Weaver, WeaverConfig

TAPS = (1, 16, 31, 46, 61)


@dataclass(frozen=True)
class Sizes:
    """What the shapes of target, drafter and weaver follow from; heads are (many, few)."""

    vocab: int
    hidden: int
    inner: int  # of every feed-forward block but the weaver's
    layers: int
    heads: tuple[int, int]
    head_dim: int
    gdn_heads: tuple[int, int]  # key, value
    gdn_dim: int
    drafter_heads: tuple[int, int]
    drafter_dim: int
    rank: int  # of the weaver, its feed-forward block included
    rank_heads: int


SIZES = {
    # Qwen3.6-27B, its public DFlash drafter and the released weaver
    "paper": Sizes(248_320, 5120, 17_408, 64, (24, 4), 256, (16, 48), 128, (32, 8), 128, 2048, 16),
    # the same kernels in a tenth of the memory: to compile them and to see them run
    "shallow": Sizes(32_768, 5120, 17_408, 8, (24, 4), 256, (16, 48), 128, (32, 8), 128, 2048, 16),
    # a rehearsal of the same scripts where there is no GPU
    "small": Sizes(512, 128, 256, 8, (4, 2), 32, (1, 3), 16, (4, 2), 32, 64, 2),
}


def target_config(sizes: Sizes) -> TargetConfig:
    """Return the target's shape: every fourth layer is attention."""
    return TargetConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        layer_types=tuple(ATTENTION if (i + 1) % 4 == 0 else GDN for i in range(sizes.layers)),
        num_attention_heads=sizes.heads[0],
        num_key_value_heads=sizes.heads[1],
        head_dim=sizes.head_dim,
        linear_num_key_heads=sizes.gdn_heads[0],
        linear_num_value_heads=sizes.gdn_heads[1],
        linear_key_head_dim=sizes.gdn_dim,
        linear_value_head_dim=sizes.gdn_dim,
        max_position_embeddings=32_768,
    )


def drafter_config(sizes: Sizes) -> DrafterConfig:
    """Return the drafter's shape; its taps are spread over the target's layers."""
    return DrafterConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_attention_heads=sizes.drafter_heads[0],
        num_key_value_heads=sizes.drafter_heads[1],
        head_dim=sizes.drafter_dim,
        layer_types=("sliding_attention",) * 4 + ("full_attention",),
        target_layer_ids=tuple(min(tap * sizes.layers // 64, sizes.layers - 1) for tap in TAPS),
        mask_token_id=7,
        sliding_window=2048,
    )


def weaver_config(sizes: Sizes) -> WeaverConfig:
    """Return the weaver's shape."""
    return WeaverConfig(
        d_model=sizes.hidden, d_embed=sizes.hidden, d_rank=sizes.rank, num_heads=sizes.rank_heads, mlp_dim=sizes.rank
    )


def random_models(sizes: Sizes, device: torch.device) -> Models:
    """Return bf16 models with random weights: the cost of the real ones, drafts that are never right."""
    drafter = drafter_config(sizes)
    taps = tuple(dict.fromkeys(drafter.target_layer_ids))
    if len(taps) != len(TAPS):
        raise ValueError(f"layers: {sizes.layers} is not allowed (allowed: 5 or more, for five taps); raise it")
    parts = [("target", lambda: Target(target_config(sizes), taps)), ("drafter", lambda: Drafter(drafter))]
    parts.append(("weaver", lambda: Weaver(weaver_config(sizes))))
    torch.manual_seed(0)
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
