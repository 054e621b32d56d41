"""The records of a cell on disk: written so that a kill loses nothing, read so that damage is never averaged."""

import hashlib
import io
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tfm import side_file
from tfm.cell_shape import KINDS, RECORD
from tfm.config import WHOLE_LAW
from tfm.json_shape import read_object
from tfm.manifest import SEAL, is_sealed, sealed, sha256_file, write_atomic, write_json
from tfm.side_file import SideFile, sync_folder
from tfm.trace import STAGES, SUBSTAGES, RequestTrace, StepTrace, TreeNode

MANIFEST = "cell.json"
STEP_FIELDS = tuple(field.name for field in fields(StepTrace))
STAGE_COLUMNS = tuple(f"{name}_us" for name in (*STAGES, *SUBSTAGES))
SCHEMAS = {
    "requests": pa.schema(
        [
            ("request", pa.int32()),
            ("id", pa.string()),
            ("index", pa.int32()),
            ("prompt_tokens", pa.int32()),
            ("new_tokens", pa.int32()),
            ("steps", pa.int32()),
            ("prefill_us", pa.float64()),
            ("decode_us", pa.float64()),
            ("wall_us", pa.float64()),
            ("finish_reason", pa.string()),
            ("output_sha256", pa.string()),
            ("output_tokens", pa.list_(pa.int32())),
        ]
    ),
    "steps": pa.schema(
        [
            ("request", pa.int32()),
            ("step", pa.int32()),
            ("context", pa.int32()),
            ("nodes", pa.int32()),
            ("depth", pa.int32()),
            ("accepted", pa.int32()),
            ("accepted_untrimmed", pa.int32()),
            ("committed", pa.int32()),
            ("expected_accepted", pa.float32()),
            *((name, pa.float32()) for name in STAGE_COLUMNS),
        ]
    ),
    "trees": pa.schema(
        [
            ("request", pa.int32()),
            ("step", pa.int32()),
            ("node", pa.int32()),
            ("parent", pa.int32()),
            ("token", pa.int32()),
            ("log_prob", pa.float32()),
            ("depth", pa.int32()),
            ("accepted", pa.bool_()),
        ]
    ),
}


class CellWriter:
    """Collects the finished requests of one cell in its side file, then writes the final files.

    `done` holds the requests that a killed run had finished, `facts` what the cell.json of a run that `reopen` took
    back said of it. Use as a context manager: once the finals are in place, leaving it removes the side file; leaving
    it before keeps the side file for the next try. Raises BlockingIOError when another process runs the cell.
    """

    def __init__(self, folder: Path, *, digest: str):
        self.folder, self.digest = Path(folder), digest
        self.folder.mkdir(parents=True, exist_ok=True)
        self.side = SideFile(self.folder / side_file.NAME, digest=digest)
        self.facts = next((record["facts"] for record in self.side.records if "facts" in record), None)
        traces = [trace_from_json(record) for record in self.side.records if "facts" not in record]
        self.done = {trace.id: trace for trace in traces}
        self._finished = False

    def __enter__(self) -> "CellWriter":
        return self

    def __exit__(self, *_) -> None:
        self.side.close(drop=self._finished)

    def add(self, trace: RequestTrace) -> None:
        """Record one finished request; it is on disk when this returns."""
        self.side.append(asdict(trace))
        self.done[trace.id] = trace

    def on_device(self, name: str, order: list[str]) -> None:
        """Say which device decodes what is left of the prompts `order`.

        What another model of device has finished is dropped, since no cell is of two; nothing is when all are done.
        """
        known = self.side.header.get("device") or ((self.facts or {}).get("device") or {}).get("name")
        if known == name or all(prompt in self.done for prompt in order):
            return
        if known is None and self.done:
            return  # written before side files knew devices
        self.side.dropped |= bool(self.done)
        self.side.restart({"cell_digest": self.digest, "device": name})
        self.done, self.facts = {}, None

    def finish(self, order: list[str], manifest: dict) -> dict:
        """Write the three parquet files in prompt order, then cell.json, which certifies them; return cell.json.

        Raises ValueError when a prompt of `order` has no record: a cell is whole or it is not there.
        """
        missing = [name for name in order if name not in self.done]
        if missing:
            raise ValueError(
                f"{self.folder}: {len(missing)} of {len(order)} prompts have no record, first {missing[0]!r}"
            )
        tables = to_tables([self.done[name] for name in order])
        # an older one would certify neither the new files nor, once they are replaced, its own
        (self.folder / MANIFEST).unlink(missing_ok=True)
        files = {}
        for kind in KINDS:
            path, data = self.folder / f"{kind}.parquet", _parquet_bytes(tables[kind])
            write_atomic(path, data)
            files[path.name] = {"sha256": hashlib.sha256(data).hexdigest(), "rows": tables[kind].num_rows}
        sync_folder(self.folder)
        manifest = sealed({**manifest, "cell_digest": self.digest, "files": files})
        write_json(self.folder / MANIFEST, manifest)
        sync_folder(self.folder)
        self._finished = True
        return manifest


