"""Draft trees of a suite for its report: steps of a few requests, every node with its token's text and probability."""

import json
import math
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from tfm.cells import Records

REQUESTS, STEPS = 3, 12  # shown of each variant
METHODS = ("tfm", "dartree", "ddtree", "dflash")


def traced_cells(plan: list[dict]) -> list[dict]:
    """Return the cells that record their trees, one a drafting method, in the order in which they are shown."""
    traced = {}
    for cell in plan:
        if cell["traced"]:
            traced.setdefault(cell["decode"]["method"], cell)
    return [traced[method] for method in METHODS if method in traced]


def trees_of(cells: list[dict], weights: str, *, read=None) -> list[dict]:
    """Return {variant, dataset, setting, id, steps} of the first requests of each cell whose records are here.

    A step is {accepted, nodes}: nodes in drafted order, each [parent, text, probability given its parent, accepted].
    `read(cell)` returns a cell's trees with the id of each request, None where they are not here; the cell's own files
    unless given.
    """
    decode, found = _decoder(Path(weights) / "target/tokenizer.json"), []
    for cell in cells:
        trees = (read or _read_files)(cell)
        if trees is None:
            continue
        trees = trees[(trees["request"] < REQUESTS) & (trees["step"] < STEPS)]
        head = {key: cell[key] for key in ("variant", "dataset", "setting")}
        for (_, name), rows in trees.groupby(["request", "id"]):
            steps = [_step(part, decode) for _, part in rows.groupby("step")]
            found.append({**head, "id": name, "steps": steps})
    return found


def packed(records: Records):
    """Return what `trees_of` reads the trees of a published folder with."""
    places = {cell["path"]: number for number, cell in enumerate(records.cells)}

    def read(cell: dict) -> pd.DataFrame | None:
        place = places.get(cell["path"])
        return None if place is None else records.trees[records.trees["cell"] == place]

    return read


def _read_files(cell: dict) -> pd.DataFrame | None:
    folder = Path(cell["path"])
    if not (folder / "trees.parquet").is_file() or not (folder / "requests.parquet").is_file():
        return None
    names = pq.read_table(folder / "requests.parquet", columns=["request", "id"]).to_pandas()
    return pq.read_table(folder / "trees.parquet").to_pandas().merge(names, on="request")


def _step(rows: pd.DataFrame, decode) -> dict:
    rows = rows.sort_values("node")
    nodes = [
        [int(parent), decode(int(token)), round(math.exp(log_prob), 4), bool(accepted)]
        for parent, token, log_prob, accepted in rows[["parent", "token", "log_prob", "accepted"]].itertuples(
            index=False
        )
    ]
    return {"accepted": int(rows["accepted"].sum()) - 1, "nodes": nodes}


def _decoder(path: Path):
    """Return token id -> text; the id itself where the tokenizer is not here."""
    if not path.is_file():
        return lambda token: f"#{token}"
    from tokenizers import Tokenizer  # only where there is one to read

    tokenizer = Tokenizer.from_file(str(path))
    return lambda token: (
        tokenizer.decode([token], skip_special_tokens=False) or tokenizer.id_to_token(token) or f"#{token}"
    )


def outline(step: dict) -> str:
    """Return the accepted path and the most probable other drafts of a step in words, for readers without a script."""
    path = [node for node in step["nodes"] if node[3]]
    words = "".join(node[1] for node in path[1:]) or "nothing"
    return f"{len(step['nodes']) - 1} drafts, {step['accepted']} accepted: {words!r}"


def as_json(trees: list[dict]) -> str:
    """Return JSON that can stand inside a script element."""
    return json.dumps(trees, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
