"""Claim a card for a server without opening it: the runner holds no CUDA context beside the server's."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from tfm import device

VISIBLE = "CUDA_VISIBLE_DEVICES"  # nvidia-smi lists every card, whatever it says
FIELDS = ("uuid", "name", "memory.total", "compute_cap", "driver_version")


@contextlib.contextmanager
def claim(kind: str) -> Iterator[tuple[dict[str, str], dict]]:
    """Hold a card, by the lock that decode_cell.py's cells take too; yield (environment of a server, facts).

    A CPU needs none. Raises ValueError when this machine has no card, or CUDA_VISIBLE_DEVICES names none of its cards.
    """
    if kind == "cpu":
        yield {}, device.facts(torch.device("cpu"))
        return
    found = cards()
    if not found:
        raise ValueError(
            "device: 'cuda' was asked for, but nvidia-smi lists no card here that CUDA_VISIBLE_DEVICES "
            f"({os.environ.get(VISIBLE, 'not set')}) lets us use; set device: cpu"
        )
    locks = [Path(device.LOCKS) / f"tfm-gpu-{card['uuid'].removeprefix('GPU-')}.lock" for card in found]
    with device.lock_first_free(locks) as index:
        card = found[index]
        facts = {"kind": "cuda", "name": card["name"], "memory_gib": _gib(card["memory.total"])}
        facts |= {"capability": card["compute_cap"], "driver": card["driver_version"]}
        yield {VISIBLE: card["uuid"]}, {**facts, "torch_threads": torch.get_num_threads()}


def cards() -> list[dict[str, str]]:
    """Return what nvidia-smi says of each card that CUDA would see (memory in MiB); none where there is no driver."""
    rows = _query("--query-gpu=" + ",".join(FIELDS))
    # its warnings stand between the rows
    found = [dict(zip(FIELDS, row, strict=True)) for row in rows if len(row) == len(FIELDS)]
    return visible(found, os.environ.get(VISIBLE))


def visible(found: list[dict[str, str]], names: str | None) -> list[dict[str, str]]:
    """Return the cards that a value of CUDA_VISIBLE_DEVICES leaves, in its order; all where it is not set.

    A name is a place in nvidia-smi's list or the start of a UUID; as for CUDA, the first that names no card ends it.
    """
    if names is None:
        return found
    chosen = []
    for name in (word.strip() for word in names.split(",")):
        fits = [card for place, card in enumerate(found) if name == str(place) or card["uuid"].startswith(name or " ")]
        if len(fits) != 1 or fits[0] in chosen:
            break
        chosen += fits
    return chosen


def memory_used_mib(uuid: str) -> int:
    """Return the MiB in use on a card, whoever uses them; raises ValueError where nvidia-smi does not say."""
    said = [row[0] for row in _query("--query-gpu=memory.used", "-i", uuid)]
    found = [int(word) for word in said if word.isdecimal()]
    if not found:
        raise ValueError(f"memory.used: nvidia-smi says {said or 'nothing'} of card {uuid}; see what it prints itself")
    return found[0]


def _gib(mib: str) -> float | None:
    """Return GiB of a text of MiB; None where nvidia-smi leaves it out, as of a card that shares the host's memory."""
    try:
        return round(float(mib) / 1024, 1)
    except ValueError:
        return None


def _query(*arguments: str) -> list[list[str]]:
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
