"""Run many cells in one process, on a machine that has torch but no Snakemake; same outputs as decode_cell.py."""

import argparse
import importlib.machinery
import importlib.util
import json
import logging
import re
import sys
import time
from pathlib import Path

from input_errors import told

REPOSITORY = Path(__file__).resolve().parent.parent.parent

DESCRIPTION = """
Reads resolved cells (a plan.json of a suite, or JSON lines) and the prompt files under --out. Writes every cell's
folder under --out at the path the cell names, skipping those that are there, whole and of this code, config and
prompts. With --part 3/10 it runs the third of ten parts of the list, so that a list of many thousand cells needs no
graph of jobs. Needs torch, numpy, pandas, pyarrow, safetensors and tokenizers; nothing has to be installed of this
project. Last line of stdout: one JSON object. Exit 2 on bad input, 1 when a cell failed.
"""


def register_kernels() -> None:
    """Make ./kernels importable as tfm_kernels, and the repository's packages by their names."""
    sys.path.insert(0, str(REPOSITORY))
    if importlib.util.find_spec("tfm_kernels") is None:
        spec = importlib.machinery.ModuleSpec("tfm_kernels", None, is_package=True)
        spec.submodule_search_locations = [str(REPOSITORY / "kernels")]
        sys.modules["tfm_kernels"] = importlib.util.module_from_spec(spec)


def part_of(cells: list[dict], part: str | None) -> list[dict]:
    """Return every N-th cell from the I-th on for "I/N", so that parts are alike; all cells for None.

    Raises ValueError for a part that does not exist.
    """
    if part is None:
        return cells
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(
            f"--part: {part!r} is not allowed (allowed: I/N with 1 <= I <= N); write 3/10 for the third tenth"
        )
    return cells[int(found[1]) - 1 :: int(found[2])]


def prompts_file(cell: dict, out: Path) -> Path:
    """Return where a cell's prompts lie."""
    think = "-think" if cell["reasoning"] else ""
    return out / f"results/{cell['suite']}/prompts/{cell['target']}/{cell['dataset']}{think}.jsonl"


def is_done(cell: dict, out: Path) -> bool:
    """Return whether the cell's records are there, whole, and those that a run would make now."""
    from decode_cell import digest_of

    from tfm.cells import is_whole

    prompts = prompts_file(cell, out)
    return prompts.exists() and is_whole(out / cell["path"], digest=digest_of(cell, prompts))


def run(options: argparse.Namespace) -> dict:
    """Run the cells in list order; a failed cell is reported and the next one starts. Returns the counts."""
    from decode_cell import run_cell  # after register_kernels

    if options.seconds is not None and not options.seconds > 0:
        raise ValueError(
            f"--seconds: {options.seconds} is not allowed (allowed: a number above 0); leave it out for all"
        )
    from baselines.plans import read_cells

    cells, done, failed = part_of(read_cells(options.list), options.part), [], {}
    deadline = time.monotonic() + options.seconds if options.seconds else float("inf")
    for number, cell in enumerate(cells, start=1):
        folder = options.out / cell["path"]
        if is_done(cell, options.out):
            continue
        if time.monotonic() > deadline:
            break
        suite = {"cells": str(options.out / f"results/{cell['suite']}/cells"), "total": len(cells), "done": 0}
        try:
            prompts = prompts_file(cell, options.out)
            result = run_cell(
                cell, prompts=prompts, out=folder, commit=options.commit, suite={**suite, "start": time.time()}
            )
            done.append({"path": cell["path"], "seconds": result["seconds"]})
        except Exception as error:  # the other cells are still worth the machine's time; the exit code tells
            logging.exception("cell %d of %d: %s failed", number, len(cells), cell["path"])
            failed[cell["path"]] = f"{type(error).__name__}: {error}"
    left = sum(not is_done(cell, options.out) for cell in cells)
    return {"cells": len(cells), "run": len(done), "left": left, "failed": failed}


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", required=True, type=Path, help="plan.json or JSON lines of resolved cells")
    parser.add_argument("--out", required=True, type=Path, help="folder that stands for the repository's root")
    parser.add_argument("--commit", required=True, help="commit of the code, recorded in every cell")
    parser.add_argument("--part", help="I/N: only the I-th of N parts of the list, for N calls side by side")
    parser.add_argument("--seconds", type=float, help="start no further cell after this long")
    parser.add_argument("--log", type=Path, help="file for everything but the progress line (default: stderr)")
    options = parser.parse_args()
    logging.basicConfig(filename=options.log, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    register_kernels()
    result = run(options)
    print(json.dumps(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
