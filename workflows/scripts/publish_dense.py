"""Publish suite dense-real as it came back from a GPU machine: records, builders, losslessness, DARTree's claims."""

import argparse
import contextlib
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import yaml
from dense_readme import folder_text, readme_text
from input_files import read_plan, told
from make_figures import draw
from packing import PLAN, write_packed
from probe_records import load_probes
from publish import copy_probes, pack, settle
from publish_graft import put_into, whole_cells
from rebuild_published import rebuild_suite
from write_manifest import manifest

from tfm.manifest import sha256_file

DESCRIPTION = """
Reads --run, the folder that workflows/offline/dense.sh worked in: results/dense-real (plan, prompts, cells, builders),
and lossless.json. Writes --out anew, at most --limit bytes: records packed in one parquet a kind, plan, manifest,
tables, figures, compare, builders/, lossless/, summary.json and README.md with DARTree's claims beside the numbers.
Planned cells that are not there are left out and counted. NOTES.md in --out stays. With --readme, what stands between
<!-- table: dense --> and <!-- end of table: dense --> is replaced. Last line of stdout: one JSON object. Exit 2 on bad
input.
"""
SUITE = "results/dense-real"
LIMIT = 1_200_000
TABLES = ("dartree_claims", "lossless")  # of what lies beside the cells; a plan of before them lacks the names
LEFT_OUT = ("*.md", "*.tex")
FIGURES = ("throughput", "tau", "latency", "sweeps")
MARKS = ("<!-- table: dense -->", "<!-- end of table: dense -->")


def as_measured(run: Path, plan: dict, asked: dict) -> dict:
    """Return the plan with each cell as its manifest has it: budgets may have been timed after it.

    `asked` is the config as planned, sets and temperatures that were not run among it.
    """
    cells = []
    for cell in plan["cells"]:
        facts = json.loads((run / cell["path"] / "cell.json").read_text(encoding="utf-8"))
        cells.append(facts["cell"] | {"path": cell["path"], "part": cell["part"]})
    config = plan["config"]
    tables = [*config["tables"], *(name for name in TABLES if name not in config["tables"])]
    return {**plan, "config": config | {"tables": tables} | only_run(asked, cells), "cells": cells}


def only_run(asked: dict, cells: list[dict]) -> dict:
    """Return the sets and temperatures that the headline's cells hold, and under `open` those of `asked` they lack.

    A mean over sets then says how many it is over.
    """
    headline = [cell for cell in cells if cell["part"] == "headline"]
    run = {cell["dataset"] for cell in headline}, {cell["decode"]["temperature"] for cell in headline}
    found, items = {}, []
    for key, title, have in zip(("datasets", "temperatures"), ("sets", "temperatures"), run, strict=True):
        found[key] = [one for one in asked[key] if one in have]
        if lacking := [str(one) for one in asked[key] if one not in have]:
            items.append({"item": f"{title} {', '.join(lacking)}", "needs": "their cells, which have not been run"})
    return found | {"open": [*asked.get("open", []), *items]}


def copy_beside(run: Path, lossless: list[Path], out: Path) -> None:
    """Copy the builders' records and lossless.json; raises ValueError naming what is missing or was wrong.

    Of several files the first one makes the table; the others lie beside it as they are, numbered.
    """
    copy_probes(run / SUITE, out)
    if not (out / "builders").is_dir():
        raise ValueError(f"--run: {run / SUITE}/builders is missing; unpack builders.tar.gz there")
    if not lossless:
        raise ValueError("--lossless: missing; give the lossless.json of dense.sh lossless")
    (out / "lossless").mkdir()
    for number, file in enumerate(lossless):
        if not file.is_file():
            raise ValueError(f"--lossless: {file} is missing; give what check_lossless.py wrote")
        if wrong := json.loads(file.read_text(encoding="utf-8"))["wrong"]:
            raise ValueError(f"--lossless: {wrong} outputs of {file} differ from ar's and are no near ties; mend them")
        shutil.copyfile(file, out / f"lossless/lossless{f'-{number}' if number else ''}.json")


def write_folder(run: Path, plan: dict, lossless: list[Path], expected: dict, packed: Path, made: Path) -> None:
    """Write everything but README.md into `packed`; `made` takes the tables' other forms."""
    copy_beside(run, lossless, packed)
    with contextlib.chdir(run):  # cells are named by their paths in the suite
        pack([Path(cell["path"]) for cell in plan["cells"]], packed)
        facts = manifest(plan, Path(SUITE))
    write_packed(packed / PLAN, plan)
    rebuild_suite(packed, expected, made, figures=False)
    draw(made / "tables", made / "figures", plan["config"]["figures"])
    for name in ("summary.json", "compare.csv"):
        shutil.copyfile(made / name, packed / name)
    # rule rebuild_published makes the other forms again
    shutil.copytree(made / "tables", packed / "tables", ignore=shutil.ignore_patterns(*LEFT_OUT))
    (packed / "figures").mkdir()
    for path in (path for name in FIGURES for path in (made / "figures").glob(f"{name}.svg")):
        shutil.copyfile(path, packed / "figures" / path.name)
    facts["probes"] = {name: probe.facts for name, probe in load_probes(packed).items()}
    files = (path for pattern in ("tables/*", "figures/*", "*.csv", "summary.json") for path in packed.glob(pattern))
    facts["outputs"] = {path.relative_to(packed).as_posix(): sha256_file(path) for path in sorted(files)}
    write_packed(packed / "manifest.json.gz", facts)


def publish(options) -> dict:
    """Write everything; return sizes and what is missing. Raises ValueError for too many bytes or damaged records."""
    run, out = options.run.resolve(), options.out.resolve()
    expected = yaml.safe_load(options.expected.read_text(encoding="utf-8"))
    planned = read_plan(run / SUITE / "plan.json")
    plan, missing = whole_cells(run, planned)
    if not plan["cells"]:
        raise ValueError(f"--run: no cell of {SUITE} is there; run dense.sh measure")
    made, packed = out.with_name(f".{out.name}.made"), out.with_name(f".{out.name}.partial")
    for folder in (made, packed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    write_folder(run, as_measured(run, plan, planned["config"]), options.lossless, expected, packed, made)
    tables = {path.stem: pd.read_csv(path, keep_default_na=True) for path in (packed / "tables").glob("*.csv")}
    summary = json.loads((packed / "summary.json").read_text(encoding="utf-8"))
    (packed / "README.md").write_text(folder_text(packed, tables, summary, len(planned["cells"])), encoding="utf-8")
    settled = settle(packed, out, limit=options.limit)
    shutil.rmtree(made)
    if options.readme:
        put_into(options.readme, readme_text(tables, summary), MARKS)
    found = {"published": str(options.out), "bytes": settled["bytes"], "cells": len(plan["cells"])}
    return found | {"missing": len(missing), "first_missing": missing[:1]}


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, help="folder RUN of the offline scripts, or the checkout")
    parser.add_argument(
        "--lossless", type=Path, nargs="+", default=[], help="lossless.json; more of them lie beside it"
    )
    parser.add_argument("--out", type=Path, default=Path("results/published/dense-h200"))
    parser.add_argument("--expected", type=Path, default=Path("workflows/config/expected.yaml"))
    parser.add_argument("--readme", type=Path, help="file whose table is replaced")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"bytes at most (default: {LIMIT})")
    options = parser.parse_args()
    print(json.dumps(publish(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
