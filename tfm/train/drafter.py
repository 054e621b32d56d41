"""Train the drafter against the frozen target's law along sampled answers, with the LK loss.

Row d weighs exp(-d / gamma); rows past the end of the answer do not count. Anchors are uniform over each answer.
"""

import torch
from torch import Tensor

from tfm import checkpoints
from tfm.drafter import Drafter, init_drafter
from tfm.manifest import sha256_file, sha256_weights
from tfm.train.blocks import Blocks, RowMeans, compute_blocks, keep_outputs
from tfm.train.layout import Layout, stage_main
from tfm.train.lk_forms import lk_rows
from tfm.train.loop import Deadline, Stage, train
from tfm.train.losses import LkLoss, leading_matches, lk_of_rows, row_weights
from tfm.train.peers import ALONE, Peers
from tfm.train.precision import Shadow
from tfm.train.sample import Samples, split_samples
from tfm.train.settings import LossSettings, TrainSettings
from tfm.train.target import load_frozen

VALIDATION_BATCHES = 2  # of each bucket


def run(settings: TrainSettings, layout: Layout, *, device: str, deadline: Deadline, peers: Peers = ALONE) -> dict:
    """Train, or go on training, and export the drafter. Returns the loop's report."""
    samples = Samples.load(layout.require(layout.samples, "sample"))
    kept, held = split_samples(samples, settings, device)
    target = load_frozen(settings, layout, device)
    if settings.keep_outputs:
        keep_outputs(target, kept, settings.drafter.tokens_per_step)
    drafter = Drafter(settings.drafter_model)
    init_drafter(drafter, settings.seed)
    shadow = Shadow(drafter.to(device), settings.precision)
    schedule, loss_settings = settings.drafter, settings.drafter_loss

    def loss(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = compute_blocks(target, shadow.compute, batch, train_drafter=True)
        terms = drafter_loss(blocks, loss_settings, peers)
        return {"loss": terms.loss, "alpha": terms.alpha, "kl": terms.kl, "kl_weight": terms.kl_weight}

    def validate() -> dict[str, float]:
        means = RowMeans()
        for batch in held.fixed_batches(schedule.tokens_per_step, VALIDATION_BATCHES, loss_settings.anchors):
            blocks = compute_blocks(target, shadow.compute, batch, train_drafter=False)
            add_marginal_measures(means, blocks, loss_settings)
        return means.means()

    inputs = {"target": sha256_weights(layout.weights("target")), "samples": sha256_file(layout.samples)}
    report = train(
        Stage(
            name="drafter",
            shadow=shadow,
            schedule=schedule,
            digest_fields=settings.digest_fields("drafter") | inputs,
            batch=lambda step: kept.batch(step, schedule.tokens_per_step, loss_settings.anchors, peers),
            loss=loss,
            validate=validate,
            peers=peers,
        ),
        layout.stage("drafter"),
        deadline=deadline,
    )
    if report["done"] and peers.is_first:
        checkpoints.save_drafter(drafter, layout.weights("drafter"), storage=settings.storage)
    peers.wait()
    return report | {"parameters": sum(p.numel() for p in drafter.parameters())}


def drafter_loss(blocks: Blocks, settings: LossSettings, peers: Peers = ALONE) -> LkLoss:
    """Return the LK loss of the marginals over the whole vocabulary."""
    return lk_of_rows(
        *lk_rows(blocks.target_logits, blocks.draft_logits, settings.form),
        row_weights(blocks.valid, settings.gamma),
        kl_scale=settings.kl_scale,
        kl_decay=settings.kl_decay,
        peers=peers,
    )


@torch.no_grad()
def add_marginal_measures(means: RowMeans, blocks: Blocks, settings: LossSettings) -> None:
    """Add val_alpha (acceptance of the full marginals by position) and val_chain (length of the argmax chain)."""
    terms = drafter_loss(blocks, settings)
    means.add("val_loss", terms.loss.expand(1, 1), torch.ones(1, 1, device=terms.loss.device))
    means.add("val_alpha", terms.alpha_rows, blocks.valid)
    chain = leading_matches(blocks.draft_logits.argmax(-1), blocks.tokens, blocks.valid)[..., None]
    means.add("val_chain", chain, torch.ones_like(chain))


if __name__ == "__main__":
    stage_main("drafter", run, __doc__)
