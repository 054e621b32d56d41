"""A suite's plan.json, and lists of resolved cells: read by everything that goes on from them, refused in one way."""

import json
from pathlib import Path

from baselines.methods import METHODS
from tfm.cell_shape import CELL
from tfm.json_shape import Each, OneOf, problem_of, read_object

# newer keys of a cell may be missing in a published plan; digests are null where the weights were not here, and
# prompts where a suite takes all of a set
PLANNED = {**CELL, "decode": {**CELL["decode"], "method": OneOf(tuple(METHODS))}}
PLANNED |= {"path": str, "part": str, "threads": int, "prompts": (int, None)}
PLANNED |= {"weights": Each(str), "weights_sha256": Each((str, None))}


def read_plan(path: Path, config: dict | None = None) -> dict:
    """Return a suite's plan.json, or a published plan.json.gz: {config, cells, draft_rows}.

    `config` is a shape (tfm.json_shape) of what the caller reads of the config beside its suite. Raises ValueError
    naming file, key, value and remedy for a plan that is missing, damaged or lacks what is read of it.
    """
    shape = {"config": {"suite": str, **(config or {})}, "cells": [PLANNED], "draft_rows?": (int, None)}
    return read_object(path, shape, remedy=remedy(path))


def read_cells(path: Path) -> list[dict]:
    """Return the resolved cells of a plan.json, or of a file with one cell a line; at least one.

    Raises ValueError naming file, cell, key and value for what is none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        try:
            whole = json.loads(text)
            cells = whole.get("cells", [whole]) if isinstance(whole, dict) else whole
        except json.JSONDecodeError:
            cells = [json.loads(line) for line in text.split("\n") if line.strip()]
        problem = problem_of({"cells": cells}, {"cells": [PLANNED]}) or (None if cells else "holds no cell")
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError) as error:
        problem = f"is damaged ({error})"
    if problem:
        raise ValueError(f"{path}: {problem}; give a suite's plan.json, or cells of one, one a line")
    return cells


def remedy(path: Path) -> str:
    """Return what to do about a plan that cannot be used."""
    return f"make it with `snakemake --cores all {path}`, or restore it from git"
