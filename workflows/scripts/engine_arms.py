"""The arms that bench_engine times, and how: steps of one request at a given context, random weights, host included."""

import contextlib
import gc
import importlib
import re
import statistics
import time
from dataclasses import dataclass, replace

import torch

from baselines.methods import METHODS
from baselines.static_methods import make_static_proposer
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, _Request
from tfm.engine.forms import TRITON, Forms
from tfm.engine.loop import Engine
from tfm.gpu_meter import facts

FORMS = ("attention", "rows", "sampling", "growth", "linear")
# as in the paper; a weaver's suite overrides them by the arm's name
DEFAULTS = {
    "ar": {},
    "dflash": {},
    "ddtree": {"budget": 64},
    "dartree": {"budget": 64, "candidates": 512},
    "tfm": {"budget": 64, "candidates": 512},
}
ARMS = tuple(DEFAULTS)
KNOBS = {"b": "budget", "w": "width", "k": "candidates", "c": "children", "d": "depth"}
WARM_UP_STEPS = 4


@dataclass(frozen=True)
class Variant:
    """How arms compute: forms ("all", "none", or parts in Triton, comma separated), GDN backend, clock, launches."""

    forms: str
    gdn_backend: str
    clock: str = "off"
    launches: str = "early"  # plain: none of Triton's kernels comes up before the previous one is done
    prefill: str = "torch"  # or chunks

    @staticmethod
    def parse(text: str) -> "Variant":
        """Return the variant of forms:backend[:clock[:launches]]."""
        words = text.split(":")
        if not 2 <= len(words) <= 5 or words[3:4] not in ([], ["early"], ["plain"]):
            allowed = "forms:gdn_backend[:clock[:early or plain[:torch or chunks]]]"
            raise ValueError(f"--variants: {text!r} is not allowed (allowed: {allowed}); see --help")
        return Variant(*words)

    def __str__(self) -> str:
        words = [self.forms, self.gdn_backend, self.clock, self.launches, self.prefill]
        usual = ["", "", "off", "early", "torch"]
        return ":".join(words[: max(i + 1 for i in range(5) if words[i] != usual[i])])

    def make_forms(self, *, graphs: bool) -> Forms:
        """Return the forms, captured in graphs or not. Raises ValueError for a part that does not exist."""
        chosen = FORMS if self.forms == "all" else () if self.forms == "none" else tuple(self.forms.split(","))
        unknown = sorted(set(chosen) - set(FORMS))
        if unknown:
            raise ValueError(f"--variants: {unknown[0]!r} is not allowed (allowed: all, none, {', '.join(FORMS)})")
        return Forms(graphs=graphs, ahead=graphs, prefill=self.prefill, **dict.fromkeys(chosen, TRITON))


def arm_config(name: str, gdn_backend: str) -> DecodeConfig:
    """Return the settings of an arm at temperature 1: a method, then knobs, as in tfm-b64-w4."""
    method, *words = name.split("-")
    found = [re.fullmatch(r"([bwkcd])(\d+)", word) for word in words]
    if method not in DEFAULTS or not all(found):
        allowed = f"{', '.join(DEFAULTS)}, and -b, -w, -k, -c, -d with a number"
        raise ValueError(f"--arms: {name!r} is not allowed (allowed: {allowed}); for example tfm-b32-w4")
    knobs = {KNOBS[match[1]]: int(match[2]) for match in found}
    settings = {**DEFAULTS[method], **knobs}
    return DecodeConfig(
        method=method, temperature=1.0, gdn_backend=gdn_backend, max_new_tokens=10**6, **settings
    ).check()


