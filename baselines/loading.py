"""Checkpoint folders -> the models that a method decodes with."""

from pathlib import Path

import torch

from tfm import checkpoints
from tfm.config import HEADS
from tfm.decode import Models
from tfm.graft import graft as widen
from tfm.stored import listed


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
    shape that the models are widened to; the folders are then the source's. Raises ValueError for a part with a weight
    that is NaN or infinite: its drafts would be refused without a word, and its method would look slow.
    """
    models = _load(weights, device=device, dtype=dtype, swa_causal=swa_causal, graft=graft)
    for part, model in (("target", models.target), ("drafter", models.drafter), ("weaver", models.weaver)):
        _check_finite(part, model, weights)
    for part in (part for part in HEADS if part in weights and part != "weaver"):
        _check_finite(part, models.head, weights)
    return models


def _check_finite(part: str, model: torch.nn.Module | None, weights: dict) -> None:
    if model is None:
        return
    tensors = {name: tensor for name, tensor in model.state_dict().items() if tensor.numel()}
    # one device-to-host copy a part
    sizes = torch.stack([tensor.abs().amax().float() for tensor in tensors.values()])
    broken = [name for name, is_finite in zip(tensors, sizes.isfinite().tolist(), strict=True) if not is_finite]
    if broken:
        raise ValueError(
            f"weights.{part}: {weights[part]}: {listed(broken)} hold NaN or infinite values; restore the checkpoint, "
            "or train it again from the last good stage"
        )


def _load(weights, *, device, dtype, swa_causal, graft) -> Models:
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
