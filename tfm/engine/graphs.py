"""CUDA graphs of a step's parts, and the clock that times stages inside them."""

import itertools
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor

from tfm.clock import Clock

WARM_UPS = 2  # eager runs before a capture: kernels compile and libraries make their workspaces there


class GraphClock(Clock):
    """A Clock whose CUDA stages may stand inside a captured graph: their events are recorded at every replay."""

    def __init__(self, mode: str = "off", device: torch.device | str = "cpu"):
        super().__init__(mode, device)
        self._replayed: dict[int, list[tuple[str, object, object]]] = {}
        self._capturing = False

    @contextmanager
    def capture(self):
        """Yield a list that holds, after the block, the stages entered in it; their graph's replays bring them back."""
        found: list[tuple[str, object, object]] = []
        self._spans.clear()
        self._capturing = True
        try:
            yield found
        finally:
            self._capturing = False
            found += self._spans
            self._spans.clear()

    def replay(self, spans: list[tuple[str, object, object]]) -> None:
        """Count the stages of a graph that is replayed now: towards this step, or the next when none is open.

        A graph that a step does not replay has events of another step, or none; one that it replays twice has those of
        the second time.
        """
        self._replayed[id(spans)] = spans

    def end_step(self) -> dict[str, float] | None:
        self._spans += itertools.chain.from_iterable(self._replayed.values())
        self._replayed = {}
        return super().end_step()

    def _mark(self):
        if not self._capturing:
            return super()._mark()
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        return event


class Part:
    """A function of device state, run as it is or captured once and replayed. Its results keep their addresses.

    Capturing runs it first: the caller puts the state that it changes back.
    """

    def __init__(self, function: Callable[[], Tensor | None], clock: Clock, pool=None):
        self._function, self._clock, self._pool = function, clock, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None
        self._spans: list = []

    def warm_up(self, stream: torch.cuda.Stream) -> None:
        """Run on a side stream, as a capture will; libraries keep a workspace for every stream."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._function()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self) -> None:
        """Capture on the current device; nothing is executed."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with self._clock.capture() as self._spans, torch.cuda.graph(graph, pool=self._pool):
            self._result = self._function()
        self._graph = graph

    def __call__(self) -> Tensor | None:
        if self._graph is None:
            return self._function()
        self._graph.replay()
        self._clock.replay(self._spans)
        return self._result
