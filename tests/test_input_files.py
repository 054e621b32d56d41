"""Scripts that are given other files than they read say so in one line and return 2; none leaves a traceback."""

import json
import subprocess
import sys

from workflow_runs import ROOT, environment_of

PUBLISHED, EXPECTED = "results/published/nano", "workflows/config/expected.yaml"
WRONG = {"nothing": None, "empty": b"", "list": b"[]", "null": b"null", "bytes": b"\xff\xfe", "nested": b"[" * 100_000}
SCRIPTS = {
    "make_tables": ["--plan", "FILE", "--out", "OUT"],
    "make_figures": ["--tables", "FILE", "--out", "OUT", "--figures", "tau"],
    "make_report": ["--plan", f"{PUBLISHED}/plan.json.gz", "--manifest", "FILE", "--out", "OUT"],
    "compare_paper": ["--expected", EXPECTED, "--summary", "FILE", "--out", "OUT"],
    "publish": ["--plan", "FILE", "--out", "OUT"],
    "publish_dense": ["--run", "FILE", "--out", "OUT"],
    "publish_graft": ["--run", "FILE", "--out", "OUT"],
    "write_manifest": ["--plan", "FILE", "--out", "OUT"],
}
# all in one process: what takes time is importing
RUN = """
import contextlib, importlib, io, json, sys
sys.path.insert(0, "workflows/scripts")
found = []
for name, *words in json.loads(sys.argv[1]):
    sys.argv[:], text = [name + ".py", *words], io.StringIO()
    with contextlib.redirect_stderr(text):
        found.append([importlib.import_module(name).main(), text.getvalue()])
print(json.dumps(found))
"""


def test_a_file_that_is_none_of_its_own_is_named_in_one_line(tmp_path):
    for kind, data in WRONG.items():
        if data is not None:
            (tmp_path / kind).write_bytes(data)
    (tmp_path / "folder").mkdir()
    out, tries = tmp_path / "out", [(name, kind) for name in SCRIPTS for kind in (*WRONG, "folder")]
    places = [{"FILE": str(tmp_path / kind), "OUT": str(out)} for _, kind in tries]
    calls = [[name, *(p.get(word, word) for word in SCRIPTS[name])] for (name, _), p in zip(tries, places, strict=True)]
    call = [sys.executable, "-c", RUN, json.dumps(calls)]
    done = subprocess.run(call, cwd=ROOT, env=environment_of(ROOT), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for (name, kind), (status, text) in zip(tries, json.loads(done.stdout), strict=True):
        assert status == 2 and text.count("\n") == 1 and text.startswith(f"{name}: "), (name, kind, status, text)
        assert str(tmp_path / kind) in text, (name, kind, text)
    assert not out.exists() or not any(out.iterdir())


def test_a_plan_whose_cells_are_not_here_is_refused_with_the_command_that_makes_them(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text('{"config": {"suite": "nano"}, "cells": [{"path": "results/nano/nowhere"}]}')
    call = [sys.executable, "workflows/scripts/publish.py", "--plan", str(plan), "--out", str(tmp_path / "out")]
    done = subprocess.run(call, cwd=ROOT, env=environment_of(ROOT), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "results/nano/nowhere/cell.json is missing; make it again: snakemake" in done.stderr
