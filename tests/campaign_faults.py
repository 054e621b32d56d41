"""Break a small suite in every way but kill -9, recover as the messages say, and compare with an undisturbed run."""

import argparse
import fcntl
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaign_bench import Bench, Outcome  # noqa: E402
from campaign_kill import TARGET, differences, lost_cells  # noqa: E402
from campaign_kinds import KINDS  # noqa: E402
from campaign_log import Trials  # noqa: E402

from tfm.side_file import NAME  # noqa: E402

DESCRIPTION = """
Runs two cells and their tables in copies of the code in a temporary folder: once undisturbed, then once a fault. The
kinds: full disk, read-only results, damaged records, manifests, prompts, weights, configs and side files, clock jumps,
two calls at once, a card that vanishes or is out of memory, SIGTERM with grace. After each, `tfm resume` is called, and
what its message says is done until it ends well. Checks that all columns but times equal the undisturbed run's, that no
finished prompt was decoded twice unless its record was the damaged one, that no table was made of a damaged record, and
that no process, lock or held card is left. Adds to --trials, whose sum campaign_log.py makes; trials that are in it are
not made again. Last line of stdout: one JSON object. Exit 1 when a trial was not survived.
"""


def verdict(bench: Bench, outcome: Outcome) -> list[str]:
    """Return what is wrong after recovery."""
    run, problems = outcome.run, list(outcome.problems)
    try:
        problems += differences(bench.reference.folder, run.folder)
    except ValueError as error:
        problems.append(str(error))
    again = sum(count - 1 for count in run.decoded().values())
    problems += [f"{again} prompts were decoded again"] if again > outcome.repeats else []
    problems += [f"{name}: {NAME} is left" for name, folder in run.cells().items() if (folder / NAME).exists()]
    problems += [f"process left: {' '.join(process.command)[:80]}" for process in run.jobs()]
    problems += ["snakemake's lock is left"] if any((run.folder / ".snakemake/locks").glob("*")) else []
    problems += [] if (run.folder / TARGET).exists() else [f"{TARGET} is missing"]
    with open(bench.card, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problems.append("the card is still held")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=sorted(KINDS), help="kinds of faults (default: all)")
    parser.add_argument("--first", type=int, help="only so many trials of each kind")
    parser.add_argument("--cores", type=int, default=2, help="for Snakemake (default: 2)")
    parser.add_argument("--trials", type=Path, help="file of trials; those in it are not made again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        trials = Trials(options.trials or work / "trials.jsonl")
        bench, before = Bench(work, options.cores), len(trials.rows)
        for kind in options.kinds or KINDS:
            for name, trial in list(KINDS[kind]())[: options.first]:
                if trials.has(kind, name):
                    continue
                start = time.monotonic()
                outcome = trial(bench)
                if outcome is None:
                    print(f"{kind}, {name}: cannot be made here", file=sys.stderr)
                    continue
                problems, lost = verdict(bench, outcome), lost_cells(bench.reference.folder, outcome.run.folder)
                text = f"{outcome.text}; {time.monotonic() - start:.0f} s"
                scrubbed = [problem.replace(str(work), "") for problem in problems]
                trials.add(kind, name, problems=scrubbed, lost_cells=lost, outcome=text.replace(str(work), ""))
                shutil.rmtree(outcome.run.folder, ignore_errors=True)
        failed = sum(bool(row["problems"]) for row in trials.rows[before:])
        print(json.dumps({"trials": len(trials.rows) - before, "failures": failed}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
