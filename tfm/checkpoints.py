"""Public checkpoint formats in and out: Hugging Face target, DFlash drafter, Weaver (.pth or safetensors directory).

Every tensor a model needs must be there with its shape, and nothing else may be: what is missing, misshapen or left
over is an error that names the tensor, both shapes, the file and the remedy. Weights lie in bfloat16 on disk and are
loaded into the dtype asked for.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from tfm.drafter import Drafter, DrafterConfig
from tfm.manifest import write_atomic, write_json
from tfm.target import Target, TargetConfig
from tfm.weaver import Weaver, WeaverConfig

logger = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TARGET_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
NOT_TEXT = re.compile(r"(^|\.)(visual|vision\w*|mtp)\.")
BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)")
LISTED = 12  # names printed of a long list


@dataclass(frozen=True)
class StoredTensors:
    """Tensors of one checkpoint and the file each came from."""

    tensors: dict[str, Tensor]
    files: dict[str, Path]


def read_tensors(directory: Path | str) -> dict[str, Tensor]:
    """Return every tensor of a safetensors directory, one file or shards with an index, in the dtype on disk.

    Raises ValueError naming the file when a shard is missing or damaged, or when shards and index disagree.
    """
    return _read(Path(directory)).tensors


def write_tensors(directory: Path | str, tensors: dict[str, Tensor], config: dict, *, dtype=torch.bfloat16) -> None:
    """Write model.safetensors (floating tensors in `dtype`) and config.json, each atomically."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    write_atomic(directory / SINGLE, save(stored, metadata={"format": "pt"}))
    write_json(directory / "config.json", config)


def load_target(directory: Path | str, *, device="cpu", dtype: torch.dtype = torch.float32, tap_layers=()) -> Target:
    """Return the text model of a Hugging Face directory; vision and MTP tensors are skipped and their names logged."""
    directory = Path(directory)
    config = TargetConfig.from_dict(_read_config(directory))
    stored = _read(directory)
    named = {_text_name(name): name for name in stored.tensors if not NOT_TEXT.search(name)}
    skipped = sorted(name for name in stored.tensors if NOT_TEXT.search(name))
    if skipped:
        logger.info("%s: skipped %d tensors that are no text model: %s", directory, len(skipped), ", ".join(skipped))
    if config.tie_word_embeddings and "lm_head.weight" in named:
        _check_tied(stored, named)
        del named["lm_head.weight"]
    renamed = StoredTensors(
        {short: stored.tensors[name] for short, name in named.items()},
        {short: stored.files[name] for short, name in named.items()},
    )
    return _fill(lambda: Target(config, tap_layers=tuple(tap_layers)), renamed, directory, device, dtype)


def load_drafter(directory: Path | str, *, device="cpu", dtype: torch.dtype = torch.float32) -> Drafter:
    """Return the drafter of a DFlash directory; tensor names may carry a `model.` prefix."""
    directory = Path(directory)
    config = DrafterConfig.from_dict(_read_config(directory))
    stored = _read(directory)
    renamed = StoredTensors(
        {name.removeprefix("model."): tensor for name, tensor in stored.tensors.items()},
        {name.removeprefix("model."): path for name, path in stored.files.items()},
    )
    return _fill(lambda: Drafter(config), renamed, directory, device, dtype)


def load_weaver(path: Path | str, *, device="cpu", dtype: torch.dtype = torch.float32) -> Weaver:
    """Return the weaver of a released .pth file or of a safetensors directory.

    Names inside a block are matched by suffix and shape; q, k and v may be fused. Raises ValueError with both lists
    of names when a match is missing or ambiguous.
    """
    path = Path(path)
    raw, stored = (_read_config(path), _read(path)) if path.is_dir() else _read_pth(path)
    config = WeaverConfig.from_dict(raw)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Weaver(config).state_dict().items()}
    tensors = match_weaver_names(expected, split_fused(stored.tensors), where=str(path))
    files = dict.fromkeys(tensors, path)
    return _fill(lambda: Weaver(config), StoredTensors(tensors, files), path, device, dtype)


