"""Rehearse suite paper at its shape: random weights through the public files and its loader into the static engine."""

import argparse
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from engine_shapes import SIZES, random_models
from input_errors import told
from safetensors.torch import save_file
from torch import Tensor, nn

from baselines import engines, suite
from baselines.loading import load_models
from tfm import checkpoints, device, manifest
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt

DESCRIPTION = """
Makes random models of the paper's shape (--layers of the target's 64), writes them under --folder in the formats of
Qwen3.6-27B (shards with an index), its DFlash drafter and the Weaver (.pth), and loads them as suite paper does. Cells
of that suite (engine torch-static) decode a prompt with ar and tfm, with the weights handed over and with those loaded:
every tensor's checksum and every token must be equal. Writes seconds, bytes and what differs to --out; the files go at
the end. Exit 1 if anything differs, 2 where the disk is too small.
"""
CONFIG = Path("workflows/config/paper.yaml")
METHODS = ("ar", "tfm")
SHARD_BYTES = 5 * 10**9
CONTEXT = 262_144  # positions of Qwen3.6-27B
CHUNK = 1 << 26  # numbers of a tensor that are summed at a time
# what the target's files hold beside the text model, which a loader must pass over
BESIDE = {"model.visual.patch_embed.proj.weight": (16, 8), "mtp.fc.weight": (8, 16)}


class Watch:
    """Seconds of each stage."""

    def __init__(self, where: torch.device):
        self._where, self._last, self.seconds = where, time.monotonic(), {}

    def lap(self, name: str) -> None:
        if self._where.type == "cuda":
            torch.cuda.synchronize(self._where)
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 2), now
        print(f"{name}: {self.seconds[name]} s", file=sys.stderr, flush=True)


def make_models(options, where: torch.device) -> Models:
    """Return random models; vectors are spread too, so that two norms in each other's place show."""
    sizes = SIZES[options.shape]
    models = random_models(replace(sizes, layers=options.layers or sizes.layers), where)
    for part in (models.target, models.drafter, models.weaver):
        for parameter in part.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.05 * torch.randn_like(parameter))
    return models


def bytes_of(models: Models) -> dict[str, int]:
    """Return the bytes of each part's file: bfloat16, and the Weaver's float32."""
    sizes = {name: _numbers(getattr(models, name)) for name in ("target", "drafter", "weaver")}
    return {name: count * (4 if name == "weaver" else 2) for name, count in sizes.items()}


def write_target(model: nn.Module, folder: Path) -> None:
    """Write shards one after the other, each made on the host when it is written, under the multimodal names."""
    folder.mkdir(parents=True)
    tensors = {name if name.startswith("lm_head.") else f"model.language_model.{name}": tensor
               for name, tensor in model.state_dict().items()}  # fmt: skip
    tensors |= {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in BESIDE.items()}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    places = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name].contiguous().cpu() for name in names}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    manifest.write_json(folder / checkpoints.INDEX, index)
    text = model.config.to_dict() | {"max_position_embeddings": CONTEXT}
    text.pop("architectures")
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    manifest.write_json(folder / checkpoints.CONFIG, config | {"tie_word_embeddings": False})


def write_models(models: Models, folder: Path, watch: Watch) -> None:
    """Write the three parts where suite paper looks for them."""
    write_target(models.target, folder / "target")
    watch.lap("write_target")
    (folder / "drafter").mkdir()
    drafter = {name: tensor.contiguous().cpu() for name, tensor in models.drafter.state_dict().items()}
    save_file(drafter, folder / "drafter" / checkpoints.SINGLE, metadata={"format": "pt"})
    manifest.write_json(folder / "drafter" / checkpoints.CONFIG, models.drafter.config.to_dict())
    (folder / "weaver").mkdir()
    checkpoints.save_weaver_pth(models.weaver, folder / "weaver/qwen36_27b_weaver.pth")
    watch.lap("write_drafter_and_weaver")


def cells_of(folder: Path, where: torch.device) -> dict[str, dict]:
    """Return a cell of suite paper for each method, for the static engine and these weights."""
    forms = {"forms": "fast", "gdn_backend": "fused_cuda"} if where.type == "cuda" else {}
    forms = forms or {"forms": "torch", "gdn_backend": "solve"}
    raw = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    changed = {"suite": "paper-rehearsal", "engine": "torch-static", "weights": str(folder), "device": where.type}
    # the audited rules walk trees on the host
    config = suite.resolve({**raw, **changed, **forms, "audit": []})
    names = {variant.method: variant.name(config) for variant in suite.headline(config)}
    # the weights are these, whatever their digest
    digests = dict.fromkeys(("target", "drafter", "weaver"))
    where_of = {"dataset": config["datasets"][0], "setting": "t1-think", "seed": config["seeds"][0]}
    return {name: suite.resolve_cell(config, variant=names[name], digests=digests, **where_of) for name in METHODS}


