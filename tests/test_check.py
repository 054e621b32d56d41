"""`check` and `bless`: an unchanged tree passes, each planted regression fails by its name and says what to run."""

import difflib
import json
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import campaign_check
import pytest
import torch
import yaml
from workflow_runs import ROOT, jobs, snakemake

from baselines import suite
from tfm import decode as loop
from tfm.acceptance import accept
from tfm.cells import load_cells
from tfm.drafter import Drafter
from tfm.manifest import sealed, write_json
from tfm_kernels import conv

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import bless
import check
import expectations
import prepare_prompts
from decode_cell import run_cell
from kernel_runs import load_kernel_run
from make_tables import write_tables

CONFIG = yaml.safe_load((ROOT / "workflows/config/ci-cpu.yaml").read_text())
# one set and three methods of suite ci-cpu: six cells
SMALL = {"datasets": ["sample-math"], "methods": ["ar", "dflash", "tfm"], "audit": [], "kernels": None}
SMALL |= {"prompts": 2, "requests": 2, "max_new_tokens": 16}
SMALL |= {"tables": ["headline", "per_set", "sanity"], "figures": ["tau"]}
EXPECTED = yaml.safe_load((ROOT / "workflows/config/expected.yaml").read_text())
BENCH = ROOT / "results/published/kernels-h200"


# --- a run in this process, so that a fault can be planted in it and not in the code


