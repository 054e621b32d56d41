"""What is on disk of each cell of a suite, and whether it is still what the code, weights and prompts would give."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from baselines.engine_names import source_of
from tfm.cell_shape import CELL, RECORD
from tfm.json_shape import Each, problem_of
from tfm.manifest import cell_digest, is_sealed, loader_digest, sha256_file
from tfm.side_file import count_records

STATES = ("done", "stale", "incomplete", "running", "failed", "damaged", "missing")
FINISHED = {**RECORD, "cell": {**CELL, "weights_sha256": Each(str)}}  # what is read of a cell.json
FAILED, STARTED = "the cell failed", " done before"  # what decode.log says


@dataclass(frozen=True)
class CellState:
    """One cell of a suite: its path, its state and why, and how many of its prompts are done."""

    cell: dict  # as resolved, with path and part
    folder: Path
    state: str
    reason: str = ""
    done: int = 0
    prompts: int | None = None  # None when neither prompts nor records are here


class Inspector:
    """Looks at cells under a results folder, read only; weights and prompts that are not here decide nothing."""

    def __init__(self, results: Path):
        self.results = Path(results)
        self._sources: dict[tuple[str, str], str] = {}
        self._locked = locked_inodes()
        self._prompts: dict[Path, tuple[str, int] | None] = {}

    def inspect(self, cell: dict) -> CellState:
        """Return the state of one resolved cell; what cannot be read, such as a folder in a file's place, is damage."""
        folder = self.folder(cell)
        try:
            return self._look(cell, folder)
        except OSError as error:
            return CellState(cell, folder, "damaged", f"{Path(str(error.filename)).name}: {error.strerror}")

    def _look(self, cell: dict, folder: Path) -> CellState:
        found = self._prompt_file(cell)
        prompts = found[1] if found else None
        side = folder / "done.jsonl"
        finished = count_records(side)
        if side.exists() and side.stat().st_ino in self._locked:
            return CellState(cell, folder, "running", done=finished, prompts=prompts)
        if (folder / "cell.json").exists():
            return self._finished(cell, folder, prompts)
        if failure := failure_of(folder / "decode.log"):
            return CellState(cell, folder, "failed", failure, finished, prompts)
        if side.exists():
            reason = "" if self._goes_on(cell, side) else "of other code, config, weights or prompts: starts over"
            return CellState(cell, folder, "incomplete", reason, finished, prompts)
        left = sorted(path.name for path in folder.glob("*.parquet"))
        if left:
            return CellState(cell, folder, "damaged", f"cell.json is gone, {', '.join(left)} are here", 0, prompts)
        return CellState(cell, folder, "missing", prompts=prompts)

    def folder(self, cell: dict) -> Path:
        """Return where a cell lies: its path with `results` replaced by this folder."""
        return self.results / Path(cell["path"]).relative_to("results")

    def _finished(self, cell: dict, folder: Path, prompts: int | None) -> CellState:
        try:
            manifest = read_manifest(folder)
        except ValueError as error:
            return CellState(cell, folder, "damaged", str(error), 0, prompts)
        done = manifest["files"]["requests.parquet"]["rows"]
        reasons = self._reasons(cell, manifest)
        return CellState(cell, folder, "stale" if reasons else "done", ", ".join(reasons), done, prompts or done)

    def _goes_on(self, cell: dict, side: Path) -> bool:
        """Return whether a run would keep the side file's requests; what cannot be known counts as yes."""
        found = self._prompt_file(cell)
        if found is None or None in cell["weights_sha256"].values():
            return True
        cell = {key: value for key, value in cell.items() if key not in ("path", "part")}
        digest = cell_digest(cell, source=self._source(cell), prompts_sha256=found[0])
        return digest.encode() in side.read_bytes().partition(b"\n")[0]

    def _reasons(self, cell: dict, manifest: dict) -> list[str]:
        """Return what differs from the run that made the records: code, weights, prompts, config."""
        recorded = manifest["cell"]
        source, found = self._source(cell), self._prompt_file(cell)
        prompts = found[0] if found else manifest["prompts_sha256"]
        known = {part: digest for part, digest in cell["weights_sha256"].items() if digest is not None}
        expected = {key: value for key, value in cell.items() if key not in ("path", "part")}
        expected["weights_sha256"] = {**cell["weights_sha256"], **recorded["weights_sha256"], **known}
        if cell_digest(expected, source=source, prompts_sha256=prompts) == manifest["cell_digest"]:
            return []
        same_code = (source, loader_digest()) == (
            manifest["source_digest"],
            manifest.get("loader_digest", loader_digest()),
        )
        reasons = [] if same_code else ["code"]
        changed = [part for part, digest in known.items() if recorded["weights_sha256"].get(part) != digest]
        reasons += [f"weights ({', '.join(changed)})"] if changed else []
        reasons += ["prompts"] if prompts != manifest["prompts_sha256"] else []
        keys = changed_keys(expected, recorded)
        reasons += [f"config ({', '.join(keys)})"] if keys else []
        return reasons or ["config"]

    def _source(self, cell: dict) -> str:
        key = cell["engine"], cell.get("forms"), cell["decode"]["method"], cell["decode"]["gdn_backend"]
        if key not in self._sources:
            self._sources[key] = source_of(cell)
        return self._sources[key]

    def _prompt_file(self, cell: dict) -> tuple[str, int] | None:
        """Return the SHA-256 and the number of prompts of a cell's prompt file, None when it is not here."""
        think = "-think" if cell["reasoning"] else ""
        path = self.results / cell["suite"] / "prompts" / cell["target"] / f"{cell['dataset']}{think}.jsonl"
        if path not in self._prompts:
            here = path.exists()
            self._prompts[path] = (sha256_file(path), path.read_bytes().count(b"\n")) if here else None
        return self._prompts[path]


