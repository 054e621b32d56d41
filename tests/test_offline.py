"""The scripts for GPU machines without Snakemake: they parse, name what exists, and queue what matters first."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "workflows/offline"))

import queue_cells

FOLDER = Path(queue_cells.__file__).parent
SCRIPTS = sorted(FOLDER.glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_names_files_modules_and_options_that_exist(script):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    root = FOLDER.parents[1]
    for name in re.findall(r"(?:workflows|tests)/[\w/]+\.(?:py|sh|yaml)", text):
        assert (root / name).is_file(), name
    for module in re.findall(r"-m (tfm\.[\w.]+)", text):
        assert (root / f"{module.replace('.', '/')}.py").is_file(), module
    # options of each call of our own Python, up to the end of its line
    for call in re.findall(r"(workflows/scripts/\w+\.py|-m tfm\.[\w.]+)((?:[^\n\\]|\\\n)*)", text):
        source = root / (call[0] if call[0].endswith(".py") else f"{call[0][3:].replace('.', '/')}.py")
        known = (
            source.read_text()
            + (root / "tfm/train/layout.py").read_text()
            + (root / "workflows/scripts/probe_records.py").read_text()
        )
        for option in re.findall(r"--([a-z][\w-]+)", call[1]):
            assert f'"--{option}"' in known, (source.name, option)


def cell(part: str, setting: str = "t1", seed: int = 0, clock: str = "off", method: str = "tfm") -> dict:
    path = f"results/s/cells/torch/mini/d/{method}-{part}/{setting}/seed{seed}"
    return {
        "part": part,
        "setting": setting,
        "seed": seed,
        "clock": clock,
        "dataset": "d",
        "path": path,
        "suite": "s",
        "weights": {"target": "w/target"},
        "weights_sha256": {"target": "old"},
    }


def queue(tmp_path, monkeypatch, cells, *words) -> list[dict]:
    plan = tmp_path / "results/s/plan.json"
    (plan.parent / "prompts").mkdir(parents=True)
    plan.write_text(json.dumps({"cells": cells}))
    out = tmp_path / "queue"
    out.mkdir()
    call = ["x", "--plan", str(plan), "--run", str(tmp_path), "--out", str(out), *words]
    monkeypatch.setattr(sys, "argv", call)
    queue_cells.main()
    return [json.loads(line) for path in sorted(out.glob("*.json")) for line in path.read_text().splitlines()]


def test_the_headline_comes_first_and_timed_cells_not_at_all(tmp_path, monkeypatch):
    cells = [cell("depths"), cell("headline", seed=1), cell("headline", "t0"), cell("residuals"), cell("headline")]
    cells += [cell("headline", clock="wall", method="ar")] + [cell("budgets", seed=k) for k in range(9)]
    found = queue(tmp_path, monkeypatch, cells)
    order = [(c["part"], c["setting"], c["seed"]) for c in found]
    assert order[:2] == [("headline", "t1", 0), ("residuals", "t1", 0)] and len(found) == 14
    assert order[-2:] == [("headline", "t1", 1), ("headline", "t0", 0)] and order[-3][0] == "depths"
    assert len(list((tmp_path / "queue").glob("*.json"))) == 2


def test_other_weights_make_a_suite_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(queue_cells, "sha256_weights", lambda folder: f"sha of {folder.name}")
    weights = tmp_path / "mini-1/weights"
    found = queue(tmp_path, monkeypatch, [cell("headline"), cell("depths")], "--weights", str(weights))
    assert [c["suite"] for c in found] == ["s-mini-1"]
    assert found[0]["path"].startswith("results/s-mini-1/cells/") and found[0]["weights_sha256"] == {
        "target": "sha of target"
    }
    assert (
        found[0]["weights"] == {"target": str(weights / "target")} and (tmp_path / "results/s-mini-1/prompts").is_dir()
    )
