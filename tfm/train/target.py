"""Train the target on next tokens: conversations in rows of at most 512 tokens, each from its own beginning."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from tfm import checkpoints
from tfm.target import Target
from tfm.train.layout import Layout, stage_main
from tfm.train.loop import Deadline, Stage, train
from tfm.train.losses import next_token_loss
from tfm.train.rows import split_text
from tfm.train.settings import TrainSettings
from tfm.train.text import TokenisedText

VALIDATION_BATCHES = 2  # of each bucket


def run(settings: TrainSettings, layout: Layout, *, device: str, deadline: Deadline) -> dict:
    """Train, or go on training, and export the bfloat16 target that all later stages use. Returns the loop's report."""
    text = TokenisedText.load(layout.corpus)
    kept, held = split_text(
        text,
        buckets=settings.text.buckets,
        held_out_every=settings.text.held_out_every,
        seed=settings.seed,
        device=device,
    )
    target = Target(settings.target_model, tap_layers=settings.drafter_model.target_layer_ids)
    init_target(target, settings.seed)
    target.to(device)
    schedule = settings.target

    def validate() -> dict[str, float]:
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in held.fixed_batches(schedule.tokens_per_step, VALIDATION_BATCHES):
                tokens = int(batch["lengths"].sum()) - len(batch["lengths"])
                total += float(target_loss(target, batch)) * tokens
                count += tokens
        return {"val_loss": total / count}

    report = train(
        Stage(
            name="target",
            model=target,
            schedule=schedule,
            digest_fields=settings.digest_fields("target"),
            batch=lambda step: kept.batch(step, schedule.tokens_per_step),
            loss=lambda batch: {"loss": target_loss(target, batch)},
            validate=validate,
        ),
        layout.stage("target"),
        deadline=deadline,
    )
    if report["done"]:
        sharpen(target, settings.sharpen)
        checkpoints.save_target(target, layout.weights("target"))
    return report | {"parameters": sum(p.numel() for p in target.parameters()), "train_tokens": kept.total_tokens}


def target_loss(target: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean next-token cross entropy in nats over all real tokens, prompts included."""
    return next_token_loss(target(batch["tokens"]).logits, batch["tokens"], batch["lengths"])


@torch.no_grad()
def sharpen(target: Target, factor: float) -> None:
    """Multiply the logits by `factor` through the final norm: the law becomes the old one at temperature 1 / factor.

    A model of this size is far less certain than a 27B; sharpened, its tokens are about as predictable as drafting
    methods are made for. The card states the factor and the entropy.
    """
    target.norm.weight.copy_((1.0 + target.norm.weight) * factor - 1.0)


def init_target(target: Target, seed: int) -> None:
    """Fill every parameter from `seed`: matrices normal(0, 0.02), output projections smaller by sqrt(2 layers).

    The decay starts as in Mamba: time steps log-uniform in [0.001, 0.1], A uniform in [1, 16].
    """
    generator = torch.Generator().manual_seed(seed)
    narrow = 0.02 / math.sqrt(2 * len(target.layers))
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(1, 16, generator=generator).log())
            elif name.endswith("dt_bias"):
                low, high = math.log(1e-3), math.log(1e-1)
                time_step = torch.empty_like(parameter).uniform_(low, high, generator=generator).exp()
                parameter.copy_(time_step + torch.log(-torch.expm1(-time_step)))  # the inverse of softplus
            elif name.endswith("conv1d.weight"):
                bound = parameter.shape[-1] ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
            elif parameter.dim() > 1:
                is_output = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                parameter.normal_(std=narrow if is_output else 0.02, generator=generator)


def load_frozen(settings: TrainSettings, layout: Layout, device: str) -> Target:
    """Return the exported target in float32: later stages see the weights that ship, rounded to bfloat16."""
    taps = settings.drafter_model.target_layer_ids
    return checkpoints.load_target(Path(layout.weights("target")), device=device, tap_layers=taps)


if __name__ == "__main__":
    stage_main("target", run, __doc__)
