"""Public checkpoint formats in and out: Hugging Face target, DFlash drafter, Weaver (.pth or safetensors directory).

Every tensor a model needs must be there with its shape, and nothing else may be: what is missing, misshapen or left
over is an error that names the tensor, both shapes, the file and the remedy. Weights lie in bfloat16 on disk, or in
int8 rows with scales (tfm/quantise.py), and are loaded into the dtype asked for.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tfm.drafter import Drafter, DrafterConfig
from tfm.heads import HeadConfig, build_head
from tfm.manifest import write_atomic, write_json
from tfm.quantise import as_bfloat16, inexact_in_bfloat16, pack
from tfm.stored import CONFIG, INDEX, SINGLE, StoredTensors, listed, parse, read_config, read_pth, read_tensors
from tfm.target import Target, TargetConfig
from tfm.weaver import Weaver, WeaverConfig

logger = logging.getLogger(__name__)

TARGET_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
# vision towers, multi-token-prediction layers, and the rotary tables that old Llama files carry
NOT_TEXT = re.compile(r"(^|\.)(visual|vision\w*|mtp)\.|\.rotary_emb\.inv_freq$")
BLOCK_NAME = re.compile(r"blocks\.(\d+)\.(.+)")
STORAGES = {"bfloat16": as_bfloat16, "int8": pack}


def write_tensors(directory: Path | str, tensors: dict[str, Tensor], config: dict, *, storage="bfloat16") -> None:
    """Write model.safetensors and config.json, each atomically. Storage int8: matrices in rows with scales."""
    if storage not in STORAGES:
        raise ValueError(f"storage: {storage!r} is not allowed (allowed: {', '.join(STORAGES)}); choose one of them")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / SINGLE, save(STORAGES[storage](tensors), metadata={"format": "pt"}))
    write_json(directory / CONFIG, config)


def load_target(directory: Path | str, *, device="cpu", dtype: torch.dtype = torch.float32, tap_layers=()) -> Target:
    """Return the text model of a Hugging Face directory: Qwen3.5/3.6, Qwen3 or Llama (see tfm/target_config.py).

    Vision, MTP and rotary-table tensors are skipped and their names logged.
    """
    directory = Path(directory)
    config = parse(TargetConfig.from_dict, read_config(directory), directory)
    stored = read_tensors(directory)
    skipped = sorted(name for name in stored.tensors if NOT_TEXT.search(name))
    if skipped:
        logger.info("%s: skipped %d tensors that are no text model: %s", directory, len(skipped), ", ".join(skipped))
    text = {name: name for name in stored.tensors if name not in skipped}
    renamed = _renamed(stored.pick(text), _text_name, directory)
    if config.tie_word_embeddings and "lm_head.weight" in renamed.tensors:
        _check_tied(renamed, directory)
        renamed = renamed.pick({name: name for name in renamed.tensors if name != "lm_head.weight"})
    return _fill(lambda: Target(config, tap_layers=tuple(tap_layers)), renamed, directory, device, dtype)


def load_drafter(
    directory: Path | str, *, device="cpu", dtype: torch.dtype = torch.float32, swa_causal: bool | None = None
) -> Drafter:
    """Return the drafter of a DFlash directory; tensor names may carry a `model.` prefix.

    `swa_causal` replaces what config.json says of sliding layers (public ports disagree); None keeps it.
    """
    directory = Path(directory)
    config = parse(DrafterConfig.from_dict, read_config(directory), directory / CONFIG)
    if swa_causal is not None:
        config = replace(config, swa_causal=swa_causal).check()
    renamed = _renamed(read_tensors(directory), lambda name: name.removeprefix("model."), directory)
    return _fill(lambda: Drafter(config), renamed, directory, device, dtype)


def load_weaver(path: Path | str, *, device="cpu", dtype: torch.dtype = torch.float32) -> Weaver:
    """Return the weaver of a released .pth file, of a folder with one such file, or of a safetensors directory.

    Names inside a block are matched by suffix and shape; q, k and v may be fused. Raises ValueError with both lists
    of names when a match is missing or ambiguous.
    """
    path = _single_pth(Path(path))
    raw, stored = (read_config(path), read_tensors(path)) if path.is_dir() else read_pth(path)
    config = parse(WeaverConfig.from_dict, raw, path / CONFIG if path.is_dir() else path)
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Weaver(config).state_dict().items()}
    matched = match_weaver_names(expected, split_fused(stored, path), path)
    return _fill(lambda: Weaver(config), matched, path, device, dtype)


def load_head(directory: Path | str, *, device="cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the correction head (tfm/heads.py) of a safetensors directory."""
    directory = Path(directory)
    config = parse(HeadConfig.from_dict, read_config(directory), directory / CONFIG)
    return _fill(lambda: build_head(config), read_tensors(directory), directory, device, dtype)


