"""Prefill on static memory: the prompt in chunks of one size, each verified as a chain and committed whole.

A chunk's padding rows are roots of their own that nothing attends to; the next chunk, or the first step, is written
over them. So every chunk of every prompt is the same work on the same addresses, and one CUDA graph serves them all.
"""

import torch
from torch import Tensor

from tfm.clock import OFF
from tfm.engine.graphs import WARM_UPS, GraphClock, Part
from tfm.engine.target import StaticTarget
from tfm.target import TargetOutput
from tfm.tree import DraftTree

ROWS = 128  # tokens of a chunk


class ChunkPrefill:
    """Fills the memory of `target`, which must hold `rows` rows a pass, with one prompt at a time."""

    def __init__(self, target: StaticTarget, rows: int, *, graphs: bool):
        device = target.length.device
        self._target, self._rows = target, rows
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._count = torch.ones(1, dtype=torch.int64, device=device)
        self._steps = torch.arange(rows, device=device)
        # a clock of its own: the spans of a prefill are no step's
        self._part = Part(self._run, GraphClock("off", device))
        if graphs:
            stream = torch.cuda.Stream()
            for _ in range(WARM_UPS):
                target.reset()
                self._part.warm_up(stream)
            target.reset()
            self._part.capture()

    def __call__(self, tokens: list[int]) -> TargetOutput:
        """Prefill `tokens`; return logits [1, 1, vocab] and hidden [1, 1, d] of the last, taps [1, L, ..] of all."""
        self._target.reset()
        taps = []
        for start in range(0, len(tokens), self._rows):
            chunk = torch.tensor(tokens[start : start + self._rows], device=self._tokens.device)
            self._tokens[: len(chunk)] = chunk
            self._count.fill_(len(chunk))
            self._part()
            # a replay overwrites them
            taps.append(self._output.taps[:, : len(chunk)].clone())
        last = self._count - 1
        logits, hidden = (rows.index_select(1, last) for rows in (self._output.logits, self._output.hidden))
        return TargetOutput(logits, hidden, torch.cat(taps, dim=1))

    def _run(self) -> Tensor:
        is_real = self._steps < self._count
        tree = DraftTree(
            tokens=torch.where(is_real, self._tokens, 0)[None],
            parents=torch.where(is_real, self._steps - 1, -1)[None],
            depths=torch.where(is_real, self._steps, 0)[None],
            log_probs=torch.zeros(1, self._rows, device=self._steps.device),
            num_nodes=self._count,
        )
        self._output = self._target.verify(tree, OFF)
        self._target.commit(torch.where(is_real, self._steps, -1)[None])
        return self._output.logits
