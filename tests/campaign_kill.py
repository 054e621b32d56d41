"""Kill Snakemake, a cell or a worker at random moments of a small suite; resume; compare with an undisturbed run."""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaign_log import Trials  # noqa: E402
from workflow_runs import checkout, environment_of  # noqa: E402

from baselines.commands.resume import Process, processes_in  # noqa: E402
from tfm.cells import KINDS, MANIFEST, is_whole, load_cells, read_cell  # noqa: E402
from tfm.manifest import environment  # noqa: E402
from tfm.side_file import NAME, count_records  # noqa: E402

DESCRIPTION = """
Runs a slice of suite nano in copies of the code in a temporary folder: once undisturbed, then, at random moments, in
turn with kill -9 of Snakemake (its scripts live on as orphans), of a cell, and of a worker: the shell in which
Snakemake runs a job, whose script lives on. Each time `tfm resume` follows. Checks that all columns but times equal the
undisturbed run's, that no finished prompt was decoded twice (the cells note each prompt once its record is on disk),
and that no process or lock is left. Adds to --log, a line a kill without host, user or absolute path, and to --trials,
whose sum campaign_log.py makes: a campaign that was stopped goes on where it stopped, and --moments 50 after
--moments 10 makes the other 40. Last line of stdout: one JSON object. Exit 1 when a check fails.
"""
SLICE = ["datasets=sample-math", "methods=ar,tfm", "prompts=6", "max_new_tokens=48", "temperatures=1", "seeds=0"]
SLICE += [f"{key}=[]" for key in ("widths", "candidate_counts", "children_counts", "depths", "residuals", "audit")]
SLICE += ["budgets=16", "requests=3", "stages=false", "tables=headline,per_set,sweeps", "figures=tau"]
TARGET = "results/nano/summary.json"  # prompts, cells and tables
# imported by every Python of a run: notes each prompt's record once it is on disk. Snakemake removes the log of a job
# that it runs again, so the cells' own logs do not tell what was decoded before
HOOK = """
import json, os, sys, time
def fsync(descriptor, real=os.fsync):
    real(descriptor)
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if path.endswith("/done.jsonl"):
        with open(path) as file:
            record = json.loads(file.read().splitlines()[-1])["record"]
        if "id" in record:
            with open(LEDGER, "a") as file:
                file.write(f"{os.path.dirname(path)} {record['id']}\\n")
            THEN
if any("decode_cell.py" in word for word in sys.orig_argv):
    os.fsync = fsync
    if CARD:
        import fcntl
        card = open(CARD, "a")
        fcntl.flock(card, fcntl.LOCK_EX)
"""


@dataclass(frozen=True)
class Run:
    """One copy of the code, the arguments of its Snakemake calls, and what it does with them."""

    folder: Path
    arguments: tuple[str, ...]
    then: str = "pass"  # what a cell's process does after each record; LEDGER is the path of the ledger
    card: Path | None = None  # a file that each cell locks while it runs, as it would a card

    def start(self, *, wrapper=(), log: str = "printed.log", environment=None, **options) -> subprocess.Popen:
        """Start Snakemake in a session of its own, as a terminal would; what it prints goes to `log`.

        `wrapper` are words before the command, `environment` adds variables, `options` go to Popen.
        """
        call, place = [*wrapper, sys.executable, "-m", "snakemake", *self.arguments], self._place()
        place["env"] = (environment or {}) | place["env"] | {"PATH": (environment or os.environ)["PATH"]}
        with open(self.folder / log, "wb") as file:
            return subprocess.Popen(call, **place, stdout=file, stderr=file, start_new_session=True, **options)

    def resume(self) -> subprocess.CompletedProcess:
        """Call `tfm resume` with the same arguments."""
        call = [sys.executable, "-m", "baselines.cli", "resume", *self.arguments]
        return subprocess.run(call, **self._place(), capture_output=True, text=True, timeout=600)

    def jobs(self) -> list[Process]:
        """Return the scripts that a Snakemake of this folder started and that still run."""
        return [process for process in processes_in(self.folder) if process.is_left_over]

    def cells(self) -> dict[str, Path]:
        """Return the folders of cells that have any file, by their path."""
        folders = {path.parent for path in self.folder.glob("results/*/cells/**/decode.log")}
        return {folder.relative_to(self.folder).as_posix(): folder for folder in sorted(folders)}

    def progress(self) -> str:
        """Return how far the cells are, as a log line says it."""
        done = [folder for folder in self.cells().values() if (folder / MANIFEST).exists()]
        partial = {name: count_records(folder / NAME) for name, folder in self.cells().items() if folder not in done}
        running = ", ".join(f"{'/'.join(name.split('/')[5:7])} with {count} prompts" for name, count in partial.items())
        return f"{len(done)} cells done" + (f", {running}" if running else "")

    def decoded(self) -> Counter:
        """Return how often each prompt of each cell was decoded to its end, killed processes included."""
        ledger = self.folder / "ledger"
        return Counter(ledger.read_text().splitlines() if ledger.exists() else [])

    def _place(self) -> dict:
        hook = self.folder / "hook"
        hook.mkdir(exist_ok=True)
        text = HOOK.replace("THEN", self.then).replace("LEDGER", repr(str(self.folder / "ledger")))
        text = text.replace("CARD", repr(self.card and str(self.card)))
        (hook / "sitecustomize.py").write_text(text)
        return {"cwd": self.folder, "env": environment_of(self.folder, hook)}


