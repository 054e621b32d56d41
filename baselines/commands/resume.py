"""`tfm resume`: end what a kill left running, unlock, and run Snakemake again."""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = (
    "Checks that no Snakemake is alive in this folder, ends cells that a dead one left running, unlocks, and runs "
    "snakemake --rerun-incomplete with the arguments given (--cores all when they name none). Finished prompts of a "
    "cell are kept. Give the --config and --configfile of the run that was killed."
)
TAKES_REST = True  # what the parser does not know goes to Snakemake
WAIT = 20.0  # seconds that an orphan gets to stop


@dataclass(frozen=True)
class Process:
    """A running process of this checkout."""

    pid: int
    parent: int
    command: tuple[str, ...]

    def runs(self, script: str) -> bool:
        """Whether a word of the command line is this script or program."""
        return any(Path(word).name == script for word in self.command[:4])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare nothing: every argument is Snakemake's."""


def run(options: argparse.Namespace) -> int:
    """Run `resume` with the arguments that the command line left over."""
    return resume(options.rest)


def resume(arguments: list[str], *, folder: Path | None = None) -> int:
    """Unlock and run Snakemake again in `folder` (default: here); return its exit status.

    Raises ValueError when a Snakemake is alive there or when there is no Snakefile.
    """
    folder = Path.cwd() if folder is None else folder
    if not (folder / "Snakefile").exists():
        raise ValueError(f"{folder} has no Snakefile; change to the repository and call tfm resume there")
    alive = [process for process in processes_in(folder) if process.runs("snakemake")]
    if alive:
        raise ValueError(
            f"snakemake is running here (process {alive[0].pid}); wait for it, or stop it with Ctrl-C in its terminal"
        )
    for process in [process for process in processes_in(folder) if process.runs("decode_cell.py")]:
        end(process)
    cores = [] if any(word.startswith(("--cores", "-c", "--jobs", "-j")) for word in arguments) else ["--cores", "all"]
    call = [sys.executable, "-m", "snakemake", *cores, *arguments]
    if any((folder / ".snakemake/locks").glob("*")):
        print("unlocking", file=sys.stderr)
        unlocked = subprocess.run([*call, "--unlock"], cwd=folder, capture_output=True, text=True)
        if unlocked.returncode:
            print(unlocked.stderr, file=sys.stderr)
            return unlocked.returncode
    return subprocess.run([*call, "--rerun-incomplete"], cwd=folder).returncode


def end(process: Process) -> None:
    """Stop a cell whose Snakemake is gone; its finished prompts are on disk."""
    print(f"ending process {process.pid}, left over: {' '.join(process.command)[:90]}", file=sys.stderr)
    deadline = time.monotonic() + WAIT
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(process.pid, kind)
            while time.monotonic() < deadline and _is_alive(process.pid):
                time.sleep(0.1)
        except ProcessLookupError:
            return
        deadline += WAIT
    if _is_alive(process.pid):
        raise ValueError(f"process {process.pid} does not end; end it by hand, then call tfm resume again")


def processes_in(folder: Path) -> Iterator[Process]:
    """Yield the other processes whose working directory is `folder` (Linux; nothing elsewhere)."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) == os.getpid() or Path(os.readlink(entry / "cwd")) != folder.resolve():
                continue
            words = tuple((entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0"))
            status = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended, or it is another user's
        if status[0] != "Z":
            yield Process(int(entry.name), int(status[1]), words)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
