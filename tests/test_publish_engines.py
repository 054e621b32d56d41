"""What ran inside SGLang as it comes back: one call publishes it, names what is missing, and it makes itself again."""

import json
import shutil
import tarfile
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
import yaml
from served import ENGINES, fake_python, on_cpu
from test_bench_serving import bench  # noqa: F401, a fixture
from workflow_runs import ROOT, write_tiny_family

from baselines import suite
from baselines.serving.cell import Place, Session
from baselines.sglang.flags import VERSION
from tfm.prompts import PreparedPrompt

EXPECTED = ROOT / "workflows/config/expected.yaml"
FIELDS = {name: "x" for name in ("dataset", "domain", "category", "template", "sha256")}
SHAPE = {"target": {"num_hidden_layers": 64, "hidden_size": 5120}}
LOG = {"tfm": {"ssm_state": 0.28, "plugin": 0.21}, "dflash": {"ssm_state": 0.28, "intermediate_ssm_state_cache": 4.5}}
LOG["ddtree-recurrent"] = {"ssm_state": 0.28, "intermediate_ssm_state_cache": 18.28}


def bench_file(path: Path, failed: dict | None = None, **arms) -> dict:
    """Write a file of bench_serving.py; arms are milliseconds of requests at 512 prompt tokens."""
    found = {}
    for arm, values in arms.items():
        rows = [{"prompt_tokens": 512, "new_tokens": 256, "steps": 64, "step_ms": value} for value in values]
        engine = {
            "version": VERSION,
            "effective": {"served_model_name": "/tmp/x/target"},
            "memory_gib": {"weight": 50.1},
        }
        found[arm] = {"rows": rows, "state_gib": LOG.get(arm, {}), "memory_used_mib": 9000, "engine": engine}
        found[arm]["cell"] = {"weights": {"target": "/tmp/x/target"}, "server": {"flags": {}}}
    options = {"attention": "triton", "budget": 64, "candidates": 512, "accept": 3, "new_tokens": 256, "repeats": 3}
    record = {"device": {"name": "NVIDIA H200"}, "shape": SHAPE, "options": options, "arms": found}
    record |= {"failed": failed or {}, "torch": "2.11.0", "git": {"commit": None, "dirty": None}}
    path.write_text(json.dumps(record))
    return record


def own_file(path: Path) -> None:
    """Write a file of bench_engine.py with two rounds of ar and tfm."""
    variant = "all:fused_cuda"
    ms = {"ar": [14.1, 14.2, 14.3], "tfm": [20.1, 20.2, 20.6]}
    records = [
        {"arm": arm, "variant": variant, "context": 512, "round": turn, "ms": values}
        for turn in range(2)
        for arm, values in ms.items()
    ]
    facts = {"rows": 65, "kept_gib": 3.0}
    report = {"arms": {f"{arm} {variant}": facts for arm in ms}, "records": records, "weights_gib": 53.4}
    path.write_text(json.dumps({"tuned": report | {"environment": {"git": {"commit": "abcdef012", "dirty": True}}}}))


