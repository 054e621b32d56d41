"""Stage timing: nothing, or the wall of each stage of each step. The only place that reads a timer."""

import time
from contextlib import contextmanager, nullcontext

import torch

from tfm.trace import STAGES, SUBSTAGES

MODES = ("off", "wall", "stages")
_NOTHING = nullcontext()


class Clock:
    """Times requests ("wall") and also stages inside a step ("stages"); "off" times nothing.

    On CUDA a stage is the span between two events, read once the step has ended: nothing waits inside a step. With
    "stages" a step begins and ends with a synchronisation, so walls come from "wall". A substage counts towards the
    stage it runs in as well.
    """

    def __init__(self, mode: str = "off", device: torch.device | str = "cpu"):
        if mode not in MODES:
            raise ValueError(f"clock: {mode!r} is not allowed (allowed: {', '.join(MODES)}); choose one of them")
        self.mode = mode
        self._cuda = torch.device(device).type == "cuda"
        self._spans: list[tuple[str, object, object]] = []
        self._step_start = 0.0

    def now(self) -> float | None:
        """Seconds of a monotonic clock with all device work done, or None when the clock is off."""
        if self.mode == "off":
            return None
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def stage(self, name: str):
        """Context manager that adds its span to stage `name` of the current step."""
        return self._span(name) if self.mode == "stages" else _NOTHING

    def start_step(self) -> None:
        self._spans.clear()
        if self.mode == "stages":
            self._step_start = self.now()

    def end_step(self) -> dict[str, float] | None:
        """Microseconds of each stage and substage of the step; "other" and "target_other" are the remainders."""
        if self.mode != "stages":
            return None
        wall = (self.now() - self._step_start) * 1e6
        spent = dict.fromkeys((*STAGES, *SUBSTAGES), 0.0)
        for name, start, end in self._spans:
            spent[name] += start.elapsed_time(end) * 1e3 if self._cuda else (end - start) * 1e6
        spent["other"] = wall - sum(spent[name] for name in STAGES if name != "other")
        target = sum(spent[name] for name in SUBSTAGES if name.startswith("target_"))
        spent["target_other"] = spent["verify"] - target
        return spent

    @contextmanager
    def _span(self, name: str):
        start = self._mark()
        try:
            yield
        finally:
            self._spans.append((name, start, self._mark()))

    def _mark(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


OFF = Clock("off")
