"""Time the static engine on a CUDA device, one stage a call. `pytest -m gpu tests/test_engine*.py` comes first."""

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

import torch
from engine_arms import ARMS, time_arm
from engine_shapes import random_models, step_bytes

from tfm import device
from tfm.engine.forms import TRITON, Forms
from tfm.gpu_meter import GpuMeter

DESCRIPTION = """
Stages, in the order in which they are worth calling:
  products   time torch's and our products at the paper's shapes; writes linear_choices.json to --out
  attention  time the tree attention's tilings at the paper's shapes
  steps      ms a step of each arm at the paper's shapes, random weights, with the bytes it must read
  stages     the same arms with the clock inside the graphs
Every stage writes <stage>.json to --out, also what it had when it failed. --forms leaves a form out ("torch") to find
the one that is broken; nothing falls back by itself. Last line of stdout: one JSON object. Exit 1 if anything failed.
"""
FORMS = ("attention", "rows", "sampling", "growth", "linear")


def forms_of(names: str, graphs: bool) -> Forms:
    """Return the forms with every part of `names` (comma separated, all, none) in Triton."""
    chosen = FORMS if names == "all" else () if names == "none" else tuple(names.split(","))
    unknown = sorted(set(chosen) - set(FORMS))
    if unknown:
        raise ValueError(f"--forms: {unknown[0]!r} is not allowed (allowed: all, none, {', '.join(FORMS)})")
    return Forms(graphs=graphs, ahead=graphs, **dict.fromkeys(chosen, TRITON))


def copy_bandwidth(where: torch.device, gib: int = 4) -> float:
    """Return bytes read and written a second by a copy of `gib` GiB."""
    source = torch.empty(gib * 2**30, dtype=torch.uint8, device=where)
    copy = torch.empty_like(source)
    spans = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        copy.copy_(source)
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end))
    return 2 * source.numel() / (sorted(spans)[len(spans) // 2] / 1e3)


def run_steps(options, where: torch.device, report: dict, clock: str) -> None:
    """Time every arm, the order reversed every second round; each finished arm is in the report at once."""
    forms = forms_of(options.forms, options.graphs)
    models = random_models(options.layers, where, options.vocab)
    meter = GpuMeter(where)
    report |= {"layers": options.layers, "vocab": options.vocab, "forms": vars(forms), "arms": {}}
    for name in options.arms:
        started = time.time()
        try:
            arm = time_arm(models, name, forms, options, clock=clock, meter=meter)
        except Exception:
            arm = {"error": traceback.format_exc()}
            print(arm["error"], file=sys.stderr, flush=True)
        bytes_read = step_bytes(models, ARMS[name]["method"], context=options.contexts[0])
        floor = sum(bytes_read.values()) / report["copy_bytes_per_s"] * 1e3
        report["arms"][name] = {**arm, "bytes": bytes_read, "floor_ms": floor, "seconds": time.time() - started}
        shown = {
            key: value
            for key, value in arm.items()
            if key in ("ms", "device_ms", "prefill_ms", "error", "stages_ms", "peak_gib")
        }
        print(name, json.dumps(shown)[:600], f"floor {floor:.2f} ms", flush=True)
        write(options, report)


def write(options, report: dict) -> None:
    path = options.out / f"{options.stage}.json"
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = ("products", "attention", "steps", "stages")
    parser.add_argument("--stage", required=True, choices=stages)
    parser.add_argument("--out", required=True, type=Path, help="folder for the stage's JSON")
    parser.add_argument("--forms", default="all", help="all, none, or parts in Triton: " + ",".join(FORMS))
    parser.add_argument("--eager", dest="graphs", action="store_false", help="do not capture CUDA graphs")
    parser.add_argument("--gdn-backend", default="fused_cuda", help="of the steps; fused_cuda takes the CUDA mixer")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512], help="committed tokens of the timed steps")
    parser.add_argument("--steps", type=int, default=40, help="timed steps an arm and context")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for the products' search")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    where = device.check_device("cuda")
    device.make_deterministic(threads=4)
    report = {"stage": options.stage, "device": device.facts(where), "copy_bytes_per_s": copy_bandwidth(where)}
    torch.cuda.empty_cache()
    print(json.dumps(report, default=str), flush=True)
    try:
        if options.stage in ("products", "attention"):
            # lazy: needs Triton
            module = importlib.import_module("engine_products")
            report[options.stage] = getattr(module, f"measure_{options.stage}")(where, options)
        else:
            clock = "stages" if options.stage == "stages" else "off"
            run_steps(options, where, report, clock)
    except Exception:
        report["error"] = traceback.format_exc()
        print(report["error"], file=sys.stderr, flush=True)
    write(options, report)
    failed = "error" in report or any("error" in arm for arm in report.get("arms", {}).values())
    print(json.dumps({"stage": options.stage, "ok": not failed, "out": str(options.out)}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