def save_target(target: Target, directory: Path | str, *, storage="bfloat16") -> None:
    """Write a target as a Hugging Face directory of its architecture (without tokenizer)."""
    tensors = {
        name if name.startswith("lm_head.") else f"model.{name}": tensor for name, tensor in target.state_dict().items()
    }
    write_tensors(directory, tensors, target.config.to_dict(), storage=storage)


def save_drafter(drafter: Drafter, directory: Path | str, *, storage="bfloat16") -> None:
    """Write a drafter as a DFlash directory."""
    write_tensors(directory, drafter.state_dict(), {**drafter.config.to_dict(), "dtype": "bfloat16"}, storage=storage)


def save_weaver(weaver: Weaver, directory: Path | str, *, storage="bfloat16") -> None:
    """Write a weaver as a safetensors directory, with the released file's names and config keys."""
    write_tensors(directory, weaver.state_dict(), weaver.config.to_dict(), storage=storage)


def save_head(head: nn.Module, directory: Path | str, *, storage="bfloat16") -> None:
    """Write a correction head as a safetensors directory."""
    write_tensors(directory, head.state_dict(), head.config.to_dict(), storage=storage)


def export(source: Path | str, destination: Path | str) -> None:
    """Write a stored directory of any part as the public bfloat16 one: dequantised, its other files copied.

    Raises ValueError, before anything is written, when a tensor is not exact in bfloat16.
    """
    source, destination = Path(source), Path(destination)
    stored = read_tensors(source)
    changed = inexact_in_bfloat16(stored.tensors)
    if changed:
        raise ValueError(
            f"{source}: {listed(changed)} would change in bfloat16; store rows with scales that are powers of two"
        )
    write_tensors(destination, stored.tensors, read_config(source))
    for path in sorted(source.glob("*.json")):
        if path.name not in (CONFIG, INDEX):
            shutil.copyfile(path, destination / path.name)


def save_weaver_pth(weaver: Weaver, path: Path | str, *, dtype=torch.float32) -> None:
    """Write a weaver as the released single file: {"config", "state_dict"}."""
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in weaver.state_dict().items()}
    torch.save({"config": weaver.config.to_dict(), "state_dict": state}, path)


def split_fused(stored: StoredTensors, where: Path) -> StoredTensors:
    """Return tensors with every `...qkv_proj.weight` [3 width, width] split into q_proj, k_proj and v_proj.

    Raises ValueError when a part is stored on its own as well.
    """
    parts = {name: _split(name, tensor, where) for name, tensor in stored.tensors.items()}
    sources = _sources(((part, name) for name in parts for part in parts[name]), where)
    return StoredTensors(
        {part: parts[name][part] for part, name in sources.items()},
        {part: stored.files[name] for part, name in sources.items()},
    )


def match_weaver_names(expected: dict[str, tuple[int, ...]], stored: StoredTensors, where: Path) -> StoredTensors:
    """Return tensors under the expected names.

    A stored name fits an expected one when it ends in it (inside a block: in its last part, whatever stands between)
    and has its shape. An exact name goes first. Raises ValueError unless exactly one stored tensor fits each.
    """
    matched, taken, doubtful, absent = {}, set(), [], []
    for name in sorted(expected, key=lambda name: name not in stored.tensors):
        fits = [found for found in stored.tensors if found not in taken and _fits(name, found)]
        shaped = [found for found in fits if tuple(stored.tensors[found].shape) == expected[name]]
        chosen = [name] if name in fits else shaped
        if len(chosen) == 1:
            matched[name] = chosen[0]
            taken.add(chosen[0])
        elif chosen:
            doubtful.append(f"{name} {expected[name]} could be any of {', '.join(sorted(chosen))}")
        else:
            found = "; ".join(f"{found} {stored.describe(found)}" for found in sorted(fits))
            absent.append(f"{name} {expected[name]}" + (f" (found {found})" if found else ""))
    left = [f"{found} {stored.describe(found)}" for found in stored.tensors if found not in taken]
    if doubtful or absent or left:
        raise ValueError(
            f"{where}: weaver tensors do not match. Ambiguous: {listed(doubtful)}. Missing: {listed(absent)}. "
            f"Not understood: {listed(left)}. Only the first released form is supported (learned positions, GELU "
            "MLP); take that file or rename the tensors"
        )
    return stored.pick(matched)