def decode_all(models: Models, cells: dict[str, dict], options, where: torch.device) -> dict[str, list[int]]:
    """Return the new tokens of one prompt by method."""
    vocab, found = models.target.config.vocab_size, {}
    prompt = Prompt("rehearsal", 0, [(31 * i + 8) % (vocab - 8) + 8 for i in range(options.prompt_tokens)])
    for name, cell in cells.items():
        config = DecodeConfig(**{**cell["decode"], "stop": (), "eos_tokens": ()})
        config = replace(config, max_new_tokens=options.max_new_tokens).check()
        parts = (getattr(models, part) if part in cell["weights"] else None for part in ("drafter", "weaver"))
        run = engines.make_loop(cell, Models(models.target, *parts), config, where, longest=len(prompt.tokens))
        run([prompt], on_finish=lambda trace, name=name: found.update({name: trace.output_tokens}))
    return found


def checksums(models: Models) -> dict[str, int]:
    """Return a sum of every tensor's bits, weighted by their places, by part and name."""
    parts = {name: getattr(models, name) for name in ("target", "drafter", "weaver")}
    return {f"{part}.{name}": checksum(tensor) for part, model in parts.items()
            for name, tensor in model.state_dict().items()}  # fmt: skip


def checksum(tensor: Tensor) -> int:
    bits, total = tensor.detach().contiguous().flatten().view(torch.int16), 0
    for number, chunk in enumerate(bits.split(CHUNK)):
        place = torch.arange(len(chunk), device=chunk.device) % 65521 + 1 + number
        total += int((chunk.to(torch.int64) * place).sum())
    return total


def _numbers(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in model.state_dict().values())


def rehearse(options, where: torch.device) -> dict:
    """Run everything; return the report, whose `wrong` names what differs. Raises OSError where the disk is small."""
    watch = Watch(where)
    models = make_models(options, where)
    report = {"device": device.facts(where), "environment": manifest.environment(), "bytes": bytes_of(models)}
    report |= {"layers": len(models.target.layers), "seconds": watch.seconds}
    watch.lap("make")
    free, needed = shutil.disk_usage(options.folder.parent).free, sum(report["bytes"].values())
    if free < 1.02 * needed:
        raise OSError(f"--folder: {free} bytes are free, {needed} are needed; lower --layers")
    expected = checksums(models)
    watch.lap("checksums")
    write_models(models, options.folder, watch)
    cells = cells_of(options.folder, where)
    handed_over = decode_all(models, cells, options, where)
    watch.lap("decode_handed_over")
    del models
    if where.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
    weights, special = cells["tfm"]["weights"], {"swa_causal": cells["tfm"].get("swa_causal")}
    models = load_models(weights, device=where, dtype=torch.bfloat16, **special)
    watch.lap("load")
    found = checksums(models)
    loaded = decode_all(models, cells, options, where)
    watch.lap("decode_loaded")
    wrong = [f"tensor {name}" for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    wrong += [f"tokens of {name}" for name in METHODS if handed_over[name] != loaded[name]]
    report |= {"tensors": len(expected), "shards": len(list((options.folder / "target").glob("*.safetensors")))}
    report |= {"tokens": {name: len(tokens) for name, tokens in loaded.items()}, "wrong": sorted(wrong)}
    if where.type == "cuda":
        report["peak_gib"] = round(torch.cuda.max_memory_allocated(where) / 2**30, 2)
    return report


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--folder", required=True, type=Path, help="folder for the weights, which must not exist yet")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SIZES, default="paper")
    parser.add_argument("--layers", type=int, help="of the target, a multiple of 4 (default: the shape's)")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    options = parser.parse_args()
    where = device.check_device(options.device)
    device.make_deterministic(threads=4)
    if options.folder.exists():
        raise ValueError(f"--folder: {options.folder} exists (allowed: a new folder); name another one")
    options.folder.mkdir(parents=True)
    try:
        report = rehearse(options, where)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_json(options.out, report)
    print(json.dumps({name: report[name] for name in ("layers", "bytes", "seconds", "tensors", "tokens", "wrong")}))
    return int(bool(report["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
