"""The machine a cell runs on: claim one card, make runs repeatable, and say what it was."""

import contextlib
import fcntl
import functools
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tfm.manifest import cpu_name
from tfm_kernels import launches

# not $TMPDIR, which differs between users and batch jobs: a card has one lock on a machine
LOCKS = Path("/tmp")
DRIVER = Path("/proc/driver/nvidia/version")


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
def claim(device: torch.device, *, shared: bool = False) -> Iterator[torch.device]:
    """Hold one card for the block, by a lock on its UUID that other checkouts and users see; a CPU needs none.

    Takes the first free card; waits for one when all are held. Work without a clock may be `shared`: it stands beside
    other such work on a card, and neither beside work that is timed.
    """
    if device.type == "cpu":
        yield device
        return
    with lock_first_free(_card_locks(), shared=shared) as index:
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
        "driver": driver_version(),
        "launches": launches.chosen(),
        "torch_threads": torch.get_num_threads(),
    }


@functools.cache
def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, from its own file or nvidia-smi; None where neither tells it."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", DRIVER.read_text(encoding="utf-8", errors="replace")):
            return found[0]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return next((line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"[\d.]+", line.strip())), None)
    return None


@contextlib.contextmanager
def lock_first_free(paths: list[Path], *, every: float = 0.5, shared: bool = False) -> Iterator[int]:
    """Hold a lock on the first of `paths` that nobody holds and yield its index; wait while all are held.

    Where all are held, `shared` also takes one whose holders are shared too.

    The kernel releases it when the process ends, however it ends. The files stay: unlinking one would let two
    processes lock two inodes of one name.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(os.fdopen(_open_shared(path))) for path in paths]
        for attempt in itertools.count():
            index = _lock_one(files, shared)
            if index is not None:
                break
            if attempt == 0:
                print("all cards are held by other runs; waiting for one", file=sys.stderr, flush=True)
            time.sleep(every)
        yield index


def _lock_one(files: list, shared: bool) -> int | None:
    free = next((index for index, file in enumerate(files) if _is_locked(file, fcntl.LOCK_EX)), None)
    if not shared:
        return free
    # not all holders to the first card
    order = [(os.getpid() + turn) % len(files) for turn in range(len(files))] if free is None else [free]
    return next((index for index in order if _is_locked(files[index], fcntl.LOCK_SH)), None)


def _is_locked(file, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _card_locks() -> list[Path]:
    cards = range(torch.cuda.device_count())
    return [LOCKS / f"tfm-gpu-{torch.cuda.get_device_properties(index).uuid}.lock" for index in cards]


def _open_shared(path: Path) -> int:
    # for reading: another user's file in a sticky folder can be neither written nor opened with O_CREAT
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDONLY)
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    if os.fstat(descriptor).st_uid == os.getuid():
        os.fchmod(descriptor, 0o644)  # whatever the umask is, or other users could not open it
    return descriptor