def kill_driver(run: Run, after: float) -> str | None:
    """Kill Snakemake `after` seconds from its start; return what was hit, or None when it had ended before."""
    with run.start() as driver:
        try:
            driver.wait(timeout=after)
            return None
        except subprocess.TimeoutExpired:
            driver.kill()
    return f"{run.progress()}; {len(run.jobs())} scripts left running"


def kill_cell(run: Run, after: float) -> str | None:
    """Kill the first cell that runs `after` seconds from the start or later; None when none did."""
    return kill_job(run, after, lambda process, driver: process.runs("decode_cell.py"))


def kill_worker(run: Run, after: float) -> str | None:
    """Kill the shell in which Snakemake runs a job: Snakemake takes the job for failed, its script lives on."""
    return kill_job(run, after, lambda process, driver: process.parent == driver and process.runs("bash"))


def kill_job(run: Run, after: float, is_meant: Callable[[Process, int], bool]) -> str | None:
    """Kill the first process meant that runs `after` seconds from the start or later; None when none did."""
    killed = None
    with run.start() as driver:
        # looking at all processes takes the run's own time, so not before it has to be
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(timeout=after)
        while driver.poll() is None and killed is None:
            time.sleep(0.01)
            found = [process for process in processes_in(run.folder) if is_meant(process, driver.pid)]
            if found:
                killed = run.progress()
                try:
                    os.kill(found[0].pid, signal.SIGKILL)
                except ProcessLookupError:
                    killed = None
        driver.wait(timeout=600)
    if killed is None:
        return None
    # killed on its way out, after its records: the job is done, and Snakemake may be content
    return f"{killed}; snakemake exits {driver.returncode}, {len(run.jobs())} scripts left running"


def problems_after(run: Run, resumed: subprocess.CompletedProcess, reference: Path) -> list[str]:
    """Return what is wrong after a kill and `tfm resume`; nothing when all is as it should be."""
    if resumed.returncode:
        return [f"tfm resume exits {resumed.returncode}: {resumed.stderr[-2000:]}"]
    problems = differences(reference, run.folder)
    problems += [f"{prompt} was decoded {count} times" for prompt, count in run.decoded().items() if count > 1]
    problems += [f"{name}: {NAME} is left" for name, folder in run.cells().items() if (folder / NAME).exists()]
    problems += [f"process left: {' '.join(process.command)[:80]}" for process in run.jobs()]
    problems += ["snakemake's lock is left"] if any((run.folder / ".snakemake/locks").glob("*")) else []
    return problems


def differences(reference: Path, folder: Path) -> list[str]:
    """Return the cells of `folder` whose records differ from those of `reference` in anything but times."""
    paths = sorted(path.parent.relative_to(folder) for path in folder.glob(f"results/*/cells/**/{MANIFEST}"))
    load_cells([folder / path for path in paths])  # checks every file
    problems = [] if paths else ["no cell is there"]
    for path in paths:
        for kind in KINDS:
            one, other = (pq.read_table(root / path / f"{kind}.parquet") for root in (reference, folder))
            timeless = [name for name in one.column_names if not name.endswith("_us")]
            if not one.select(timeless).equals(other.select(timeless)):
                problems.append(f"{path}: {kind} differ")
        if read_cell(reference / path)["cell_digest"] != read_cell(folder / path)["cell_digest"]:
            problems.append(f"{path}: cell_digest differs")
    return problems


