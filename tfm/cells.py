"""The records of a cell on disk: written so that a kill loses nothing, read so that damage is never averaged."""

import fcntl
import hashlib
import io
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tfm.manifest import sha256_file, write_atomic, write_json
from tfm.trace import STAGES, SUBSTAGES, RequestTrace, StepTrace, TreeNode

KINDS = ("requests", "steps", "trees")
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
    """Collects the finished requests of one cell in `done.jsonl`, then writes the final files.

    The side file starts with the cell's digest; a file of another digest, and a torn last line, are dropped. It is
    locked for the writer's life, so a second process on the same cell stops with BlockingIOError. Use as a context
    manager; leaving it without `finish` keeps the side file for the next try.
    """

    def __init__(self, folder: Path, *, digest: str):
        self.folder, self.digest = Path(folder), digest
        self.side_file = self.folder / "done.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = _open_locked(self.side_file)
        self.done: dict[str, RequestTrace] = {}
        self._resume()

    def __enter__(self) -> "CellWriter":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def add(self, trace: RequestTrace) -> None:
        """Record one finished request; it is on disk when this returns."""
        self._append(asdict(trace))
        self.done[trace.id] = trace

    def finish(self, order: list[str], manifest: dict) -> dict:
        """Write the three parquet files in prompt order, then cell.json, then drop the side file; return cell.json.

        Raises ValueError when a prompt of `order` has no record: a cell is whole or it is not there.
        """
        missing = [name for name in order if name not in self.done]
        if missing:
            raise ValueError(
                f"{self.folder}: {len(missing)} of {len(order)} prompts have no record, first {missing[0]!r}"
            )
        tables = to_tables([self.done[name] for name in order])
        files = {}
        for kind in KINDS:
            path, data = self.folder / f"{kind}.parquet", _parquet_bytes(tables[kind])
            write_atomic(path, data)
            files[path.name] = {"sha256": hashlib.sha256(data).hexdigest(), "rows": tables[kind].num_rows}
        manifest = {**manifest, "cell_digest": self.digest, "files": files}
        write_json(self.folder / "cell.json", manifest)
        _sync_folder(self.folder)
        self.side_file.unlink()
        return manifest

    def _resume(self) -> None:
        lines = self._file.read().split(b"\n")
        header, *records = (_checked(line) for line in lines[:-1]) if len(lines) > 1 else (None,)
        if header is None or header.get("cell_digest") != self.digest:
            self._file.seek(0)
            self._file.truncate()
            self._append({"cell_digest": self.digest})
            return
        kept = len(lines[0]) + 1
        for line, record in zip(lines[1:], records, strict=False):
            if record is None:
                break
            trace = trace_from_json(record)
            self.done[trace.id] = trace
            kept += len(line) + 1
        self._file.seek(kept)
        self._file.truncate()

    def _append(self, record: dict) -> None:
        body = json.dumps(record, separators=(",", ":"))
        digest = hashlib.sha256(body.encode()).hexdigest()
        self._file.write(f'{{"sha256":"{digest}","record":{body}}}\n'.encode())
        self._file.flush()
        os.fsync(self._file.fileno())


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
        manifest_path = folder / "cell.json"
        if allow_missing and not manifest_path.exists():
            unfinished = folder / "done.jsonl"
            lines = unfinished.read_bytes().count(b"\n") if unfinished.exists() else 0
            missing[str(folder)] = f"incomplete, {lines - 1} requests done" if lines else "not run"
            continue
        manifest = _read_manifest(manifest_path)
        for kind in KINDS:
            tables[kind].append(
                _read_checked(folder, kind, manifest).append_column("cell", _column(manifest, kind, len(cells)))
            )
        cells.append({**manifest, "path": folder.as_posix()})
    return join_records(cells, {kind: _concat(tables[kind], kind) for kind in KINDS}, missing=missing)


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


def _open_locked(path: Path):
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BlockingIOError(f"{path}: another process is running this cell; wait for it, or end it") from None
    return file


def _checked(line: bytes) -> dict | None:
    try:
        value = json.loads(line)
        body = json.dumps(value["record"], separators=(",", ":"))
        return value["record"] if hashlib.sha256(body.encode()).hexdigest() == value["sha256"] else None
    except (ValueError, TypeError, KeyError):
        return None


def _read_manifest(path: Path) -> dict:
    try:
        manifest = json.loads(path.read_bytes())
        if {"cell", "files", "source_digest", "cell_digest"} <= set(manifest):
            return manifest
        problem = "has no cell, files or digests"
    except FileNotFoundError:
        problem = "is missing"
    except ValueError:
        problem = "is not whole JSON"
    raise ValueError(f"{path} {problem}; make it again: {rerun_command(path.parent)}")


def _read_checked(folder: Path, kind: str, manifest: dict) -> pa.Table:
    path = folder / f"{kind}.parquet"
    expected = manifest["files"][path.name]["sha256"]
    found = sha256_file(path) if path.exists() else "no file"
    if found != expected:
        raise ValueError(
            f"{path} is damaged: sha256 {found[:12]}, cell.json says {expected[:12]}; "
            f"make it again: {rerun_command(folder)}"
        )
    return pq.read_table(path, schema=SCHEMAS[kind])


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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
