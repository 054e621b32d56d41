"""Run for long in one process: a day of cells in compressed time, and 20,000 tokens by a chain of requests."""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "workflows/scripts")]

import prepare_prompts  # noqa: E402
from campaign_log import Trials  # noqa: E402
from decode_cell import run_cell  # noqa: E402

from baselines import suite  # noqa: E402
from baselines.loading import load_models  # noqa: E402
from baselines.methods import resolve  # noqa: E402
from tfm import decode as loop  # noqa: E402
from tfm.cache import AttentionRows  # noqa: E402
from tfm.cells import KINDS  # noqa: E402
from tfm.config import DecodeConfig  # noqa: E402
from tfm.tokenizer import load_tokenizer  # noqa: E402

DESCRIPTION = """
First decodes small cells of suite ci-cpu one after another in this process, each a quarter of an hour of the clock
after the one before: what they cost in memory, file handles and threads must not grow, and a cell's records must be
those of its first run. Then decodes 1,000 tokens after the last 1,024 of the request before, again and again, with
trees of 64 nodes at temperature 1; after each request the committed rows, windows and states are compared with those of
a fresh prefill of the same tokens. Adds the numbers to --trials. Last line of stdout: one JSON object. Exit 1 when
something grew or drifted.
"""
INTERVAL = 15 * 60  # seconds of the clock between two cells
KEPT, NEW = 1024, 1000  # tokens of a request's prompt, and new ones: together within the context of 2,048
SMALL = {"datasets": ["sample-math"], "methods": ["ar", "dflash", "ddtree", "tfm"], "audit": [], "kernels": None}
SMALL |= {
    "prompts": 1,
    "requests": 1,
    "max_new_tokens": 16,
    "temperatures": [1],
    "tables": ["headline", "per_set"],
    "figures": ["tau"],
}
GROWTH_MIB = 16  # between the middle and the last third: allocators keep what they once needed
DRIFT = 1e-4  # of a state's, row's or window's largest value


def usage() -> dict[str, float]:
    """Return this process's resident memory in MiB, its open handles and its threads."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = int(status["VmRSS"].split()[0]) / 1024
    return {"mib": memory, "handles": len(os.listdir("/proc/self/fd")), "threads": int(status["Threads"])}


def growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return how much the mean of the last third of samples is above that of the middle third."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    return {name: sum(one[name] for one in last) / third - sum(one[name] for one in middle) / third for name in last[0]}


def grown(found: dict[str, float]) -> list[str]:
    """Return what grew."""
    limits = {"mib": GROWTH_MIB, "handles": 0.5, "threads": 0.5}
    return [f"{name} grew by {found[name]:.1f}" for name, limit in limits.items() if found[name] > limit]


def run_cells(count: int, work: Path) -> tuple[dict, list[str]]:
    """Run `count` cells in compressed time; return the numbers and what is wrong."""
    config = suite.resolve({**yaml.safe_load((ROOT / "workflows/config/ci-cpu.yaml").read_text()), **SMALL})
    cells, prompts = suite.expand(config), work / "prompts.jsonl"
    words = ["--dataset", "sample-math", "--source", "embedded", "--tokenizer", "tfm/weights/nano/target"]
    words += ["--target", "nano", "--out", str(prompts), "--context", "2048", "--max-new-tokens", "16"]
    prepare_prompts.run(prepare_prompts.parse([*words, "--limit", "1", "--pins", str(suite.PINS_FILE)]))
    clock, samples, problems, started, first = time.time, [], [], [], {}
    try:
        for number in range(count):
            cell, out = cells[number % len(cells)], work / f"{number}"
            time.time = lambda shift=number * INTERVAL: clock() + shift
            started.append(run_cell(cell, prompts=prompts, out=out, commit="long run")["started"])
            records = {kind: timeless(out / f"{kind}.parquet") for kind in KINDS}
            if first.setdefault(cell["path"], records) != records:
                problems.append(f"cell {number}, {cell['variant']}: other records than its first run")
            samples.append(usage())
    finally:
        time.time = clock
    found = growth(samples)
    hours = count * INTERVAL / 3600
    numbers = {"long_cells": count, "long_simulated_hours": hours, "long_cells_mib": round(samples[-1]["mib"])}
    numbers |= {f"long_cells_growth_{name}": round(value, 2) for name, value in found.items()}
    days = {text[:13] for text in started}  # to the hour
    problems += [] if len(days) >= hours else [f"the clock went through {len(days)} hours only"]
    return numbers, problems + grown(found)


def timeless(path: Path) -> dict:
    """Return a record file's columns without times."""
    table = pq.read_table(path)
    return table.select([name for name in table.column_names if not name.endswith("_us")]).to_pydict()


