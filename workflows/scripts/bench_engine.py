"""Time the static engine on a CUDA device, one stage a call. `pytest -m gpu tests/test_engine*.py` comes first."""

import argparse
import dataclasses
import importlib
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch
from engine_arms import ARMS, Arm, Variant, arm_config, mark, span_ms, synchronise
from engine_shapes import SIZES, random_models, step_bytes, weight_bytes
from input_errors import told

from tfm import device, manifest
from tfm.gpu_meter import GpuMeter

DESCRIPTION = """
Stages, in the order in which they are worth calling:
  steps      ms a step of each arm at the paper's shapes, random weights, with the bytes it must read. Arms of one
             variant stand side by side and are timed in the order A B .. B A
  products   time torch's and our products at those shapes; writes linear_choices.json to --out, which the engine takes
             from kernels/
  attention  time the tree attention's tilings at those shapes
  compile    compile what products and attention will try, without timing anything; --part 0/4 takes every fourth
Arms are method names with knobs, as in tfm-b32-w4. Variants are forms:gdn_backend[:clock[:launches[:prefill]]]: forms
in Triton (all, none, or some of attention,rows,sampling,growth,linear); stages as the clock puts events inside the
graphs; plain as the launches lets no kernel come up before the one before it is done; chunks as the prefill takes the
engine's own, as in all:fused_cuda:off:early:chunks. Prefill is timed in the first variant and in those. Every stage
writes --name (default: the stage) .json to --out, also what it had when it failed; nothing falls back by itself. Last
line of stdout: one JSON object. Exit 1 if anything failed.
"""


def copy_bandwidth(where: torch.device, gib: float = 4) -> float:
    """Return bytes read and written a second by a copy of `gib` GiB."""
    source = torch.empty(int(gib * 2**30), dtype=torch.uint8, device=where)
    copy = torch.empty_like(source)
    spans = []
    for _ in range(8):
        start = mark(where)
        copy.copy_(source)
        end = mark(where)
        synchronise(where)
        spans.append(span_ms(start, end))
    return 2 * source.numel() / (statistics.median(spans) / 1e3)


class Bench:
    """The timed steps of every variant, written after each group of arms."""

    def __init__(self, options, where: torch.device, report: dict):
        self.options, self.where, self.report = options, where, report
        self.end = time.monotonic() + options.seconds
        report |= {"sizes": dataclasses.asdict(sizes_of(options)), "arms": {}, "records": [], "errors": []}
        self.meter = make_meter(where, report)
        self.models = random_models(sizes_of(options), where)
        parts = (self.models.target, self.models.drafter, self.models.weaver)
        report["weights_gib"] = sum(map(weight_bytes, parts)) / 2**30

    def run(self) -> None:
        for number, (names, variants, contexts) in enumerate(groups_of(self.options)):
            for text in variants:
                variant = Variant.parse(text)
                arms = [arm for name in names if (arm := self._build(name, variant, contexts)) is not None]
                try:
                    self._time(arms, variant, contexts)
                    if number == 0 and text == variants[0] or variant.prefill == "chunks":
                        self._time_prefill(arms, variant)
                except Exception:
                    self._failed(str(variant))
                for arm in arms:
                    arm.close()
                write(self.options, self.report)

    def _build(self, name: str, variant: Variant, contexts: list[int]) -> Arm | None:
        options = self.options
        # a step commits at most 16 tokens; each context is set anew
        capacity = max(contexts) + 16 * ((options.rounds + 2) * options.steps + 2 * 8)
        capacity = max(capacity, *options.prefills, 0)
        try:
            if time.monotonic() > self.end:
                raise TimeoutError("left out: --seconds are over")
            arm = Arm(self.models, name, variant, capacity=capacity, graphs=options.graphs)
        except Exception:
            self._failed(f"{name} {variant}")
            return None
        bytes_read = step_bytes(self.models, arm.config.method, context=contexts[0])
        floor = sum(bytes_read.values()) / self.report["copy_bytes_per_s"] * 1e3
        self.report["arms"][f"{name} {variant}"] = {**arm.facts, "bytes": bytes_read, "floor_ms": floor}
        return arm

    def _time(self, arms: list[Arm], variant: Variant, contexts: list[int]) -> None:
        for context in contexts:
            for arm in arms:
                arm.put_context(context)
            for number in range(self.options.rounds):
                for arm in arms[:: -1 if number % 2 else 1]:
                    if time.monotonic() > self.end:
                        raise TimeoutError(f"context {context}, round {number}: --seconds are over")
                    timed = arm.time(self.options.steps, self.meter)
                    self._record(arm, variant, context=context, round=number, **timed)
            for arm in arms:
                found = arm.device_ms(min(self.options.steps, 8))
                self._record(arm, variant, context=context, device_ms=found)
            self._show(arms, variant, context)

    def _time_prefill(self, arms: list[Arm], variant: Variant) -> None:
        # with the fewest and with the most parts; what the steps are made of does not matter to it
        for arm in {arm.name: arm for arm in (arms[0], arms[-1])}.values() if arms and self.options.prefills else ():
            spans = {length: arm.prefill_ms(length) for length in self.options.prefills}
            self._record(arm, variant, prefill_ms=spans)
            print(arm.name, "prefill ms", spans, flush=True)

    def _record(self, arm: Arm, variant: Variant, **fields) -> None:
        self.report["records"].append({"arm": arm.name, "variant": str(variant), **fields})

    def _failed(self, what: str) -> None:
        self.report["errors"].append({"what": what, "error": traceback.format_exc()})
        print(what, traceback.format_exc(), file=sys.stderr, flush=True)

    def _show(self, arms: list[Arm], variant: Variant, context: int) -> None:
        for arm in arms:
            mine = [
                record
                for record in self.report["records"]
                if (record["arm"], record["variant"], record.get("context")) == (arm.name, str(variant), context)
            ]
            spans = [span for record in mine for span in record.get("ms", ())]
            apart = next(record["device_ms"] for record in mine if "device_ms" in record)
            facts = self.report["arms"][f"{arm.name} {variant}"]
            parts = " ".join(f"{name} {ms:.2f}" for name, ms in apart.items())
            print(
                f"{str(variant):24} {arm.name:12} context {context:5} median {statistics.median(spans):7.3f} ms  "
                f"device: {parts}  floor {facts['floor_ms']:.2f}",
                flush=True,
            )