def _split(name: str, tensor: Tensor, where: Path) -> dict[str, Tensor]:
    if not name.endswith("qkv_proj.weight"):
        return {name: tensor}
    if tensor.dim() != 2 or tensor.shape[0] % 3:
        raise ValueError(
            f"{where}: {name}: shape {tuple(tensor.shape)} is no q, k and v of one width; expected a matrix with a "
            "multiple of 3 rows: take the released weights"
        )
    stem = name.removesuffix("qkv_proj.weight")
    return {f"{stem}{part}_proj.weight": rows for part, rows in zip("qkv", tensor.chunk(3), strict=True)}


def _renamed(stored: StoredTensors, short: Callable[[str], str], where: Path) -> StoredTensors:
    return stored.pick(_sources(((short(name), name) for name in sorted(stored.tensors)), where))


def _sources(pairs: Iterable[tuple[str, str]], where: Path) -> dict[str, str]:
    # the stored name behind each new one, from pairs (new, stored)
    sources = {}
    for new, name in pairs:
        if new in sources:
            raise ValueError(
                f"{where}: {sources[new]} and {name} are both {new}, which is read once; remove the one that does not "
                "belong to the model, or download the checkpoint again"
            )
        sources[new] = name
    return sources


def _fits(name: str, found: str) -> bool:
    block = BLOCK_NAME.fullmatch(name)
    if block is None:
        return found == name or found.endswith("." + name)
    number, leaf = block.groups()
    return re.search(rf"(^|\.)blocks\.{number}\.(.+\.)?{re.escape(leaf)}$", found) is not None


class _NoFirstWeights(TorchFunctionMode):
    """Leaves first weights out: on `meta` they hold nothing, and making them loads torch's compiler, 3 s of a core."""

    # of one tensor, whose shape they keep
    LEFT_OUT = (Tensor.normal_, Tensor.uniform_, Tensor.log)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.LEFT_OUT or getattr(func, "__module__", None) == torch.nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _fill(build: Callable[[], nn.Module], stored: StoredTensors, where: Path, device, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"), _NoFirstWeights():
        model = build()
    expected = model.state_dict()
    problems = [
        f"{name}: missing, expected shape {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name not in stored.tensors
    ]
    problems += [
        f"{name}: shape {stored.describe(name)}, expected {tuple(expected[name].shape)}"
        if name in expected
        else f"{name}: not part of the model (shape {stored.describe(name)})"
        for name, tensor in stored.tensors.items()
        if name not in expected or tensor.shape != expected[name].shape
    ]
    if problems:
        raise ValueError(
            f"{where}: {len(problems)} tensors do not fit the config. {listed(problems, '; ')}. Restore the "
            "checkpoint, or use the config.json that belongs to it"
        )
    loaded = {name: tensor.to(device=device, dtype=dtype) for name, tensor in stored.tensors.items()}
    model.load_state_dict(loaded, assign=True)
    return model.requires_grad_(False).eval()


def _single_pth(path: Path) -> Path:
    found = sorted(path.glob("*.pth"))
    if not found:
        return path
    if len(found) > 1 or any(path.glob("*.safetensors")):
        names = ", ".join(sorted(file.name for file in path.iterdir() if file.suffix in (".pth", ".safetensors")))
        raise ValueError(f"{path}: holds {names}; leave one weaver in the folder")
    return found[0]


def _text_name(name: str) -> str:
    for prefix in TARGET_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _check_tied(stored: StoredTensors, where: Path) -> None:
    head, embed = stored.tensors["lm_head.weight"], stored.tensors.get("embed_tokens.weight")
    if embed is not None and not torch.equal(head, embed):
        raise ValueError(
            f"{where}: lm_head.weight in {stored.files['lm_head.weight'].name} differs from embed_tokens.weight in "
            f"{stored.files['embed_tokens.weight'].name}, to which config.json ties it; set tie_word_embeddings to "
            "false there"
        )
