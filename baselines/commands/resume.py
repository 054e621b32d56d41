"""`tfm resume`: end what a kill left running, unlock, and run Snakemake again."""

import argparse
import base64
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DESCRIPTION = (
    "Checks that no Snakemake is alive in this folder, ends scripts that a dead one left running, unlocks, and runs "
    "snakemake --rerun-incomplete with the arguments given (--cores all when they name none). Finished prompts and "
    "finished cells are kept. Give the --config and --configfile of the run that was killed."
)
TAKES_REST = True  # what the parser does not know goes to Snakemake
JOB_MARK = b"TFM_PROGRESS="  # in the environment of a job: the Snakefile sets it on start
WAIT = 20.0  # seconds that an orphan gets to stop


@dataclass(frozen=True)
class Process:
    """A running process of this checkout."""

    pid: int
    parent: int
    command: tuple[str, ...]
    is_job: bool = False  # of a Snakemake of this workflow, which sets JOB_MARK

    @property
    def is_left_over(self) -> bool:
        """Whether this is a job's script, given that no Snakemake is alive. One started by hand is none."""
        return self.is_job and any(word.startswith(("workflows/scripts/", "tfm.train.")) for word in self.command[:4])

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

    Raises ValueError when a Snakemake or another resume is alive there, or when there is no Snakefile.
    """
    folder = (Path.cwd() if folder is None else folder).resolve()
    if not (folder / "Snakefile").exists():
        raise ValueError(f"{folder} has no Snakefile; change to the repository and call tfm resume there")
    cores = [] if any(word.startswith(("--cores", "-c", "--jobs", "-j")) for word in arguments) else ["--cores", "all"]
    call = [sys.executable, "-m", "snakemake", *cores, *arguments]
    with alone(folder):
        check_no_snakemake(folder)
        for process in [process for process in processes_in(folder) if process.is_left_over]:
            end(process)
        take_back_whole_cells(folder)
        take_back_future_times(folder)
        if any((folder / ".snakemake/locks").glob("*")):
            print("unlocking", file=sys.stderr)
            # one may have started meanwhile, and that lock is its own
            check_no_snakemake(folder)
            unlocked = subprocess.run([*call, "--unlock"], cwd=folder, capture_output=True, text=True)
            if unlocked.returncode:
                print(unlocked.stderr, file=sys.stderr)
                return unlocked.returncode
        status = subprocess.run([*call, "--rerun-incomplete"], cwd=folder).returncode
    if status < 0:
        print(f"snakemake was ended by signal {-status}; call tfm resume again", file=sys.stderr)
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock of this command; raises ValueError when another resume holds it."""
    path = folder / ".snakemake/tfm-resume.lock"
    path.parent.mkdir(exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError("another tfm resume is running here; wait for it, or stop it with Ctrl-C") from None
        yield


def check_no_snakemake(folder: Path) -> None:
    """Raise ValueError when a Snakemake is alive in the folder."""
    alive = [process for process in processes_in(folder) if process.runs("snakemake")]
    if alive:
        raise ValueError(
            f"snakemake is running here (process {alive[0].pid}); wait for it, or stop it with Ctrl-C in its terminal"
        )


def take_back_whole_cells(folder: Path) -> None:
    """Keep the records of cells that are whole, though Snakemake died before it noted so and will run them again."""
    cells = [(folder / file).parent for file in incomplete_files(folder) if file.endswith("/cell.json")]
    if cells:
        from tfm.cells import reopen  # pyarrow and torch take a second

        for cell in cells:
            if reopen(cell):
                print(f"keeping {cell.relative_to(folder)}, which is whole", file=sys.stderr)


def take_back_future_times(folder: Path) -> None:
    """Give files of results/ that a later clock wrote the time of now.

    Snakemake fails a job whose input is newer than what the job has just written, and removes its records.
    """
    now = time.time()
    for path in (folder / "results").rglob("*"):
        # one that is gone by now, or another user's, is nobody's to change
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if path.lstat().st_mtime > now + 1:
                os.utime(path, (now, now), follow_symlinks=False)


def incomplete_files(folder: Path) -> list[str]:
    """Return the files that a killed Snakemake was making: it notes each by its name in base64, cut into folders."""
    marks = folder / ".snakemake/incomplete"
    found = []
    for path in (path for path in sorted(marks.rglob("*")) if path.is_file()):
        name = "".join(part.removeprefix("@") for part in path.relative_to(marks).parts)
        # a file that the system or a network disk put there is no note
        with contextlib.suppress(ValueError):
            found.append(base64.b64decode(name, b"-_", validate=True).decode())
    return found


def end(process: Process) -> None:
    """Stop a script whose Snakemake is gone; a cell's finished prompts are on disk."""
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
            status = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            is_job = JOB_MARK in (entry / "environ").read_bytes()
        except OSError:
            continue  # it ended, or it is another user's
        if status[0] != "Z":
            yield Process(int(entry.name), int(status[1]), words, is_job)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
