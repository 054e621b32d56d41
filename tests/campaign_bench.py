"""Where trials of the fault campaign start from, and how they recover: by doing what the messages say."""

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaign_kill import TARGET, Run, run_undisturbed  # noqa: E402
from workflow_runs import checkout  # noqa: E402

from tfm.cells import is_whole  # noqa: E402
from tfm.side_file import NAME  # noqa: E402

SLICE = ["datasets=sample-math", "methods=ar,tfm", "prompts=4", "max_new_tokens=24", "temperatures=1", "seeds=0"]
SLICE += [f"{key}=[]" for key in ("widths", "candidate_counts", "children_counts", "depths", "residuals", "audit")]
SLICE += ["budgets=[]", "dartree_widths=[]", "budget=16", "width=1", "requests=4", "stages=false"]
SLICE += ["tables=headline,per_set", "figures=tau"]
AR, TFM = (f"results/nano/cells/torch/nano/sample-math/{name}/t1/seed0" for name in ("ar", "tfm-b16-w1"))
REMEDIES = (r"snakemake --cores all --force (\S+)", r"`--force (\S+)`", r"snakemake --cores all (\S+plan\.json)")


@dataclass
class Bench:
    """Where trials start from: a checkout, a run killed in mid-cell, a finished run."""

    work: Path
    cores: int
    card: Path = field(init=False)

    def __post_init__(self):
        self.card = self.work / "card.lock"
        self.card.touch()
        self.reference = replace(self.clean("reference"), card=None)
        self.seconds = run_undisturbed(self.reference)
        self.killed = self.clean("half", then="len(open(LEDGER).readlines()) == 2 and os._exit(9)")
        flag, cores, _, *config = self.killed.arguments
        # this cell alone, or the other one might be the first
        self.killed = replace(self.killed, arguments=(flag, cores, f"{AR}/requests.parquet", *config))
        with self.killed.start() as driver:
            driver.wait()
        if not (self.killed.folder / AR / NAME).exists():
            raise SystemExit(f"no cell stopped half-way:\n{(self.killed.folder / 'printed.log').read_text()[-3000:]}")

    def clean(self, name: str = "trial", *, then: str = "pass") -> Run:
        """Return a run in a new copy of the code."""
        checkout(self.work / name, ROOT / "tfm/weights/nano")
        return self._run(name, then)

    def half(self, *, then: str = "pass") -> Run:
        """Return a run of which two of four prompts of the first cell are done."""
        return self._copy(self.killed.folder, then)

    def finished(self, *, without_tables: bool = True) -> Run:
        """Return a run whose cells are done; its tables are to be made unless told otherwise."""
        run = self._copy(self.reference.folder, "pass")
        if without_tables:
            (run.folder / TARGET).unlink()
            shutil.rmtree(run.folder / "results/nano/tables")
        return run

    def own_weights(self, run: Run) -> Path:
        """Give a run a copy of the weights, to damage; return its folder."""
        place = run.folder / "tfm/weights/nano"
        place.unlink()
        shutil.copytree(ROOT / "tfm/weights/nano", place)
        return place

    def _copy(self, source: Path, then: str) -> Run:
        shutil.copytree(source, self.work / "trial", symlinks=True)
        return self._run("trial", then)

    def _run(self, name: str, then: str) -> Run:
        arguments = ("--cores", str(self.cores), TARGET, "--config", *SLICE)
        return Run(self.work / name, arguments, then, self.card)


@dataclass
class Outcome:
    """What a trial did and found."""

    run: Run
    text: str
    problems: list[str] = field(default_factory=list)
    repeats: int = 0  # prompts that may be decoded again, since their records were what was damaged


def recover(outcome: Outcome, *, names: tuple[str, ...] = (), restore: Callable[[], None] | None = None) -> Outcome:
    """Call tfm resume, and do what it says, until it ends well.

    `names` are words of which a refusal must hold one: what is damaged. `restore` puts a damaged input back, as
    `git checkout` does; it is called once a refusal names it, and in any case before the last call.
    """
    for attempt in range(6):
        done = outcome.run.resume()
        text = done.stdout + done.stderr
        if done.returncode == 0 and restore is None:
            outcome.text += f"; tfm resume ends well, call {attempt + 1}"
            return outcome
        if done.returncode:
            outcome.problems += refusal_problems(outcome.run, text, names)
        command = next(filter(None, (re.search(pattern, text) for pattern in REMEDIES)), None)
        if done.returncode and command and restore is None:
            force(outcome.run, command[1].rstrip(".,;"))
        elif restore is not None:
            restore()
            restore = None
        elif attempt:
            break
    tail = "\n".join(text.strip().splitlines()[-12:])
    outcome.problems.append(f"tfm resume exits {done.returncode}: {tail}")
    return outcome


def refusal_problems(run: Run, text: str, names: tuple[str, ...]) -> list[str]:
    """Return what is wrong with a refusal: it names no damaged file, shows a traceback, or came after a table."""
    tail = " | ".join(text.strip().splitlines()[-6:])
    problems = [] if not names or any(name in text for name in names) else [f"no {' or '.join(names)} in: {tail}"]
    problems += [f"a traceback: {tail}"] if "Traceback (most recent" in text else []
    return problems + (["tables were made of what was refused"] if names and (run.folder / TARGET).exists() else [])


def force(run: Run, file: str) -> None:
    """Run the command that a message gives, with the config of the run."""
    flag, cores, _, *config = run.arguments
    call = replace(run, arguments=(flag, cores, "--force", file, *config))
    with call.start(log="forced.log") as driver:
        driver.wait()


def partial_cells(run: Run) -> list[str]:
    """Return the cells that claim to be finished and are not."""
    cells = [path.parent for path in run.folder.glob("results/*/cells/**/cell.json")]
    return [f"{cell.name} has a cell.json without its records" for cell in cells if not is_whole(cell)]
