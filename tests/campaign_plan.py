"""Plan grids of many cells: seconds and memory of the calls that people make, and where the time goes."""

import argparse
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaign_log import Trials  # noqa: E402
from workflow_runs import NANO, checkout, environment_of  # noqa: E402

from baselines import suite  # noqa: E402

DESCRIPTION = """
Writes a suite of so many cells (suite nano with many seeds) in a copy of the code and measures `snakemake -n` there:
wall seconds, processor seconds (the better measure on a machine that does other work) and peak memory. With --finished,
every cell's files are there too, empty, and are marked as made by `snakemake --touch`: the cost of a call with nothing
to do. With --profile, prints where the time goes. Adds the numbers to --trials. Last line of stdout: one JSON object.
"""


def grid(cells: int) -> dict:
    """Return a config of suite `grid` with `cells` cells, or a few more."""
    config = {**NANO, "suite": "grid", "prompts": 2, "stages": False, "audit": [], "residuals": []}
    config |= {
        key: [] for key in ("widths", "dartree_widths", "candidate_counts", "children_counts", "depths", "budgets")
    }
    arms = len(config["datasets"]) * len(config["methods"])
    # seeds count at temperature 1; at 0 there is one
    return config | {"seeds": list(range(-(-cells // arms) - 1)), "real": {}}


def timed(call: list[str], folder: Path) -> dict:
    """Run a command; return its wall seconds and peak memory in MiB. Raises RuntimeError when it fails."""
    start = time.monotonic()
    with open(folder / "printed.log", "wb") as file:
        process = subprocess.Popen(call, cwd=folder, env=environment_of(folder), stdout=file, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(call)}\n{(folder / 'printed.log').read_text()[-3000:]}")
    numbers = {"seconds": time.monotonic() - start, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    return {**{key: round(value, 1) for key, value in numbers.items()}, "mib": round(usage.ru_maxrss / 1024)}


def write_finished(folder: Path, config: dict) -> None:
    """Make every cell's files, empty but for a byte."""
    for cell in suite.expand(config):
        place = folder / cell["path"]
        place.mkdir(parents=True)
        for name in ("requests.parquet", "steps.parquet", "trees.parquet", "cell.json"):
            (place / name).write_bytes(b" ")


def profile(call: list[str], folder: Path, lines: int) -> None:
    """Run a command under cProfile and print the functions in which most time was spent."""
    out = folder / "profile.out"
    timed([call[0], "-m", "cProfile", "-o", str(out), *call[1:]], folder)
    stats = pstats.Stats(str(out), stream=sys.stderr)
    stats.sort_stats("tottime").print_stats(lines)
    stats.sort_stats("cumtime").print_stats(lines * 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[10_000], help="sizes of grids (default: 10000)")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--finished", action="store_true", help="also with every cell done")
    parser.add_argument("--batches", type=int, help="also the first of so many batches (--batch make_tables=1/N)")
    parser.add_argument("--plan-file", action="store_true", help="also plan.json alone, as run_cells.py needs it")
    parser.add_argument("--no-whole", action="store_true", help="not the graph of the whole grid")
    parser.add_argument("--profile", type=int, metavar="LINES", help="print so many functions instead of measuring")
    parser.add_argument("--trials", type=Path, help="file of trials to add the numbers to")
    options = parser.parse_args()
    measured = {}
    with tempfile.TemporaryDirectory() as work:
        trials = Trials(options.trials or Path(work) / "trials.jsonl")
        for cells in options.cells:
            folder = checkout(Path(work) / f"{cells}", ROOT / "tfm/weights/nano")
            config = grid(cells)
            (folder / "grid.yaml").write_text(yaml.safe_dump(config))
            call = [sys.executable, "-m", "snakemake", "-n", "-q", "all", "--cores", str(options.cores)]
            call += ["--configfile", "grid.yaml"]
            if options.profile:
                profile(call, folder, options.profile)
                continue
            count = len(suite.expand(suite.resolve(config)))
            plans = {} if options.no_whole else {"plan": timed(call, folder)}
            if options.plan_file:
                # what run_cells.py takes in parts: a graph of one job, whatever the number of cells
                one = [word for word in call if word != "-n"] + ["--", "results/grid/plan.json"]
                plans["plan_file"] = timed(one, folder)
            if options.batches:
                # a part of the cells at a time. Of the tables alone: the manifest of a suite hangs on all cells too
                part = [*call, "--batch", f"make_tables=1/{options.batches}", "--", "results/grid/tables/headline.csv"]
                plans["batch"] = timed(part, folder)
            if options.finished:
                write_finished(folder, suite.resolve(config))
                touch = [word for word in call if word != "-n"] + ["--touch"]
                plans["touch"] = timed(touch, folder)
                plans["plan_finished"] = timed(call, folder)
            for what, numbers in plans.items():
                values = {f"{what}_{unit}_{cells}_cells": number for unit, number in numbers.items()}
                trials.count("plan", f"{count} cells, {options.cores} cores, {what}", **values)
                measured |= values
            shutil.rmtree(folder)
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
