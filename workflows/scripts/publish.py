"""Copy a finished suite into the tracked tree: records packed in one parquet a kind, tables, figures and summary."""

import argparse
import contextlib
import gzip
import json
import os
import re
import shutil
import socket
import sys
from getpass import getuser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from input_errors import told
from input_files import read_manifest, read_plan
from packing import GRADED, PLAN, reduced, whole, write_packed, write_table
from probe_records import load_probes

from baselines.probes import FILES as PROBE_FILES
from tfm.cell_shape import KINDS, RECORD
from tfm.cells import Records, join_records, load_cells
from tfm.json_shape import Each, read_object
from tfm.manifest import sha256_file

DESCRIPTION = """
Reads plan.json, the cells it lists, the records beside them (ceiling/, oracle/, kernels/, definitions/) and the suite's
tables, figures, compare.csv, compare.md, summary.json and manifest.json. Writes --out anew, at most --limit bytes,
without host, user or absolute path; plan, cells.json.gz and manifest.json.gz, which programs read, are compressed.
Columns that follow from others are left out, and load_published makes them again; of the recorded trees those stay that
a report shows. Rebuild the tables from it with make_tables.py --records OUT --plan OUT/plan.json.gz. Last line of
stdout: one JSON object. Exit 2 on bad input.
"""
LIMIT = 6 * 2**20
# not report.html: it holds all figures a second time, and make_report.py makes it again from these
FILES = ("compare.csv", "compare.md", "summary.json")
PACKED = {"cells": [{**RECORD, "path": str}], "sha256": Each(str)}  # cells.json.gz
TEXT = (".json", ".gz", ".csv", ".md", ".tex", ".html", ".svg", ".txt")


def pack(records_of: list[Path], out: Path) -> None:
    """Write requests.parquet, steps.parquet, trees.parquet (a `cell` column numbers the cells) and cells.json.gz."""
    cells = load_cells(records_of).cells  # checks every file
    # cells of uncommitted code are refused: nobody else could make them again
    dirty = [cell["path"] for cell in cells if cell["environment"]["git"]["dirty"]]
    if dirty:
        raise ValueError(
            f"{len(dirty)} of {len(cells)} cells were made by uncommitted code, first {dirty[0]}; commit it and make "
            f"them again: snakemake --cores all -R {dirty[0]}/requests.parquet"
        )
    tables = {}
    for kind in KINDS:
        parts = [pq.read_table(folder / f"{kind}.parquet") for folder in records_of]
        numbered = [part.append_column("cell", pa.array([i] * len(part), pa.int32())) for i, part in enumerate(parts)]
        tables[kind] = pa.concat_tables(numbered)
    for kind, table in reduced(tables).items():
        write_table(table, out / f"{kind}.parquet")
    files = {f"{kind}.parquet": sha256_file(out / f"{kind}.parquet") for kind in KINDS}
    write_packed(out / "cells.json.gz", {"cells": cells, "sha256": files})


def copy_probes(suite_folder: Path, out: Path) -> None:
    """Copy the records of what was measured beside the cells; raises ValueError for those of uncommitted code."""
    for name, probe in load_probes(suite_folder).items():
        if probe.facts["environment"]["git"]["dirty"]:
            facts = f"{suite_folder}/{PROBE_FILES[name][0]}"
            raise ValueError(
                f"{facts} was made by uncommitted code; commit it and make it again: snakemake --cores all -R {facts}"
            )
        for file in PROBE_FILES[name]:
            (out / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(suite_folder / file, out / file)


def load_published(folder: Path) -> Records:
    """Return the records of a published folder; raises ValueError naming a file that is damaged."""
    packed = read_object(folder / "cells.json.gz", PACKED, remedy="restore it from git")
    for name, expected in packed["sha256"].items():
        if not (folder / name).is_file() or sha256_file(folder / name) != expected:
            raise ValueError(
                f"{folder / name} is damaged: its sha256 is not that of cells.json.gz; restore it from git"
            )
    return join_records(packed["cells"], whole({kind: pq.read_table(folder / f"{kind}.parquet") for kind in KINDS}))


def private_words(root: Path) -> list[str]:
    """Return what must not be published: this machine's name, user, home and checkout path."""
    words = {socket.gethostname(), str(Path.home()), str(root.resolve()), os.environ.get("USER", "")}
    with contextlib.suppress(KeyError, OSError):
        words.add(getuser())
    # a user called root, or a home "/", would match ordinary words
    return sorted(word for word in words if len(word) > 3 and word not in ("root", "/root", "localhost"))


def check_clean(folder: Path, words: list[str]) -> None:
    """Raise ValueError naming the first text file that holds a private word or a home path."""
    pattern = re.compile("|".join([*map(re.escape, words), r"/home/\w+", r"/root/", r"/Users/\w+"]))
    for path in sorted(folder.rglob("*")):
        if path.suffix not in TEXT:
            continue
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        if found := pattern.search(text):
            raise ValueError(
                f"{path}: holds {found[0]!r}, which must not be published; remove its source and run again"
            )


def publish(suite_folder: Path, plan: dict, out: Path, *, limit: int) -> dict:
    """Write the published folder; return its size and files. Raises ValueError when it is too large or not clean."""
    temporary = out.with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    pack([Path(cell["path"]) for cell in plan["cells"]], temporary)
    copy_probes(suite_folder, temporary)
    for name in FILES:
        shutil.copyfile(suite_folder / name, temporary / name)
    write_packed(temporary / PLAN, plan)
    write_packed(temporary / "manifest.json.gz", read_manifest(suite_folder / "manifest.json"))
    for name in ("tables", "figures"):
        # csv and svg hold all that the others do; rule rebuild_published makes those again
        shutil.copytree(suite_folder / name, temporary / name, ignore=shutil.ignore_patterns("*.png", "*.pdf", "*.tex"))
    return {"published": str(out), **settle(temporary, out, limit=limit)}


def settle(made: Path, out: Path, *, limit: int) -> dict[str, int]:
    """Put a folder in the place of `out`, which keeps what was written by hand or graded apart; return bytes and files.

    Raises ValueError, and leaves `out` as it was, for a folder that is not clean or has more than `limit` bytes.
    """
    for kept in (*out.glob("*.md"), *out.glob(GRADED)):
        if not (made / kept.name).exists():
            shutil.copyfile(kept, made / kept.name)
    check_clean(made, private_words(Path.cwd()))
    sizes = {path.relative_to(made).as_posix(): path.stat().st_size for path in made.rglob("*") if path.is_file()}
    if sum(sizes.values()) > limit:
        largest = ", ".join(f"{name} {size}" for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:5])
        raise ValueError(f"{out}: {sum(sizes.values())} bytes, more than the limit of {limit}; largest: {largest}")
    shutil.rmtree(out, ignore_errors=True)
    made.rename(out)
    return {"bytes": sum(sizes.values()), "files": len(sizes)}


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json in the suite's folder")
    parser.add_argument("--out", required=True, type=Path, help="results/published/<suite>")
    parser.add_argument("--limit", type=int, default=LIMIT, help="bytes at most (default: 6 MiB)")
    options = parser.parse_args()
    plan = read_plan(options.plan)
    print(json.dumps(publish(options.plan.parent, plan, options.out, limit=options.limit)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