def save_target(target: Target, directory: Path | str) -> None:
    """Write a target as a Qwen3_5ForCausalLM directory in bfloat16 (without tokenizer)."""
    tensors = {
        name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in target.state_dict().items()
    }
    write_tensors(directory, tensors, target_config_json(target.config))


def save_drafter(drafter: Drafter, directory: Path | str) -> None:
    """Write a drafter as a DFlash directory in bfloat16."""
    write_tensors(directory, drafter.state_dict(), {**drafter.config.to_dict(), "dtype": "bfloat16"})


def save_weaver(weaver: Weaver, directory: Path | str) -> None:
    """Write a weaver as a safetensors directory in bfloat16, with the released file's names and config keys."""
    write_tensors(directory, weaver.state_dict(), weaver.config.to_dict())


def save_weaver_pth(weaver: Weaver, path: Path | str, *, dtype=torch.float32) -> None:
    """Write a weaver as the released single file: {"config", "state_dict"}."""
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in weaver.state_dict().items()}
    torch.save({"config": weaver.config.to_dict(), "state_dict": state}, path)


def target_config_json(config: TargetConfig) -> dict:
    """Return the Hugging Face config.json of a target."""
    values = asdict(config)
    rope = {key: values.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    return {
        **values,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "num_hidden_layers": len(config.layer_types),
        "layer_types": list(config.layer_types),
        "eos_token_id": list(config.eos_token_id),
        "rope_parameters": {"rope_type": "default", **rope},
    }


def split_fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with every `...qkv_proj.weight` [3 width, width] split into q_proj, k_proj and v_proj."""
    split = {}
    for name, tensor in tensors.items():
        if not name.endswith("qkv_proj.weight"):
            split[name] = tensor
            continue
        if tensor.shape[0] % 3:
            raise ValueError(f"{name}: {tensor.shape[0]} rows are no q, k and v of one width; expected a multiple of 3")
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            split[name.removesuffix("qkv_proj.weight") + f"{part}_proj.weight"] = rows
    return split


def match_weaver_names(
    expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor], *, where: str
) -> dict[str, Tensor]:
    """Return tensors under the expected names.

    A stored name fits an expected one when it ends in it (inside a block: in its last part, whatever stands between)
    and has its shape. An exact name goes first. Raises ValueError unless exactly one stored tensor fits each.
    """
    matched, taken, doubtful, absent = {}, set(), [], []
    for name in sorted(expected, key=lambda name: name not in tensors):
        fits = [found for found in tensors if found not in taken and _fits(name, found)]
        shaped = [found for found in fits if tuple(tensors[found].shape) == expected[name]]
        chosen = [name] if name in fits else shaped
        if len(chosen) == 1:
            matched[name] = tensors[chosen[0]]
            taken.add(chosen[0])
        elif chosen:
            doubtful.append(f"{name} {expected[name]} could be any of {', '.join(sorted(chosen))}")
        else:
            absent.append(f"{name} {expected[name]}" + (f" (found {_shapes(tensors, fits)})" if fits else ""))
    left = [found for found in tensors if found not in taken]
    if doubtful or absent or left:
        raise ValueError(
            f"{where}: weaver tensors do not match. Ambiguous: {_listed(doubtful)}. Missing: {_listed(absent)}. "
            f"Not understood: {_listed(_shapes(tensors, left).split('; ') if left else [])}. Only the first released "
            "form is supported (learned positions, GELU MLP); take that file or rename the tensors"
        )
    return matched


def _fits(name: str, found: str) -> bool:
    block = BLOCK_NAME.fullmatch(name)
    if block is None:
        return found == name or found.endswith("." + name)
    number, leaf = block.groups()
    return re.search(rf"(^|\.)blocks\.{number}\.(.+\.)?{re.escape(leaf)}$", found) is not None


def _fill(build: Callable[[], nn.Module], stored: StoredTensors, where: Path, device, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        model = build()
    expected = model.state_dict()
    problems = [
        f"{name}: missing, expected shape {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name not in stored.tensors
    ]
    problems += [
        f"{name}: shape {tuple(tensor.shape)} in {stored.files[name].name}, expected {tuple(expected[name].shape)}"
        if name in expected
        else f"{name}: not part of the model (shape {tuple(tensor.shape)} in {stored.files[name].name})"
        for name, tensor in stored.tensors.items()
        if name not in expected or tensor.shape != expected[name].shape
    ]
    if problems:
        raise ValueError(
            f"{where}: {len(problems)} tensors do not fit the config. {_listed(problems, '; ')}. Restore the "
            "checkpoint, or use the config.json that belongs to it"
        )
    loaded = {name: tensor.to(device=device, dtype=dtype) for name, tensor in stored.tensors.items()}
    model.load_state_dict(loaded, assign=True)
    return model.requires_grad_(False).eval()


def _read(directory: Path) -> StoredTensors:
    if (directory / INDEX).is_file():
        return _read_shards(directory)
    files = [directory / SINGLE] if (directory / SINGLE).is_file() else sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        what = f"{len(files)} safetensors files but no {INDEX}" if files else "no safetensors file"
        raise ValueError(f"{directory}: {what}; a checkpoint is {SINGLE}, or shards with {INDEX}: download it again")
    tensors = _open_file(files[0])
    return StoredTensors(tensors, dict.fromkeys(tensors, files[0]))


def _read_shards(directory: Path) -> StoredTensors:
    weight_map: dict[str, str] = json.loads((directory / INDEX).read_text(encoding="utf-8")).get("weight_map", {})
    tensors, files = {}, {}
    for shard in sorted(set(weight_map.values())):
        listed = {name for name, file in weight_map.items() if file == shard}
        if not (directory / shard).is_file():
            raise ValueError(
                f"{directory / shard}: missing, it holds {len(listed)} tensors ({_listed(listed)}); download it again"
            )
        found = _open_file(directory / shard)
        for names, verb in ((listed - set(found), "are listed for"), (set(found) - listed, "are not listed for")):
            if names:
                raise ValueError(
                    f"{directory / INDEX}: tensors {_listed(names)} {verb} {shard}; index and shards must be of one "
                    "download, fetch both again"
                )
        tensors |= found
        files |= dict.fromkeys(found, directory / shard)
    return StoredTensors(tensors, files)


def _open_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged safetensors file ({error}); download it again") from error


def _read_pth(path: Path) -> tuple[dict, StoredTensors]:
    if not path.is_file():
        raise ValueError(f"{path}: no such weaver; give a .pth file or a safetensors directory")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and torch errors alike
        raise ValueError(f"{path}: not readable as plain tensors ({error}); take the released .pth file") from error
    if not isinstance(content, dict) or not {"config", "state_dict"} <= set(content):
        keys = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: holds {keys}, expected the keys config and state_dict; take the released .pth file")
    tensors = content["state_dict"]
    return content["config"], StoredTensors(tensors, dict.fromkeys(tensors, path))


def _read_config(directory: Path) -> dict:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: missing; give the directory of a checkpoint with its config.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _text_name(name: str) -> str:
    for prefix in TARGET_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _check_tied(stored: StoredTensors, named: dict[str, str]) -> None:
    head = stored.tensors[named["lm_head.weight"]]
    embed = stored.tensors.get(named.get("embed_tokens.weight", ""))
    if embed is None or not torch.equal(head, embed):
        raise ValueError(
            f"{named['lm_head.weight']}: config.json ties it to the embedding, but it differs from it in "
            f"{stored.files[named['lm_head.weight']].name}; set tie_word_embeddings to false"
        )


def _shapes(tensors: dict[str, Tensor], names: Iterable[str]) -> str:
    return "; ".join(f"{name} {tuple(tensors[name].shape)}" for name in sorted(names))


def _listed(names: Iterable[str], separator: str = ", ") -> str:
    names = sorted(names)
    more = f"{separator}and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (separator.join(names[:LISTED]) + more) or "none"
