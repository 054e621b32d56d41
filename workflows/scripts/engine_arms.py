"""The arms that bench_engine times, and how: steps of one request at a given context, random weights, host included."""

import gc
import statistics
import time
from dataclasses import replace

import torch

from baselines.methods import METHODS
from baselines.static_methods import make_static_proposer
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, _Request
from tfm.engine.forms import Forms
from tfm.engine.loop import Engine
from tfm.gpu_meter import GpuMeter, facts

ARMS = {
    "ar": {"method": "ar"},
    "dflash": {"method": "dflash"},
    "ddtree": {"method": "ddtree", "budget": 64},
    "dartree": {"method": "dartree", "budget": 64, "candidates": 512},
    "tfm": {"method": "tfm", "budget": 64, "candidates": 512},
    "tfm-b32": {"method": "tfm", "budget": 32, "candidates": 512},
    "tfm-b128": {"method": "tfm", "budget": 128, "candidates": 512},
}
WARM_UP_STEPS = 4
PREFILLS = (128, 512)  # tokens


def arm_config(name: str, gdn_backend: str) -> DecodeConfig:
    """Return the settings of an arm at temperature 1."""
    return DecodeConfig(**ARMS[name], temperature=1.0, gdn_backend=gdn_backend, max_new_tokens=10**6)


def time_arm(models: Models, name: str, forms: Forms, options, *, clock: str, meter: GpuMeter) -> dict:
    """Return ms a step (median, mean) at each context, the device's part of it, stages, energy and peak memory."""
    config = arm_config(name, options.gdn_backend)
    parts = METHODS[config.method].parts_for(config)
    models = Models(
        models.target, *(getattr(models, part) if part in parts else None for part in ("drafter", "weaver"))
    )
    torch.cuda.reset_peak_memory_stats()
    capacity = max(options.contexts) + 16 * (3 * options.steps + WARM_UP_STEPS + 2)
    started = time.time()
    proposer = make_static_proposer(config, models, forms)
    engine = Engine(models, config, proposer=proposer, capacity=capacity, forms=forms, clock=clock)
    torch.cuda.synchronize()
    arm = {"build_s": time.time() - started, "ms": {}, "mean_ms": {}, "device_ms": {}, "stages_ms": {}, "power": {}}
    for context in options.contexts:
        request = put_context(engine, config, context)
        timed_steps(engine, request, WARM_UP_STEPS)
        before = meter.read()
        spans, wall = timed_steps(engine, request, options.steps)
        arm["power"][context] = facts(before, meter.read())
        arm["ms"][context], arm["mean_ms"][context] = statistics.median(spans), wall / options.steps
        arm["device_ms"][context] = device_time(engine, options.steps)
        if clock == "stages":
            arm["stages_ms"][context] = stage_medians(request.steps[-options.steps :])
    arm["prefill_ms"] = {length: prefill_time(engine, length) for length in PREFILLS if length <= capacity}
    arm["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    del engine, proposer
    gc.collect()
    torch.cuda.empty_cache()
    return arm


def put_context(engine: Engine, config: DecodeConfig, context: int) -> _Request:
    """Pretend that `context` tokens are committed: random keys, values and states, as a prefill would leave."""
    step = engine.step
    engine.restart()
    with torch.inference_mode():
        for memory in (step.target, step.drafter):
            if memory is not None:
                memory.keys.normal_()
                memory.values.normal_()
        for state in step.target.states():
            state.state.normal_(std=0.01)
            state.inputs.normal_()
        step.target.length.fill_(context)
        step.context.roots.fill_(11)
        step.context.target_hidden.normal_()
        if step.drafter is not None:
            step.drafter.pending_count.zero_()
    return _Request(Prompt("context", 0, [11] * context), replace(config, max_new_tokens=10**9), None)


def timed_steps(engine: Engine, request: _Request, count: int) -> tuple[list[float], float]:
    """Return ms of each of `count` steps as the loop runs them, and of all together."""
    spans = []
    torch.cuda.synchronize()
    start = last = time.perf_counter()
    with torch.inference_mode():
        for _ in range(count):
            engine._step(request, False)
            now = time.perf_counter()
            spans.append((now - last) * 1e3)
            last = now
    torch.cuda.synchronize()
    return spans, (time.perf_counter() - start) * 1e3


def device_time(engine: Engine, count: int) -> float:
    """Return ms of a step's device work alone: its parts back to back, no host in between."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.inference_mode():
        start.record()
        for _ in range(count):
            engine.step.propose()
            engine.step.verify()
            engine.step.commit()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def prefill_time(engine: Engine, length: int, rounds: int = 3) -> float:
    """Return ms of the prefill of `length` tokens, the copy into the static memory included: the best of rounds."""
    spans, vocab = [], engine.models.target.config.vocab_size
    with torch.inference_mode():
        for number in range(rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.step.prefill([(7 * i + number) % (vocab - 8) + 8 for i in range(length)], 0, engine._first_token)
            torch.cuda.synchronize()
            spans.append((time.perf_counter() - start) * 1e3)
    return min(spans)


def stage_medians(steps: list) -> dict[str, float]:
    """Return the median ms of each stage and substage."""
    return {name: statistics.median(step.stage_us[name] for step in steps) / 1e3 for name in steps[0].stage_us}
