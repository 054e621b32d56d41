"""Files that a script of tables and checks is given: read with an error that names file, key, value and remedy."""

import io
from pathlib import Path

import pandas as pd
import yaml

from baselines import plans
from baselines.validation import problem_of_resolved
from tfm.cell_shape import ENVIRONMENT
from tfm.json_shape import NUMBER, Each, read_object

MAYBE = (*NUMBER, None)
SUMMARY = Each({"value": MAYBE, "low": MAYBE, "high": MAYBE, "n": MAYBE})
# a prompt set's .manifest.json
PROMPTS = {"n": int, "prompts_sha256": str, "skipped?": [{"id": str, "reason": str}]}
# what write_manifest.py says of a suite, as far as it is read again
MANIFEST = {
    "cells": Each(
        dict.fromkeys(("cell_digest", "source_digest", "prompts_sha256", "ended"), str)
        | {"prompts": int, "seconds": NUMBER, "weights": Each((str, None))}
    ),
    "devices": [{"name": str}],
    "environments": [{**ENVIRONMENT, "python": str, "system": str, "packages": Each(str)}],
    "prompts": Each(PROMPTS),
    "probes?": Each({"environment": ENVIRONMENT, "files?": Each({"sha256": str})}),
    "outputs": Each(str),
}
ITEM = dict.fromkeys(("item", "unit", "per", "source"), str) | {"row": int, "paper": (*MAYBE, str)}
ITEM |= {"ours": (str, list, None), "low?": NUMBER, "high?": NUMBER}
ITEM |= dict.fromkeys(("needs?", "test?", "dtype?", "no_data?"), str)
EXPECTED = {"card": str, "comparable": [str], "not_comparable": Each(str), "items": [ITEM], "rows": Each(str)}
EXPECTED |= {"runs?": Each(Each(Each({"value": NUMBER, "tolerance": NUMBER, "source": str})))}
EXPECTED |= {"kernel_times?": {"run": str, "tolerance": NUMBER}, "inventory_order?": [str]}


def read_table(path: Path, *columns: str) -> pd.DataFrame:
    """Return a table of ours, a csv file with `columns`; raises ValueError naming it where it is damaged or cut.

    An interval has both its ends and its value.
    """
    try:
        data = path.read_bytes()
        table = pd.read_csv(io.BytesIO(data))
        ends = [name for name in table if name.endswith(("_low", "_high"))]
        needed = {*columns, *(f"{name.rpartition('_')[0]}{end}" for name in ends for end in ("", "_low", "_high"))}
        lacking = sorted(needed - set(table))
        problem = f"lacks {', '.join(lacking)}" if lacking else ""
        problem = problem if data.endswith(b"\n") else "is cut off in its last line"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except ValueError as error:  # pandas' own, and what is not UTF-8
        problem = f"is damaged ({error})"
    if problem:
        raise ValueError(f"{path} {problem}; make it again: snakemake --cores all --force {path}")
    return table


def read_plan(path: Path) -> dict:
    """Return a suite's plan.json, or a published plan.json.gz, whose config is one that the suite's schema allows.

    Raises ValueError naming file, key, value and remedy.
    """
    plan = plans.read_plan(path)
    if problem := problem_of_resolved(plan["config"]):
        raise ValueError(f"{path}: config.{problem}; {plans.remedy(path)}")
    return plan


def read_manifest(path: Path) -> dict:
    """Return a suite's manifest.json, or a published manifest.json.gz; raises ValueError as `read_plan` does."""
    return read_object(path, MANIFEST, remedy="make it with write_manifest.py, or restore it from git")


def read_summary(path: Path) -> dict:
    """Return a suite's summary.json, name -> {value, low, high, n, ..}; raises ValueError as `read_plan` does."""
    return read_object(path, SUMMARY, remedy="make it with make_tables.py, or restore it from git")


def read_expected(path: Path) -> dict:
    """Return expected.yaml; raises ValueError as `read_plan` does, also for an item of a row that it does not name."""
    found = read_object(path, EXPECTED, remedy="mend it, or restore it from git", parse=_yaml)
    for item in found["items"]:
        if item["row"] not in found["rows"]:
            raise ValueError(f"{path}: items: {item['item']} is of row {item['row']}, which rows lacks; add it there")
    return found


def _yaml(data: bytes):
    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
