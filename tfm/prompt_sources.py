"""The three places that prompt sets come from: embedded in the package, files of a directory, the hub.

A run names its source. None of the loaders falls back to another; each raises ValueError with name, what was
expected and the remedy.
"""

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tfm.pins import check_dataset, require_pinned
from tfm.prompts import PromptRow
from tfm.sharechat import rebuild_sharechat

DOMAINS = ("chat", "math", "code")


@dataclass(frozen=True)
class PromptSet:
    """The rows of one set in file order, how the protocol takes a subset, and what pins the content."""

    name: str
    source: str  # embedded, local or hub
    rows: list[PromptRow]
    sha256: str  # of the file's bytes; for the hub of the rows as JSON
    revision: str | None = None  # hub only
    cap: int | None = None  # prompts of the paper's protocol, None = all
    stratify: bool = False

    def count(self, limit: int | None) -> int | None:
        """Return how many rows a run takes: `limit` overrides the protocol's cap."""
        return self.cap if limit is None else limit


def load_prompt_set(pins: dict, *, source: str, name: str, data: Path | str | None = None) -> PromptSet:
    """Load one set from the named source. `data` is the directory of source local, None for the others."""
    check_dataset(pins, source, name)
    if (data is not None) != (source == "local"):
        raise ValueError(
            f"data: {data!r} is not allowed with source {source} (allowed: a directory with source local, "
            "nothing otherwise); set both"
        )
    if source == "embedded":
        return load_embedded(pins, name)
    return load_directory(pins, name, data) if source == "local" else load_hub(pins, name)


def load_embedded(pins: dict, name: str) -> PromptSet:
    """Load a set that ships with the package (tfm/data)."""
    entry = check_dataset(pins, "embedded", name)
    content = (resources.files("tfm.data") / f"{name}.jsonl").read_bytes()
    return _prompt_set(name, "embedded", entry, parse_rows(content, name, entry), _sha256(content))


def load_directory(pins: dict, name: str, data: Path | str) -> PromptSet:
    """Load a set from a directory; its bytes must have the pinned SHA-256."""
    entry = check_dataset(pins, "local", name)
    path = Path(data) / entry["file"]
    if not path.is_file():
        raise ValueError(
            f"data: {str(path)!r} does not exist ({name} needs it); put the file there (source: {entry['source']}) "
            "or leave the set out"
        )
    content = path.read_bytes()
    actual = _sha256(content)
    if actual != entry["sha256"]:
        raise ValueError(
            f"sha256: {str(path)!r} differs from its pin: expected {entry['sha256']}, actual {actual}; restore the "
            f"file (source: {entry['source']}), or if the change is meant set local.{name}.sha256 in "
            "workflows/config/datasets.yaml"
        )
    return _prompt_set(name, "local", entry, parse_rows(content, name, entry), actual)


def load_hub(pins: dict, name: str, *, load_dataset: Callable | None = None) -> PromptSet:
    """Load one of the paper's sets at its pinned revision through `datasets.load_dataset`.

    A `data_files` that is a plain path names a frozen copy, JSON lines or CSV in the hub's columns. A pinned `sha256`,
    of the rows as JSON, must be that of the rows found.
    """
    entry = require_pinned(pins, name)
    if load_dataset is None and not is_frozen(entry):
        from datasets import load_dataset  # seconds to import, and absent where only cells run
    if entry.get("builder") == "sharechat":
        rows = rebuild_sharechat(lambda url: _fetch(load_dataset, name, entry, data_files=url), entry)
    else:
        records = _fetch(load_dataset, name, entry, data_files=entry.get("data_files"))
        rows = [_hub_row(record, index, name, entry) for index, record in enumerate(records)]
    _check_ids(rows, name)
    actual = _sha256("".join(json.dumps([row.id, row.turns, row.category]) + "\n" for row in rows).encode())
    loaded = _prompt_set(name, "hub", entry, rows, actual, revision=entry["revision"])
    if entry.get("sha256") not in (None, actual):
        raise ValueError(
            f"sha256: the rows of {name} differ from their pin: expected {entry['sha256']}, actual {actual}; restore "
            f"the set, or if the change is meant set hub.{name}.sha256 in workflows/config/datasets.yaml"
        )
    return loaded


def is_frozen(entry: dict) -> bool:
    """Return whether a hub set is read from files of this machine instead of from the hub."""
    return bool(entry.get("data_files")) and "://" not in entry["data_files"]


def parse_rows(content: bytes, name: str, entry: dict) -> list[PromptRow]:
    """Return the rows of a file in the format {id, dataset, domain, turns, reference?, meta?}, JSON lines.

    Raises ValueError with the line on a malformed row or a repeated id. A turn may be None or empty here.
    """
    rows: list[PromptRow] = []
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 ({error}); restore the file") from error
    if not text.strip():
        raise ValueError(f"{name}: the file holds no row; restore it")
    for number, line in enumerate(text.rstrip("\r\n").split("\n"), start=1):
        rows.append(_file_row(line, f"{name} line {number}", index=number - 1, name=name, entry=entry))
    _check_ids(rows, name)
    return rows