def make_meter(where: torch.device, report: dict) -> GpuMeter | None:
    """Return the card's meter if it reads; else None, and the report says why there is no energy."""
    try:
        meter = GpuMeter(where)
        meter.read()
    except Exception as error:
        # times are worth having without energy, which the report then lacks by name
        report["no_energy"] = f"{type(error).__name__}: {error}"
        return None
    return meter


def groups_of(options) -> list[tuple[list[str], list[str], list[int]]]:
    """Return the groups of (arms, variants, contexts) to time, one after the other."""
    groups = [(options.arms, options.variants, options.contexts)]
    for text in options.also:
        words = [part.split() for part in text.split(";")]
        if len(words) != 3 or not all(words):
            raise ValueError(f"--also: {text!r} is not allowed (allowed: 'ARMS; VARIANTS; CONTEXTS'); see --help")
        groups.append((words[0], words[1], [int(word) for word in words[2]]))
    return groups


def sizes_of(options):
    """Return the shape, with another number of layers where one was asked for."""
    sizes = SIZES[options.shape]
    return dataclasses.replace(sizes, layers=options.layers) if options.layers else sizes


def write(options, report: dict) -> None:
    path = options.out / f"{options.name or options.stage}.json"
    path.write_text(json.dumps(report, default=str) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", required=True, choices=("steps", "products", "attention", "compile"))
    parser.add_argument("--out", required=True, type=Path, help="folder for the stage's JSON")
    parser.add_argument("--name", help="of the JSON file, without its end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--shape", choices=SIZES, default="paper")
    parser.add_argument("--layers", type=int, help="of the target (default: the shape's)")
    parser.add_argument("--variants", nargs="+", default=["all:fused_cuda"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument(
        "--also", action="append", default=[], metavar="'ARMS; VARIANTS; CONTEXTS'", help="one more group of steps"
    )
    parser.add_argument("--eager", dest="graphs", action="store_false", help="do not capture CUDA graphs")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512], help="committed tokens of the timed steps")
    parser.add_argument("--prefills", type=int, nargs="*", default=[], help="prompt lengths whose prefill is timed")
    parser.add_argument("--steps", type=int, default=20, help="timed steps an arm, context and round")
    parser.add_argument("--rounds", type=int, default=4, help="of A B .. B A")
    parser.add_argument("--seconds", type=float, default=300.0, help="start nothing more after this long")
    parser.add_argument("--part", default="0/1", help="of compile: this part of so many")
    options = parser.parse_args(arguments)
    for names, variants, _ in groups_of(options):
        for name in names:
            arm_config(name, "solve")
        for text in variants:
            Variant.parse(text).make_forms(graphs=False)
    return options


@told
def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    where = device.check_device(options.device)
    device.make_deterministic(threads=4)
    report = {"stage": options.stage, "device": device.facts(where), "environment": manifest.environment()}
    failed = False
    try:
        if options.stage == "steps":
            report["copy_bytes_per_s"] = copy_bandwidth(where, 4 if where.type == "cuda" else 0.01)
            print(f"copy {report['copy_bytes_per_s'] / 1e12:.3f} TB/s", json.dumps(report["device"]), flush=True)
            Bench(options, where, report).run()
        else:
            # lazy: needs Triton
            module = importlib.import_module("engine_products")
            report[options.stage] = getattr(module, f"run_{options.stage}")(where, options, sizes_of(options))
    except Exception:
        report["error"], failed = traceback.format_exc(), True
        print(report["error"], file=sys.stderr, flush=True)
    write(options, report)
    failed = failed or bool(report.get("errors"))
    print(json.dumps({"stage": options.stage, "ok": not failed, "out": str(options.out)}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