def reopen(folder: Path) -> bool:
    """Turn a whole cell back into its side file, so that the job's next run takes its records over; False if it is not
    whole.

    Snakemake runs a job again, and removes its outputs first, when it was killed between the cell's last write and its
    own note of it. The cell.json travels along, so that the next run writes the same one.
    """
    folder = Path(folder)
    try:
        manifest = read_cell(folder)
        tables = {kind: _read_checked(folder, kind, manifest) for kind in KINDS}
    except ValueError:
        return False
    facts = {key: value for key, value in manifest.items() if key not in ("files", "cell_digest", SEAL)}
    side = SideFile(folder / side_file.NAME, digest=manifest["cell_digest"])
    try:
        for record in [*map(asdict, to_traces(tables)), {"facts": facts}]:
            if record not in side.records:
                side.append(record)
    finally:
        side.close()
    return True


@dataclass
class Records:
    """The records of many cells; each frame has the columns of SCHEMAS and `cell`, requests the cell's fields too."""

    cells: list[dict]  # the cell.json of each, with "path"
    requests: "object"  # pandas.DataFrame
    steps: "object"  # pandas.DataFrame, with id, index and the identity columns
    trees: "object"  # pandas.DataFrame
    missing: dict[str, str]  # path -> why, for cells that are not there


def load_cells(folders: list[Path], *, allow_missing: bool = False) -> Records:
    """Read cells, check every file against the SHA-256 in its cell.json, and join the cell's fields as columns.

    Raises ValueError naming the damaged file and the command that makes it again. A cell without a cell.json is an
    error too, or listed in `missing` when `allow_missing`.
    """
    cells, tables, missing = [], {kind: [] for kind in KINDS}, {}
    for folder in map(Path, folders):
        if allow_missing and not (folder / MANIFEST).exists():
            unfinished = folder / side_file.NAME
            done = f"incomplete, {side_file.count_records(unfinished)} requests done"
            missing[str(folder)] = done if unfinished.exists() else "not run"
            continue
        manifest = read_cell(folder)
        for kind in KINDS:
            tables[kind].append(
                _read_checked(folder, kind, manifest).append_column("cell", _column(manifest, kind, len(cells)))
            )
        cells.append({**manifest, "path": folder.as_posix()})
    return join_records(cells, {kind: _concat(tables[kind], kind) for kind in KINDS}, missing=missing)


def read_cell(folder: Path, more: dict | None = None) -> dict:
    """Return a cell.json that has what a table reads of it, and `more` (a shape of tfm.json_shape) where it is given.

    Raises ValueError with the rerun command when it is missing, cut, altered, or lacks some of that.
    """
    path = Path(folder) / MANIFEST
    remedy = f"make it again: {rerun_command(path.parent)}"
    manifest = read_object(path, {**RECORD, **(more or {})}, remedy=remedy)
    if not is_sealed(manifest):
        raise ValueError(f"{path} was altered: its content is not that of its {SEAL}; {remedy}")
    return manifest


def is_whole(folder: Path, *, digest: str | None = None) -> bool:
    """Return whether a cell's four files are there and undamaged; with `digest`, also of that cell_digest."""
    try:
        manifest = read_cell(folder)
        for kind in KINDS:
            _check(folder, kind, manifest)
    except ValueError:
        return False
    return digest is None or manifest["cell_digest"] == digest


def join_records(cells: list[dict], tables: dict[str, pa.Table], *, missing: dict[str, str] | None = None) -> Records:
    """Return Records from cell manifests and tables whose `cell` column counts them."""
    frames = {kind: tables[kind].to_pandas() for kind in KINDS}
    fields = pa.Table.from_pylist([{"cell": i, **identity(cell)} for i, cell in enumerate(cells)]).to_pandas()
    if not cells:
        return Records([], **frames, missing=missing or {})
    requests = frames["requests"].merge(fields, on="cell", how="left", validate="many_to_one")
    names = requests[["cell", "request", "id", "index", *(column for column in fields.columns if column != "cell")]]
    steps = frames["steps"].merge(names, on=["cell", "request"], how="left", validate="many_to_one")
    trees = frames["trees"].merge(names[["cell", "request", "id"]], on=["cell", "request"], how="left")
    return Records(cells, requests, steps, trees, missing=missing or {})


