"""Records of a published suite in few bytes: what follows from other columns is left out, and made again when read."""

import gzip
import hashlib
import json
import zlib
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tree_steps import REQUESTS, STEPS

from tfm.cells import SCHEMAS

PLAN = "plan.json.gz"  # of a published suite
GRADED = "accuracy.csv"  # of grade_cells.py: needs the reference answers, which are not published


def published_folders(published: Path) -> list[Path]:
    """Return the folders of results/published, sorted; what a killed publication left behind is hidden."""
    return sorted(path for path in published.iterdir() if path.is_dir() and not path.name.startswith("."))


def write_packed(path: Path, value) -> None:
    """Write `value` as JSON without blanks, compressed where the name ends in .gz; the same bytes on every call."""
    data = (json.dumps(value, separators=(",", ":"), sort_keys=True) + "\n").encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def read_packed(path: Path):
    """Return what `write_packed` wrote; raises OSError or ValueError for a file that is missing or damaged."""
    try:
        return json.loads(gzip.decompress(path.read_bytes()))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path.name}: {error}") from error


def write_table(table: pa.Table, where) -> None:
    """Write a table to a path or stream; the bytes of like weight of a float together: the same numbers, a quarter
    smaller."""
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    others = [name for name in table.column_names if name not in floats]
    options = {"compression": "zstd", "compression_level": 22, "use_dictionary": others}
    pq.write_table(table, where, **options, use_byte_stream_split=floats)


def reduced(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """Return requests, steps and trees without the columns that `whole` makes again, value for value.

    Of the trees only the steps that a report shows are kept: the first STEPS of the first REQUESTS of a cell.
    """
    kept = dict(tables)
    for kind, columns in _following(tables["requests"], tables["steps"]).items():
        again = [name for name, column in columns.items() if tables[kind][name].combine_chunks().equals(column)]
        kept[kind] = tables[kind].drop_columns(again)
    trees = tables["trees"]
    kept["trees"] = trees.filter(pc.and_(pc.less(trees["request"], REQUESTS), pc.less(trees["step"], STEPS)))
    return kept


def whole(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """Return tables of tfm.cells.SCHEMAS, with `cell` behind, from what `reduced` left."""
    found = dict(tables)
    for kind, columns in _following(tables["requests"], tables["steps"]).items():
        have = {name: tables[kind][name] for name in tables[kind].column_names}
        found[kind] = pa.table({name: (columns | have)[name] for name in [*SCHEMAS[kind].names, "cell"]})
    return found


def _following(requests: pa.Table, steps: pa.Table) -> dict[str, dict[str, pa.Array]]:
    """Return kind -> name -> column, for the columns that follow from those that are always kept."""
    tokens = requests["output_tokens"].to_pylist()
    keys = ["cell", "request"]
    frame = steps.select([*keys, "accepted_untrimmed"]).to_pandas()
    owner = requests.select([*keys, "prompt_tokens"]).to_pandas().assign(new_tokens=[len(text) for text in tokens])
    frame = frame.merge(owner, on=keys, how="left")
    groups = frame.groupby(keys, sort=False)
    # a step emits its accepted drafts and one more token, the last one what is left of the text
    full = frame["accepted_untrimmed"] + 1
    emitted = full.groupby([frame["cell"], frame["request"]]).cumsum()
    last = groups.cumcount(ascending=False) == 0
    committed = full.where(~last, frame["new_tokens"] - 1 - (emitted - full))
    counts = owner[keys].merge(groups.size().rename("steps").reset_index(), on=keys, how="left")["steps"]
    return {
        "requests": {
            "new_tokens": _integers(owner["new_tokens"]),
            "steps": _integers(counts.fillna(0)),
            "output_sha256": pa.array([output_sha256(text) for text in tokens], pa.string()),
        },
        "steps": {
            "step": _integers(groups.cumcount()),
            "context": _integers(frame["prompt_tokens"] + 1 + emitted - full),
            "accepted": _integers(frame["accepted_untrimmed"].clip(upper=committed)),
            "committed": _integers(committed),
        },
    }


def output_sha256(tokens: list[int]) -> str:
    """Return the hash of a text's tokens as tfm.cells writes it."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()


def _integers(column: pd.Series) -> pa.Array:
    return pa.array(column, pa.int32(), from_pandas=True)
