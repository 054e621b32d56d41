"""What pins a suite's checkpoints, checked before a run: every file against a SHA-256 or its download record.

A pin (section `checkpoints` of a suite's config) names a repository, a revision, and the SHA-256 that are known of its
files. A file that no SHA-256 is written for is compared with the record that `hf download --local-dir` leaves under
.cache/huggingface: the pinned revision, and the hub's own hash of the content. A file with neither is refused.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tfm.manifest import sha256_file, weight_files

RECORDS = Path(".cache/huggingface/download")
CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Checked:
    """One file whose content is the pinned one; `by` says what it was compared with."""

    part: str
    file: str  # relative to the part's folder
    sha256: str
    by: str  # "config" or "download record"


def check_checkpoints(weights: Path | str, pins: dict[str, dict]) -> list[Checked]:
    """Return every weight file of the pinned parts under `weights`, all of them equal to their pins.

    All bytes are read: about a minute for 55 GB from a fast disk. Raises ValueError listing each file that is missing,
    that differs (expected and actual hash) or that nothing pins, with the download command as the remedy.
    """
    checked, problems = [], []
    for part, pin in pins.items():
        folder = Path(weights) / part
        files = {path.relative_to(folder).as_posix(): path for path in weight_files(folder)}
        absent = sorted(set(pin["sha256"]) - set(files)) if files else []
        if not files:
            problems.append(f"{folder}: holds no weight file")
        problems += [f"{folder / name}: missing, expected SHA-256 {pin['sha256'][name]}" for name in absent]
        for name, path in files.items():
            try:
                checked.append(_check_file(part, name, path, Path(weights), pin))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        parts = [part for part in pins if any(f"{Path(weights) / part}" in problem for problem in problems)]
        commands = "\n".join(f"    {download_command(weights, part, pins[part])}" for part in parts)
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(
            f"checkpoints: {len(problems)} files are not the pinned ones; no model was loaded\n{lines}\n"
            f"  remedy: remove the files named above and download them again:\n{commands}"
        )
    return checked


def download_command(weights: Path | str, part: str, pin: dict) -> str:
    """Return the command that puts a part's files where the suite looks for them."""
    # a repository that holds the part as a folder of its own name is laid out over the parent folder
    nested = any(file.startswith(f"{part}/") for file in pin.get("files", ()))
    folder = Path(weights) if nested else Path(weights) / part
    words = [
        "hf download",
        pin["repo"],
        *pin.get("files", ()),
        f"--revision {pin['revision']}",
        f"--local-dir {folder}",
    ]
    return " ".join(words)


def _check_file(part: str, name: str, path: Path, weights: Path, pin: dict) -> Checked:
    actual, expected = sha256_file(path), pin["sha256"].get(name)
    if expected is not None:
        if actual != expected:
            raise ValueError(f"{path}: SHA-256 differs, expected {expected}, actual {actual}")
        return Checked(part, name, actual, "config")
    record = _record(path, part, weights)
    if record is None:
        raise ValueError(
            f"{path}: nothing pins it (no download record, no entry in checkpoints.{part}.sha256); its SHA-256 is "
            f"{actual}"
        )
    revision, etag = record
    if revision != pin["revision"]:
        raise ValueError(f"{path}: downloaded at revision {revision}, expected {pin['revision']}")
    # the hub names large files by SHA-256 and small ones by their git blob
    found = actual if len(etag) == 64 else _git_blob(path)
    if found != etag:
        raise ValueError(f"{path}: differs from its download record, expected {etag}, actual {found}")
    return Checked(part, name, actual, "download record")


def _record(path: Path, part: str, weights: Path) -> tuple[str, str] | None:
    # (revision, etag) as huggingface_hub writes them: one a line, then a time
    for root in (weights / part, weights):
        file = root / RECORDS / f"{path.relative_to(root).as_posix()}.metadata"
        if file.is_file():
            lines = file.read_text(encoding="utf-8").split("\n")
            if len(lines) < 2:
                raise ValueError(f"{file}: damaged download record; expected revision and etag, one a line")
            return lines[0].strip(), lines[1].strip()
    return None


def _git_blob(path: Path) -> str:
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
