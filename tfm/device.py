"""The machine a cell runs on: claim one card, make runs repeatable, and say what it was."""

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tfm.manifest import cpu_name


def make_deterministic(*, threads: int) -> None:
    """Set the thread count and full fp32 products. Call before any model is built."""
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_grad_enabled(False)


def check_device(name: str) -> torch.device:
    """Return the device, or raise ValueError when this machine lacks it. Never falls back to another one."""
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: {name!r} is not allowed (allowed: cpu, cuda)")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: 'cuda' was asked for, but this machine has no CUDA device; set device: cpu")
    return torch.device(name)


@contextlib.contextmanager
def claim(device: torch.device) -> Iterator[torch.device]:
    """Hold one card for the block, by a lock on its UUID that other checkouts and users see; a CPU needs none.

    Takes the first free card. Waits for the first one when all are held.
    """
    if device.type == "cpu":
        yield device
        return
    with contextlib.ExitStack() as stack:
        index = _lock_a_card(stack)
        torch.cuda.set_device(index)
        yield torch.device("cuda", index)


def facts(device: torch.device) -> dict:
    """Return what a table has to name: kind, model, cores or memory, threads."""
    if device.type == "cpu":
        return {"kind": "cpu", "name": cpu_name(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": "cuda",
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
    }


def _lock_a_card(stack: contextlib.ExitStack) -> int:
    files = []
    for index in range(torch.cuda.device_count()):
        path = Path(tempfile.gettempdir()) / f"tfm-gpu-{torch.cuda.get_device_properties(index).uuid}.lock"
        # the file stays: unlinking it would let two processes lock two inodes of one name
        files.append(stack.enter_context(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")))
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            return index
    print("all cards are held by other runs; waiting for the first one", file=sys.stderr, flush=True)
    fcntl.flock(files[0], fcntl.LOCK_EX)
    return 0