def write_run(folder: Path, monkeypatch, *, only=lambda cell: True) -> None:
    """Decode the chosen cells of the small suite below `folder` and make its tables."""
    monkeypatch.chdir(folder)
    config = suite.resolve({**CONFIG, **SMALL})
    cells, out = suite.expand(config), Path("results/ci-cpu")
    prompts = out / "prompts/nano/sample-math.jsonl"
    if not prompts.exists():
        words = ["--dataset", "sample-math", "--source", "embedded", "--tokenizer", "tfm/weights/nano/target"]
        words += ["--target", "nano", "--out", str(prompts), "--context", "2048", "--max-new-tokens", "16"]
        prompts.parent.mkdir(parents=True)
        prepare_prompts.run(prepare_prompts.parse([*words, "--limit", "2", "--pins", str(suite.PINS_FILE)]))
    for cell in filter(only, cells):
        shutil.rmtree(cell["path"], ignore_errors=True)
        run_cell(cell, prompts=prompts, out=Path(cell["path"]), commit="c0ffee")
    torch.set_grad_enabled(True)  # a cell's process has no use for gradients; this one has
    plan = {"config": config, "cells": cells, "draft_rows": 15}
    (out / "plan.json").write_text(json.dumps(plan))
    write_tables(plan, load_cells([cell["path"] for cell in cells]), out)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """The small suite of the unchanged tree, and what `bless` proposes of it as expectations."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "tfm").symlink_to(ROOT / "tfm")
    with pytest.MonkeyPatch.context() as patch:
        write_run(folder, patch)
        blank = folder / "blank.yaml"
        blank.write_text(yaml.safe_dump({**EXPECTED, "runs": {}}))
        words = ["--plan", "results/ci-cpu/plan.json", "--expected", str(blank), "--out", "proposed.yaml"]
        assert bless.main(words) == 0
    proposed = yaml.safe_load((folder / "proposed.yaml").read_text())
    (folder / "expected.yaml").write_text(yaml.safe_dump({**EXPECTED, **proposed}))
    return folder


@pytest.fixture
def copy(unchanged, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(unchanged, folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


def run_check(folder: Path, *words) -> int:
    paths = ["--plan", "results/ci-cpu/plan.json", "--expected", "expected.yaml", "--out", "check"]
    return check.main([*paths, "--published", str(ROOT / "results/published"), *map(str, words)])


def failed_cases(folder: Path) -> dict[str, str]:
    """The failed test cases of junit.xml, with their text."""
    top = ElementTree.parse(folder / "check/junit.xml").getroot()
    cases = {case.get("name"): case.find("failure") for case in top.iter("testcase")}
    assert int(top.get("tests")) == len(cases) and int(top.get("failures")) == sum(
        c is not None for c in cases.values()
    )
    return {name: failure.text for name, failure in cases.items() if failure is not None}


def test_an_unchanged_tree_passes(copy, capsys):
    assert run_check(copy) == 0 and not failed_cases(copy)
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert counts["pass"] >= 10 and counts["fail"] == 0
    assert "passed" in (copy / "check/summary.md").read_text()


def test_text_of_any_kind_leaves_the_reports_readable():
    """A CI reads the file, and one sign that XML lacks loses all of its cases."""
    hostile = 'a<b> & "c" ]]> \x1b[31m\x00 | \ud800 two\r\nlines \u2028'
    found = expectations.Finding(hostile, "fail", hostile, hostile, hostile, hostile, hostile)
    skipped = expectations.Finding("item", "not comparable", "", "", hostile)
    top = ElementTree.fromstring(check.to_junit(hostile, hostile, [found, skipped]))
    assert [case.get("name") for case in top.iter("testcase")][1] == "item"
    assert "a<b>" in top.find("testcase").get("name") and "]]>" in top.find("testcase/failure").text
    table = check.to_markdown("s", "c", [found, skipped]).partition("| --- |")[2].splitlines()[1:]
    assert len(table) == 2 and all(line.startswith("| ") and line.endswith(" |") for line in table)


def lossy(tree, logits, *, rule, **named):
    """The rule of the oldest public kernel in place of the one that was asked for."""
    return accept(tree, logits, rule="legacy_traversal", **named)


def windows_of_neighbours(parents, width):
    """The rows that stand before a node instead of its ancestors: right for a chain, wrong for a tree."""
    rows = torch.arange(width - 1, width - 1 + parents.shape[1]).expand(parents.shape)
    return torch.stack([rows - back for back in range(width)][::-1], dim=-1)


draft = Drafter.draft


def one_row_late(self, roots, cache, target):
    """Node at depth d reads the marginal of depth d + 1."""
    return tuple(part.roll(-1, dims=1) for part in draft(self, roots, cache, target))


PLANTED = {  # fault -> (what is replaced, cells that it reaches, items that must fail, items that must not, hint)
    "lossy_verifier": (
        (loop, "accept", lossy),
        lambda cell: cell["decode"]["method"] == "tfm",
        {"same_as_ar_tfm_T1"},
        {"same_as_ar_tfm_T0", "same_as_ar_dflash_T1"},
        "the acceptance rule",
    ),
    "wrong_conv_window": (
        (conv, "window_index", windows_of_neighbours),
        lambda cell: cell["decode"]["method"] == "tfm",
        {"same_as_ar_tfm_T0", "same_as_ar_tfm_T1"},
        {"same_as_ar_dflash_T0", "same_as_ar_dflash_T1"},
        "tree verification",
    ),
    "off_by_one_drafter_row": (
        (Drafter, "draft", one_row_late),
        lambda cell: cell["decode"]["method"] != "ar",
        {"tau_dflash_T0", "tau_dflash_T1", "tau_tfm_T0", "tau_tfm_T1"},
        {"same_as_ar_tfm_T0", "same_as_ar_tfm_T1", "same_as_ar_dflash_T1"},
        "the drafter's rows",
    ),
}


@pytest.mark.parametrize("fault", list(PLANTED))
def test_a_planted_regression_fails_by_its_name(copy, monkeypatch, capsys, fault):
    where, reached, wanted, unharmed, hint = PLANTED[fault]
    with monkeypatch.context() as planted:
        planted.setattr(*where)
        write_run(copy, planted, only=reached)
    monkeypatch.chdir(copy)
    assert run_check(copy) == 1
    failed, printed = failed_cases(copy), capsys.readouterr().err
    assert wanted <= set(failed) and not unharmed & set(failed), failed
    for name in wanted:
        line = next(line for line in printed.splitlines() if line.startswith(f"check: {name}: "))
        assert "expected " in line and ", got " in line
    # the command names the cells of the item, of that setting alone
    name = min(wanted)
    command = failed[name].splitlines()[-1]
    assert command.startswith("snakemake check --cores all --configfile workflows/config/ci-cpu.yaml -R results/")
    setting = name.rpartition("_")[2].lower()
    assert f"/{setting}/seed0/requests.parquet" in command and len({w.split("/")[-3] for w in command.split()[7:]}) == 1
    assert "look first at: " in printed and hint in printed.partition("look first at: ")[2]
    assert "FAILED" in (copy / "check/summary.md").read_text()


def test_an_item_that_was_not_measured_fails_and_a_time_of_another_card_does_not_count(copy):
    expected = yaml.safe_load((copy / "expected.yaml").read_text())
    number = {"value": 2.0, "tolerance": 0.1, "source": "a test"}
    expected["runs"]["ci-cpu"]["any"]["tau_tfm_T0.6"] = number
    expected["runs"]["ci-cpu"]["NVIDIA H200"] = {"tok_s_tfm_T1": number}
    (copy / "expected.yaml").write_text(yaml.safe_dump(expected))
    assert run_check(copy) == 1
    assert set(failed_cases(copy)) == {"tau_tfm_T0.6"}
    text = (copy / "check/summary.md").read_text()
    assert "`tok_s_tfm_T1` | ≠ not comparable" in text and "a number of NVIDIA H200, this is" in text


def test_bless_proposes_and_writes_no_expectation(copy, capsys):
    before = (copy / "expected.yaml").read_bytes()
    expected = yaml.safe_load(before)
    entry = expected["runs"]["ci-cpu"]["any"]["tau_tfm_T1"]
    entry |= {"value": 1.0, "tolerance": 0.123}
    (copy / "expected.yaml").write_text(yaml.safe_dump(expected))
    before = (copy / "expected.yaml").read_bytes()
    words = ["--plan", "results/ci-cpu/plan.json", "--expected", "expected.yaml", "--out", "proposed.yaml"]
    assert bless.main(words) == 0
    printed = capsys.readouterr().err
    assert "-      tau_tfm_T1: {value: 1.0," in printed and "nothing was written to expected.yaml" in printed
    assert (copy / "expected.yaml").read_bytes() == before
    proposed = yaml.safe_load((copy / "proposed.yaml").read_text())["runs"]["ci-cpu"]["any"]["tau_tfm_T1"]
    assert proposed["value"] > 2 and proposed["tolerance"] == 0.123 and "c0ffee" in proposed["source"]


def test_numbers_of_uncommitted_code_are_not_proposed(copy):
    path = next(Path("results/ci-cpu/cells").rglob("cell.json"))
    facts = json.loads(path.read_text())
    facts["environment"]["git"]["dirty"] = True
    write_json(path, sealed(facts))
    with pytest.raises(ValueError, match="made by uncommitted code; commit it"):
        bless.source_of(json.loads(Path("results/ci-cpu/plan.json").read_text()))


def test_the_same_requests_are_compared_with_the_last_published_run(copy):
    plan = json.loads(Path("results/ci-cpu/plan.json").read_text())
    records = load_cells([cell["path"] for cell in plan["cells"]])
    found = expectations.against_published(records, records, plan)
    assert len(found) == 6 and {one.status for one in found} == {"pass"}
    other = load_cells([cell["path"] for cell in plan["cells"]])
    other.requests.loc[other.requests["variant"] == "dflash", "steps"] += 1
    found = {one.item: one for one in expectations.against_published(records, other, plan)}
    failed = {name for name, one in found.items() if one.status == "fail"}
    assert failed == {"published_tau_dflash_t0", "published_tau_dflash_t1"}
    assert "sample-math/dflash/t0/seed0/requests.parquet" in found["published_tau_dflash_t0"].command
    # a run of other prompts has nothing in common with it
    other.requests["id"] += "x"
    assert expectations.against_published(records, other, plan) == []


# --- kernels


def slowed(folder: Path, share: float, arm: str = "fused_cuda") -> Path:
    """A copy of the published run in which one arm takes longer."""
    shutil.copytree(BENCH, folder)
    samples = json.loads((folder / "samples.json").read_text())
    for arms in samples.values():
        arms.update({name: [value * share for value in values] for name, values in arms.items() if name == arm})
    (folder / "samples.json").write_text(json.dumps(samples))
    return folder


def test_a_slower_kernel_fails_by_its_name_and_only_that_one(copy, tmp_path, capsys):
    assert run_check(copy, "--bench", slowed(tmp_path / "slow", 1.25)) == 1
    failed = failed_cases(copy)
    assert {"kernel_us_fused_cuda_random_T64", "kernel_us_fused_cuda_random_T128"} <= set(failed)
    assert all(name.startswith("kernel_us_fused_cuda_") and "plain" not in name for name in failed)
    assert "slower by 25%" in failed["kernel_us_fused_cuda_random_T64"] and "bench.py" in failed[min(failed)]
    assert "a kernel is slower than published" in capsys.readouterr().err


def test_the_kernel_that_is_planted_on_a_card_differs_by_one_launch(tmp_path):
    planted = campaign_check.plant(tmp_path / "code")
    lines = (planted / "kernels/gdn/csrc/tree_verify.cu").read_text().splitlines()
    before = (ROOT / "kernels/gdn/csrc/tree_verify.cu").read_text().splitlines()
    added = [line for line in difflib.ndiff(before, lines) if line[0] in "+-"]
    assert len(added) == 1 and added[0].startswith("+   tfm::launch(kernel, grid, ") and added[0].endswith(", args);")
    shapes = {f"random_T{rows}" for rows in (64, 65, 128)}
    assert {name.rpartition("cuda_")[2] for name in campaign_check.SLOWED} <= shapes
    assert "SIZES = (64, 65, 128)" in (planted / campaign_check.BENCH).read_text()


@pytest.mark.parametrize("share", [1.0, 1.05, 0.5])
def test_a_kernel_within_the_tolerance_or_faster_passes(copy, tmp_path, share):
    assert run_check(copy, "--bench", slowed(tmp_path / "timed", share)) == 0


def test_kernel_times_of_another_card_are_not_comparable(tmp_path):
    folder = slowed(tmp_path / "run", 9.0)
    facts = json.loads((folder / "summary.json").read_text())
    facts["environment"]["gpu"] = "NVIDIA B200"
    (folder / "summary.json").write_text(json.dumps(facts))
    found = expectations.check_kernels(load_kernel_run(folder), load_kernel_run(BENCH), tolerance=0.1)
    assert [one.status for one in found] == ["not comparable"] and "this is NVIDIA B200" in found[0].reason


@pytest.mark.parametrize("name", ["samples.json", "summary.json"])
def test_a_damaged_kernel_run_is_named(tmp_path, name):
    folder = slowed(tmp_path / "run", 1.0)
    (folder / name).write_text('{"random-T16": ')
    with pytest.raises(ValueError, match=f"{name} is missing or damaged.*bench.py"):
        load_kernel_run(folder)


# --- what is expected, and the rules


@pytest.mark.parametrize("name", ["ci", "ci-cpu"])
def test_every_expectation_names_value_tolerance_and_source(name):
    runs = EXPECTED["runs"][name]
    config = suite.resolve(yaml.safe_load((ROOT / f"workflows/config/{name}.yaml").read_text()))
    drafting = {f"tau_{method}_T{t}" for method in config["methods"] if method != "ar" for t in config["temperatures"]}
    assert drafting <= set(runs["any"])
    for items in runs.values():
        for entry in items.values():
            assert set(entry) == {"value", "tolerance", "source"} and entry["source"]
            assert 0 < entry["tolerance"] < 0.15 * entry["value"]


@pytest.mark.parametrize(
    ("entry", "status"),
    [
        ({"value": 1.001, "low": 0.99, "high": 1.01, "n": 9}, "pass"),
        ({"value": 1.004, "low": 1.003, "high": 1.006, "n": 9}, "pass"),
        ({"value": 1.08, "low": 1.06, "high": 1.1, "n": 9}, "fail"),
        ({"value": 0.9, "low": 0.88, "high": 0.93, "n": 9}, "fail"),
        # of four prompts all lie on one side of 1 in an eighth of all undisturbed runs
        ({"value": 1.03, "low": 1.01, "high": 1.05, "n": 4}, "pass"),
        ({"value": 0.626, "low": 0.6125, "high": 0.639, "n": 4}, "fail"),
        ({"value": 0.9, "low": 0.9, "high": 0.9, "n": 1}, "fail"),
    ],
)
def test_ar_against_ar_has_to_hold_one(entry, status):
    plan = {"config": {"suite": "ci", "dtype": "float32"}, "cells": []}
    found = expectations.check_run(EXPECTED | {"runs": {}}, plan, {expectations.NULL: entry}, card="a card")
    assert [(one.item, one.status) for one in found] == [(expectations.NULL, status)]


def test_check_and_bless_are_rules_that_hang_on_every_cell():
    counts = jobs(snakemake(ROOT, "-n", "check", "bless", "--forceall", "--configfile", "workflows/config/ci-cpu.yaml"))
    assert counts["decode_cell"] == 31 and counts["check"] == counts["bless"] == 1 and "make_figures" not in counts
    counts = jobs(snakemake(ROOT, "-n", "check", "--forceall", "--configfile", "workflows/config/ci.yaml"))
    assert counts["decode_cell"] == 33 and counts["bench_graphs"] == 1
