"""Tensors and config of a checkpoint on disk: one file, shards with an index, or the released Weaver's .pth.

What is missing, damaged, listed twice or of another type is a ValueError with the file, what was found and the remedy.
"""

import json
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from tfm.manifest import PACKED, unpacked
from tfm.quantise import unpack

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LISTED = 12  # names printed of a long list


@dataclass(frozen=True)
class StoredTensors:
    """Tensors of one checkpoint and the file each came from, under the same names."""

    tensors: dict[str, Tensor]
    files: dict[str, Path]

    def describe(self, name: str) -> str:
        """Return the shape of a tensor and the name of its file, as errors print them."""
        return f"{tuple(self.tensors[name].shape)} in {self.files[name].name}"

    def pick(self, sources: dict[str, str]) -> "StoredTensors":
        """Return the tensors that `sources`, new name -> stored name, lists, under their new names."""
        return StoredTensors(
            {new: self.tensors[name] for new, name in sources.items()},
            {new: self.files[name] for new, name in sources.items()},
        )


def read_tensors(directory: Path) -> StoredTensors:
    """Return the tensors of a safetensors directory, int8 rows dequantised."""
    stored = _read_files(directory)
    tensors = unpack(stored.tensors, lambda name: str(stored.files[name]))
    return StoredTensors(tensors, {name: stored.files[name] for name in tensors})


def _read_files(directory: Path) -> StoredTensors:
    if (directory / INDEX).is_file():
        return _read_shards(directory)
    files = [directory / SINGLE] if (directory / SINGLE).is_file() else sorted(directory.glob("*.safetensors"))
    files = files or sorted(directory.glob(f"*{PACKED}"))
    if len(files) != 1:
        what = f"{len(files)} safetensors files but no {INDEX}" if files else "no safetensors file"
        raise ValueError(f"{directory}: {what}; a checkpoint is {SINGLE}, or shards with {INDEX}: download it again")
    tensors = _open_file(files[0])
    return StoredTensors(tensors, dict.fromkeys(tensors, files[0]))


def _read_shards(directory: Path) -> StoredTensors:
    weight_map = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(x, str) for x in weight_map.values()):
        raise ValueError(
            f"{directory / INDEX}: weight_map: found {brief(weight_map)}, expected an object from tensor names to "
            "file names; download it again"
        )
    tensors, files = {}, {}
    for shard in sorted(set(weight_map.values())):
        named = {name for name, file in weight_map.items() if file == shard}
        if not (directory / shard).is_file():
            raise ValueError(
                f"{directory / shard}: missing, it holds {len(named)} tensors ({listed(named)}); download it again"
            )
        found = _open_file(directory / shard)
        for names, verb in ((named - set(found), "are listed for"), (set(found) - named, "are not listed for")):
            if names:
                raise ValueError(
                    f"{directory / INDEX}: tensors {listed(names)} {verb} {shard}; index and shards must be of one "
                    "download, fetch both again"
                )
        tensors |= found
        files |= dict.fromkeys(found, directory / shard)
    return StoredTensors(tensors, files)


def _open_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.name.endswith(PACKED):
            return load(unpacked(path))
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged safetensors file ({error}); download it again") from error


def read_pth(path: Path) -> tuple[dict, StoredTensors]:
    """Return config and tensors of a released weaver."""
    if not path.is_file():
        raise ValueError(f"{path}: no such weaver; give a .pth file or a safetensors directory")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch errors alike
        raise ValueError(f"{path}: not readable as plain tensors ({error}); take the released .pth file") from error
    if not isinstance(content, dict) or not {"config", "state_dict"} <= set(content):
        keys = sorted(map(str, content)) if isinstance(content, dict) else brief(content)
        raise ValueError(f"{path}: holds {keys}, expected the keys config and state_dict; take the released .pth file")
    _check_pth(path, content)
    tensors = dict(content["state_dict"])
    return content["config"], StoredTensors(tensors, dict.fromkeys(tensors, path))


def _check_pth(path: Path, content: dict) -> None:
    for key in ("config", "state_dict"):
        value = content[key]
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ValueError(
                f"{path}: {key}: found {brief(value)}, expected a dictionary with names as keys; take the released "
                ".pth file"
            )
    for name, value in content["state_dict"].items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{path}: state_dict: {name}: found {brief(value)}, expected a tensor; take the released .pth file"
            )


def parse(read: Callable[[dict], object], raw: dict, where: Path):
    """Return `read(raw)`; a value that it does not take is a ValueError naming the file."""
    try:
        return read(raw)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except (TypeError, AttributeError, OverflowError, KeyError) as error:
        raise ValueError(
            f"{where}: a value is of another type than its key takes ({type(error).__name__}: {error}); download it "
            "again"
        ) from error


def read_config(directory: Path) -> dict:
    """Return a checkpoint directory's config.json."""
    path = directory / CONFIG
    if not path.is_file():
        raise ValueError(f"{path}: missing; give the directory of a checkpoint with its config.json")
    return _read_json(path)


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # cut short, or not UTF-8
        raise ValueError(f"{path}: damaged JSON file ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: found {brief(content)}, expected an object; download it again")
    return content


def brief(value: object) -> str:
    """Return a value's type and its text, cut, as errors print it."""
    return f"{type(value).__name__} {reprlib.repr(value)}"


def listed(names: Iterable[str], separator: str = ", ") -> str:
    """Return names sorted, at most LISTED of them, as errors print them."""
    names = sorted(names)
    more = f"{separator}and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (separator.join(names[:LISTED]) + more) or "none"
