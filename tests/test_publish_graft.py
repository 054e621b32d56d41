"""Suite graft as it comes back from a GPU machine: one call makes the published folder, and that makes itself again."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from test_engine_tables import report
from test_run_paired import FIELDS
from workflow_runs import NANO, ROOT

sys.path.insert(0, str(ROOT / "workflows/scripts"))

from baselines import suite
from tfm.prompts import PreparedPrompt

EXPECTED = ROOT / "workflows/config/expected.yaml"
SMALL = {
    "suite": "graft-real",
    "engine": "torch-static",
    "forms": "torch",
    "timed": "all",
    "datasets": ["sample-math"],
    "max_new_tokens": 6,
    "requests": 1,
    "seeds": [0, 1],
    "temperatures": [0, 1],
    "methods": ["ar", "dflash", "ddtree", "tfm"],
    "budget": 8,
    "budgets": [4],
    **{key: [] for key in ("widths", "candidate_counts", "children_counts", "depths", "residuals")},
    "audit": [],
    "tables": ["headline", "per_set", "latency", "sweeps", "paired"],
    "figures": ["throughput", "sweeps"],
}
# what the issue of this suite asks for by name; energy and memory need a card
NAMES = ("ar_step_ms", "ar_step_over_floor", "tfm_step_over_ar_B64", "gdn_verify_share", "host_other_share")
NAMES += ("stage_sum_over_wall", "speedup_tfm_over_ar", "speedup_tfm_over_dflash", "speedup_tfm_over_ddtree")
NAMES += tuple(f"tau_{method}" for method in SMALL["methods"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """RUN as the offline scripts leave it: all cells at T = 1, none at T = 0, and timed steps."""
    import run_paired

    out = tmp_path_factory.mktemp("run")
    config = suite.resolve({**NANO, **SMALL})
    cells = suite.expand(config)
    rows = [PreparedPrompt(id=f"q{i}", index=i, tokens=list(range(20, 30 + i)), **FIELDS) for i in range(3)]
    folder = out / "results/graft-real"
    prompts = folder / "prompts" / cells[0]["target"] / "sample-math.jsonl"
    prompts.parent.mkdir(parents=True)
    prompts.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    plan = {"config": config, "cells": cells, "draft_rows": suite.draft_rows(config)}
    (folder / "plan.json").write_text(json.dumps(plan))
    first = out / "first.json"
    first.write_text(json.dumps({"cells": [cell for cell in cells if cell["setting"] == "t1"]}))
    given = {"list": first, "out": out, "commit": "c0ffee", "part": None, "seconds": None, "again": False}
    found = run_paired.run(argparse.Namespace(**given))
    assert (found["left"], found["failed"]) == (0, {})
    (out / "graft-bench").mkdir()
    (out / "graft-bench/tuned.json").write_text(json.dumps(report()))
    place = {"is_near_tie": True}
    runs = {"tfm t1": {"same_as_source": 2, "parts_from_ar": [place], "logits": {"largest": 0.5}}}
    runs["tfm t1"]["static"] = {"parts_from_ar": []}
    (out / "graft-bench/check_graft.json").write_text(json.dumps({"bfloat16": {"runs": runs, "wrong": []}}))
    paper = {"layers": 16, "tensors": 300, "wrong": [], "seconds": {"load": 9.5}}
    (out / "rehearse_paper.json").write_text(json.dumps(paper))
    return out


def call(run: Path, out: Path, monkeypatch, *more: str) -> int:
    import publish_graft

    words = ["publish_graft.py", "--run", str(run), "--out", str(out), "--expected", str(EXPECTED), *more]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.chdir(ROOT)
    return publish_graft.main()


@pytest.fixture(scope="module")
def published(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "graft-h200"
    folder.mkdir()
    (folder / "README.md").write_text("written by hand\n")
    readme = folder.parent / "readme.md"
    readme.write_text("before\n<!-- table: graft -->\nold\n<!-- end of table: graft -->\nafter\n")
    with pytest.MonkeyPatch.context() as patch:
        assert call(run, folder, patch, "--readme", str(readme)) == 0
    return folder


def test_one_call_gives_every_name_and_the_table_of_the_read_me(published):
    summary = json.loads((published / "summary.json").read_text())
    assert all(summary[name]["value"] is not None for name in NAMES)
    assert summary["tau_ar"]["value"] == 1 and summary["cells"]["value"] == 14
    assert (summary["graft_bfloat16_runs_beside_ar"]["value"], summary["graft_bfloat16_near_ties"]["value"]) == (2, 1)
    assert summary["paper_rehearsal_wrong"]["value"] == 0 and "graft_float32_wrong" not in summary
    readme = (published.parent / "readme.md").read_text()
    assert readme.startswith("before\n<!-- table: graft -->\n| method |") and readme.endswith("-->\nafter\n")
    assert "old" not in readme and "| DFlash-TfM | 4.37 | " in readme and "T = 1 of a suite of 14 cells;" in readme
    assert (published / "README.md").read_text() == "written by hand\n"


def test_sweeps_show_speed_and_the_cost_of_a_step(published):
    header, *rows = (published / "tables/sweeps.csv").read_text().splitlines()
    assert {"tok_s", "step_ms"} <= set(header.split(",")) and len(rows) == 4
    assert all(float(row.split(",")[header.split(",").index("step_ms")]) > 0 for row in rows)


def test_what_is_published_is_made_again_from_itself(published, tmp_path):
    from rebuild_published import differences, rebuild

    rebuild(published.parent, yaml.safe_load(EXPECTED.read_text()), tmp_path, figures=False)
    assert differences(published.parent, tmp_path) == {}
    again, kept = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "graft-h200", published))
    assert again == kept


def test_too_many_bytes_and_an_empty_run_are_refused_and_leave_what_was_there(published, run, tmp_path, monkeypatch):
    before = sorted(path.name for path in published.iterdir())
    assert call(run, published, monkeypatch, "--limit", "1000") == 2
    assert sorted(path.name for path in published.iterdir()) == before
    empty = tmp_path / "results/graft-real"
    empty.mkdir(parents=True)
    (empty / "plan.json").write_text((run / "results/graft-real/plan.json").read_text())
    assert call(tmp_path, published, monkeypatch) == 2
