"""Cut a plan's untimed cells into lists that processes take one after another, what matters most first."""

import argparse
import json
import shutil
from pathlib import Path

from tfm.manifest import sha256_weights

PARTS = ("headline", "residuals", "candidate_counts", "budgets")
CELLS_A_LIST = 8


def rank(cell: dict) -> tuple:
    """Return where a cell stands: the headline's first seed at T = 1, ablations, further settings and seeds."""
    first = cell["part"] != "headline" or (cell["setting"] == "t1" and cell["seed"] == 0)
    part = PARTS.index(cell["part"]) if cell["part"] in PARTS else len(PARTS)
    return not first, part, cell["setting"] != "t1", cell["seed"], cell["dataset"], cell["path"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument(
        "--weights", type=Path, help="a family's folder in place of the plan's: headline at T = 1 alone"
    )
    parser.add_argument("--methods", help="comma-separated, with --weights: these alone")
    parser.add_argument("--run", type=Path, required=True, help="folder whose results/ the cells go to")
    parser.add_argument("--out", type=Path, required=True, help="folder of the lists")
    options = parser.parse_args()
    cells, suite = json.loads(options.plan.read_text())["cells"], None
    cells = [cell for cell in cells if cell["clock"] == "off"]
    if options.weights:
        cells = [cell for cell in cells if (cell["part"], cell["setting"], cell["seed"]) == ("headline", "t1", 0)]
        methods = options.methods.split(",") if options.methods else None
        cells = [cell for cell in cells if methods is None or cell["decode"]["method"] in methods]
        old = cells[0]["suite"]
        suite = f"{old}-{options.weights.parent.name}"
        prompts = options.run / "results" / suite / "prompts"
        if not prompts.exists():
            shutil.copytree(options.plan.parent / "prompts", prompts)
        digests = {part: sha256_weights(options.weights / part) for part in ("target", "drafter", "weaver")}
        for cell in cells:
            cell["path"] = cell["path"].replace(f"results/{old}/", f"results/{suite}/")
            cell["suite"] = suite
            cell["weights"] = {part: str(options.weights / part) for part in cell["weights"]}
            cell["weights_sha256"] = {part: digests[part] for part in cell["weights"]}
    cells.sort(key=rank)
    for number, at in enumerate(range(0, len(cells), CELLS_A_LIST)):
        lines = "".join(json.dumps(cell) + "\n" for cell in cells[at : at + CELLS_A_LIST])
        (options.out / f"{number:04d}.json").write_text(lines)
    print(json.dumps({"suite": suite, "cells": len(cells)}))


if __name__ == "__main__":
    main()
