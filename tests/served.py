"""Cells and sessions for the tests of the serving engines, with a fake server in an engine's place."""

import json
import os
import stat
import sys
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import yaml
from workflow_runs import ROOT

from baselines import suite
from baselines.serving import keeper
from baselines.serving.cell import Place, Session
from tfm.prompts import PreparedPrompt

sys.path.insert(0, str(ROOT / "workflows/scripts"))
FAKE_SERVER = ROOT / "tests/fake_server.py"
ENGINES = yaml.safe_load((ROOT / "workflows/config/engines.yaml").read_text())
FIELDS = {name: "x" for name in ("dataset", "domain", "category", "template", "sha256")}
# an engine's Python: answers what site.probe asks, and runs the fake server for the engine's module
PYTHON = """#!{python}
import json, os, sys
words = sys.argv[1:]
engine = "sglang" if {version!r}.startswith("0.5") else "vllm"
if words[0] == "-c":
    print(json.dumps({{"version": {version!r}, "plugins": ["dflash_tfm"]}}))
else:
    rest = [word for word in words if word not in ("-m", "sglang.launch_server", "vllm.entrypoints.cli.main", "serve")]
    os.execv({python!r}, [{python!r}, {server!r}, engine, *rest])
"""


def fake_python(folder: Path, version: str) -> str:
    """Write an executable that stands for the Python of an engine's environment."""
    path = folder / "engine-python"
    path.write_text(PYTHON.format(python=sys.executable, version=version, server=str(FAKE_SERVER)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def place_for(version: str, folder: Path, monkeypatch) -> Place:
    """Return where the servers of a test live: fake ones of an engine's version, which do nothing wrong."""
    fault(monkeypatch)
    return Place(folder / "server", fake_python(folder, version), start_seconds=120)


def resolved(engine: str, method: str, *, setting: str = "t0", weights: Path | str | None = None, **more) -> dict:
    """Return a cell of suite engines; device cpu, so that no card is claimed."""
    config = suite.resolve({**ENGINES, "engine": engine, **({"weights": str(weights)} if weights else {}), **more})
    variant = next(entry.name(config) for entry in suite.headline(config) if entry.method == method)
    return suite.resolve_cell(config, dataset="sample-math", variant=variant, setting=setting, seed=0)


def on_cpu(cell: dict) -> dict:
    """Return a cell that claims no card."""
    return {**cell, "device": "cpu"}


def write_prompts(folder: Path, count: int = 3) -> Path:
    """Write prompts of 20 tokens and more."""
    path = folder / "prompts.jsonl"
    rows = [PreparedPrompt(id=f"q{i}", index=i, tokens=list(range(20, 40 + i)), **FIELDS) for i in range(count)]
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return path


def fault(monkeypatch, **facts) -> None:
    """Say what the fake servers of a test do."""
    monkeypatch.setenv("FAKE", json.dumps(facts))


def processes_of(word: str) -> list[int]:
    """Return the ids of live processes with `word` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "environ").read_bytes()
            is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if word.encode() in text and not is_zombie and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def serve(cell, place, tmp_path, out="cell", count=3):
    from serve_cell import run_cell

    with Session(place) as session:
        return run_cell(
            on_cpu(cell), prompts=write_prompts(tmp_path, count), out=tmp_path / out, session=session, commit="test"
        )


def rows(tmp_path, kind, out="cell"):
    return pq.read_table(tmp_path / out / f"{kind}.parquet").to_pylist()


def nothing_runs(place) -> bool:
    return not processes_of(str(place.folder)) and not (place.folder / "server.json").exists()


def mark(place) -> str:
    return f"{keeper.MARK}={json.loads((place.folder / 'server.json').read_text())['token']}"
