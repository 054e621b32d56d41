"""The side file of a running cell: a line a finished request, so that a kill costs the request it hit and no other."""

import fcntl
import hashlib
import json
import os
from pathlib import Path

NAME = "done.jsonl"


class SideFile:
    """JSON lines `{"sha256": of the record's text, "record": {...}}`; the first record is `{"cell_digest": digest}`,
    with the device once that is known.

    `records` are those that were there: none when the file is of another digest. A torn last line is cut off, and a
    line whose checksum fails is passed over and counted in `damaged`; both are done again. The file is locked while it
    is open, on every device: a second process gets BlockingIOError. The lock ends with the process, however it ends.
    """

    def __init__(self, path: Path, *, digest: str):
        self.path, self.damaged, self.records = Path(path), 0, []
        self._descriptor = _open_locked(self.path)
        lines = self._read().split(b"\n")
        header = _checked(lines[0]) if len(lines) > 1 else None
        if header is None or header.get("cell_digest") != digest:
            self.dropped = bool(lines[0])  # there was something, and it was not ours
            self.restart({"cell_digest": digest})
            sync_folder(self.path.parent)
            return
        self.dropped, self.header = False, header
        records = [_checked(line) for line in lines[1:-1]]
        self.records = [record for record in records if record is not None]
        self.damaged = len(records) - len(self.records) + bool(lines[-1])
        os.ftruncate(self._descriptor, sum(len(line) + 1 for line in lines[:-1]))

    def restart(self, header: dict) -> None:
        """Drop all records and start over under this header."""
        os.ftruncate(self._descriptor, 0)
        self.header, self.records = header, []
        self.append(header)

    def append(self, record: dict) -> None:
        """Add one record; it is on disk when this returns."""
        line = _line(record)
        while line:
            line = line[os.write(self._descriptor, line) :]
        os.fsync(self._descriptor)

    def close(self, *, drop: bool = False) -> None:
        """Release the file, removing it first when `drop`."""
        if drop:
            # before the lock goes, or a second process could lock a file that is about to vanish
            self.path.unlink()
            sync_folder(self.path.parent)
        os.close(self._descriptor)

    def _read(self) -> bytes:
        with open(self._descriptor, "rb", closefd=False) as file:
            return file.read()


def count_records(path: Path) -> int:
    """Return how many finished requests a side file holds, without locking it; 0 when there is none."""
    lines = path.read_bytes().split(b"\n")[1:-1] if path.exists() else []
    return sum(_checked(line) is not None for line in lines)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk, so that a power cut keeps the order of renames."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BlockingIOError(
                f"{path}: another process is running this cell; wait for it, or end it (tfm resume ends what a killed "
                "Snakemake left running)"
            ) from None
        if path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return descriptor
        os.close(descriptor)  # its holder finished and removed it between our open and our lock


def _line(record: dict) -> bytes:
    body = json.dumps(record, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"sha256":"{digest}","record":{body}}}\n'.encode()


def _checked(line: bytes) -> dict | None:
    try:
        value = json.loads(line)
        body = json.dumps(value["record"], separators=(",", ":"))
        return value["record"] if hashlib.sha256(body.encode()).hexdigest() == value["sha256"] else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
