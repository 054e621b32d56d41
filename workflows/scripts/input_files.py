"""Files that a script is given: read with a clear error, and bad input as one line on standard error and status 2."""

import functools
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import yaml
from packing import read_packed

# what every script reads of a plan
CONFIG_KEYS = {"suite", "family", "methods", "datasets", "temperatures", "seeds", "reasoning", "side", "tables"}
CELL_KEYS = {"part", "engine", "target", "dataset", "domain", "variant", "setting", "seed", "decode", "clock", "traced"}


def told(main: Callable[[], int]) -> Callable[[], int]:
    """Return a script's `main` that says in one line what is wrong with its input, and then returns 2."""

    @functools.wraps(main)
    def call() -> int:
        try:
            return main()
        except (ValueError, OSError) as error:
            what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
            print(f"{Path(sys.argv[0]).stem}: {what}", file=sys.stderr)
            return 2

    return call


def read_object(path: Path, *keys: str, remedy: str) -> dict:
    """Return an object with `keys` from a JSON (.json, .json.gz) or YAML file.

    Raises ValueError naming the file and the remedy for one that is missing, damaged, or lacks a key.
    """
    try:
        if path.suffix == ".gz":
            found = read_packed(path)
        else:
            text = path.read_text(encoding="utf-8")
            found = yaml.safe_load(text) if path.suffix in (".yaml", ".yml") else json.loads(text)
    except FileNotFoundError:
        problem = "does not exist"
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        problem = f"is damaged ({error})"
    else:
        if isinstance(found, dict) and set(keys) <= set(found):
            return found
        problem = f"lacks {' or '.join(keys)}" if keys else "holds no object"
    raise ValueError(f"{path} {problem}; {remedy}")


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
    """Return a suite's plan.json, or a published plan.json.gz; raises ValueError with a remedy where it is damaged."""
    remedy = f"make it with `snakemake --cores all {path}`, or restore it from git"
    plan = read_object(path, "config", "cells", remedy=remedy)
    if not isinstance(plan["config"], dict) or "suite" not in plan["config"]:
        raise ValueError(f"{path} has a config without a suite; {remedy}")
    cells = plan["cells"]
    if not isinstance(cells, list) or not all(isinstance(cell, dict) and "path" in cell for cell in cells):
        raise ValueError(f"{path} has cells without a path; {remedy}")
    return plan


def check_version(plan: dict, path: Path) -> None:
    """Raise ValueError unless a plan has all that tables and pages are made by, as another version's may not."""
    for what, lacking in (
        ("a config", sorted(CONFIG_KEYS - set(plan["config"]))),
        ("cells", sorted({key for cell in plan["cells"] for key in CELL_KEYS - set(cell)})),
    ):
        if lacking:
            remedy = f"make it again: snakemake --cores all --force {path}"
            raise ValueError(f"{path} has {what} without {', '.join(lacking)}, as another version writes; {remedy}")
