"""Train a drafter and correction heads for a target that is given (suite dense), in bounded, resumable calls.

    python -m tfm.llama_gguf --out tfm/weights/smollm2/target
    python -m tfm.train.dense --config workflows/config/train_dense.yaml --target tfm/weights/smollm2/target \
        --gguf FILE --data DIR --out OUT --device cuda --minutes 9
    python -m tfm.train.export --from OUT/weights --to tfm/weights/smollm2

Stages: sample (the target's answers), drafter, then one for each head against the drafter as it ships, then export
(size limit, card, hashes). Every call does what fits and says what remains; call again with the same --out until
nothing does. The last line of stdout is a JSON object: {"done": [stages], "remaining": [stages], "reports": [...]}.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tfm import checkpoints
from tfm.drafter import Drafter, init_drafter
from tfm.heads import build_head, init_head
from tfm.manifest import sha256_file, sha256_weights
from tfm.target import Target
from tfm.train import dense_export, dense_sample
from tfm.train.blocks import RowMeans, compute_blocks, keep_outputs
from tfm.train.dense_settings import PARTS, DenseSettings, PartSettings, load_dense_settings
from tfm.train.drafter import VALIDATION_BATCHES, add_marginal_measures, drafter_loss
from tfm.train.layout import Layout, prepare_device
from tfm.train.lk_forms import FORMS, check_form
from tfm.train.loop import Deadline, Stage, train
from tfm.train.losses import LkLoss
from tfm.train.precision import Shadow
from tfm.train.sample import Samples
from tfm.train.weaver import add_measures, weaver_loss
from tfm.weaver import Weaver, init_weaver

STAGES = ("sample", *PARTS, "export")


class Material:
    """What all parts are trained on, loaded once a call: the frozen target, and the rows with its outputs."""

    def __init__(self, settings: DenseSettings, layout: Layout, target: Path, device: str):
        samples = Samples.load(layout.require(layout.samples, "sample"))
        self.kept, self.held = dense_sample.split(samples, settings.sample, seed=settings.seed, device=device)
        drafter, dtype = settings.parts["drafter"], getattr(torch, settings.precision)
        taps = drafter.model.target_layer_ids
        self.target = checkpoints.load_target(target, device=device, dtype=dtype, tap_layers=taps)
        if settings.keep_outputs:
            keep_outputs(self.target, self.kept, drafter.train.tokens_per_step)
        self.inputs = {"target": sha256_weights(target), "samples": sha256_file(layout.samples)}


def run_part(
    name: str, settings: DenseSettings, layout: Layout, material: Material, *, device: str, deadline: Deadline
) -> dict:
    """Train, or go on training, one part and export it. Returns the loop's report."""
    kept, held, frozen = material.kept, material.held, material.target
    part, dtype = settings.parts[name], getattr(torch, settings.precision)
    check_form(part.loss.form, frozen.config.vocab_size, device, dtype)
    model = new_part(name, part, settings.seed)
    shadow = Shadow(model.to(device), settings.precision)
    inputs, drafter = dict(material.inputs), None
    if name != "drafter":
        folder = layout.require(layout.weights("drafter"), "drafter")
        drafter = checkpoints.load_drafter(folder, device=device, dtype=dtype)
        inputs["drafter"] = sha256_weights(folder)
    loss, measure = objectives(part, frozen, shadow.compute, drafter)

    def validate() -> dict[str, float]:
        means = RowMeans()
        for batch in held.fixed_batches(part.train.tokens_per_step, VALIDATION_BATCHES, part.loss.anchors):
            measure(means, batch)
        return means.means()

    report = train(
        Stage(
            name=name,
            shadow=shadow,
            schedule=part.train,
            digest_fields=settings.digest_fields(name) | inputs,
            batch=lambda step: kept.batch(step, part.train.tokens_per_step, part.loss.anchors),
            loss=lambda batch: terms_of(loss(batch)),
            validate=validate,
        ),
        layout.stage(name),
        deadline=deadline,
    )
    if report["done"]:
        save_part(name, model, layout.weights(name), storage=settings.storage)
    return report | {"parameters": sum(p.numel() for p in model.parameters())}


