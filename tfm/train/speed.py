"""Time training steps of the target on this device, variant by variant, before any time is spent on training.

    python -m tfm.train.speed --config workflows/config/train_mini.yaml --device cuda --variants bfloat16/blocked

A variant is precision/form (see `precision` and `gdn` in tfm/train/settings.py), "/graphs" behind it captures CUDA
graphs as training does. Random tokens, the config's batch, every row length; prints one line a variant and length and,
as the last line of stdout, all of them as JSON: tokens a second of whole steps, loss and optimizer included, and GiB.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from tfm.target import Target
from tfm.train.gdn import use_form
from tfm.train.layout import prepare_device
from tfm.train.loop import Backward, Stage, new_optimiser
from tfm.train.precision import Shadow
from tfm.train.settings import TrainSettings, load_settings
from tfm.train.target import init_target, target_loss

WARM_UP = 3


def time_variant(settings: TrainSettings, device: str, *, graphs: bool, steps: int) -> list[dict]:
    """Return a row for each row length: length, tokens_per_second, peak_gib (None on a CPU), loss after the steps."""
    target = Target(settings.target_model)
    init_target(target, settings.seed)
    shadow = Shadow(use_form(target.to(device), settings.gdn, device), settings.precision)
    stage = Stage(
        name="speed",
        shadow=shadow,
        schedule=settings.target,
        digest_fields={},
        batch=lambda step: {},
        loss=lambda batch: {"loss": target_loss(shadow.compute, batch)},
        validate=dict,
    )
    optimiser = new_optimiser(stage)
    backward, rows = Backward(stage, optimiser, graphs=graphs), []
    optimiser.set_scale(0.01)
    for length in settings.text.buckets:
        count = max(1, settings.target.tokens_per_step // length)
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(6, settings.target_model.vocab_size, (count, length), generator=generator).to(device)
        batch = {"tokens": tokens, "lengths": torch.full((count,), length, device=device)}
        seconds, loss = _time(backward, batch, steps, device)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
        rows.append({"length": length, "tokens_per_second": tokens.numel() * steps / seconds, "peak_gib": peak} | loss)
    return rows


def _time(backward: Backward, batch: dict, steps: int, device: str) -> tuple[float, dict[str, float]]:
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            _settle(device)
            began = time.perf_counter()
        terms = backward(batch)
        backward.update()
    _settle(device)
    return time.perf_counter() - began, {name: float(term) for name, term in terms.items()}


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="workflows/config/train_<family>.yaml")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--variants", required=True, help="comma-separated precision/form[/graphs]")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each length, after three more")
    options = parser.parse_args()
    prepare_device(options.device)
    settings, found = load_settings(options.config), []
    for variant in options.variants.split(","):
        precision, form, *rest = variant.split("/")
        own = replace(settings, precision=precision, gdn=form)
        graphs = rest == ["graphs"] and options.device == "cuda"
        try:
            rows = time_variant(own, options.device, graphs=graphs, steps=options.steps)
        except (ValueError, RuntimeError) as error:  # a form that fails here must not keep the others from being timed
            rows = [{"error": f"{type(error).__name__}: {error}"[:500]}]
        for row in rows:
            found.append({"variant": variant, **row})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
