"""The next step's draft and tree, launched behind a commit: the device drafts while the scheduler reads the tokens."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ahead:
    """A draft and its tree under way for the next step of one request."""

    request: object  # of SGLang
    places: Tensor  # [W] int64, slots of the positions that the step may write
    verified: tuple | None  # the target's output and whether a graph ran, where the verify is under way too
    kept: tuple[Tensor, ...]  # what the other stream reads: must not be freed before it is joined


@dataclass(frozen=True)
class Room:
    """What a draft ahead may not exceed: the step's tokens are not known on the host when it is launched."""

    nodes: int  # rows of a tree; SGLang reserves two trees behind what was committed before the step
    block: int  # rows of the drafter
    path: int  # tokens that a step may emit
    context: int  # positions of a request

    def holds(self, committed: int, tokens_left: int) -> bool:
        """Whether the next draft's places are reserved, its positions exist, and the request may outlive this step.

        `committed` positions before the step, `tokens_left` of the request's limit before it.
        """
        most = min(self.path, self.nodes)
        is_reserved = most + max(self.nodes, self.block) <= 2 * self.nodes
        return is_reserved and committed + most + self.block <= self.context and tokens_left > 1


class Aside:
    """A stream beside the current one; on a CPU what would run there is done at once."""

    def __init__(self, device: torch.device):
        # torch hands the same 32 streams out again and again, and SGLang's own come from those of priority 0
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def behind(self):
        """Launch what follows aside, behind all that the current stream holds."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all that was launched aside; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
