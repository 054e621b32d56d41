"""`tfm cells`: every state and its reason, conditions that execute nothing, and requests as JSON lines."""

import fcntl
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from workflow_runs import NANO, ROOT

from baselines import cell_states, cli, engine_names, suite
from baselines.cell_states import Inspector
from baselines.commands.cells import KINDS, cells_of, row_of
from baselines.methods import METHODS
from tfm import manifest
from tfm.cells import CellWriter
from tfm.manifest import cell_digest, sha256_file, source_digest
from tfm.trace import RequestTrace, StepTrace

SMALL = [
    "datasets=sample-math",
    "prompts=2",
    "seeds=0",
    "temperatures=0,1",
    "methods=ar,dflash,tfm",
    "audit=[]",
    "residuals=[]",
]
SMALL += ["widths=[]", "candidate_counts=[]", "children_counts=[]", "depths=[]", "budgets=8", "stages=false"]


cached_digest = functools.cache(source_digest)


@pytest.fixture(autouse=True)
def code_is_read_once(monkeypatch):
    monkeypatch.setattr(engine_names, "source_digest", cached_digest)


@pytest.fixture(scope="module")
def sources():
    return {name: cached_digest(METHODS[name].factory) for name in ("ar", "dflash", "tfm")}


@pytest.fixture(scope="module")
def cells():
    return cells_of("nano", None, SMALL, Path("results"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cells, sources):
    """A results folder where every cell of the small suite is done, by invented records."""
    results = tmp_path_factory.mktemp("done") / "results"
    prompts = results / "nano/prompts/nano/sample-math.jsonl"
    prompts.parent.mkdir(parents=True)
    prompts.write_text('{"id": "a"}\n{"id": "b"}\n')
    for cell in cells:
        write_cell(results, cell, sources[cell["decode"]["method"]], sha256_file(prompts))
    return results


@pytest.fixture
def results(tmp_path, finished):
    return Path(shutil.copytree(finished, tmp_path / "results"))


def traces():
    step = StepTrace(0, 5, 3, 2, 1, 1, 2, 0.5)
    for index, name in enumerate("ab"):
        yield RequestTrace(name, index, 4, [7, 8, 9], "length", 1.5, None, steps=[step])


def resolved(cell):
    return {key: value for key, value in cell.items() if key not in ("path", "part")}


def write_cell(results, cell, source, prompts_sha256):
    """Write a cell's files as decode_cell does, the tokenizer's EOS filled in."""
    digest = cell_digest(resolved(cell), source=source, prompts_sha256=prompts_sha256)
    facts = {"cell": {**resolved(cell), "decode": {**cell["decode"], "eos_tokens": [2]}}, "source_digest": source}
    facts |= {"loader_digest": manifest.loader_digest()}
    facts |= {"prompts_sha256": prompts_sha256, "device": {"name": "a cpu", "torch_threads": 1}}
    facts |= {"environment": {"git": {"commit": "c0ffee", "dirty": False}}}
    with CellWriter(results / Path(cell["path"]).relative_to("results"), digest=digest) as writer:
        for trace in traces():
            writer.add(trace)
        writer.finish(["a", "b"], facts)


def pick(cells, method, setting="t1", **fields):
    return next(
        cell
        for cell in cells
        if (cell["decode"]["method"], cell["setting"]) == (method, setting)
        and all(cell["decode"][key] == value for key, value in fields.items())
    )


def folder_of(results, cell):
    return results / Path(cell["path"]).relative_to("results")


def inspect(results, cell):
    state = Inspector(results).inspect(cell)
    return state.state, state.reason, state.done, state.prompts


def run(capsys, *words, expect=0):
    capsys.readouterr()
    try:
        status = cli.main(["cells", *map(str, words)])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert status == expect, err
    return out, err


# --- states


def test_every_cell_of_a_finished_suite_is_done(finished, cells):
    assert len(cells) == 7 and {inspect(finished, cell) for cell in cells} == {("done", "", 2, 2)}


def test_before_anything_was_run_every_cell_is_missing(tmp_path, cells):
    assert {inspect(tmp_path, cell) for cell in cells} == {("missing", "", 0, None)}


def test_a_changed_setting_makes_its_cells_stale_and_is_named(results, cells):
    cell = pick(cells, "tfm", budget=64)
    changed = {**cell, "decode": {**cell["decode"], "children": 4, "max_new_tokens": 9}}
    assert inspect(results, changed) == ("stale", "config (children, max_new_tokens)", 2, 2)
    assert inspect(results, {**cell, "dtype": "float64"})[:2] == ("stale", "config (dtype)")


def test_changed_code_weights_and_prompts_are_told_apart(results, cells, monkeypatch):
    cell = pick(cells, "tfm", budget=64)
    weights = {**cell["weights_sha256"], "weaver": "0" * 64}
    assert inspect(results, {**cell, "weights_sha256": weights})[:2] == ("stale", "weights (weaver)")
    with open(results / "nano/prompts/nano/sample-math.jsonl", "a") as file:
        file.write('{"id": "c"}\n')
    assert inspect(results, cell) == ("stale", "prompts", 2, 3)
    monkeypatch.setattr(engine_names, "source_digest", lambda factory, **_: "1" * 64)
    assert inspect(results, cell)[:2] == ("stale", "code, prompts")


def test_changed_code_that_loads_is_code(results, cells, monkeypatch):
    for module in (manifest, cell_states):
        monkeypatch.setattr(module, "loader_digest", lambda: "2" * 64)
    assert inspect(results, pick(cells, "ar"))[:2] == ("stale", "code")


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A copy of the code that digests cover, to change."""
    folder = tmp_path_factory.mktemp("code")
    for name in ("kernels", "tfm", "baselines", "workflows/scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "weights", "data")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


@pytest.mark.parametrize(
    ("helper", "text", "stale"),
    [
        ("tfm/siblings.py", "CHANGED = 1", {"tfm"}),
        ("baselines/dflash.py", "CHANGED = 1", {"dflash"}),
        ("tfm/acceptance.py", "CHANGED = 1", {"ar", "dflash", "tfm"}),
        ("kernels/gdn/fused_triton.py", "CHANGED = 1", set()),  # a backend that these cells do not use
        ("tfm/acceptance.py", "# a comment", set()),
    ],
)
def test_a_changed_helper_marks_exactly_the_cells_that_it_makes_stale(
    finished, cells, code, monkeypatch, helper, text, stale
):
    path = code / helper
    before = path.read_text()
    path.write_text(f"{before}\n{text}\n")
    try:
        digest = functools.cache(functools.partial(source_digest, root=code))
        monkeypatch.setattr(engine_names, "source_digest", digest)
        found = {(cell["decode"]["method"], *inspect(finished, cell)[:2]) for cell in cells}
    finally:
        path.write_text(before)
    assert {(method, state) for method, state, _ in found} == {
        (method, "stale" if method in stale else "done") for method in ("ar", "dflash", "tfm")
    }
    assert {reason for _, state, reason in found if state == "stale"} <= {"code"}


def test_weights_and_prompts_that_are_not_here_decide_nothing(results, cells):
    """A results folder copied to a machine without the checkpoints is judged by what that machine has."""
    shutil.rmtree(results / "nano/prompts")
    bare = [{**cell, "weights_sha256": dict.fromkeys(cell["weights_sha256"])} for cell in cells]
    assert {inspect(results, cell) for cell in bare} == {("done", "", 2, 2)}


def test_an_unfinished_cell_counts_its_prompts(results, cells, sources):
    cell = pick(cells, "dflash")
    folder = folder_of(results, cell)
    shutil.rmtree(folder)
    prompts = sha256_file(results / "nano/prompts/nano/sample-math.jsonl")
    for digest in (cell_digest(resolved(cell), source=sources["dflash"], prompts_sha256=prompts), "other"):
        with CellWriter(folder, digest=digest) as writer:
            writer.add(next(traces()))
            assert inspect(results, cell) == ("running", "", 1, 2)
        reason = "" if digest != "other" else "of other code, config, weights or prompts: starts over"
        assert inspect(results, cell) == ("incomplete", reason, 1, 2)


def test_looking_takes_no_lock(results, cells):
    """A cell that starts while its state is read must get its lock."""
    cell = pick(cells, "ar")
    folder = folder_of(results, cell)
    shutil.rmtree(folder)
    with CellWriter(folder, digest="d"), open(folder / "done.jsonl") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not Inspector(results)._locked & {(folder / "done.jsonl").stat().st_ino}


def test_a_failed_cell_says_why_until_it_is_run_again(results, cells):
    cell = pick(cells, "ar")
    folder = folder_of(results, cell)
    shutil.rmtree(folder)
    folder.mkdir()
    log = folder / "decode.log"
    log.write_text("x: 2 prompts, 0 done before\ndecode_cell the cell failed\nTraceback\nOSError: disk full\n")
    assert inspect(results, cell)[:2] == ("failed", "OSError: disk full")
    log.write_text(log.read_text() + "x: 2 prompts, 1 done before\n")
    assert inspect(results, cell)[0] == "missing"


@pytest.mark.parametrize("name", ["requests.parquet", "steps.parquet", "trees.parquet", "cell.json"])
@pytest.mark.parametrize("how", ["cut", "altered", "removed"])
def test_a_damaged_final_is_named(results, cells, name, how):
    cell = pick(cells, "ar")
    path = folder_of(results, cell) / name
    data = path.read_bytes()
    if how == "removed":
        path.unlink()
    else:
        other = b"1" if data[-20:-19] == b"0" else b"0"
        path.write_bytes(data[: len(data) // 2] if how == "cut" else data[:-20] + other + data[-19:])
    state, reason, done, _ = inspect(results, cell)
    assert state == "damaged" and name in reason and done == 0


@pytest.mark.parametrize("name", ["requests.parquet", "cell.json", "done.jsonl"])
def test_a_folder_in_a_files_place_is_damage(results, cells, name):
    cell = pick(cells, "ar")
    path = folder_of(results, cell) / name
    path.unlink(missing_ok=True)
    path.mkdir()
    state, reason, done, _ = inspect(results, cell)
    assert state == "damaged" and name in reason and done == 0


# --- the command


def test_in_a_pipe_a_line_holds_state_path_progress_and_reason(capsys, results, cells):
    (folder_of(results, pick(cells, "dflash")) / "steps.parquet").unlink()
    out, err = run(capsys, "--results", results, "--config", *SMALL)
    rows = [line.split("\t") for line in out.splitlines()]
    assert len(rows) == 7 and all(len(row) == 4 and Path(row[1]).is_dir() for row in rows)
    assert [row[0] for row in rows].count("damaged") == 1 and ["damaged", "0/2", "steps.parquet is gone"] in [
        [row[0], *row[2:]] for row in rows
    ]
    assert (
        err.startswith("7 cells: 6 done, 1 damaged\n")
        and f"snakemake --cores all --config {shlex.join(SMALL)} --force" in err
    )


def test_cells_are_those_that_snakemake_lists(capsys):
    out, _ = run(capsys)
    assert [line.split("\t")[1] for line in out.splitlines()] == [
        cell["path"] for cell in suite.expand(suite.resolve(dict(NANO)))
    ]


def test_states_and_conditions_select(capsys, results, cells):
    (folder_of(results, pick(cells, "ar", "t0")) / "cell.json").unlink()
    words = ["--results", results, "--config", *SMALL]
    assert run(capsys, *words, "--state", "damaged,missing")[0].count("\n") == 1
    assert run(capsys, *words, "--where", "method==tfm and budget==64")[0].count("\n") == 2
    assert run(capsys, *words, "--where", "state!=done or temperature>0")[0].count("\n") == 5
    out, err = run(capsys, *words, "--where", "seed>5")
    assert out == "" and err.startswith("0 of 7 cells")


def test_requests_are_exported_one_a_line(capsys, results, cells):
    (folder_of(results, pick(cells, "ar", "t0")) / "steps.parquet").unlink()
    words = ["--results", results, "--config", *SMALL, "--export", "jsonl"]
    out, err = run(capsys, *words, expect=1)
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 12 and "1 of 7 cells have no records: 1 damaged" in err
    row = next(row for row in rows if row["variant"] == "tfm-b64-w4" and row["setting"] == "t1" and row["id"] == "b")
    expected = {"state": "done", "new_tokens": 3, "steps": 1, "output_tokens": [7, 8, 9], "budget": 64, "seed": 0}
    assert expected.items() <= row.items() and row["prefill_us"] == 1.5 and row["decode_us"] is None
    assert row["cell"] == pick(cells, "tfm", budget=64)["path"] and row["commit"] == "c0ffee"
    out, _ = run(capsys, *words, "--where", "method==dflash and temperature==0")
    assert len(out.splitlines()) == 2


def test_a_suite_without_a_config_is_known_from_its_plan(capsys, results, cells):
    (results / "other").mkdir()
    (results / "other/plan.json").write_text(json.dumps({"config": {"suite": "other"}, "cells": cells}))
    out, _ = run(capsys, "--results", results, "--suite", "other")
    assert out.count("done\t") == 7
    _, err = run(capsys, "--results", results, "--suite", "other", "--config", "seeds=1", expect=2)
    assert "nothing can be changed" in err
    (results / "other/plan.json").write_text(json.dumps({"config": {"suite": "other"}, "cells": [*cells, {"path": 3}]}))
    _, err = run(capsys, "--results", results, "--suite", "other", expect=2)
    assert "other/plan.json: cells[7].suite: missing key; make it with `snakemake" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--suite", "nanu"], "did you mean nano?", id="suite"),
        pytest.param(["--state", "gone"], "state: 'gone' is not allowed (allowed: done, stale", id="state"),
        pytest.param(["--state", ""], "state: '' is not allowed", id="no_state"),
        pytest.param(["--export", "csv"], "export: 'csv' is not allowed (allowed: jsonl)", id="export"),
        pytest.param(["--config", "promts=3"], "did you mean prompts?", id="config_key"),
        pytest.param(["--config", "prompts"], "allowed: KEY=VALUE", id="config_without_value"),
        pytest.param(["--config", "widths=[1"], "close its brackets", id="config_brackets"),
        pytest.param(["--configfile", "none.yaml"], "none.yaml does not exist", id="configfile"),
        pytest.param(["--configfile", "workflows/config/datasets.yaml"], "no key suite", id="no_suite_config"),
        pytest.param(["--results", "nowhere"], "results: nowhere is no folder", id="results"),
        pytest.param(["--where", "metod==tfm"], "'metod' is no field; did you mean method? fields: state,", id="where"),
    ],
)
def test_bad_words_are_refused(capsys, monkeypatch, words, message):
    monkeypatch.chdir(ROOT)
    out, err = run(capsys, *words, expect=2)
    assert out == "" and message in err


@pytest.mark.parametrize("content", ['{"cells":', "[]", '{"cells": [{"path": 1}]}', '{"cells": 3}', None])
def test_a_damaged_plan_is_named(capsys, results, content):
    path = results / "other/plan.json"
    path.parent.mkdir()
    path.mkdir() if content is None else path.write_text(content)
    _, err = run(capsys, "--results", results, "--suite", "other", expect=2)
    assert f"tfm cells: {path}" in err and "make it with `snakemake --cores all" in err and err.count("\n") == 1


def test_a_key_that_a_config_says_twice_is_named_with_its_lines(capsys, tmp_path):
    text = (ROOT / "workflows/config/nano.yaml").read_text()
    (tmp_path / "x.yaml").write_text(f"budget: 8\n{text}")
    _, err = run(capsys, "--configfile", tmp_path / "x.yaml", expect=2)
    assert re.search(r"budget: is in .*x.yaml twice, lines 1 and \d+; remove one", err)


def test_a_config_that_is_no_text_is_named(capsys, tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"suite: caf\xe9\n")
    _, err = run(capsys, "--configfile", tmp_path / "x.yaml", expect=2)
    assert "x.yaml is not YAML" in err


def test_the_list_needs_neither_torch_nor_weights(tmp_path):
    code = "import sys; from baselines import cli; s = cli.main(sys.argv[1:]); sys.exit(s or 'torch' in sys.modules)"
    call = [sys.executable, "-c", code, "cells", "--config", "weights=nowhere"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("missing\t") == done.stdout.count("\n") > 50, done.stderr


def test_a_method_s_row_has_no_setting_that_it_does_not_take(finished, cells):
    row = row_of(Inspector(finished).inspect(pick(cells, "ar")))
    assert row["budget"] is row["width"] is row["candidates"] is None and row["temperature"] == 1
    assert set(row) == set(KINDS)
