"""Publish suite dense-real as it came back from a GPU machine: records, builders, losslessness, DARTree's claims."""

import dataclasses
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pandas as pd
from dense_readme import folder_text, readme_text
from input_errors import told
from packing import write_packed
from probe_records import load_probes
from publish import copy_probes
from publish_run import Folder, parser_of, publish

from tfm.cells import read_cell
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
MARKS = ("<!-- table: dense -->", "<!-- end of table: dense -->")


def as_measured(folder: Folder) -> Folder:
    """Return the folder with each cell as its manifest has it: budgets may have been timed after the plan.

    The config lists what was run of it, sets and temperatures that were not among `open`.
    """
    cells = []
    for cell in folder.plan["cells"]:
        facts = read_cell(folder.run / cell["path"])
        cells.append(facts["cell"] | {"path": cell["path"], "part": cell["part"]})
    config = folder.plan["config"]
    tables = [*config["tables"], *(name for name in TABLES if name not in config["tables"])]
    config = config | {"tables": tables} | only_run(folder.planned["config"], cells)
    return dataclasses.replace(folder, plan={**folder.plan, "config": config, "cells": cells})


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


def write_folder(folder: Folder, *, lossless: list[Path]) -> str:
    """Write everything; return the README's tables."""
    packed = folder.packed
    copy_beside(folder.run, lossless, packed)
    facts = folder.pack_cells()
    folder.make("tables", left_out=LEFT_OUT)
    facts["probes"] = {name: probe.facts for name, probe in load_probes(packed).items()}
    files = (path for pattern in ("tables/*", "figures/*", "*.csv", "summary.json") for path in packed.glob(pattern))
    facts["outputs"] = {path.relative_to(packed).as_posix(): sha256_file(path) for path in sorted(files)}
    write_packed(packed / "manifest.json.gz", facts)
    tables = {path.stem: pd.read_csv(path, keep_default_na=True) for path in (packed / "tables").glob("*.csv")}
    text = folder_text(packed, tables, folder.summary(), len(folder.planned["cells"]))
    (packed / "README.md").write_text(text, encoding="utf-8")
    return readme_text(tables, folder.summary())


@told
def main() -> int:
    of_run = "folder RUN of the offline scripts, or the checkout"
    parser = parser_of(DESCRIPTION, run=of_run, out="results/published/dense-h200", limit=LIMIT)
    parser.add_argument(
        "--lossless", type=Path, nargs="+", default=[], help="lossless.json; more of them lie beside it"
    )
    options = parser.parse_args()
    write = partial(write_folder, lossless=options.lossless)
    names = {"where": SUITE, "script": "dense.sh measure", "marks": MARKS}
    print(json.dumps(publish(options, write, **names, change=as_measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
