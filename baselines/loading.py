"""Checkpoint folders -> the models that a method decodes with."""

from pathlib import Path

import torch

from tfm import checkpoints
from tfm.config import HEADS
from tfm.decode import Models
from tfm.graft import graft as widen


def load_models(
    weights: dict[str, Path | str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    swa_causal: bool | None = None,
    graft: dict | None = None,
) -> Models:
    """Return the models of the given parts (target, drafter, a head -> folder); a part that is not given is None.

    `swa_causal` overrides the drafter's config.json, None leaves it to that. `graft` holds a seed and, by part, the
    shape that the models are widened to; the folders are then the source's.
    """
    if graft is not None:
        source = load_models(weights, device=torch.device("cpu"), dtype=torch.float32, swa_causal=swa_causal)
        shape = {part: graft[part] for part in weights}
        return widen(source, shape, seed=graft["seed"], device=device, dtype=dtype)
    drafter = weaver = head = None
    if "drafter" in weights:
        drafter = checkpoints.load_drafter(weights["drafter"], device=device, dtype=dtype, swa_causal=swa_causal)
    if "weaver" in weights:
        weaver = checkpoints.load_weaver(weights["weaver"], device=device, dtype=dtype)
    for part in (part for part in HEADS if part in weights and part != "weaver"):
        head = checkpoints.load_head(weights[part], device=device, dtype=dtype)
    taps = tuple(drafter.config.target_layer_ids) if drafter is not None else ()
    target = checkpoints.load_target(weights["target"], device=device, dtype=dtype, tap_layers=taps)
    return Models(target.eval(), drafter and drafter.eval(), weaver and weaver.eval(), head and head.eval())