def read_manifest(folder: Path) -> dict:
    """Return a cell.json whose files are whole; raises ValueError that names the damage."""
    try:
        manifest = json.loads((folder / "cell.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError("cell.json is not whole") from error
    if problem := problem_of(manifest, FINISHED):
        raise ValueError(f"cell.json: {problem}")
    if not is_sealed(manifest):
        raise ValueError("cell.json was altered")
    for name in RECORD["files"]:
        if not (folder / name).is_file():
            raise ValueError(f"{name} is gone")
        if sha256_file(folder / name) != manifest["files"][name]["sha256"]:
            raise ValueError(f"{name} is not the file that cell.json names")
    return manifest


def changed_keys(expected: dict, recorded: dict) -> list[str]:
    """Return the keys of the resolved cell that changed; those of `decode` by their own names."""
    expected, recorded = (json.loads(json.dumps(cell)) for cell in (expected, recorded))
    keys = [key for key in expected if key not in ("decode", "weights_sha256") and expected[key] != recorded.get(key)]
    ours, theirs = expected["decode"], recorded.get("decode", {})
    # an empty list means the tokenizer's, which the run wrote down
    return keys + [key for key in ours if ours[key] != theirs.get(key) and not (key == "eos_tokens" and not ours[key])]


def locked_inodes() -> set[int]:
    """Return the inodes that some process holds an exclusive flock on (Linux; none elsewhere).

    Read from the kernel's list: taking the lock to find out could stop a cell that starts at this moment.
    """
    locks = Path("/proc/locks")
    lines = locks.read_text(encoding="utf-8").splitlines() if locks.exists() else []
    found = (re.search(r" FLOCK +\w+ +WRITE +\S+ +\w+:\w+:(\d+) ", line) for line in lines)
    return {int(match[1]) for match in found if match}


def failure_of(log: Path) -> str:
    """Return the last line of a log whose last run failed, else an empty string."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    if text.rfind(FAILED) <= text.rfind(STARTED):
        return ""
    return text.strip().splitlines()[-1]


def count_states(states: Iterable[CellState]) -> dict[str, int]:
    """Return how many cells are in each state, in the order of STATES, empty ones left out."""
    found = [state.state for state in states]
    return {name: found.count(name) for name in STATES if name in found}
