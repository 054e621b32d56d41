"""Gather the headline's records of families that were trained apart from the shipped one, for the table `families`."""

import argparse
import csv
import json
import sys
from pathlib import Path

import pyarrow as pa
import yaml
from family_tables import METHODS
from input_errors import told
from input_files import read_plan
from probe_records import write_rows

from baselines.names import setting_name
from tfm import manifest, metrics
from tfm.cells import load_cells

DESCRIPTION = """
Takes the suite's headline cells at its highest temperature and first seed, of each --family NAME=FOLDER, from
results/<suite>-NAME (workflows/offline/cells.sh makes them there). FOLDER has the family's train.yaml and weights with
their curves. Writes families.json and requests.parquet to --out, the suite's folder families/. Last line of stdout: one
JSON object. Exit 2 on bad input.
"""
SCHEMA = pa.schema(
    [
        ("family", pa.string()),
        ("dataset", pa.string()),
        ("id", pa.string()),
        ("seed", pa.int32()),
        ("method", pa.string()),
        ("steps", pa.int32()),
        ("new_tokens", pa.int32()),
        ("accepted", pa.float64()),
    ]
)


def trained(folder: Path) -> dict:
    """Return what a family's recipe and curves say of it; raises ValueError naming a file that is missing."""
    try:
        recipe = yaml.safe_load((folder / "train.yaml").read_text(encoding="utf-8"))
        ends = {part: _end_of_curve(folder, part) for part in ("drafter", "weaver")}
    except OSError as error:
        raise ValueError(f"{error.filename} is missing; a family's folder has train.yaml and the curves") from error
    return {
        "seed": recipe["seed"],
        "answers": recipe["sample"]["conversations"],
        "d_rank": recipe["weaver"]["model"]["d_rank"],
        "weaver_steps": recipe["weaver"]["train"]["steps"],
        "drafter_chain": ends["drafter"].get("val_chain"),
        "weaver_alpha": ends["weaver"]["val_alpha"],
    }


def _end_of_curve(folder: Path, part: str) -> dict[str, float]:
    """Return the last validation of a stage; a variant of a weaver has no drafter's curve of its own."""
    places = [folder / f"weights/{part}_curve.csv", folder / part / "curve.csv"]
    path = next((place for place in places if place.is_file()), None)
    if path is None and part == "drafter":
        return {}
    with (path or places[0]).open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val_alpha")]
    return {name: float(value) for name, value in rows[-1].items() if value}


def gather(plan: dict, name: str) -> tuple[list[dict], dict]:
    """Return a family's rows of requests and what its cells say: weights, commit, device; none missing but methods."""
    suite, cells = plan["config"]["suite"], headline(plan)
    paths = [Path(cell["path"].replace(f"results/{suite}/", f"results/{suite}-{name}/", 1)) for cell in cells]
    records = load_cells([path for path in paths if path.exists()])
    if not records.cells:
        raise ValueError(f"family {name}: no cells in results/{suite}-{name}; run workflows/offline/cells.sh")
    table = metrics.per_request(records.requests, records.steps)
    methods, sets = set(table["method"]), set(table["dataset"])
    lacking = [
        str(path)
        for cell, path in zip(cells, paths, strict=True)
        if cell["decode"]["method"] in methods and not path.exists()
    ]
    if lacking:
        raise ValueError(f"family {name}: {len(lacking)} of its cells are missing, first {lacking[0]}; run them")
    rows = table[list(SCHEMA.names[1:])].assign(family=name).to_dict("records")
    weights = {part: digest for cell in records.cells for part, digest in cell["cell"]["weights_sha256"].items()}
    first = records.cells[0]["environment"]
    said = {"weights_sha256": weights, "methods": sorted(methods), "sets": sorted(sets), "environment": first}
    return rows, said | {"device": sorted(table["device_name"].unique()), "dtype": sorted(table["dtype"].unique())}


def headline(plan: dict) -> list[dict]:
    """Return the plan's headline cells of the drafting methods at the highest temperature and the first seed."""
    setting, seed = place(plan)
    wanted = {"part": "headline", "setting": setting, "seed": seed}
    cells = [cell for cell in plan["cells"] if all(cell[key] == value for key, value in wanted.items())]
    return [cell for cell in cells if cell["decode"]["method"] in METHODS]


def place(plan: dict) -> tuple[str, int]:
    """Return the setting and the seed that families are compared at."""
    config = plan["config"]
    return setting_name(max(config["temperatures"]), reasoning=config["reasoning"][0]), config["seeds"][0]


@told
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="the suite's plan.json")
    parser.add_argument("--family", required=True, action="append", metavar="NAME=FOLDER", help="may be given again")
    parser.add_argument("--out", required=True, type=Path, help="results/<suite>/families")
    options = parser.parse_args(arguments)
    plan, rows, found = read_plan(options.plan), [], {}
    for entry in options.family:
        name, _, folder = entry.partition("=")
        more, said = gather(plan, name)
        rows, found[name] = rows + more, said | trained(Path(folder))
    setting, seed = place(plan)
    facts = {"families": found, "setting": setting, "seed": seed, "environment": manifest.environment()}
    facts["files"] = {"requests.parquet": write_rows(options.out / "requests.parquet", rows, SCHEMA)}
    facts["source_digest"] = manifest.script_digest("compare_families")
    manifest.write_json(options.out / "families.json", facts)
    print(json.dumps({"out": str(options.out), "families": list(found), "rows": len(rows)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
