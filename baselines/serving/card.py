"""Claim a card for a server without opening it: the runner holds no CUDA context beside the server's."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from tfm import device

FIELDS = ("uuid", "name", "memory.total", "compute_cap", "driver_version")


@contextlib.contextmanager
def claim(kind: str) -> Iterator[tuple[dict[str, str], dict]]:
    """Hold a card, by the lock that decode_cell.py's cells take too; yield (environment of a server, facts).

    A CPU needs none. Raises ValueError when this machine has no card.
    """
    if kind == "cpu":
        yield {}, device.facts(torch.device("cpu"))
        return
    found = cards()
    if not found:
        raise ValueError("device: 'cuda' was asked for, but nvidia-smi lists no card here; set device: cpu")
    locks = [Path(device.LOCKS) / f"tfm-gpu-{card['uuid'].removeprefix('GPU-')}.lock" for card in found]
    with device.lock_first_free(locks) as index:
        card = found[index]
        facts = {"kind": "cuda", "name": card["name"], "memory_gib": round(float(card["memory.total"]) / 1024, 1)}
        facts |= {"capability": card["compute_cap"], "driver": card["driver_version"]}
        yield {"CUDA_VISIBLE_DEVICES": card["uuid"]}, {**facts, "torch_threads": torch.get_num_threads()}


def cards() -> list[dict[str, str]]:
    """Return what nvidia-smi says of each card (memory in MiB); none where there is no driver."""
    rows = _query("--query-gpu=" + ",".join(FIELDS))
    return [dict(zip(FIELDS, row, strict=True)) for row in rows]


def memory_used_mib(uuid: str) -> int:
    """Return the MiB in use on a card, whoever uses them."""
    return int(_query("--query-gpu=memory.used", "-i", uuid)[0][0])


def _query(*arguments: str) -> list[list[str]]:
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
