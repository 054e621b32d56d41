"""Scripts that are given other files than they read say so in one line and return 2; none leaves a traceback."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workflow_runs import ROOT, environment_of

sys.path.insert(0, str(ROOT / "workflows/scripts"))
from input_files import read_plan, read_table
from make_report import check_outputs

from baselines.plans import read_cells
from tfm.manifest import sha256_file

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
SCRIPT = re.compile(r"^(def main\(|if __name__)", re.MULTILINE)
# every script's command line fails as bad input does; what takes time is importing, so all in one process
FAIL = """
import argparse, contextlib, io, json, os, runpy, sys

ERRORS = {
    "ours": lambda: ValueError("--x: 3 is not allowed"),
    "library": lambda: json.loads("{"),
    "file": lambda: open("/nowhere/x.json"),
}

def fail(parser, *_):
    made = ERRORS[kind]()
    raise made

argparse.ArgumentParser.parse_args = fail
os._exit = sys.exit  # a script may leave at once
found = []
for script in json.loads(sys.argv[1]):
    sys.path[0], sys.argv = os.path.dirname(script), [script]
    for kind in ERRORS:
        status, text = "returned", io.StringIO()
        with contextlib.redirect_stderr(text):
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as leaving:
                status = leaving.code
            except BaseException as error:
                status = f"{type(error).__name__}: {error}"
        found.append([script, kind, status, text.getvalue()])
print(json.dumps(found))
"""
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


def published_plan() -> dict:
    return json.loads(gzip.decompress((ROOT / f"{PUBLISHED}/plan.json.gz").read_bytes()))


def test_every_script_says_in_one_line_what_is_wrong_with_its_input_and_exits_2():
    """A new script cannot forget it: its command line is made to fail here, whatever options it has."""
    scripts = [
        str(path) for path in sorted((ROOT / "workflows/scripts").glob("*.py")) if SCRIPT.search(path.read_text())
    ]
    assert len(scripts) > 30
    call = [sys.executable, "-c", FAIL, json.dumps(scripts)]
    done = subprocess.run(call, cwd=ROOT, env=environment_of(ROOT), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = {
        "ours": "--x: 3 is not allowed",
        "library": ".py:",
        "file": "/nowhere/x.json: No such file or directory\n",
    }
    for script, kind, status, text in json.loads(done.stdout):
        name = Path(script).stem
        assert status == 2 and text.startswith(f"{name}: ") and text.count("\n") == 1, (name, kind, status, text)
        assert said[kind] in text, (name, kind, text)


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
    plan, whole = tmp_path / "plan.json", published_plan()
    whole["cells"][0]["path"] = "results/nano/nowhere"
    plan.write_text(json.dumps(whole))
    call = [sys.executable, "workflows/scripts/publish.py", "--plan", str(plan), "--out", str(tmp_path / "out")]
    done = subprocess.run(call, cwd=ROOT, env=environment_of(ROOT), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "results/nano/nowhere/cell.json is missing; make it again: snakemake" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no cell"),
        ("[]", "holds no cell"),
        ("3", "cells: 3 is not allowed"),
        ('{"cells": null}', "cells: null is not allowed"),
        ('{"cells": [{}]}', r"cells.0..suite: missing key"),
        ('{"cells":', "is damaged"),
        ("\ufffe{", "is damaged"),
        (None, "cannot be read"),
    ],
)
def test_a_list_of_cells_that_is_none_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "list.json"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=f"^{path}: {words}.*; give a suite's plan.json"):
        read_cells(path)


@pytest.mark.parametrize("seconds", ["0", "-3", "nan"])
def test_a_time_of_nothing_is_not_the_whole_list(tmp_path, seconds):
    (tmp_path / "list.json").write_text("[]")
    words = ["--list", str(tmp_path / "list.json"), "--out", str(tmp_path), "--commit", "c", "--seconds", seconds]
    done = subprocess.run(
        [sys.executable, ROOT / "workflows/scripts/run_cells.py", *words], capture_output=True, text=True
    )
    assert done.returncode == 2 and f"--seconds: {float(seconds)} is not allowed" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged"),
        (b"a,b\n1,", "is cut off in its last line"),
        (b"\xff\xfe", "is damaged"),
        (b"variant,tau,tau_low\n", "lacks tau_high"),
        (b"variant\nx\n", "lacks tau"),
        (None, "cannot be read"),
    ],
)
def test_a_table_that_is_cut_or_none_is_named_and_never_drawn(tmp_path, content, words):
    path = tmp_path / "tau.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path} .*{words}.*; make it again: snakemake --cores all --force {path}"):
        read_table(path, *(["tau"] if content == b"variant\nx\n" else []))


@pytest.mark.parametrize(("part", "key"), [("config", "side"), ("cells", "clock")])
def test_a_plan_of_another_version_is_refused_by_what_it_lacks(tmp_path, part, key):
    path, plan = tmp_path / "plan.json", published_plan()
    del (plan["config"] if part == "config" else plan["cells"][1])[key]
    path.write_text(json.dumps(plan))
    named = "config" if part == "config" else r"cells\[1\]"
    with pytest.raises(ValueError, match=rf"^{path}: {named}.{key}: missing key; make it with `snakemake .*{path}`"):
        read_plan(path)


@pytest.mark.parametrize("content", [None, b"a,b\n1,2\n"])
def test_a_page_is_made_of_the_files_that_its_manifest_names(tmp_path, content):
    """Half a table is a table too, and nobody would see it on the page."""
    path = tmp_path / "tables/tau.csv"
    path.parent.mkdir()
    path.write_bytes(b"a,b\n1,2\n3,4\n")
    manifest = {"outputs": {"tables/tau.csv": sha256_file(path)}}
    check_outputs(tmp_path, manifest)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"tables/tau.csv is (gone|not the file that the manifest names); make it again"
    ):
        check_outputs(tmp_path, manifest)
