"""What a suite reads beside its config: pins of prompt sets, and the checkpoint folders. Needs no torch."""

import functools
import json
from pathlib import Path

from baselines.methods import METHODS
from tfm.config import HEADS
from tfm.manifest import sha256_weights, weight_files
from tfm.pins import load_pins

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"
PINS_FILE = WORKFLOWS / "config/datasets.yaml"
# of a config.json, the integers that a plan reads and the least of each; a block is the root and at least one mask
LEAST = dict.fromkeys(("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings", "d_model"), 1)
LEAST |= {"d_embed": 1, "K": 1, "block_size": 2, "mask_token_id": None}


@functools.cache
def pins() -> dict:
    """Return the pins of all prompt sets, by source and name."""
    return load_pins(PINS_FILE)


def read_object(path: Path) -> dict:
    """Return the object of a JSON file, read again only when the file changed; do not change what is returned.

    Raises ValueError naming the file when it is damaged.
    """
    facts = path.stat()
    return _read_object(path, (facts.st_ino, facts.st_size, facts.st_mtime_ns))


@functools.lru_cache(maxsize=64)
def _read_object(path: Path, state: tuple[int, int, int]) -> dict:
    del state  # a changed file is another entry
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        problem = None if isinstance(content, dict) else f"holds a {type(content).__name__}, expected an object"
    except ValueError as error:  # cut short, or not UTF-8
        problem = f"is damaged ({error})"
    if problem:
        raise ValueError(f"weights: {path} {problem}; restore the file (git checkout, or download it again)")
    return content


def checkpoint_config(config: dict, part: str) -> dict:
    """Return a part's config.json, an empty one when it is not here.

    Raises ValueError naming file and key where a size that a plan reads is none.
    """
    path = Path(config["weights"]) / part / "config.json"
    if not path.exists():
        return {}
    fields = read_object(path)
    for key in ("text_config", "dflash_config"):
        if not isinstance(fields.get(key) or {}, dict):
            raise _no_size(path, key, fields[key], "an object")
    for group in (fields, fields.get("text_config") or {}, fields.get("dflash_config") or {}):
        for key, least in LEAST.items():
            value = group.get(key)
            if value is not None and (type(value) is not int or (least is not None and value < least)):
                raise _no_size(path, key, value, "an integer" if least is None else f"an integer >= {least}")
        layers = group.get("target_layer_ids") or []
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise _no_size(path, "target_layer_ids", layers, "a list of layers")
    return fields


def _no_size(path: Path, key: str, value, allowed: str) -> ValueError:
    return ValueError(
        f"weights: {path}: {key} {value!r} is not allowed (allowed: {allowed}); take the config.json that belongs to "
        "the weights"
    )


def draft_rows(config: dict) -> int | None:
    """Return how many positions the drafter drafts, None when its config.json is not here."""
    fields = checkpoint_config(config, "drafter")
    if not fields:
        return None
    block_size = (fields.get("dflash_config") or {}).get("block_size") or fields.get("block_size")
    if not block_size:
        from tfm.drafter import DrafterConfig  # needs torch, whose import takes seconds

        block_size = DrafterConfig.from_dict(fields).block_size
    return block_size - 1


def missing_weights(config: dict) -> list[str]:
    """Return the folders of the parts that the suite's methods need and that hold no file."""
    parts = ["target", *(part for method in config["methods"] for part in METHODS[method].parts)]
    parts += config.get("heads", []) if "weaver" in parts else []
    parts = dict.fromkeys(parts)
    folders = [f"{config['weights']}/{part}" for part in parts]
    return [folder for folder in folders if not weight_files(Path(folder))]


def weight_digests(config: dict) -> dict[str, str | None]:
    """Return the digest of each part's checkpoint folder; None for one that is not here."""
    return {part: sha256_weights(Path(config["weights"]) / part) for part in ("target", "drafter", *HEADS)}
