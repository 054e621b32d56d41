"""A small random family without a single zero, shapes to widen it to, and one pass through all its parts."""

from dataclasses import replace

import torch
from torch import Tensor

from tfm.decode import Models
from tfm.drafter import Drafter, DrafterConfig
from tfm.graft_shape import PARTS
from tfm.marginals import Marginals
from tfm.target import Target, TargetConfig
from tfm.tree import DraftTree
from tfm.weaver import Weaver, WeaverConfig, WeaverScorer

GDN, ATTENTION = "linear_attention", "full_attention"
WIDTH, VOCAB = 12, 30
# attention groups of 2, GDN groups of 3, a tap after the first layer, an inner and the last one
TARGET = TargetConfig(
    VOCAB,
    WIDTH,
    20,
    (GDN, ATTENTION, GDN, ATTENTION),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=3,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    partial_rotary_factor=0.5,
    tie_word_embeddings=True,
    rms_norm_eps=1e-2,  # large, so that an eps taken wrongly shows
)
DRAFTER = DrafterConfig(
    WIDTH, 14, 4, 2, 8, ("sliding_attention", "full_attention"), (0, 2, 3), 5, 6, 4, rms_norm_eps=1e-2
)
WEAVER = WeaverConfig(d_model=WIDTH, d_embed=WIDTH, d_rank=8, num_heads=2, mlp_dim=10, K=5, norm_eps=1e-2)


def heads(*, attention: tuple[int, int], gdn: tuple[int, int]) -> dict[str, int]:
    """Sizes of a target's shape from (query, key) and (value, key) heads."""
    many, few = ("num_attention_heads", "linear_num_value_heads"), ("num_key_value_heads", "linear_num_key_heads")
    return {
        **dict(zip(many, (attention[0], gdn[0]), strict=True)),
        **dict(zip(few, (attention[1], gdn[1]), strict=True)),
    }


WIDER = {
    "target": {"hidden_size": 5 * WIDTH, "vocab_size": 47, "intermediate_size": 33},
    "drafter": {"intermediate_size": 21},
    "weaver": {"d_rank": 24, "num_heads": 6, "mlp_dim": 13, "K": 7},
}
DEEPER = {
    "target": {"num_hidden_layers": 10, "full_attention_interval": 2, "layers": [2, 3, 6, 9]},
    "drafter": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "target_layer_ids": [2, 8, 9],
        "layers": [2, 3],
    },
    "weaver": {"num_layers": 3, "layers": [1]},
}
SHAPES = {
    "the_same": {part: {} for part in PARTS},
    "wider_by_no_power_of_two": WIDER,
    "deeper": DEEPER,
    "larger_groups": {
        "target": heads(attention=(18, 3), gdn=(10, 2)),
        "drafter": {"num_attention_heads": 12, "num_key_value_heads": 3},
        "weaver": {},
    },
    "smaller_groups_with_copied_key_heads": {
        "target": heads(attention=(5, 5), gdn=(8, 4)),
        "drafter": {"num_attention_heads": 4, "num_key_value_heads": 4},
        "weaver": {},
    },
    "everything": {part: {**WIDER[part], **DEEPER[part]} for part in PARTS},
}  # fmt: skip

# of the shipped family nano
MIDDLE = {
    "target": {
        "vocab_size": 3000, "hidden_size": 480, "intermediate_size": 600, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "layers": [1, 2, 4, 7],
    },
    "drafter": {
        "intermediate_size": 400, "num_attention_heads": 6, "num_key_value_heads": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "target_layer_ids": [1, 6, 7], "layers": [1, 2],
    },
    "weaver": {"d_rank": 256, "num_heads": 8, "mlp_dim": 200, "K": 16, "layers": [0]},
}  # fmt: skip


def random_family(dtype: torch.dtype = torch.float64, *, tied: bool = True, seed: int = 0) -> Models:
    """Models whose every weight is random and non-zero, so that a misplaced one shows."""
    generator = torch.Generator().manual_seed(seed)
    target = Target(replace(TARGET, tie_word_embeddings=tied), DRAFTER.target_layer_ids)
    models = Models(target, Drafter(DRAFTER), Weaver(WEAVER))
    for part in PARTS:
        model = getattr(models, part).to(dtype).requires_grad_(False).eval()
        for parameter in model.parameters():
            spread = 0.4 if parameter.dim() > 1 else 0.2
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    return models


def narrow(value: Tensor, width: int) -> Tensor:
    """The copies of a repeated vector as a dimension of their own, [.., copies, width]."""
    return value.unflatten(-1, (-1, width))


def one_pass(models: Models, prompts: Tensor, lengths: Tensor, tree: DraftTree) -> dict[str, Tensor]:
    """Prefill, verify a tree, commit a path of it, verify it again, draft, score first nodes with the weaver."""
    target, drafter, weaver = models.target, models.drafter, models.weaver
    width, taps = target.config.hidden_size, len(target.tap_layers)
    cache = target.new_cache(len(prompts), prompts.shape[1] + 20)
    prefill = target.prefill(prompts, lengths, cache)
    first = target.verify(tree, cache)
    leaf = torch.tensor([[0, 1, 3, -1], [0, 2, -1, -1]])
    cache.commit(first.scratch, leaf)
    second = target.verify(tree, cache)
    context = drafter.new_cache(len(prompts), prompts.shape[1] + 20)
    drafter.append(prefill.taps, lengths, context)
    logits, hidden = drafter.draft(tree.tokens[:, 0], context, target)
    embeds = target.embed(tree.tokens[:, : drafter.draft_rows])
    queries = weaver.path_queries(prefill.hidden[:, 0], hidden, embeds)
    scorer, marginals = WeaverScorer(weaver, target), Marginals.from_logits(logits, hidden, 12)
    scorer.begin(marginals, prefill.hidden[:, 0], 3)
    at = torch.tensor([[0], [0]])
    scores = [scorer.expand(at, at, tree.tokens[:, :1], at)]
    scores.append(scorer.expand(at + 1, at, tree.tokens[:, 1:2], at + 1))
    rows = {"prefill": prefill, "verify": first, "verify_after_commit": second}
    found = {f"{name}_logits": output.logits for name, output in rows.items()}
    found |= {f"{name}_hidden": output.hidden for name, output in rows.items()}
    found |= {f"{name}_taps": output.taps.unflatten(-1, (taps, width)) for name, output in rows.items()}
    found |= {"draft_logits": logits, "draft_hidden": hidden, "weaver_residual": queries @ target.head_weight.mT}
    return found | {"candidates": marginals.tokens, "weaver_scores": torch.cat(scores, 1)}
