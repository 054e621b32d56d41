"""The DAG: job counts, single cells, and a slice of the nano suite from prompts to report."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from workflow_runs import EVERY_METHOD, NANO, ROOT, SLICE, SMALL, checkout, environment_of, jobs, snakemake

from baselines import suite
from baselines.commands import resume
from tfm.manifest import sealed, write_json

sys.path.insert(0, str(ROOT / "workflows/scripts"))
PROBES = ("estimate_ceiling", "bench_kernel", "check_definitions")
CELL = "results/nano/cells/torch/nano/sample-math"


def test_a_dry_run_counts_its_jobs(tmp_path, tiny_weights):
    folder = checkout(tmp_path, tiny_weights)
    counts = jobs(snakemake(folder, "-n"))
    assert counts == {"prepare_prompts": 3, "write_plan": 1, "decode_cell": 81, "all": 1} | dict.fromkeys(
        ("make_tables", "make_figures", "compare_paper", "write_manifest", "make_report", *PROBES), 1
    )
    # one more budget: a cell of ddtree, dartree and tfm each
    assert jobs(snakemake(folder, "-n", config=["budgets=8,16,32,48"]))["decode_cell"] == 84


def test_a_dry_run_lists_its_jobs_without_weights_and_the_run_names_them(tmp_path):
    config = [*SLICE, f"weights={tmp_path}"]
    text = snakemake(checkout(tmp_path / "code", tmp_path), "-n", config=config)
    assert f"weights: {tmp_path}/drafter holds no file" in text and jobs(text)["decode_cell"] == 21
    text = snakemake(tmp_path / "code", config=config, expect=1)
    assert "tokenizer" in text and "Traceback" not in text and str(tmp_path / "target") in text


def test_a_dry_run_lists_the_cells_of_a_method_that_is_asked_for():
    text = snakemake(ROOT, "-n", "--forceall", config=[EVERY_METHOD, *SMALL])
    cells = set(re.findall(rf"{CELL}/(\S+)/requests.parquet", text))
    assert {cell for cell in cells if cell.startswith("dartree")} == {
        *(f"dartree-b64-w12/{setting}/seed0" for setting in ("t0", "t1")),
        *(f"dartree-b{budget}-w12/t1/seed0" for budget in NANO["budgets"]),
        *(f"dartree-b64-w{width}/t1/seed0" for width in NANO["dartree_widths"]),
        *(f"dartree-b64-w12-d{depth}/t1/seed0" for depth in NANO["depths"]),
        "dartree-b64-w12-stages/t1/seed0",
    }
    assert "tfm-b64-w4-r0/t1/seed0" in cells


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("sample-math/ar/t0.0/seed0", ["setting: 't0.0' is another spelling; write 't0'"]),
        ("sample-math/ar/t1/seed00", ["seed: '00'"]),
        ("/sglang/nano/sample-math/ar/t1/seed0", ["is not a cell of suite nano", "cells/torch/nano"]),
        ("/torch/nono/sample-math/ar/t1/seed0", ["is not a cell of suite nano", "cells/torch/nano"]),
        ("sample-math/dflsh/t1/seed0", ["method: 'dflsh'", "did you mean dflash?"]),
        ("sample-mth/ar/t1/seed0", ["dataset: 'sample-mth'", "did you mean sample-math?"]),
        ("sample-math/tfm-b64/t1/seed0", ["variant: 'tfm-b64'", "tfm-bN-wN"]),
        ("sample-math/ar/warm/seed0", ["setting: 'warm'", "t0.6"]),
        ("sample-math/ar/t1/seed-1", ["seed: '-1'"]),
        ("sample-math/ar/t1", ["is not a cell of suite nano", "DATASET/VARIANT/SETTING/seedN"]),
    ],
)
def test_a_path_that_is_no_cell_gets_a_readable_error(cell, words):
    cell = cell[1:] if cell.startswith("/") else f"torch/nano/{cell}"
    path = f"results/nano/cells/{cell}/requests.parquet"
    text = snakemake(ROOT, "-n", path, expect=1)
    assert all(word in text for word in words), text[-2000:]


def test_the_workflow_lints_but_for_containers():
    text = snakemake(ROOT, "--lint", expect=None)
    found = set(re.findall(r"^    \* (.*?)(?:\.:|:)$", text, flags=re.MULTILINE))
    # PYTHON: the training rules name the interpreter by a variable; SERVER: where a server lives is no parameter, whose
    # change would run finished cells again
    allowed = {"Specify a conda environment or container for each rule"}
    allowed |= {
        f"Shell command directly uses variable {name} from outside of the rule" for name in ("PYTHON", "SERVER")
    }
    assert found <= allowed, text


def test_rules_are_formatted():
    snakefmt = Path(sys.executable).with_name("snakefmt")
    if not snakefmt.exists():
        pytest.skip("snakefmt is not installed")
    done = subprocess.run([snakefmt, "--check", "Snakefile", "workflows"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_suite_runs_end_to_end_with_one_core(finished):  # C119
    out = finished / "results/nano"
    headline = pd.read_csv(out / "tables/headline.csv")
    assert set(headline["variant"]) == {"ar", "dflash", "ddtree-b8", "dartree-b8-w3", "tfm-b8-w2"}
    assert (headline["n"] == 2).all() and (headline["tok_s"] > 0).all()
    # every method emits ar's tokens, greedy and at temperature 1
    assert (headline["same_as_ar"] == headline["compared"]).all() and (headline["compared"] == 2).all()
    summary = json.loads((out / "summary.json").read_text())
    for name in [
        f"{metric}_{method}_{t}" for metric in ("tau", "accepted") for method in NANO["methods"] for t in ("T0", "T1")
    ]:
        assert set(summary[name]) == {"value", "low", "high", "n", "unit"}, name
    assert summary["cells"]["value"] == 21 and summary["suite_seconds"]["value"] > 0
    sweeps = pd.read_csv(out / "tables/sweeps.csv")
    residual = sweeps[sweeps["sweep"] == "residual"]
    assert residual[["value", "variant"]].values.tolist() == [[0, "tfm-b8-w2-r0"], [1, "tfm-b8-w2"]]
    assert residual["tau"].notna().all()
    compare = pd.read_csv(out / "compare.csv")
    assert set(compare["row"]) == set(range(1, 31)) and compare.loc[compare["status"] != "pass", "reason"].notna().all()
    status = compare.set_index("item")["status"]
    assert status["tok_s_tfm"] == "not comparable" and status["public_pins"] == "open"
    kept = ("gdn_error_float64", "commit_error_float64", "same_as_ar_share", "weaver_parameters", "expansions_b64_w4")
    assert (status[list(kept)] == "pass").all(), status[list(kept)]
    for probe in ("ceiling", "ceiling_claims", "kernels", "sanity"):
        assert len(pd.read_csv(out / f"tables/{probe}.csv")) > 3, probe
    for name in NANO["figures"]:
        assert all((out / f"figures/{name}.{form}").stat().st_size > 0 for form in ("pdf", "svg", "png", "txt"))


def test_code_and_text_of_prompts_make_them_stale(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, symlinks=True)
    source = folder / "tfm/prompts.py"
    source.write_text(source.read_text().replace('"raw": "{turn}"', '"raw": "{turn}\\n"'))
    assert jobs(snakemake(folder, "-n", config=SLICE))["prepare_prompts"] == 1


def test_stages_add_up_to_the_decode_wall(finished):
    table = pd.read_csv(finished / "results/nano/tables/latency.csv")
    for _, rows in table[table["level"] == "stage"].groupby("variant"):
        assert abs(rows["share"].sum() - 1) < 0.01 and (rows["us"] >= -1).all()


def test_captions_state_verified_rows_and_what_is_open(finished):  # C019
    captions = json.loads((finished / "results/nano/tables/captions.json").read_text())
    of_cells = {name: text for name, text in captions.items() if name not in ("ceiling", "ceiling_claims", "kernels")}
    assert all("8 drafted nodes, 9 verified rows" in text and "Open: " in text for text in of_cells.values())
    assert "2 anchors" in captions["ceiling"] and "4 continuations" in captions["ceiling"]
    assert "2 value heads" in captions["kernels"] and "(cpu), 1 thread" in captions["kernels"]
    steps = pd.read_parquet(finished / CELL / "ddtree-b8/t1/seed0/steps.parquet")
    assert (steps["nodes"] == 8 + 1).all()


def test_snakemakes_own_report_holds_every_table_and_figure_and_needs_no_network(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, symlinks=True)
    alone = ("unshare", "--user", "--map-root-user", "--net")
    wrapper = alone if subprocess.run([*alone, "true"], capture_output=True).returncode == 0 else ()
    snakemake(copy, "--report", "report.html", config=SLICE, wrapper=wrapper)
    text = (copy / "report.html").read_text()
    for place, form in (("tables", "csv"), ("figures", "svg")):
        names = {path.name for path in (copy / "results/nano" / place).glob(f"*.{form}")}
        assert names and all(name in text for name in names), place


def test_a_second_call_does_nothing(finished):
    assert "Nothing to be done" in snakemake(finished, config=SLICE)


def test_one_cell_is_run_again_with_what_hangs_on_it(finished):  # C115
    before = {path: path.stat().st_mtime_ns for path in finished.glob(f"{CELL}/*/*/*/cell.json")}
    path = f"{CELL}/ar/t0/seed0"
    counts = jobs(snakemake(finished, "-n", "-R", f"{path}/requests.parquet", config=SLICE))
    assert counts["decode_cell"] == 1 and counts["make_tables"] == 1 and "prepare_prompts" not in counts
    snakemake(finished, "--force", f"{path}/requests.parquet", config=SLICE)
    after = {path: path.stat().st_mtime_ns for path in finished.glob(f"{CELL}/*/*/*/cell.json")}
    assert [
        changed.parent.relative_to(finished).as_posix() for changed in before if before[changed] != after[changed]
    ] == [path]


def test_a_new_value_runs_only_new_cells(finished):  # C107
    counts = jobs(snakemake(finished, "-n", config=[*SLICE[:-2], "budgets=4,2", SLICE[-1]]))
    assert counts["decode_cell"] == 3
    counts = jobs(snakemake(finished, "-n", config=[*SLICE, "title=another"]))
    assert "decode_cell" not in counts and counts["make_report"] == 1


def test_code_of_one_method_makes_only_its_cells_stale(finished, tmp_path):  # C105
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, symlinks=True)
    assert "decode_cell" not in jobs(snakemake(folder, "-n", config=SLICE))
    source = folder / "baselines/dflash.py"
    source.write_text(source.read_text() + "\n# a comment\n")
    assert "decode_cell" not in jobs(snakemake(folder, "-n", config=SLICE))
    source.write_text(source.read_text() + "\nCHANGED = True\n")
    assert jobs(snakemake(folder, "-n", config=SLICE))["decode_cell"] == 3


@pytest.mark.parametrize("size", ["half", "empty"])
def test_tables_refuse_a_truncated_record(finished, tmp_path, size):  # C117
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, symlinks=True)
    path = f"{CELL}/ar/t0/seed0/steps.parquet"
    data = (folder / path).read_bytes()
    (folder / path).write_bytes(data[: len(data) // 2] if size == "half" else b"")
    done = tables(folder)
    assert done.returncode == 2 and path in done.stderr
    assert f"snakemake --cores all --force {CELL}/ar/t0/seed0/requests.parquet" in done.stderr


def test_tables_refuse_mixed_source_digests_and_name_missing_cells(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, symlinks=True)
    facts = folder / CELL / "tfm-b8-w2/t0/seed0/cell.json"
    write_json(facts, sealed({**json.loads(facts.read_text()), "source_digest": "0" * 64}))
    done = tables(folder)
    assert done.returncode == 2 and "source_digest of tfm" in done.stderr
    assert tables(folder, "--allow-mixed").returncode == 0
    assert "MIXED: source_digest of tfm" in (folder / "results/nano/tables/headline.md").read_text()
    shutil.rmtree(facts.parent)
    assert tables(folder, "--allow-missing").returncode == 0
    headline = pd.read_csv(folder / "results/nano/tables/headline.csv").set_index(["variant", "setting"])
    row = headline.loc[("tfm-b8-w2", "t0")]
    assert pd.isna(row["tau"]) and "not run" in row["reason"]


def tables(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    call = [sys.executable, "workflows/scripts/make_tables.py", "--plan", "results/nano/plan.json", *arguments]
    environment = environment_of(folder)
    return subprocess.run([*call, "--out", "results/nano"], cwd=folder, env=environment, capture_output=True, text=True)


def test_published_records_rebuild_their_tables(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, symlinks=True)
    snakemake(folder, "publish", config=SLICE)
    out = folder / "results/published/nano"
    assert sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) < 5 * 2**20
    (folder / "tfm/weights/nano").unlink()  # tables need no weights
    call = [sys.executable, "workflows/scripts/make_tables.py", "--plan", out / "plan.json.gz", "--records", out]
    environment = environment_of(folder)
    subprocess.run([*call, "--out", tmp_path / "again"], cwd=folder, env=environment, check=True, capture_output=True)
    for path in sorted((out / "tables").glob("*.csv")):
        assert path.read_bytes() == (tmp_path / "again/tables" / path.name).read_bytes(), path.name
    # one command for everything published, which finds a number that its records do not give
    snakemake(folder, "rebuild_published", config=SLICE)
    report = json.loads((folder / "results/rebuilt/rebuilt.json").read_text())
    assert report["different"] == {} and report["compared"] >= len(NANO["tables"]) + 2
    assert (folder / "results/rebuilt/nano/figures/tau.pdf").stat().st_size > 0
    table = out / "tables/audit.csv"
    table.write_text(table.read_text().replace("0.", "1.", 1))
    text = snakemake(folder, "rebuild_published", config=SLICE, expect=1)
    assert "results/published/nano/tables/audit.csv is not what its records give: line " in text


def test_cells_of_uncommitted_code_are_not_published(finished, tmp_path):
    from publish import load_published, pack

    cell = tmp_path / "cell"
    shutil.copytree(finished / CELL / "ar/t0/seed0", cell)
    facts = json.loads((cell / "cell.json").read_text())
    facts["environment"]["git"]["dirty"] = True
    write_json(cell / "cell.json", sealed(facts))
    with pytest.raises(ValueError, match="1 of 1 cells were made by uncommitted code"):
        pack([cell], tmp_path)
    (tmp_path / "cells.json.gz").write_bytes(b"{")
    with pytest.raises(ValueError, match="cells.json.gz is damaged.*restore it from git"):
        load_published(tmp_path)


def test_a_missing_or_damaged_plan_is_named(tmp_path):
    from input_files import read_plan

    for text, words in [(None, " is missing"), ("{", " is damaged"), ("{}", ": config: missing key")]:
        if text is not None:
            (tmp_path / "plan.json").write_text(text)
        with pytest.raises(ValueError, match=f"plan.json{words}.*snakemake --cores all"):
            read_plan(tmp_path / "plan.json")


def test_a_disturbed_timing_is_flagged():
    import tables as library

    shares = [{"cpu_share": share} for share in (1.0, 0.5, None, 1.0)]
    records = library.Records(shares, None, None, None, {})
    data = library.Suite({}, [], records, None)
    arm = pd.DataFrame({"cell": [0, 0, 1, 1, 2, 2, 3], "clock": ["wall"] * 6 + ["off"], "dataset": "s", "steps": 2})
    arm["decode_us"] = [10.0, 12, 10, 12, 10, 40, None]
    assert library._disturbed(data, arm[arm["cell"] == 0]) == ""
    assert library._disturbed(data, arm) == "s cpu share 0.50; s step times spread 4.0x"


@pytest.mark.parametrize("ending", ["legacy_traversal", "traversal", "sampled-traversal"])
def test_a_rule_whose_tokens_are_not_ars_is_refused_in_the_headline(monkeypatch, ending):
    import tables as library

    config = suite.resolve(NANO)
    variant = suite.parse_variant(f"tfm-b64-w4-{ending}", config)
    monkeypatch.setattr(suite, "headline", lambda _: [variant])
    data = library.Suite(config, suite.expand(suite.resolve(NANO)), None, pd.DataFrame())
    with pytest.raises(ValueError, match=f"rule '{variant.rule}' is not allowed .*target_only.*audit"):
        library.headline(data)


def suite_cell(folder: Path, variant: str, setting: str) -> dict:
    plan = json.loads((folder / "results/nano/plan.json").read_text())
    return next(cell for cell in plan["cells"] if (cell["variant"], cell["setting"]) == (variant, setting))


def test_parts_of_a_list_hold_every_cell_once_and_alike():
    from run_cells import part_of

    cells = [{"number": number} for number in range(23)]
    parts = [part_of(cells, f"{i}/5") for i in range(1, 6)]
    assert sorted(cell["number"] for part in parts for cell in part) == list(range(23))
    assert {len(part) for part in parts} == {4, 5} and part_of(cells, None) == cells
    for wrong in ("0/5", "6/5", "1/0", "half", "1/2/3", "-1/5"):
        with pytest.raises(ValueError, match="--part: .*allowed: I/N"):
            part_of(cells, wrong)


def test_run_cells_needs_no_snakemake_and_gives_the_same_records(finished, tmp_path):
    cell = suite_cell(finished, "dflash", "t0")
    (tmp_path / "list").write_text(json.dumps(cell) + "\n")
    shutil.copytree(finished / "results/nano/prompts", tmp_path / "out/results/nano/prompts")
    call = [sys.executable, "workflows/scripts/run_cells.py", "--list", tmp_path / "list", "--out", tmp_path / "out"]
    environment = environment_of()  # nothing of the checkout
    done = subprocess.run(
        [*call, "--commit", "abc"], cwd=finished, env=environment, check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"cells": 1, "run": 1, "left": 0, "failed": {}}
    facts, original = (
        json.loads((root / cell["path"] / "cell.json").read_text()) for root in (tmp_path / "out", finished)
    )
    assert facts["cell_digest"] == original["cell_digest"] and facts["environment"]["git"]["commit"] == "abc"
    # the command is for a checkout, not for the folder that stood in for one
    assert facts["rerun"] == f"snakemake --cores all --force {cell['path']}/requests.parquet" == original["rerun"]


def test_resume_unlocks_and_goes_on(finished, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, symlinks=True)
    locks = folder / ".snakemake/locks"
    locks.mkdir(parents=True, exist_ok=True)
    (locks / "0.output.lock").write_text(str(folder / CELL / "ar/t0/seed0/steps.parquet") + "\n")
    assert resume.resume(["-n", "--cores", "1", "--config", *SLICE], folder=folder) == 0
    assert not list(locks.glob("*"))


def test_resume_refuses_where_nothing_can_be_resumed(tmp_path):
    with pytest.raises(ValueError, match="no Snakefile"):
        resume.resume([], folder=tmp_path)


def test_resume_refuses_while_snakemake_is_alive(tmp_path):
    (tmp_path / "Snakefile").write_text("rule all:\n")
    sleeper = tmp_path / "snakemake"
    sleeper.write_text("import time\ntime.sleep(60)\n")
    with subprocess.Popen([sys.executable, str(sleeper)], cwd=tmp_path) as process:
        try:
            with pytest.raises(ValueError, match=f"snakemake is running here .process {process.pid}"):
                resume.resume([], folder=tmp_path)
        finally:
            process.kill()