def identity(manifest: dict) -> dict:
    """Return the fields of a cell.json that every row carries."""
    cell, decode = manifest["cell"], manifest["cell"]["decode"]
    row = {key: cell[key] for key in ("suite", "engine", "target", "dataset", "domain", "variant", "setting", "seed")}
    row |= {key: cell[key] for key in ("clock", "traced", "device", "dtype", "reasoning", "template")}
    row |= {key: decode[key] for key in ("method", "temperature", "rule", "budget", "width", "children")}
    row |= {key: decode[key] for key in ("candidates", "max_new_tokens", "requests", "gdn_backend")}
    row["residual"] = decode.get("residual", True)  # records of before this setting had it on
    row["head"] = decode.get("head", "weaver")
    row["depth_bonus"] = decode.get("depth_bonus", 0.0)
    row["siblings"] = decode.get("siblings", "top")  # and top ones
    row |= {key: decode.get(key, off) for key, off in WHOLE_LAW.items()}
    row["depth_limit"] = decode["depth"]  # a step's own `depth` is its tree's
    row["device_name"] = manifest["device"]["name"]
    row["torch_threads"] = manifest["device"]["torch_threads"]
    row["commit"] = manifest["environment"]["git"]["commit"]
    row |= {key: manifest[key] for key in ("source_digest", "cell_digest", "prompts_sha256")}
    return row


def to_tables(traces: list[RequestTrace]) -> dict[str, pa.Table]:
    """Return the requests, steps and trees of finished requests as tables of SCHEMAS."""
    rows: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for request, trace in enumerate(traces):
        rows["requests"].append(_request_row(request, trace))
        for step in trace.steps:
            row = {key: value for key, value in asdict(step).items() if key != "stage_us"}
            times = {f"{name}_us": value for name, value in (step.stage_us or {}).items()}
            rows["steps"].append({"request": request, **row, **times})
        rows["trees"] += [{"request": request, **asdict(node)} for node in trace.trees]
    return {kind: pa.Table.from_pylist(rows[kind], schema=SCHEMAS[kind]) for kind in KINDS}


def to_traces(tables: dict[str, pa.Table]) -> list[RequestTrace]:
    """Return the requests that `to_tables` made the tables of one cell from, in row order."""
    rows = tables["requests"].to_pylist()
    steps, trees = ({row["request"]: [] for row in rows} for _ in range(2))
    for row in tables["steps"].to_pylist():
        times = {name: row[f"{name}_us"] for name in (*STAGES, *SUBSTAGES) if row[f"{name}_us"] is not None}
        steps[row["request"]].append({**{name: row.get(name) for name in STEP_FIELDS}, "stage_us": times or None})
    for row in tables["trees"].to_pylist():
        trees[row.pop("request")].append(row)
    names = [field.name for field in fields(RequestTrace) if field.name not in ("steps", "trees")]
    return [
        trace_from_json(
            {name: row[name] for name in names} | {"steps": steps[row["request"]], "trees": trees[row["request"]]}
        )
        for row in rows
    ]


def trace_from_json(record: dict) -> RequestTrace:
    """Return the request that `CellWriter.add` wrote."""
    steps = [StepTrace(**step) for step in record["steps"]]
    return RequestTrace(**{**record, "steps": steps, "trees": [TreeNode(**node) for node in record["trees"]]})


def rerun_command(folder: Path) -> str:
    """Return the command that makes a cell again."""
    return f"snakemake --cores all --force {Path(folder).as_posix()}/requests.parquet"


def _request_row(request: int, trace: RequestTrace) -> dict:
    timed = trace.prefill_us is not None and trace.decode_us is not None
    return {
        "request": request,
        "id": trace.id,
        "index": trace.index,
        "prompt_tokens": trace.prompt_tokens,
        "new_tokens": len(trace.output_tokens),
        "steps": len(trace.steps),
        "prefill_us": trace.prefill_us,
        "decode_us": trace.decode_us,
        "wall_us": trace.prefill_us + trace.decode_us if timed else None,
        "finish_reason": trace.finish_reason,
        "output_sha256": hashlib.sha256(" ".join(map(str, trace.output_tokens)).encode()).hexdigest(),
        "output_tokens": trace.output_tokens,
    }


def _read_checked(folder: Path, kind: str, manifest: dict) -> pa.Table:
    return pq.read_table(_check(folder, kind, manifest), schema=SCHEMAS[kind])


def _check(folder: Path, kind: str, manifest: dict) -> Path:
    path = Path(folder) / f"{kind}.parquet"
    expected = manifest["files"][path.name]["sha256"]
    found = sha256_file(path) if path.is_file() else "no file"
    if found != expected:
        raise ValueError(
            f"{path} is damaged: sha256 {found[:12]}, cell.json says {expected[:12]}; "
            f"make it again: {rerun_command(folder)}"
        )
    return path


def _column(manifest: dict, kind: str, number: int) -> pa.Array:
    rows = manifest["files"][f"{kind}.parquet"]["rows"]
    return pa.array([number] * rows, pa.int32())


def _concat(tables: list[pa.Table], kind: str) -> pa.Table:
    empty = SCHEMAS[kind].append(pa.field("cell", pa.int32())).empty_table()
    return pa.concat_tables([empty, *tables])


def _parquet_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()
