"""How far a cell and its suite are, on stderr: one line that updates in a terminal, a line now and then in a pipe."""

import json
import shutil
import sys
import time
from pathlib import Path

TERMINAL_EVERY, PIPE_EVERY = 0.2, 20.0  # seconds between updates


class Progress:
    """Reports finished prompts of one cell. `suite` is {cells: folder, total, done, start} of the call, or None."""

    def __init__(self, name: str, *, prompts: int, done: int = 0, suite: dict | None = None, stream=None):
        self.name, self.prompts, self.suite = name, prompts, suite
        self.stream = sys.stderr if stream is None else stream
        self.first, self.done, self.tokens = done, done, 0
        self.start = self._shown = time.time()

    def token(self, _request: str, emitted: int) -> None:
        """Take note of tokens emitted by the running requests."""
        self.tokens = emitted
        self._show(TERMINAL_EVERY if self._terminal else PIPE_EVERY)

    def finished(self) -> None:
        """Take note of one more finished prompt."""
        self.done, self.tokens = self.done + 1, 0
        self._show(TERMINAL_EVERY if self._terminal else PIPE_EVERY)

    def close(self) -> None:
        """Say that the cell is done."""
        text = (
            f"{self._suite(1)}{self.name}: {self.prompts} prompts in {clock(time.time() - self.start)}{self._left(1)}"
        )
        print(f"\r\033[K{text}" if self._terminal else text, file=self.stream, flush=True)

    @property
    def _terminal(self) -> bool:
        return self.stream.isatty()

    def _show(self, every: float) -> None:
        now = time.time()
        if now - self._shown < every:
            return
        self._shown = now
        fresh = self.done - self.first
        eta = f", {clock((now - self.start) / fresh * (self.prompts - self.done))} left in the cell" if fresh else ""
        tokens = f" + {self.tokens} tokens" if self.tokens else ""
        text = f"{self._suite(0)}{self.name}: prompt {self.done}/{self.prompts}{tokens}{eta}{self._left(0)}"
        if self._terminal:
            print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", file=self.stream, end="")
        else:
            print(text, file=self.stream)
        self.stream.flush()

    def _done_cells(self) -> int:
        # a rerun cell's old file is gone by now: Snakemake removes it first
        return sum(1 for _ in Path(self.suite["cells"]).glob("*/*/*/*/*/*/cell.json"))

    def _suite(self, extra: int) -> str:
        if self.suite is None:
            return ""
        return f"[{min(self._done_cells() + extra, self.suite['total'])}/{self.suite['total']} cells] "

    def _left(self, extra: int) -> str:
        if self.suite is None:
            return ""
        done = self._done_cells() + extra
        fresh, left = done - self.suite["done"], self.suite["total"] - done
        if fresh < 1 or left < 1:
            return ""
        return f"; about {clock((time.time() - self.suite['start']) / fresh * left)} left for the suite"


def suite_from(text: str | None) -> dict | None:
    """Return the suite's facts from what the Snakefile announced; None when there are none."""
    return json.loads(text) if text else None


def clock(seconds: float) -> str:
    """Return seconds as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