def campaign(options: argparse.Namespace, work: Path, trials: Trials, say) -> int:
    """Run the kills that `trials` does not hold yet; return how many failed."""
    arguments = ("--cores", str(options.cores), TARGET, "--config", *SLICE)
    undisturbed = Run(checkout(work / "undisturbed", ROOT / "tfm/weights/nano"), arguments)
    seconds = run_undisturbed(undisturbed)
    say(f"undisturbed: {undisturbed.progress()} in {seconds:.1f} s")
    failures = 0
    kinds = {"snakemake": kill_driver, "cell": kill_cell, "worker": kill_worker}
    # in turn, so that a campaign that is stopped has tried all of them
    for number in range(1, options.moments + 1):
        for what, kill in kinds.items():
            name = f"seed {options.seed}, kill {number}"
            if not trials.has(f"kill_{what}", name):
                run = Run(work / "killed", arguments)
                # a moment of its own for each, so that the rest of a campaign that was stopped is the same
                hit, after = kill_once(run, kill, random.Random(f"{name} {what}"), seconds)
                resumed = run.resume()
                kept, ended = (resumed.stderr.count(word) for word in ("keeping results/", "ending process"))
                wrong = problems_after(run, resumed, undisturbed.folder)
                failures += bool(wrong)
                did = f"resume ended {ended} processes, took {kept} whole cells back"
                outcome = f"killed after {after:.2f} s ({hit}); {did}"
                verdict = "; ".join(wrong) or "records equal the undisturbed run's, no prompt decoded twice"
                say(f"{what} {number} {outcome}: {verdict}")
                lost = lost_cells(undisturbed.folder, run.folder)
                trials.add(f"kill_{what}", name, problems=wrong, lost_cells=lost, outcome=outcome)
                shutil.rmtree(run.folder)
    return failures


def kill_once(run: Run, kill, rng: random.Random, seconds: float) -> tuple[str, float]:
    """Start `run` in a new copy and kill at a random moment, again until something was there to kill."""
    while True:
        checkout(run.folder, ROOT / "tfm/weights/nano")
        after = rng.uniform(0, seconds)
        hit = kill(run, after)
        if hit is not None:
            return hit, after
        shutil.rmtree(run.folder)


def run_undisturbed(run: Run) -> float:
    """Run to the end; return the seconds it took."""
    start = time.monotonic()
    with run.start() as driver:
        driver.wait()
    if driver.returncode:
        raise SystemExit(f"the undisturbed run failed:\n{(run.folder / 'printed.log').read_text()[-3000:]}")
    return time.monotonic() - start


def lost_cells(reference: Path, folder: Path) -> int:
    """Return how many cells of `reference` are not whole in `folder`."""
    cells = [path.parent.relative_to(reference) for path in reference.glob(f"results/*/cells/**/{MANIFEST}")]
    return sum(not is_whole(folder / cell) for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10, help="kills of each kind (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the moments (default: 0)")
    parser.add_argument("--cores", type=int, default=2, help="for Snakemake (default: 2)")
    parser.add_argument("--log", type=Path, help="file to which the lines that go to stderr are added")
    parser.add_argument("--trials", type=Path, help="file of trials; kills that are in it are not made again")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        if options.log:
            with open(options.log, "a") as file:
                file.write(text + "\n")

    with tempfile.TemporaryDirectory() as work:
        trials = Trials(options.trials or Path(work) / "trials.jsonl")
        facts, before = environment(), len(trials.rows)
        say(f"kill campaign of {trials.facts['date']}, commit {trials.facts['commit']}")
        say(f"python {facts['python']}, torch {facts['packages']['torch']}, {options.cores} cores, seed {options.seed}")
        say(f"snakemake {TARGET} --config {' '.join(SLICE)}")
        failures = campaign(options, Path(work), trials, say)
    kills = len(trials.rows) - before
    say(f"{kills} kills, {failures} failures")
    print(json.dumps({"kills": kills, "failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