def objectives(
    part: PartSettings, target: Target, model: nn.Module, drafter: Drafter | None
) -> tuple[Callable[[dict[str, Tensor]], LkLoss], Callable[[RowMeans, dict[str, Tensor]], None]]:
    """Return (LK loss of a batch, measures of a batch added to means) of the drafter, or with one of a head on it."""
    if drafter is None:
        return (
            lambda batch: drafter_loss(compute_blocks(target, model, batch, train_drafter=True), part.loss),
            lambda means, batch: add_marginal_measures(
                means, compute_blocks(target, model, batch, train_drafter=False), part.loss
            ),
        )
    return (
        # a head offers what the weaver's loss asks for: path_queries, and candidate_pool_size in its config
        lambda batch: weaver_loss(
            model, target, compute_blocks(target, drafter, batch, train_drafter=False), part.loss
        )[0],
        lambda means, batch: add_measures(
            means, model, target, compute_blocks(target, drafter, batch, train_drafter=False), part.loss
        ),
    )


def terms_of(loss: LkLoss) -> dict[str, Tensor]:
    """Return what the loop reports of a loss."""
    return {"loss": loss.loss, "alpha": loss.alpha, "kl": loss.kl, "kl_weight": loss.kl_weight}


def new_part(name: str, part: PartSettings, seed: int) -> nn.Module:
    """Return a part with its first weights."""
    if name == "drafter":
        model = Drafter(part.model)
        init_drafter(model, seed)
    elif name == "weaver":
        model = Weaver(part.model)
        init_weaver(model, seed)
    else:
        model = build_head(part.model)
        init_head(model, seed)
    return model


def save_part(name: str, model: nn.Module, folder: Path, *, storage: str) -> None:
    """Write a part in its format."""
    saves = {"drafter": checkpoints.save_drafter, "weaver": checkpoints.save_weaver}
    saves.get(name, checkpoints.save_head)(model, folder, storage=storage)


def run_stages(settings: DenseSettings, layout: Layout, stages: list[str], options, deadline: Deadline) -> dict:
    """Run the stages in order until one cannot finish before the deadline; finished ones only report."""
    reports, material = [], None
    for stage in stages:
        if deadline.is_over:
            break
        began, common = time.monotonic(), {"device": options.device, "deadline": deadline}
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()  # what the last stage held counts as taken otherwise
        if stage == "sample":
            report = dense_sample.run(settings, layout, gguf=options.gguf, **common)
        elif stage == "export":
            report = dense_export.run(settings, layout, target=options.target)
        else:
            material = material or Material(settings, layout, options.target, options.device)
            report = run_part(stage, settings, layout, material, **common)
        reports.append(report | {"call_seconds": round(time.monotonic() - began, 1)})
        print(json.dumps(reports[-1]), file=sys.stderr, flush=True)
        if not report["done"]:
            break
    done = [report["stage"] for report in reports if report["done"]]
    return {"done": done, "remaining": [stage for stage in stages if stage not in done], "reports": reports}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="workflows/config/train_dense.yaml")
    add("--target", type=Path, required=True, help="the target's folder, written by python -m tfm.llama_gguf")
    add("--gguf", type=Path, help="the file it was written from; the sample stage reads it, and so does nothing else")
    add("--data", type=Path, help="folder of training text; the sample stage answers its prompts")
    add("--out", type=Path, required=True, help="folder of the run; a second call goes on in it")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--minutes", type=float, help="stop cleanly after this time; default: never")
    add("--stages", default=None, help="comma-separated, in order; default: all that the config names")
    add("--loss-form", choices=FORMS, help="in place of the config's; a CPU takes torch")
    add("--no-graphs", action="store_true", help="do not use CUDA graphs")
    for part in PARTS:
        add(f"--{part}-steps", type=int, help="in place of the config's")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    settings = load_dense_settings(options.config)
    for part in settings.parts:
        settings = settings.with_steps(part, getattr(options, f"{part}_steps"))
    settings = settings.without_graphs() if options.no_graphs else settings
    form = options.loss_form or ("torch" if options.device == "cpu" else None)
    settings = settings.with_loss_form(form) if form else settings
    known = ["sample", *settings.parts, "export"]
    stages = options.stages.split(",") if options.stages else known
    unknown = [stage for stage in stages if stage not in known]
    if unknown:
        raise SystemExit(f"stages: {', '.join(unknown)} is not allowed (allowed: {', '.join(known)})")
    if "sample" in stages and options.gguf is None and not Layout(options.out, None).samples.is_file():
        raise SystemExit("gguf: missing for the sample stage; give --gguf FILE, the file that the target is made of")
    prepare_device(options.device)
    layout, deadline = Layout(options.out, options.data), Deadline(options.minutes)
    print(json.dumps(run_stages(settings, layout, stages, options, deadline)))


if __name__ == "__main__":
    main()