def _check_ids(rows: list[PromptRow], name: str) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise ValueError(f"{name}: id {row.id!r} is there twice; ids must differ, since they choose subsets")
        seen.add(row.id)


def _file_row(line: str, where: str, *, index: int, name: str, entry: dict) -> PromptRow:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); restore the file") from error
    missing = [key for key in ("id", "domain", "turns") if not isinstance(fields, dict) or key not in fields]
    if missing:
        raise ValueError(f"{where}: lacks {', '.join(missing)}; a row is {{id, dataset, domain, turns, ...}}")
    if fields["domain"] not in DOMAINS:
        raise ValueError(f"{where}: domain {fields['domain']!r} is not allowed (allowed: {', '.join(DOMAINS)})")
    turns = _turns(fields["turns"], where)
    if isinstance(fields["id"], bool) or not isinstance(fields["id"], str | int) or fields["id"] == "":
        raise ValueError(f"{where}: id {fields['id']!r} is not allowed (allowed: some text or an integer); fix the row")
    meta = fields.get("meta") or {}
    if not isinstance(meta, dict):
        raise ValueError(f"{where}: meta must be an object, got {meta!r}; fix the row")
    category = _joined(meta, entry.get("category", ()), where)
    return PromptRow(str(fields["id"]), index, name, fields["domain"], turns, category, meta)


def _turns(turns, where: str) -> tuple[str | None, ...]:
    if not isinstance(turns, list) or not all(turn is None or isinstance(turn, str) for turn in turns):
        raise ValueError(f"{where}: turns must be a list of strings, got {turns!r}; fix the row")
    return tuple(turns)


def _hub_row(record: dict, index: int, name: str, entry: dict) -> PromptRow:
    where = f"{name} row {index}"
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {record!r} is no object; a row is one with the columns of hub.{name}.columns")
    columns = entry["columns"]
    lacking = sorted(column for column in columns.values() if column not in record)
    if lacking:
        raise ValueError(
            f"{where}: column {', '.join(lacking)} is not there (there are: {', '.join(sorted(map(str, record)))}); "
            f"correct hub.{name}.columns in workflows/config/datasets.yaml or pin another revision"
        )
    turns = _turns(record[columns["turns"]] if "turns" in columns else [record[columns["turn"]]], where)
    identity = record[columns["id"]] if "id" in columns else index
    meta = {ours: record[theirs] for ours, theirs in columns.items() if ours not in ("id", "turn", "turns")}
    category = _joined(record, entry.get("category", ()), where)
    return PromptRow(f"{name}/{identity}", index, name, entry["domain"], turns, category, meta)


def _fetch(load_dataset: Callable, name: str, entry: dict, *, data_files: str | None) -> Iterable[dict]:
    revision = entry["revision"]
    try:
        if data_files is None:
            return load_dataset(entry["repo"], entry.get("config"), split=entry["split"], revision=revision)
        # the revision is part of the address here
        kind = "csv" if data_files.endswith(".csv") else "json"
        if "://" not in data_files:
            return _read_frozen(Path(data_files.format(revision=revision)), kind)
        return load_dataset(kind, data_files=data_files.format(revision=revision), split=entry.get("split", "train"))
    except Exception as error:  # whatever the client raises; there is no other place to take the set from
        raise ValueError(
            f"dataset: {name} at revision {revision} could not be loaded ({type(error).__name__}: {error}); "
            "check the connection to the hub, or use local files with data=DIR"
        ) from error


def _read_frozen(path: Path, kind: str) -> list[dict]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        if kind == "json":
            return [json.loads(line) for line in file if line.strip()]
        csv.field_size_limit(sys.maxsize)  # an answer is longer than the default limit
        return [{key: value or None for key, value in record.items()} for record in csv.DictReader(file)]


def _prompt_set(
    name: str, source: str, entry: dict, rows: list[PromptRow], sha256: str, revision: str | None = None
) -> PromptSet:
    expected = entry.get("rows")
    if expected is not None and len(rows) != expected:
        raise ValueError(
            f"rows: {name} has {len(rows)} rows, its pin says {expected}; restore the set, or correct "
            f"{source}.{name}.rows in workflows/config/datasets.yaml"
        )
    stratify = bool(entry.get("stratify", False))
    return PromptSet(name, source, rows, sha256, revision, entry.get("cap"), stratify)


def _joined(record: dict, keys: Sequence[str], where: str) -> str:
    lacking = [key for key in keys if key not in record]
    if lacking:
        raise ValueError(f"{where}: lacks {', '.join(lacking)}, which make its category; fix the row or the pins")
    return "/".join(str(record[key]) for key in keys)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