def run_chain(tokens: int, seed: int) -> tuple[dict, list[str]]:
    """Decode `tokens` tokens by a chain of requests; return the numbers and what is wrong."""
    folder = ROOT / "tfm/weights/nano"
    parts = {part: str(folder / part) for part in ("target", "drafter", "weaver")}
    models = load_models(parts, device=torch.device("cpu"), dtype=torch.float32)
    config = DecodeConfig(method="tfm", budget=64, width=16, temperature=1.0, seed=seed, max_new_tokens=NEW)
    caches, original = [], models.target.new_cache
    models.target.new_cache = lambda *arguments: caches.append(original(*arguments)) or caches[-1]
    text = (ROOT / "tfm/data/sample-chat.jsonl").read_text()
    line = load_tokenizer(folder / "target").encode(text)[:KEPT]
    samples, drifts, emitted, steps, number = [], [], 0, 0, 0
    while emitted < tokens:
        traces = []
        prompt, wanted = loop.Prompt(f"link {number}", number, line[-KEPT:]), min(NEW, tokens - emitted)
        now = replace(config, max_new_tokens=wanted)
        loop.decode([prompt], models, now, proposer=resolve("tfm")(now, models), on_finish=traces.append)
        line = prompt.tokens + traces[0].output_tokens
        drifts.append(drift(models.target, caches.pop(), line, original))
        emitted, steps, number = emitted + len(traces[0].output_tokens), steps + len(traces[0].steps), number + 1
        samples.append(usage())
        print(f"{emitted} tokens, drift {drifts[-1]:.1e}, {samples[-1]}", file=sys.stderr, flush=True)
    found, third = growth(samples), len(drifts) // 3
    numbers = {"long_tokens": emitted, "long_requests": number, "long_steps": steps, "long_drift": max(drifts)}
    numbers |= {f"long_tokens_growth_{name}": round(value, 2) for name, value in found.items()}
    problems = [f"a committed value drifted by {max(drifts):.1e} of the largest"] if max(drifts) > DRIFT else []
    if max(drifts[-third:]) > 10 * max(drifts[:third]):
        problems.append(f"the drift grew from {max(drifts[:third]):.1e} to {max(drifts[-third:]):.1e}")
    return numbers, problems + grown(found)


@torch.inference_mode()
def drift(target, cache, line: list[int], new_cache) -> float:
    """Return how far the cache of one request is from a fresh prefill of its tokens, of the layer's largest value."""
    length = int(cache.lengths[0])
    fresh = new_cache(1, length)
    target.prefill(torch.tensor([line[:length]]), torch.tensor([length]), fresh)
    worst = 0.0
    for layer, exact in zip(cache.layers, fresh.layers, strict=True):
        if isinstance(layer, AttentionRows):
            pairs = [(layer.keys[:, :, :length], exact.keys), (layer.values[:, :, :length], exact.values)]
        else:
            pairs = [(layer.state, exact.state), (layer.inputs, exact.inputs)]
        worst = max(worst, *(float((one - other).abs().max() / other.abs().max()) for one, other in pairs))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=96, help="a quarter of an hour each (default: 96, a day)")
    parser.add_argument("--tokens", type=int, default=20_000, help="by the chain of requests (default: 20000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=Path, help="file of trials to add the numbers to")
    options = parser.parse_args()
    if options.cells < 3 or options.tokens < 3 * NEW:
        parser.error(f"growth is told from thirds: at least 3 cells and {3 * NEW} tokens")
    os.chdir(ROOT)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(options.trials or Path(folder) / "trials.jsonl")
        numbers, problems = run_cells(options.cells, Path(folder))
        print(json.dumps(numbers), file=sys.stderr, flush=True)
        more, wrong = run_chain(options.tokens, options.seed)
    name = f"{options.cells} cells, {options.tokens} tokens, seed {options.seed}"
    trials.add("long_run", name, problems=problems + wrong, lost_cells=0, outcome="nothing grew, nothing drifted")
    trials.count("long", name, **numbers, **more)
    print(json.dumps({**numbers, **more, "problems": problems + wrong}))
    return int(bool(problems + wrong))


if __name__ == "__main__":
    sys.exit(main())
