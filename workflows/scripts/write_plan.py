"""Write a suite's plan: its checked config and every resolved cell with its folder."""

import argparse
import json
import sys
from pathlib import Path

from input_errors import json_argument, told

from baselines import suite
from tfm.manifest import write_json

DESCRIPTION = """
Reads the checked config (JSON) and the weights it names. Writes --out, {config, cells, draft_rows}: what the tables
read, and what run_cells.py takes as its list. Last line of stdout: one JSON object.
"""


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the suite's checked config, JSON text")
    parser.add_argument("--out", required=True, type=Path, help="plan.json")
    options = parser.parse_args()
    config = json_argument("--config", options.config)
    cells = suite.expand(config)
    # the drafter's rows, so that tables can be made where the weights are not
    write_json(options.out, {"config": config, "cells": cells, "draft_rows": suite.draft_rows(config)})
    print(json.dumps({"plan": str(options.out), "cells": len(cells)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
