"""Train the weaver against the frozen target's law along sampled answers; target and drafter are frozen.

At each anchor the drafter runs once and gives K candidates a row; the weaver reads the true tokens causally. The LK
loss compares its law over the candidates with the target's: alpha with the target's full mass (what lies outside the
candidates counts as rejected), KL with the target renormalised over them. The true token is not forced into them.
"""

import torch
from torch import Tensor

from tfm import checkpoints
from tfm.manifest import sha256_file, sha256_weights
from tfm.target import Target
from tfm.train.blocks import Blocks, RowMeans, compute_blocks, keep_outputs
from tfm.train.drafter import VALIDATION_BATCHES, add_marginal_measures
from tfm.train.layout import Layout, stage_main
from tfm.train.lk_forms import candidate_log_probs
from tfm.train.loop import Deadline, Stage, train
from tfm.train.losses import LkLoss, leading_matches, lk_loss, row_weights
from tfm.train.peers import ALONE, Peers
from tfm.train.precision import Shadow
from tfm.train.sample import Samples, split_samples
from tfm.train.settings import LossSettings, TrainSettings
from tfm.train.target import load_frozen
from tfm.weaver import Weaver, init_weaver


def run(settings: TrainSettings, layout: Layout, *, device: str, deadline: Deadline, peers: Peers = ALONE) -> dict:
    """Train, or go on training, and export the weaver. Returns the loop's report."""
    samples = Samples.load(layout.require(layout.samples, "sample"))
    kept, held = split_samples(samples, settings, device)
    target = load_frozen(settings, layout, device)
    if settings.keep_outputs:
        keep_outputs(target, kept, settings.weaver.tokens_per_step)
    dtype = getattr(torch, settings.precision)
    drafter = checkpoints.load_drafter(layout.require(layout.weights("drafter"), "drafter"), device=device, dtype=dtype)
    weaver = Weaver(settings.weaver_model)
    init_weaver(weaver, settings.seed)
    shadow = Shadow(weaver.to(device), settings.precision)
    schedule, loss_settings = settings.weaver, settings.weaver_loss

    def loss(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = compute_blocks(target, drafter, batch, train_drafter=False)
        terms, _, _ = weaver_loss(shadow.compute, target, blocks, loss_settings, peers)
        return {"loss": terms.loss, "alpha": terms.alpha, "kl": terms.kl, "kl_weight": terms.kl_weight}

    def validate() -> dict[str, float]:
        means = RowMeans()
        for batch in held.fixed_batches(schedule.tokens_per_step, VALIDATION_BATCHES, loss_settings.anchors):
            blocks = compute_blocks(target, drafter, batch, train_drafter=False)
            add_measures(means, shadow.compute, target, blocks, loss_settings)
        return means.means()

    inputs = {
        "target": sha256_weights(layout.weights("target")),
        "drafter": sha256_weights(layout.weights("drafter")),
        "samples": sha256_file(layout.samples),
    }
    report = train(
        Stage(
            name="weaver",
            shadow=shadow,
            schedule=schedule,
            digest_fields=settings.digest_fields("weaver") | inputs,
            batch=lambda step: kept.batch(step, schedule.tokens_per_step, loss_settings.anchors, peers),
            loss=loss,
            validate=validate,
            peers=peers,
        ),
        layout.stage("weaver"),
        deadline=deadline,
    )
    if report["done"] and peers.is_first:
        checkpoints.save_weaver(weaver, layout.weights("weaver"), storage=settings.storage)
    peers.wait()
    return report | {"parameters": sum(p.numel() for p in weaver.parameters())}


def weaver_loss(
    weaver: Weaver, target: Target, blocks: Blocks, settings: LossSettings, peers: Peers = ALONE
) -> tuple[LkLoss, Tensor, Tensor]:
    """Return (LK loss, candidates [R, A, D, K], weaver log-probs over them [R, A, D, K])."""
    count = min(weaver.config.candidate_pool_size, blocks.draft_logits.shape[-1])
    base, candidates = blocks.draft_logits.topk(count, dim=-1)
    queries = weaver.path_queries(
        blocks.target_hidden.flatten(0, 1), blocks.draft_hidden.flatten(0, 1), target.embed(blocks.inputs.flatten(0, 1))
    )
    # all head rows, then the candidates': a small vocabulary makes this cheaper than gathering K rows of the head
    residual = target.head(queries).unflatten(0, candidates.shape[:2]).gather(-1, candidates)
    log_probs = (base.float() + residual.float()).log_softmax(-1)
    terms = lk_loss(
        candidate_log_probs(blocks.target_logits, candidates, settings.form),
        log_probs,
        row_weights(blocks.valid, settings.gamma),
        kl_scale=settings.kl_scale,
        kl_decay=settings.kl_decay,
        peers=peers,
    )
    return terms, candidates, log_probs


@torch.no_grad()
def add_measures(means: RowMeans, weaver: Weaver, target: Target, blocks: Blocks, settings: LossSettings) -> None:
    """Add the marginals' measures as marginal_*, and the weaver's val_alpha, val_chain and candidate coverage."""
    marginal = RowMeans()
    add_marginal_measures(marginal, blocks, settings)
    for name in ("val_alpha", "val_chain"):
        means.sums[f"marginal_{name}"] = means.sums.get(f"marginal_{name}", 0) + marginal.sums[name]
        means.counts[f"marginal_{name}"] = means.counts.get(f"marginal_{name}", 0) + marginal.counts[name]
    terms, candidates, log_probs = weaver_loss(weaver, target, blocks, settings)
    means.add("val_loss", terms.loss.expand(1, 1), torch.ones(1, 1, device=terms.loss.device))
    means.add("val_alpha", terms.alpha_rows, blocks.valid)
    best = candidates.gather(-1, log_probs.argmax(-1, keepdim=True))[..., 0]
    chain = leading_matches(best, blocks.tokens, blocks.valid)[..., None]
    means.add("val_chain", chain, torch.ones_like(chain))
    means.add("val_covered", (candidates == blocks.tokens[..., None]).any(-1), blocks.valid)


if __name__ == "__main__":
    stage_main("weaver", run, __doc__)