def text_file(path: Path) -> None:
    """Write a file of check_serving.py: tfm at a near tie and at a wrong token, ar failed."""
    good = {"id": "q0", "tokens": 48, "steps": 9, "ready_s": 30.5, "verdict": "equal"}
    tie = {"at": 7, "wanted": 5, "got": 6, "gap": 0.01, "moved": 0.02, "verdict": "near tie"}
    record = {"device": {"name": "NVIDIA H200"}, "wanted": {"q0": [1, 2]}, "arms": {"tfm": [good, good | tie]}}
    record["arms"]["tfm"].append(good | tie | {"gap": 4.5, "verdict": "different"})
    record["failed"] = {"ar": "ServerError: the server ended with status 1;\n/tmp/place/of/server.log: no memory"}
    path.write_text(json.dumps(record))


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return write_tiny_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def cells(family, tmp_path_factory):
    """results/ of both suites: SGLang's greedy cells of one set but ddtree's, two sampled ones, ar and tfm of ours."""
    import serve_cell
    from decode_cell import run_cell

    root = tmp_path_factory.mktemp("cells")
    small = {"datasets": ["sample-math", "sample-chat"], "methods": ["ar", "dflash", "ddtree", "tfm"], "budget": 8}
    small |= {"max_new_tokens": 12, "weights": str(family), "temperatures": [0, 1]}
    rows = [PreparedPrompt(id=f"q{i}", index=i, tokens=list(range(20, 40 + i)), **FIELDS) for i in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE", "{}")
        place = Place(root / "servers", fake_python(root, VERSION), start_seconds=120)
        for name, engine, backend in (("engines", "sglang", "fused_cuda"), ("engines-ours", "torch", "solve")):
            more = {"engine": engine, "suite": name, "gdn_backend": backend}
            more |= {} if engine == "sglang" else {"dtype": "float32", "device": "cpu"}
            config = suite.resolve({**ENGINES, **small, **more})
            plan = [on_cpu(cell) for cell in suite.expand(config)]
            (root / f"results/{name}").mkdir(parents=True)
            (root / f"results/{name}/plan.json").write_text(json.dumps({"config": config, "cells": plan}))
            with Session(place) as session:
                for cell in plan:
                    method, is_greedy = cell["decode"]["method"], cell["setting"] == "t0"
                    run_here = ("ar", "dflash", "tfm") if is_greedy else ("dflash", "tfm")
                    if engine == "torch":
                        run_here = ("ar", "tfm") if is_greedy else ()
                    if cell["dataset"] == "sample-chat" or method not in run_here:
                        continue
                    prompts = serve_cell.prompts_file(cell, root)
                    prompts.parent.mkdir(parents=True, exist_ok=True)
                    prompts.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
                    given = {"prompts": prompts, "out": root / cell["path"], "commit": "c0ffee1"}
                    if engine == "sglang":
                        serve_cell.run_cell(cell, session=session, **given)
                    else:
                        run_cell(cell, **given)
    return root / "results"


@pytest.fixture(scope="module")
def run(cells, tmp_path_factory):
    """A folder of all that came back: two calls of steps, one with a failed arm, texts, and cells in an archive."""
    folder = tmp_path_factory.mktemp("run")
    bench_file(folder / "steps3.json", ar=[14.0, 14.2, 14.1], tfm=[19.0, 19.4, 19.2])
    failed = {"ddtree": "ServerError: Capture cuda graph failed; see /tmp/sgl/servers/ddtree/server.log"}
    bench_file(folder / "steps4.json", failed, dflash=[19.1, 19.2, 19.15])
    smoke = bench_file(folder / "smoke.json", tfm=[1.0])
    (folder / "smoke.json").write_text(json.dumps(smoke | {"options": smoke["options"] | {"layers": 8}}))
    text_file(folder / "first.json")
    own_file(folder.parent / "bench.json")
    with tarfile.open(folder / "engines.tar.gz", "w:gz") as archive:
        archive.add(cells / "engines", "results/engines")
    shutil.copytree(cells / "engines-ours", folder / "results/engines-ours")
    (folder / "plugin-tests.log").write_text("....\n8 passed in 63.10s\n")
    return folder


def call(run: Path, out: Path, *more: str) -> int:
    from publish_engines import main

    ours = run.parent / "bench.json"
    words = ["--run", str(run), "--out", str(out), "--expected", str(EXPECTED), "--ours", str(ours), *more]
    return main(words)


@pytest.fixture(scope="module")
def published(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / "engines-h200"
    folder.mkdir()
    (folder / "NOTES.md").write_text("written by hand\n")
    (folder.parent / "inventory.json").write_text("[]")
    assert call(run, folder, "--commit", "c0ffee1") == 0
    return folder


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_every_name_is_in_the_summary_with_a_number_or_a_reason(published):
    summary = summary_of(published)
    names = [f"step_ms_{engine}_{arm}" for engine in ("sglang", "ours") for arm in ("ar", "dflash", "ddtree", "tfm")]
    names += [name.replace("step_ms", "tau") for name in names] + ["state_gib_fused", "state_gib_recurrent"]
    for name in names:
        entry = summary[name]
        assert entry["n"] > 0 if entry["value"] is not None else entry["n"] == 0 and entry["reason"], name
    assert summary["step_ms_sglang_tfm"]["value"] == 19.2 and summary["step_ms_ours_ar"]["value"] == 14.2
    assert summary["step_ms_sglang_tfm"]["low"] == 19.0 and summary["step_ms_sglang_tfm"]["n"] == 3
    tau = summary["tau_sglang_tfm_t0"]
    # the fake accepts 3, 0, 2 drafts in turn: 1 + 4 + 1 + 3 + 3 of 4 tokens
    assert tau["value"] == pytest.approx(12 / 4) and tau["n"] == 3 and summary["tau_sglang_ar_t0"]["value"] == 1
    assert summary["texts_tfm"]["value"] == 2 and summary["texts_tfm"]["n"] == 3
    assert summary["texts_ar"]["value"] is None


def test_ratios_reach_across_calls_of_one_card_and_say_so(published):
    steps = pd.read_csv(published / "tables/steps.csv").set_index(["engine", "arm", "context"])
    tfm, chain = steps.loc[("sglang", "tfm", 512.0)], steps.loc[("sglang", "dflash", 512.0)]
    assert tfm["over_ar"] == pytest.approx(19.2 / 14.1) and tfm["ar_from"] == "the same call"
    assert tfm["over_ar_low"] < tfm["over_ar"] < tfm["over_ar_high"]
    assert chain["over_ar"] == pytest.approx(19.15 / 14.1) and chain["ar_from"] == "another call"
    ours = steps.loc[("ours", "tfm", 512.0)]
    assert ours["over_ar"] == pytest.approx(20.2 / 14.2) and ours["n"] == 6
    stated = steps.loc["sglang, as stated"].loc["dflash"].iloc[0]
    assert stated["over_ar"] == 1.353 and "not measured here" in stated["reason"]


def test_an_arm_timed_again_is_shown_once_and_the_other_time_is_named(tmp_path):
    for place, values in (("call1", [19.0, 19.4, 19.2]), ("call2", [21.0, 21.4, 21.2])):
        (tmp_path / "run" / place).mkdir(parents=True)
        bench_file(tmp_path / "run" / place / "steps.json", tfm=values)
    assert call(tmp_path / "run", tmp_path / "out", "--commit", "a") == 0
    assert summary_of(tmp_path / "out")["step_ms_sglang_tfm"]["value"] == 21.2
    missing = pd.read_csv(tmp_path / "out/tables/missing.csv").set_index("what")["reason"]
    assert missing["tfm of call1/steps.json"].startswith("timed again in call2/steps.json; its median was 19.20 ms")


def test_a_copy_that_calls_itself_changed_needs_the_publishers_word(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    record = bench_file(tmp_path / "run/steps.json", ar=[14.0, 14.1])
    (tmp_path / "run/steps.json").write_text(json.dumps(record | {"git": {"commit": "0ld0ld0", "dirty": True}}))
    assert call(tmp_path / "run", tmp_path / "out") == 2 and "uncommitted" in capsys.readouterr().err
    assert call(tmp_path / "run", tmp_path / "out", "--commit", "c0ffee1") == 0
    readme = (tmp_path / "out/README.md").read_text()
    assert "Commit c0ffee1" in readme and "copy of the code called itself 0ld0ld0, changed" in readme


def test_another_form_of_an_arm_and_an_older_call_are_named_as_what_they_are(tmp_path):
    for place, arms in (("new", {"ar": [14.0, 14.1], "tfm": [19.0]}), ("old", {"ddtree-recurrent": [31.0]})):
        (tmp_path / "run" / place).mkdir(parents=True)
        bench_file(tmp_path / "run" / place / "steps.json", **arms)
    (tmp_path / "run/form").mkdir()
    record = bench_file(tmp_path / "run/form/steps.json", {"ddtree": "no memory"}, tfm=[24.0])
    record["options"]["plugin"] = ["attention=sglang", "ahead=none"]
    (tmp_path / "run/form/steps.json").write_text(json.dumps(record))
    assert call(tmp_path / "run", tmp_path / "out", "--commit", "aaaaaaa", "old=bbbbbbb") == 0
    steps = pd.read_csv(tmp_path / "out/tables/steps.csv").set_index(["engine", "arm"])
    assert steps.loc[("sglang", "tfm"), "step_ms"] == 19.0
    other = steps.loc[("sglang", "tfm attention=sglang ahead=none")]
    assert other["step_ms"] == 24.0 and other["over_ar"] == pytest.approx(24 / 14.05)
    assert steps.loc[("sglang", "ddtree-recurrent"), "commit"] == "bbbbbbb" and other["commit"] == "aaaaaaa"
    summary, readme = summary_of(tmp_path / "out"), (tmp_path / "out/README.md").read_text()
    assert summary["step_ms_sglang_tfm"]["value"] == 19.0 and not any("sglang_tfm " in name for name in summary)
    assert "failed" not in summary["step_ms_sglang_ddtree"]["reason"]  # another form of it failed
    assert "| DFlash-TfM, plugin attention=sglang ahead=none | 512 | 24.00 | 1.7" in readme
    assert "Of another commit than ar's aaaaaaa" in readme and "SGLang's own kernel: bbbbbbb" in readme


@pytest.mark.parametrize("words", [["a", "b"], ["=a"], ["steps1="], ["steps1=a", "steps1=b"]])
def test_a_commit_that_says_nothing_is_refused(words, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    bench_file(tmp_path / "run/steps.json", ar=[14.0])
    assert call(tmp_path / "run", tmp_path / "out", "--commit", *words) == 2
    assert "--commit: " in (told := capsys.readouterr().err) and "allowed: COMMIT once, CALL=COMMIT" in told


def test_a_chains_states_are_neither_the_fused_nor_the_recurrent_trees(published):
    summary = summary_of(published)
    assert summary["state_gib_fused"]["value"] == 0.21 and summary["state_gib_fused"]["arm"] == "tfm"
    assert summary["state_gib_recurrent"]["value"] is None and "not run" in summary["state_gib_recurrent"]["reason"]
    memory = pd.read_csv(published / "tables/memory.csv").set_index(["engine", "arm"])
    assert memory.loc[("sglang", "dflash"), "node_states_gib"] == 4.5


def test_what_is_missing_is_named_with_its_reason(published):
    missing = pd.read_csv(published / "tables/missing.csv").set_index("what")["reason"]
    assert missing["step of sglang ddtree at 512"] == "failed: ServerError: Capture cuda graph failed; see server.log"
    assert missing["step of sglang ddtree-recurrent at 512"] == "not run"
    assert missing["greedy text of ar"].endswith("status 1; server.log: no memory")
    assert missing["tau of sglang ddtree, t0"] == "2 of its cells missing: not run"
    assert missing["tau of ours dflash, t0"] == "2 of its cells missing: not run"
    # a cell of the other set is missing: what is there is shown and said to lack it
    assert missing["tau of sglang tfm, t0"] == "1 of its cells missing: not run"
    assert missing["tau of sglang ar, t1"] == "2 of its cells missing: not run"
    assert missing["states of the recurrent kernel"] == "ddtree-recurrent: not run"
    assert missing["smoke.json"] == "a smoke run with 8 layers: no time"
    readme = (published / "README.md").read_text()
    assert all(f"- {what}: {reason}." in readme for what, reason in missing.items())


def test_engines_are_paired_by_prompt(published):
    pairs = pd.read_csv(published / "tables/pairs.csv").set_index(["setting", "one", "other", "number"])
    row = pairs.loc[("t0", "sglang tfm", "ours tfm", "tau difference")]
    assert row["n"] == 3 and row["outputs"] == 3 and row["low"] <= row["value"] <= row["high"]
    # the fake server decodes by arithmetic, its methods alike
    assert row["same_tokens"] == 0
    assert pairs.loc[("t0", "sglang tfm", "sglang ar", "same tokens"), "same_tokens"] == 3
    assert pairs.loc[("t0", "sglang tfm", "sglang dflash", "tau ratio"), "value"] == pytest.approx(1)


def test_the_read_me_says_what_was_measured_and_what_was_not(published):
    readme = (published / "README.md").read_text()
    assert readme.startswith("# Inside SGLang: ") and "NVIDIA H200" in readme and (published / "NOTES.md").exists()
    assert "| DFlash-TfM | 512 | 19.20 [19.00, 19.40] | 1.362 [" in readme and "| 3.0 | 20.20 [" in readme
    assert "1.003 [0.990, 1.016] | 3.0 | 20.20" in readme
    assert "| DDTree | 512 | missing |" in readme and "dflash: 19.84 ms, 1.353" in readme
    assert "within 1.4 x ar's inside SGLang: 1.362 [" in readme and ", met.**" in readme
    assert "8 passed in 63.10s" in readme and "Commit c0ffee1" in readme and "64 layers" in readme
    assert "another run" in readme and "did not stand beside each other" in readme
    # the fake server says the same tokens whatever it drafts; the loop decodes a model
    assert "| 0 | DFlash-TfM | 3.00 [3.00, 3.00] | 3 | 3 of 3 | " in readme and "| 0 of 3 |" in readme
    assert "ours: engine torch, float32, " in readme and "sglang: engine sglang, bfloat16, " in readme
    assert "| DFlash-TfM | 3 | 1 | 1 | 1: different | token 7 (0.010; 0.020); token 7 (4.500; 0.020) |" in readme


def test_what_is_published_is_made_again_from_itself_and_names_no_machine(published, tmp_path):
    from packing import read_packed
    from rebuild_published import differences, rebuild

    rebuild(published.parent, yaml.safe_load(EXPECTED.read_text()), tmp_path, figures=False)
    found = {name for name in differences(published.parent, tmp_path) if name.startswith("engines-h200")}
    assert found == set() and len(list(published.glob("tables/*.csv"))) == 6
    again = json.loads((tmp_path / "engines-h200/summary.json").read_text())
    assert again == summary_of(published)
    texts = [json.dumps(read_packed(path)) for path in published.glob("*.json.gz")]
    assert "/tmp/" not in "".join(texts + [path.read_text() for path in published.rglob("*.csv")])
    from tfm.manifest import is_sealed

    assert all(map(is_sealed, read_packed(published / "cells.json.gz")["cells"]))


def test_the_inventory_holds_the_run_behind_all_others(published, tmp_path):
    from inventory import inventory

    entries = inventory(yaml.safe_load(EXPECTED.read_text()), published.parent)
    items = {item["item"]: item for entry in entries for item in entry["items"]}
    row = items["tau_over_dflash"]
    assert (row["run"], row["ours"], row["n"], row["status"]) == ("engines-h200", 1, 3, "not comparable")
    assert row["reason"].startswith("mini inside SGLang")
    # ddtree was not served: nothing is said of it
    assert items["tau_over_ddtree"]["run"] is None and items["tau_over_ddtree"]["status"] == "open"
    assert json.loads((published.parent / "inventory.json").read_text()) == json.loads(json.dumps(entries))
    order = yaml.safe_load(EXPECTED.read_text())["inventory_order"]
    assert order[-1] == "engines-h200"


def test_a_run_that_stopped_early_is_published_as_that(tmp_path):
    (tmp_path / "run").mkdir()
    own_file(tmp_path / "bench.json")
    out = tmp_path / "engines-h200"
    assert call(tmp_path / "run", out) == 2 and not out.exists()
    assert call(tmp_path / "run", out, "--stopped", "first=no server answered in 300 s", "steps=not reached") == 0
    summary = summary_of(out)
    assert summary["step_ms_sglang_tfm"]["reason"] == "not reached" and summary["step_ms_sglang_tfm"]["value"] is None
    assert summary["step_ms_ours_tfm"]["value"] == 20.2
    readme = (out / "README.md").read_text()
    assert "nothing was timed" in readme and "no server answered in 300 s" in readme and "not measured.**" in readme


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--stopped", "stepz=x", "--commit", "a"], "stepz.* is not allowed .allowed: PART=WHY"),
        ([], "--commit: a file of bench_serving.py names no commit"),
        (["--limit", "1000", "--commit", "a"], "more than the limit of 1000"),
    ],
)
def test_bad_input_is_refused_and_leaves_what_was_there(run, published, tmp_path, change, message, capsys):
    import re

    out = tmp_path / "engines-h200"
    shutil.copytree(published, out)
    assert call(run, out, *change) == 2
    assert re.search(message, capsys.readouterr().err)
    assert (out / "summary.json").read_bytes() == (published / "summary.json").read_bytes()


def test_steps_of_two_cards_or_budgets_are_not_laid_beside_each_other(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    bench_file(tmp_path / "run/a.json", ar=[14.0, 14.1])
    other = bench_file(tmp_path / "run/b.json", tfm=[19.0, 19.1])
    for change in ({"device": {"name": "NVIDIA H100"}}, {"options": other["options"] | {"budget": 32}}):
        (tmp_path / "run/b.json").write_text(json.dumps(other | change))
        assert call(tmp_path / "run", tmp_path / "out", "--commit", "a") == 2
        assert "publish them apart" in capsys.readouterr().err


def test_another_engines_cells_are_not_taken_for_ours():
    from engine_taus import engine_of

    names = ("sglang", "sglang-paper", "torch", "torch-static", "vllm")
    assert [engine_of(name) for name in names] == ["sglang", "sglang", "ours", "ours", "vllm"]


def test_a_file_of_the_bench_itself_is_read(bench, tmp_path, monkeypatch):  # noqa: F811
    from served import fault

    fault(monkeypatch)
    bench("--arms", "ar", "tfm", "--repeats", "2", "--commit", "c0ffee1")
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "out.json", tmp_path / "run/steps.json")
    assert call(tmp_path / "run", tmp_path / "engines", "--context", "12", "--ours", str(tmp_path / "none")) == 0
    summary = summary_of(tmp_path / "engines")
    assert summary["step_over_ar_sglang_tfm"]["value"] > 0 and summary["step_ms_ours_tfm"]["value"] is None
    assert summary["state_gib_fused"]["reason"] == "the server logged no size"
    assert "8 layers" in (tmp_path / "engines/README.md").read_text()


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (1.38, 1.35, 1.39, "met"),
        (1.39, 1.36, 1.42, "met, but the interval holds 1.4"),
        (1.41, 1.39, 1.43, "missed, but the interval holds 1.4"),
        (1.45, 1.41, 1.5, "missed"),
        (1.38, None, None, "met"),
    ],
)
def test_a_goal_inside_the_interval_is_not_called_met_or_missed_alone(value, low, high, verdict):
    from engines_readme import _verdict

    assert _verdict({"value": value, "low": low, "high": high}, 1.4) == verdict
