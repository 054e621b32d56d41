"""Sample a static batch, token by token: on CUDA one graph a step. No draft, no cells, no fixed noise.

A model that is sampled offers `new_cache(requests, rows)`, `prefill(tokens, lengths, cache, requests)`,
`step(tokens, positions, cache, rows)`, both returning hidden rows, `logits(hidden)` and `device`.
"""

from typing import Protocol

import torch
from torch import Tensor

PREFILL_ROWS = 256
ROWS_STEP = 64  # cache rows that attention reads grow in steps of this
LOOK_EVERY = 16  # steps between two looks at who is still writing


class StepModel(Protocol):
    """What the sampler asks of a model; see the module."""

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, requests: int, rows: int) -> object:
        """Return room for `requests` sequences of `rows` tokens."""

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: object, requests: slice) -> Tensor:
        """Fill some requests' cache from right-padded tokens [n, L]; return the last real token's hidden row [n, d]."""

    def step(self, tokens: Tensor, positions: Tensor, cache: object, rows: int) -> Tensor:
        """Append tokens [R] at positions [R] (each below `rows`) and return their hidden rows [R, d]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab] of hidden rows [..., d]."""


class Sampler:
    """Samples up to `requests` prompts at once; prompt and answer have `rows` tokens together at most."""

    def __init__(self, model: StepModel, *, end: int, requests: int, rows: int):
        self.model, self.end, self.requests = model, end, requests
        self.rows = -(-rows // ROWS_STEP) * ROWS_STEP
        self.cache = model.new_cache(requests, self.rows)
        self.tokens = torch.full((requests,), end, device=model.device)
        self.positions = torch.zeros_like(self.tokens)
        self.alive = torch.zeros(requests, dtype=torch.bool, device=model.device)
        self.temperature = torch.ones((), device=model.device)
        self.generator = torch.Generator(device=model.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # replays follow one another, so all graphs may use the same memory
        self.pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    @torch.no_grad()
    def sample(
        self, prompts: list, *, cap: int, seed: int, temperature: float = 1.0, left_over: float = 0.0
    ) -> list[list[int]]:
        """Return at most `cap` tokens after each prompt (rows of ids), the end token included where it was reached.

        The batch stops when no more than the share `left_over` of its prompts is still writing; those are cut there.
        """
        longest = max(map(len, prompts))
        if longest + cap > self.rows or len(prompts) > self.requests:
            raise ValueError(
                f"rows: {len(prompts)} prompts of up to {longest} tokens and {cap} more do not fit {self.requests} x "
                f"{self.rows}; make the sampler larger"
            )
        self.generator.manual_seed(seed)
        self.temperature.fill_(temperature)
        self._prefill(prompts)
        emitted = [self.tokens.clone()]
        for count in range(1, cap):
            self._step(min(self.rows, -(-(longest + count) // ROWS_STEP) * ROWS_STEP))
            emitted.append(self.tokens.clone())
            if count % LOOK_EVERY == 0 and float(self.alive[: len(prompts)].float().mean()) <= left_over:
                break
        table = torch.stack(emitted, dim=1)[: len(prompts)].tolist()
        return [row[: row.index(self.end) + 1] if self.end in row else row for row in table]

    def _prefill(self, prompts: list) -> None:
        last, device = [], self.model.device
        for at in range(0, len(prompts), PREFILL_ROWS):
            part = [torch.as_tensor(row, dtype=torch.int64) for row in prompts[at : at + PREFILL_ROWS]]
            padded = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=self.end).to(device)
            lengths = torch.tensor([len(row) for row in part], device=device)
            requests = slice(at, at + len(part))
            last.append(self.model.prefill(padded, lengths, self.cache, requests))
            self.positions[requests] = lengths
        self.alive.fill_(False)
        self.alive[: len(prompts)] = True
        drawn = self._draw(self.model.logits(torch.cat(last)))
        self.tokens[: len(prompts)] = drawn
        self.alive[: len(prompts)] &= drawn != self.end

    def _step(self, rows: int) -> None:
        if rows in self.graphs:
            self.graphs[rows].replay()
            return
        if self.pool is None:
            self._advance(rows)
            return
        # the first step of a size is taken plainly, which warms its kernels up; capturing runs nothing
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._advance(rows)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, pool=self.pool):
            self._advance(rows)
        self.graphs[rows] = graph

    def _advance(self, rows: int) -> None:
        drawn = self._draw(self.model.logits(self.model.step(self.tokens, self.positions, self.cache, rows)))
        self.positions.add_(self.alive.long())
        self.tokens.copy_(torch.where(self.alive, drawn, self.end))
        self.alive.logical_and_(drawn != self.end)

    def _draw(self, logits: Tensor) -> Tensor:
        return draw(logits.float() / self.temperature, self.generator)


def draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return one token a row of logits [R, vocab], by exponential races."""
    race = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=generator)
    return (logits.float().softmax(-1) / race).argmax(-1)
