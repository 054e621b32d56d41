"""Whether the checkpoint folders of a suite are undamaged, fit each other and its shape, by their small files.

Needs no torch. What only the tensors tell is checked when they are loaded (`tfm.checkpoints`, `Models.check`).
"""

from collections.abc import Iterator
from pathlib import Path

from baselines.inputs import checkpoint_config, draft_rows, read_object
from tfm import graft_shape
from tfm.config import HEADS
from tfm.manifest import sha256_once

PARTS = graft_shape.PARTS


def problems(config: dict) -> list[str]:
    """Return what is wrong with the folders of a suite's weights; parts that are not here have nothing wrong."""
    found = [*_changed(Path(config["weights"])), *_misfits(config)]
    if config.get("graft") and not found:
        found = graft_shape.problems({part: checkpoint_config(config, part) for part in PARTS}, config["graft"])
    return found


def _changed(folder: Path) -> Iterator[str]:
    """Yield the files of a trained family that are not those of its facts.json, which training writes beside them."""
    path = folder / "facts.json"
    recorded = read_object(path).get("sha256", {}) if path.exists() else {}
    for name, expected in recorded.items():
        file = folder / name
        if not file.parent.exists():
            continue
        packed = file.with_name(f"{file.name}.gz")
        file = packed if packed.exists() and not file.exists() else file
        found = sha256_once(file) if file.exists() else "no file"
        if found != expected:
            yield (
                f"weights: {file} is not the family's (sha256 {found[:12]}, {path.name} says {expected[:12]}); restore "
                f"it (git checkout -- {file}), or keep a changed family in a folder of its own, without {path.name}: "
                "--config weights=DIR"
            )


def _misfits(config: dict) -> Iterator[str]:
    target, drafter, weaver = (checkpoint_config(config, part) for part in PARTS)
    target = target.get("text_config") or target
    width, rows = target.get("hidden_size"), draft_rows(config)
    layers = target.get("num_hidden_layers") or len(target.get("layer_types") or ())
    special = drafter.get("dflash_config") or {}

    def differs(key: str, value, allowed, what: str) -> str:
        return f"weights: {key} {value!r} is not allowed (allowed: {allowed}, {what}); take parts of one family"

    if drafter and target:
        if drafter.get("hidden_size") != width:
            yield differs("drafter hidden_size", drafter.get("hidden_size"), width, "the target's")
        for layer in special.get("target_layer_ids") or ():
            if not 0 <= layer < layers:
                yield differs("drafter target_layer_ids", layer, f"0 to {layers - 1}", "the target's layers")
        mask, vocabulary = special.get("mask_token_id"), target.get("vocab_size")
        if mask is not None and vocabulary and not 0 <= mask < vocabulary:
            yield differs("drafter mask_token_id", mask, f"0 to {vocabulary - 1}", "the target's vocabulary")
    if weaver and target:
        for key in ("d_model", "d_embed"):
            if weaver.get(key) != width:
                yield differs(f"weaver {key}", weaver.get(key), width, "the target's hidden_size")
    for name in (head for head in HEADS if head != "weaver"):
        head = checkpoint_config(config, name)
        for key in ("d_model", "d_embed") if head and target else ():
            if head.get(key) != width:
                yield differs(f"{name} {key}", head.get(key), width, "the target's hidden_size")
    if weaver and rows and weaver.get("K", rows) < rows:
        yield differs("weaver K", weaver["K"], f">= {rows}", "the rows that the drafter drafts")
