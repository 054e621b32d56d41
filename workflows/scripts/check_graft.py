"""Check a suite's graft on a device: what it costs to build, and that it computes what its source computes."""

import argparse
import gc
import json
import math
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from decode_cell import check_weights
from input_errors import told

from baselines.inputs import pins
from baselines.loading import load_models
from baselines.methods import METHODS, resolve
from baselines.plans import read_plan
from baselines.static_methods import make_static_proposer
from tfm import device, graft_shape
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, Step, decode
from tfm.engine.forms import TORCH, Forms
from tfm.engine.loop import Engine
from tfm.manifest import write_json
from tfm.prompt_sources import load_prompt_set
from tfm.prompts import Preparation, prepare
from tfm.sampling import gumbel
from tfm.tokenizer import load_tokenizer

TYPES = ("float32", "bfloat16")
# what is read of the plan's config
CONFIG = {"graft": (dict, None), "weights": str, "torch_threads": int, "context": int, "source": str, "datasets": [str]}
DESCRIPTION = """
Reads the plan of a suite with a graft (snakemake makes it: results/<suite>/plan.json) and the source's weights. In
float32, at a part of the shape's layers, and in bfloat16 at all of them, it builds the graft and decodes the suite's
first prompts with every method: the reference loop with source and graft side by side, and the static engine with the
graft (on a GPU with its fast forms). Writes sizes, seconds, peak memory and every difference to --out. Exit 1 when
float32 outputs differ, when an output parts from ar's of the same models elsewhere than at a near tie, or when padding
is emitted. Needs what run_cells.py needs, and PyYAML.
"""
# of scores: two ways to one in bfloat16, each ending in a rounding; the sum of many float32 roundings
NEAR_TIE_ULPS, NEAR_TIE_FLOAT32 = 2, 1e-4
ALLOWED_FLOAT32 = 1e-3  # logits of size 10 behind the shape's layers, sums of thousands of terms in another order


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json of a suite with a graft")
    parser.add_argument("--device", required=True, choices=("cpu", "cuda"))
    parser.add_argument("--shallow-layers", type=int, default=16, help="layers of the float32 graft (default: 16)")
    parser.add_argument("--prompts", type=int, default=4, help="prompts that are decoded (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="new tokens a prompt (default: 32)")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, help="types of the weights (default: both)")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    plan = read_plan(options.plan, CONFIG)
    config, cells = plan["config"], first_cells(plan)
    for cell in cells:
        check_weights(cell)
    device.make_deterministic(threads=config["torch_threads"])
    # nothing here is a time that anyone quotes
    with device.claim(device.check_device(options.device), shared=True) as where:
        report = {"suite": config["suite"], "device": device.facts(where), "graft": config["graft"]}
        report["weights_sha256"] = {part: digest for cell in cells for part, digest in cell["weights_sha256"].items()}
        prompts = read_prompts(config, options)
        shapes = {"float32": shallower(config, options.shallow_layers), "bfloat16": config["graft"]}
        for name in options.types:
            shape = shapes[name]
            report[name] = compare(cells, shape, prompts, options, dtype=getattr(torch, name), where=where)
            write_json(options.out, report)
    wrong = [f"{name}: {text}" for name in options.types for text in report[name]["wrong"]]
    print("\n".join(wrong), file=sys.stderr)
    print(json.dumps({"out": str(options.out), "wrong": len(wrong)}))
    return 1 if wrong else 0


def first_cells(plan: dict) -> list[dict]:
    """Return one headline cell a method and temperature, ar's first; raises ValueError for a plan without a graft."""
    if not plan["config"].get("graft"):
        raise ValueError(f"--plan: suite {plan['config']['suite']} has no graft; give the plan of one that has")
    cells = {}
    for cell in plan["cells"]:
        if cell["part"] == "headline":
            cells.setdefault((cell["setting"], cell["variant"]), cell)
    return sorted(cells.values(), key=lambda cell: cell["decode"]["method"] != "ar")


def folders(config: dict) -> dict[str, str]:
    """Return the folders of all three parts."""
    return {part: f"{config['weights']}/{part}" for part in graft_shape.PARTS}


def read_prompts(config: dict, options) -> list[Prompt]:
    """Return the first prompts of the suite's sets, one set after the other."""
    tokenizer, found = load_tokenizer(f"{config['weights']}/target"), []
    preparation = Preparation(max_new_tokens=options.max_new_tokens, context=config["context"])
    for name in config["datasets"]:
        rows = load_prompt_set(pins(), source=config["source"], name=name).rows
        found.append([Prompt(row.id, row.index, row.tokens) for row in prepare(rows, tokenizer, preparation)[0]])
    return [row for rows in zip(*found, strict=False) for row in rows][: options.prompts]


def shallower(config: dict, layers: int) -> dict:
    """Return the graft with another number of layers; each tap stands right behind the source's layer."""
    shape = config["graft"]
    source = {
        part: json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        for part, folder in folders(config).items()
    }
    target = {**shape["target"], "num_hidden_layers": layers}
    places = graft_shape.spread_layers(
        source["target"]["layer_types"], graft_shape.wide_layer_types(target, source["target"])
    )
    if places is None:
        raise ValueError(
            f"--shallow-layers: {layers} is not allowed (allowed: enough for the source's layers); raise it"
        )
    taps = [places[tap] for tap in source["drafter"]["dflash_config"]["target_layer_ids"]]
    target["layers"] = list(places)
    return {**shape, "target": target, "drafter": {**shape["drafter"], "target_layer_ids": taps}}


def compare(cells: list[dict], shape: dict, prompts: list[Prompt], options, *, dtype: torch.dtype, where) -> dict:
    """Return what the graft of one dtype costs and where it differs from its source of that dtype."""
    free_memory(where)
    start, before = time.perf_counter(), allocated(where)
    weights = {part: folder for cell in cells for part, folder in cell["weights"].items()}
    wide = load_models(weights, device=where, dtype=dtype, graft=shape)
    built = {"layers": len(wide.target.layers), "peak_gib": peak_gib(where, before)}
    built["seconds"] = round(time.perf_counter() - start, 2)
    built["weights_gib"] = round(sum(map(size_of, (wide.target, wide.drafter, wide.weaver))) / 2**30, 2)
    source = load_models(weights, device=where, dtype=dtype)
    runs, wrong, expected, vocab = {}, [], {}, source.target.config.vocab_size
    for cell in cells:
        settings, name = decode_config(cell, options), f"{cell['variant']} {cell['setting']}"
        ours, theirs = (Run.of(models, settings, prompts, vocab) for models in (wide, source))
        ar = expected.setdefault(cell["setting"], ours.outputs)  # ar's cells come first
        found = {
            "same_as_source": sum(ours.outputs[key] == theirs.outputs[key] for key in theirs.outputs),
            "steps": [len(ours.steps), len(theirs.steps)],
            "logits": logit_differences(ours, theirs),
            "parts_from_ar": [found for p in prompts if (found := difference(wide, p, ar, ours.outputs, settings))],
        }
        print(name, found["same_as_source"], found["steps"], found["logits"], flush=True)
        wrong += [f"{name}: {text}" for text in verdicts(found, ours, source, dtype)]
        try:
            static = static_run(wide, settings, prompts)
        except Exception:
            # the other methods are still worth the machine's time; the exit status tells
            wrong.append(f"{name}: the static engine failed: {traceback.format_exc()}")
        else:
            found["static"] = static["facts"]
            found["static"]["parts_from_ar"] = [
                far for p in prompts if (far := difference(wide, p, ar, static["outputs"], settings))
            ]
            wrong += [f"{name}, static engine: {text}" for text in far_from_ar(found["static"])]
            print(name, "static", found["static"], flush=True)
        runs[name] = found
        free_memory(where)  # the engine's graphs keep their pools
    return {"built": built, "runs": runs, "wrong": wrong, "peak_gib": peak_gib(where, before)}


def decode_config(cell: dict, options) -> DecodeConfig:
    """Return a cell's settings for this check: the reference loop, of any type, verifies trees in plain PyTorch."""
    changed = {"max_new_tokens": options.max_new_tokens, "requests": 1, "stop": (), "eos_tokens": ()}
    changed["gdn_backend"] = "solve"
    return DecodeConfig(**{**cell["decode"], **changed})


@dataclass
class Run:
    """Outputs and steps of one method on all prompts; a step is its tree and the target's live logits, on the host."""

    outputs: dict[str, list[int]]
    steps: list[tuple[torch.Tensor, torch.Tensor]]
    padding_is_off: bool = True  # no row had a logit at a padded id

    @staticmethod
    def of(models: Models, settings: DecodeConfig, prompts: list[Prompt], vocab: int) -> "Run":
        """Decode with the reference loop; ids from `vocab` on are padding."""
        found = Run({}, [])

        def look(step: Step) -> None:
            # looked at on the device: 65 rows of 248,320 logits are 64 MB a step
            padding = step.logits[..., vocab:]
            found.padding_is_off = found.padding_is_off and bool((padding == -torch.inf).all())
            tree = torch.stack([step.tree.tokens, step.tree.parents]).cpu()
            found.steps.append((tree, step.logits[..., :vocab].float().cpu()))

        def finish(trace) -> None:
            found.outputs[trace.id] = trace.output_tokens

        proposer = resolve(settings.method)(settings, models)
        decode(prompts, models, settings, proposer=proposer, on_finish=finish, on_step=look)
        return found


def logit_differences(ours: Run, theirs: Run) -> dict:
    """Return how far the live logits of steps with equal trees lie apart, and whether padding had any."""
    steps = zip(ours.steps, theirs.steps, strict=False)
    pairs = [(a, b) for (tree, a), (other, b) in steps if torch.equal(tree, other)]
    largest = max((float((a - b).abs().max()) for a, b in pairs), default=None)
    rows = sum(b[..., 0].numel() for _, b in pairs)
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
    found = {"steps": len(pairs), "largest": largest, "rows": rows, "same_first_choice": same}
    return found | {"padding_is_off": ours.padding_is_off}


def difference(models: Models, prompt: Prompt, expected: dict, got: dict, settings: DecodeConfig) -> dict | None:
    """Return where an output parts from ar's, judged by scoring the tokens before it in one pass without any draft."""
    pair = expected[prompt.id], got[prompt.id]
    if pair[0] == pair[1]:
        return None
    at = next(i for i, (one, other) in enumerate(zip(*pair, strict=True)) if one != other)
    line = torch.tensor([prompt.tokens + pair[0][:at]], device=models.target.embed_weight.device)
    with torch.inference_mode():
        row = models.target(line).logits[0, -1]
    scores = row.float()
    if settings.temperature > 0:
        index, position = (torch.tensor(value, device=row.device) for value in ([prompt.index], [[line.shape[1]]]))
        scores = scores / settings.temperature + gumbel(settings.seed, index, position, len(row))[0, 0]
    both = torch.tensor([pair[0][at], pair[1][at]], device=row.device)
    gap = float(scores.max() - scores[both].min())
    # what the type resolves at the larger of the two logits, however large the noise on them is
    largest = float(row[both].float().abs().max())
    step = torch.finfo(row.dtype).eps * 2.0 ** math.floor(math.log2(largest)) / (settings.temperature or 1.0)
    is_near_tie = gap <= (NEAR_TIE_FLOAT32 if row.dtype == torch.float32 else NEAR_TIE_ULPS * step)
    return {"prompt": prompt.id, "at": at, "gap": gap, "resolution": step, "is_near_tie": is_near_tie}


def verdicts(found: dict, ours: Run, source: Models, dtype: torch.dtype) -> list[str]:
    """Return what is wrong with a run."""
    vocab, wrong = source.target.config.vocab_size, []
    if not found["logits"]["padding_is_off"] or any(token >= vocab for row in ours.outputs.values() for token in row):
        wrong.append("padding of the vocabulary has a logit or was emitted")
    wrong += far_from_ar(found)
    if dtype == torch.float32:
        largest, count = found["logits"]["largest"], len(ours.outputs)
        if largest is None or not largest <= ALLOWED_FLOAT32:
            wrong.append(f"logits differ by {largest} from the source's (allowed: {ALLOWED_FLOAT32})")
        if found["same_as_source"] != count:
            wrong.append(f"{count - found['same_as_source']} of {count} outputs are not the source's")
    return wrong


def far_from_ar(found: dict) -> list[str]:
    """Return where outputs part from ar's although no near tie is there."""
    far = [f"{d['prompt']} at {d['at']}, gap {d['gap']:.2g}" for d in found["parts_from_ar"] if not d["is_near_tie"]]
    return [f"parts from ar at no near tie: {text}" for text in far]


def static_run(models: Models, settings: DecodeConfig, prompts: list[Prompt]) -> dict:
    """Return the static engine's outputs by prompt, and facts of its steps (times beside other work mean little)."""
    where, dtype = models.target.embed_weight.device, models.target.embed_weight.dtype
    forms = Forms()
    if where.type == "cuda":
        # solve_triangular may leave the stream that is captured; float32 rows of 256 overfill the attention's tiles
        is_low = dtype == torch.bfloat16
        forms = Forms.fast() if is_low else replace(Forms.fast(), attention=TORCH)
        settings = replace(settings, gdn_backend="fused_cuda" if is_low else "recurrent_triton")
    parts = METHODS[settings.method].parts_for(settings)
    models = Models(
        models.target, *(getattr(models, part) if part in parts else None for part in ("drafter", "weaver"))
    )
    capacity, done = max(len(prompt.tokens) for prompt in prompts) + settings.max_new_tokens, []
    proposer = make_static_proposer(settings, models, forms)
    engine = Engine(models, settings, proposer=proposer, capacity=capacity, forms=forms, clock="wall")
    engine.decode(prompts, on_finish=done.append)
    steps = sum(len(trace.steps) for trace in done)
    tokens = sum(len(trace.output_tokens) - 1 for trace in done)
    facts = {"steps": steps, "tokens_a_step": tokens / steps, "ms_a_step": sum(t.decode_us for t in done) / steps / 1e3}
    return {"outputs": {trace.id: trace.output_tokens for trace in done}, "facts": facts}


def free_memory(where: torch.device) -> None:
    """Give back what nothing holds any more, graphs' pools among it."""
    gc.collect()
    if where.type == "cuda":
        torch.cuda.empty_cache()


def size_of(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def allocated(where: torch.device) -> int:
    """Start counting the peak of a device's memory; return what is allocated now."""
    if where.type == "cpu":
        return 0
    torch.cuda.synchronize(where)
    torch.cuda.reset_peak_memory_stats(where)
    return torch.cuda.memory_allocated(where)


def peak_gib(where: torch.device, before: int) -> float | None:
    """Return the peak above `before` since `allocated` was called; None on a CPU, where nothing counts it."""
    if where.type == "cpu":
        return None
    torch.cuda.synchronize(where)
    return round((torch.cuda.max_memory_allocated(where) - before) / 2**30, 2)


if __name__ == "__main__":
    sys.exit(main())
