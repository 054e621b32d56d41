"""Train the target on next tokens: conversations in rows of at most 512 tokens, each from its own beginning."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from tfm import checkpoints
from tfm.target import Target
from tfm.train.gdn import use_form
from tfm.train.layout import Layout, stage_main
from tfm.train.loop import Deadline, Stage, train
from tfm.train.losses import next_token_loss
from tfm.train.peers import ALONE, Peers
from tfm.train.precision import Shadow
from tfm.train.rows import split_text
from tfm.train.settings import TrainSettings
from tfm.train.text import TokenisedText

VALIDATION_BATCHES = 2  # of each bucket


def run(settings: TrainSettings, layout: Layout, *, device: str, deadline: Deadline, peers: Peers = ALONE) -> dict:
    """Train, or go on training, and export the target that all later stages use. Returns the loop's report."""
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
    use_form(target.to(device), settings.gdn, device)
    shadow, schedule = Shadow(target, settings.precision), settings.target

    def validate() -> dict[str, float]:
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in held.fixed_batches(schedule.tokens_per_step, VALIDATION_BATCHES):
                tokens = int(batch["lengths"].sum()) - len(batch["lengths"])
                total += float(target_loss(shadow.compute, batch)) * tokens
                count += tokens
        return {"val_loss": total / count}

    report = train(
        Stage(
            name="target",
            shadow=shadow,
            schedule=schedule,
            digest_fields=settings.digest_fields("target"),
            batch=lambda step: kept.batch(step, schedule.tokens_per_step, peers=peers),
            loss=lambda batch: {"loss": target_loss(shadow.compute, batch, peers)},
            validate=validate,
            peers=peers,
        ),
        layout.stage("target"),
        deadline=deadline,
    )
    if report["done"] and peers.is_first:
        sharpen(target, settings.sharpen)
        checkpoints.save_target(target, layout.weights("target"), storage=settings.storage)
    peers.wait()
    return report | {"parameters": sum(p.numel() for p in target.parameters()), "train_tokens": kept.total_tokens}


def target_loss(target: nn.Module, batch: dict[str, Tensor], peers: Peers = ALONE) -> Tensor:
    """Return the mean next-token cross entropy in nats over all real tokens, prompts included (see next_token_loss)."""
    return next_token_loss(target(batch["tokens"]).logits, batch["tokens"], batch["lengths"], peers)


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
    """Return the exported target in the run's precision: later stages see the weights that ship."""
    taps, dtype = settings.drafter_model.target_layer_ids, getattr(torch, settings.precision)
    target = checkpoints.load_target(Path(layout.weights("target")), device=device, dtype=dtype, tap_layers=taps)
    return use_form(target, settings.gdn, device)


if __name__ == "__main__":
    stage_main("target", run, __doc__)
