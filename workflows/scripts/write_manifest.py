"""Write a suite's manifest: its cells with their digests, the code and machines, and the SHA-256 of every output."""

import argparse
import json
import sys
from pathlib import Path

from input_errors import told
from input_files import PROMPTS, read_plan
from probe_records import load_probes

from tfm.cell_shape import CELL
from tfm.cells import read_cell
from tfm.json_shape import NUMBER, Each, read_object
from tfm.manifest import environment, sha256_file, write_json

DESCRIPTION = """
Reads plan.json, the cells it lists, the records beside them, and the tables, figures, compare.csv and summary.json of
the suite. Writes manifest.json without host, user or absolute path. Last line of stdout: one JSON object.
"""
# of a cell.json, beside what tables read
RUN = {"cell": {**CELL, "weights_sha256": Each(str)}, "started": str, "ended": str, "prompts": int, "seconds": NUMBER}


def manifest(plan: dict, folder: Path) -> dict:
    """Return what made the suite's numbers."""
    cells, devices, environments = {}, [], []
    for cell in plan["cells"]:
        facts = read_cell(cell["path"], RUN)
        keys = ("source_digest", "cell_digest", "prompts_sha256", "prompts", "started", "ended", "seconds", "files")
        cells[cell["path"]] = {key: facts[key] for key in keys} | {"weights": facts["cell"]["weights_sha256"]}
        devices += [facts["device"]] if facts["device"] not in devices else []
        environments += [facts["environment"]] if facts["environment"] not in environments else []
    outputs = sorted(
        [path for pattern in ("tables/*", "figures/*", "compare.*", "summary.json") for path in folder.glob(pattern)]
    )
    prompts = {
        path.name: read_object(path, PROMPTS, remedy=f"make it with `snakemake --cores all --force {path}`")
        for path in sorted(folder.glob("prompts/*/*.manifest.json"))
    }
    return {
        "config": plan["config"],
        "cells": cells,
        "devices": devices,
        "environments": environments,
        "reported_by": environment(),
        "probes": {name: probe.facts for name, probe in load_probes(folder).items()},
        "prompts": prompts,
        "outputs": {path.relative_to(folder).as_posix(): sha256_file(path) for path in outputs},
    }


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json in the suite's folder")
    parser.add_argument("--out", required=True, type=Path, help="manifest.json")
    options = parser.parse_args()
    result = manifest(read_plan(options.plan), options.plan.parent)
    write_json(options.out, result)
    print(json.dumps({"manifest": str(options.out), "cells": len(result["cells"]), "outputs": len(result["outputs"])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
