"""Records of what a suite measures beside its cells: written with their SHA-256, read only when they match it."""

import argparse
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa
from input_errors import json_argument
from packing import write_table

from baselines.probes import FILES
from tfm.manifest import sha256_file, write_atomic, write_json


@dataclass(frozen=True)
class Probe:
    """One probe's facts (its .json) and its frames by name: anchors, or samples and checks."""

    facts: dict
    frames: dict[str, pd.DataFrame]


def write_rows(path: Path, rows: list[dict], schema: pa.Schema) -> dict:
    """Write rows as parquet in one move; return the SHA-256 and the number of rows, as the facts file keeps them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sink = pa.BufferOutputStream()
    write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    data = sink.getvalue().to_pybytes()
    write_atomic(path, data)
    return {"sha256": hashlib.sha256(data).hexdigest(), "rows": len(rows)}


def run_probe(name: str, description: str, run: Callable[[dict, Path], dict], *, fact: str) -> int:
    """Be a probe's command line: read --settings and --out, run, print one `fact`; return the exit status 0.

    `name` is the probe's in baselines.probes and of its folder. Raises ValueError for bad input.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", required=True, help=f"resolved settings, JSON text (baselines.probes.{name})")
    parser.add_argument("--out", required=True, type=Path, help=f"the suite's folder {name}/")
    parser.add_argument("--commit", help="commit of the code where this is no git checkout of it")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    facts = run(json_argument("--settings", options.settings), options.out)
    if options.commit:
        facts["environment"]["git"] = {"commit": options.commit, "dirty": None}
        write_json(options.out / Path(FILES[name][0]).name, facts)
    print(json.dumps({name: str(options.out), fact: facts[fact], "seconds": facts["seconds"]}))
    return 0


def load_probes(folder: Path) -> dict[str, Probe]:
    """Return the probes whose records lie in a suite's folder (or a published one).

    Raises ValueError naming a file that is missing or is not the one its facts file describes.
    """
    return {name: _load(name, folder) for name in FILES if (folder / FILES[name][0]).exists()}


def _load(name: str, folder: Path) -> Probe:
    facts_file, *files = (folder / file for file in FILES[name])
    remedy = f"make it again: snakemake --cores all --force {facts_file}, or restore it from git"
    try:
        facts = json.loads(facts_file.read_text(encoding="utf-8"))
        expected = {file.name: facts["files"][file.name]["sha256"] for file in files}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{facts_file} is damaged ({type(error).__name__}: {error}); {remedy}") from error
    for file in files:
        if not file.is_file() or sha256_file(file) != expected[file.name]:
            raise ValueError(f"{file} is missing or damaged: its sha256 is not that of {facts_file.name}; {remedy}")
    return Probe(facts, {file.stem: pd.read_parquet(file) for file in files})