class Arm:
    """One method's engine over the shared weights, ready to be timed."""

    def __init__(self, models: Models, name: str, variant: Variant, *, capacity: int, graphs: bool):
        self.name, self.config = name, arm_config(name, variant.gdn_backend)
        needed = METHODS[self.config.method].parts_for(self.config)
        parts = (getattr(models, part) if part in needed else None for part in ("drafter", "weaver"))
        models, forms = Models(models.target, *parts), variant.make_forms(graphs=graphs)
        self.where, start, before = models.target.embed_weight.device, time.perf_counter(), memory(None)
        proposer = make_static_proposer(self.config, models, forms)
        with plain_launches() if variant.launches == "plain" else contextlib.nullcontext():
            self.engine = Engine(
                models, self.config, proposer=proposer, capacity=capacity, forms=forms, clock=variant.clock
            )
        synchronise(self.where)
        after = memory(self.where)
        self.facts = {
            "method": self.config.method,
            "budget": self.config.budget,
            "rows": self.config.budget + 1 if self.config.budget else self.engine.step.path_rows,  # verified a step
            "expansions": getattr(proposer, "expansions", None),
            "width": getattr(proposer, "_width", None),
            "build_s": time.perf_counter() - start,
            # beside the weights: what building and capturing needed at most, and what stays
            "built_peak_gib": _gib(after, before, "peak"),
            "kept_gib": _gib(after, before, "now"),
            "reserved_gib": _gib(after, before, "reserved"),
        }

    def put_context(self, context: int) -> None:
        """Pretend that `context` tokens are committed: random keys, values and states, as a prefill would leave."""
        step = self.engine.step
        self.engine.restart()
        with torch.inference_mode():
            for rows in (step.target, step.drafter):
                if rows is not None:
                    rows.keys.normal_()
                    rows.values.normal_()
            for state in step.target.states():
                state.state.normal_(std=0.01)
                state.inputs.normal_()
            step.target.length.fill_(context)
            step.context.roots.fill_(11)
            step.context.target_hidden.normal_()
            if step.drafter is not None:
                step.drafter.pending_count.zero_()
        settings = replace(self.config, max_new_tokens=10**9)
        self._request = _Request(Prompt("context", 0, [11] * context), settings, None)
        self._steps(WARM_UP_STEPS)

    def time(self, count: int, meter=None) -> dict:
        """Return ms of each of `count` steps as the loop runs them, host included, and of all together."""
        before = meter.read() if meter is not None else None
        spans, wall = self._steps(count)
        found = {"ms": spans, "wall_ms": wall, "context_after": int(self.engine.step.target.length)}
        if self.engine.clock.mode == "stages":
            found["stages_us"] = stage_medians(self._request.steps[-count:])
        return found | ({"power": facts(before, meter.read())} if meter is not None else {})

    def _steps(self, count: int) -> tuple[list[float], float]:
        spans = []
        synchronise(self.where)
        start = last = time.perf_counter()
        with torch.inference_mode():
            for _ in range(count):
                self.engine._step(self._request, False)
                now = time.perf_counter()
                spans.append((now - last) * 1e3)
                last = now
        synchronise(self.where)
        return spans, (time.perf_counter() - start) * 1e3

    def device_ms(self, count: int) -> dict[str, float]:
        """Return ms of a step's parts on the device alone, without the host: medians of `count` steps in a row."""
        step = self.engine.step
        parts = {"propose": step.propose, "verify": step.verify, "commit": step.commit}
        self.engine.restart()
        marks = [mark(self.where)]
        with torch.inference_mode():
            for _ in range(count):
                for part in parts.values():
                    part()
                    marks.append(mark(self.where))
        synchronise(self.where)
        spans = [span_ms(one, other) for one, other in zip(marks[:-1], marks[1:], strict=True)]
        found = {name: statistics.median(spans[i :: len(parts)]) for i, name in enumerate(parts)}
        return found | {"step": sum(found.values())}

    def prefill_ms(self, length: int, rounds: int = 2) -> float:
        """Return ms of the prefill of `length` tokens, the copy into the static memory included: the best of rounds."""
        spans, vocab, engine = [], self.engine.models.target.config.vocab_size, self.engine
        with torch.inference_mode():
            for number in range(rounds):
                synchronise(self.where)
                start = time.perf_counter()
                tokens = [(7 * i + number) % (vocab - 8) + 8 for i in range(length)]
                engine.step.prefill(tokens, 0, engine._first_token)
                synchronise(self.where)
                spans.append((time.perf_counter() - start) * 1e3)
        return min(spans)

    def close(self) -> None:
        """Give back graphs and memory."""
        self.engine = None
        gc.collect()
        if self.where.type == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def plain_launches():
    """Launch Triton's kernels one after the other in the block; a graph that is captured in it stays so."""
    module = importlib.import_module("tfm_kernels.pdl_triton")  # lazy: needs Triton
    options, module.options = module.options, lambda device: {"PDL": False}
    try:
        yield
    finally:
        module.options = options


def stage_medians(steps: list) -> dict[str, float]:
    """Return the median us of each stage and substage of steps."""
    return {name: statistics.median(step.stage_us[name] for step in steps) for name in steps[0].stage_us}


def synchronise(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()


def mark(where: torch.device):
    """Return a point of time on the device's stream."""
    if where.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def span_ms(start, end) -> float:
    """Return ms between two marks whose work is done."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def memory(where: torch.device | None) -> dict[str, int]:
    """Return bytes allocated now, at the peak since the last call with None, and reserved; zeros without a GPU."""
    if not torch.cuda.is_available():
        return {"now": 0, "peak": 0, "reserved": 0}
    if where is None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    return {
        "now": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def _gib(after: dict, before: dict, key: str) -> float:
    return round((after[key] - before["now" if key == "peak" else key]) / 2**30, 3)
