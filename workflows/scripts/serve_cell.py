"""Run one cell, or a list of cells, inside a serving engine: launch its server, send the prompts, write the records."""

import argparse
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from decode_cell import check_weights, decode_config, digest_of, explain, read_cell_argument, source_of, without_place
from input_errors import told
from progress import Progress, suite_from
from run_cells import is_done, prompts_file

from baselines.plans import read_cells
from baselines.serving import cell as serving
from tfm import manifest
from tfm.cells import CellWriter
from tfm.prompts import read_prepared
from tfm.span import Span
from tfm.tokenizer import load_tokenizer

DESCRIPTION = """
Reads a resolved cell (JSON) and its prompt file, or with --list the cells of a plan.json and their prompt files under
--out. Launches the engine's server with the Python of its environment on a port of the loopback, once for all cells in
a row that need the same one, and ends it and everything it started on the way out, when killed too. Writes
requests.parquet, steps.parquet, trees.parquet (empty) and cell.json to each cell's folder as decode_cell.py does;
finished requests are kept in done.jsonl, so that a killed cell goes on where it stopped. Last line of stdout: one JSON
object. Exit 2 on bad input, 1 on any other failure.
"""
logger = logging.getLogger("serve_cell")


def run_cell(cell: dict, *, prompts: Path, out: Path, session: serving.Session, commit=None, suite=None) -> dict:
    """Decode the prompts that have no record yet, then write the cell's files; return its cell.json.

    Raises ValueError when the weights or prompts are not those of the cell, before a server starts.
    """
    # where Snakemake looks for it: `out` may lie below another folder
    span, place, cell = Span(), Path(cell.get("path", out)), without_place(cell)
    check_weights(cell)
    rows, digest = read_prepared(prompts), digest_of(cell, prompts)
    tokenizer = load_tokenizer(cell["weights"]["target"])
    config = decode_config(cell, tokenizer)
    with CellWriter(out, digest=digest) as writer:
        if writer.facts and all(row.id in writer.done for row in rows):
            return writer.finish([row.id for row in rows], writer.facts)
        resumed = len(writer.done)
        name = "/".join([cell["dataset"], cell["variant"], cell["setting"], f"seed{cell['seed']}"])
        progress = Progress(name, prompts=len(rows), done=resumed, suite=suite)
        found = serving.run_cell(
            cell, rows, config, session=session, writer=writer, detokenise=tokenizer.decode, progress=progress
        )
        progress.close()
        facts = {"source_digest": source_of(cell), "prompts_sha256": manifest.sha256_file(prompts)}
        facts |= {"prompts": len(rows), **found}
        facts |= serving.facts_of(cell, config, place, span=span, commit=commit)
        return writer.finish([row.id for row in rows], facts)


def run_list(options: argparse.Namespace, session: serving.Session) -> dict:
    """Run the cells of a list that are not done, those of one server in a row; a failed one is reported."""
    cells = [cell for cell in read_cells(options.list) if "server" in cell]
    # stable, so that the order within one server is the plan's
    cells.sort(key=lambda cell: json.dumps([cell["server"], cell["engine"]], sort_keys=True))
    done, failed = [], {}
    for cell in cells:
        if is_done(cell, options.out):
            continue
        try:
            found = run_cell(
                cell,
                prompts=prompts_file(cell, options.out),
                out=options.out / cell["path"],
                session=session,
                commit=options.commit,
            )
            done.append({"path": cell["path"], "seconds": found["seconds"]})
        except Exception as error:  # the other cells are still worth the machine's time; the exit code tells
            logger.exception("%s failed", cell["path"])
            failed[cell["path"]] = f"{type(error).__name__}: {error}"
    return {"cells": len(cells), "run": len(done), "failed": failed}


def place_of(options: argparse.Namespace) -> serving.Place:
    """Return where the servers of this call live; raises ValueError for a Python that is not there."""
    python = shutil.which(options.server_python)
    if python is None:
        raise ValueError(
            f"server_python: {options.server_python!r} is no program (allowed: the Python of the engine's "
            "environment); give its path"
        )
    # not resolved: a virtual environment's Python is a link
    python = os.path.abspath(python)
    folder = options.server_folder or options.out / ("server" if options.list is None else "servers")
    return serving.Place(folder, python, options.server_port, options.server_seconds)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cell", help="the resolved cell, JSON text or @FILE")
    add("--prompts", type=Path, help="prepared prompts of --cell (prepare_prompts.py)")
    add("--list", type=Path, help="plan.json or JSON lines of resolved cells, in place of --cell and --prompts")
    add("--out", required=True, type=Path, help="the cell's folder; with --list the folder of results/")
    add("--log", required=True, type=Path, help="file for everything but the progress line")
    add("--server-python", default="python", help="Python of the engine's environment (default: the first on the path)")
    add("--server-port", type=int, help="port on 127.0.0.1 (default: a free one)")
    add("--server-seconds", type=float, default=900, help="longest wait for a server to answer (default 900)")
    add("--server-folder", type=Path, help="folder for the server's log and state (default: under --out)")
    add("--commit", help="commit of the code where this is no git checkout")
    options = parser.parse_args(arguments)
    if (options.list is None) == (options.cell is None) or (options.cell is None) != (options.prompts is None):
        parser.error("give --cell with --prompts, or --list")
    return options


@told
def main() -> int:
    options = parse()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=options.log, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.captureWarnings(True)
    try:
        with serving.Session(place_of(options)) as session:
            if options.list is not None:
                result = run_list(options, session)
            else:
                found = run_cell(
                    read_cell_argument(options.cell),
                    prompts=options.prompts,
                    out=options.out,
                    session=session,
                    commit=options.commit,
                    suite=suite_from(os.environ.get("TFM_PROGRESS")),
                )
                result = {"cell": str(options.out), "prompts": found["prompts"], "seconds": found["seconds"]}
    except Exception as error:
        logger.exception("the cell failed")
        print(f"\nserve_cell: {options.out}: {explain(error, options.out)} (log: {options.log})", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(json.dumps(result))
    return 1 if result.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
