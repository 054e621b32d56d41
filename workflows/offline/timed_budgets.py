"""List a plan's budget sweep as timed cells: a suite that times its headline has no speed along the budgets."""

import argparse
import json
from pathlib import Path

from baselines import suite


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--methods", default="dartree", help="comma-separated (default: dartree)")
    parser.add_argument("--out", type=Path, required=True, help="list for run_paired.py; the cells keep their paths")
    options = parser.parse_args()
    config = json.loads(options.plan.read_text())["config"] | {"timed": "all"}
    methods = options.methods.split(",")
    cells = [cell for cell in suite.expand(config) if cell["part"] == "budgets"]
    # of a part that run_paired.py knows nothing of, so that the budgets stand side by side
    cells = [cell | {"part": "timed"} for cell in cells if cell["decode"]["method"] in methods]
    options.out.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
    print(json.dumps({"cells": len(cells)}))


if __name__ == "__main__":
    main()
