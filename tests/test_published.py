"""What is published: tables made again byte for byte, and an inventory of the paper from which nothing is absent."""

import json
import shutil
import sys

import pandas as pd
import pytest
import yaml
from workflow_runs import NANO, ROOT, jobs, snakemake

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import inventory as library
import tables
from compare_paper import compare, devices_of, write_comparison
from input_files import read_plan
from inventory import inventory, run_folders, to_frame, write_inventory
from kernel_figure import bandwidth_of, roofline
from kernel_runs import kernel_summary, load_kernel_run
from make_paper import write_paper
from packing import PLAN, published_folders, read_packed, write_packed
from probe_records import load_probes
from publish import load_published
from rebuild_published import ENGINE_RUN, differences, main, rebuild_kernels
from summarise_engines import MARK

from baselines import suite
from tfm.manifest import sha256_file

PUBLISHED = ROOT / "results/published"
EXPECTED = yaml.safe_load((ROOT / "workflows/config/expected.yaml").read_text())


# the tables that take a second or less; rule rebuild_published makes all of them
QUICK = ("headline", "latency", "acceptance_by_position", "audit", "ceiling_claims", "kernels")


@pytest.fixture(scope="module")
def nano():
    """The published suite, read from its records."""
    folder = PUBLISHED / "nano"
    return tables.Suite.of(read_plan(folder / PLAN), load_published(folder), load_probes(folder))


@pytest.mark.parametrize("name", QUICK)
def test_a_published_table_is_what_its_records_give_byte_for_byte(nano, name):
    text = tables.TABLES[name](nano).to_csv(index=False, lineterminator="\n")
    assert text.encode() == (PUBLISHED / f"nano/tables/{name}.csv").read_bytes()


def test_the_published_kernel_table_is_what_its_samples_give(tmp_path):
    rebuild_kernels(PUBLISHED / "kernels-h200", tmp_path)
    assert (tmp_path / "kernels.csv").read_bytes() == (PUBLISHED / "kernels-h200/kernels.csv").read_bytes()
    assert all((tmp_path / f"kernels.{form}").stat().st_size > 5000 for form in ("pdf", "svg"))
    table = pd.read_csv(tmp_path / "kernels.csv")
    ours = table[(table["arm"] == "fused_cuda") & (table["shape"] == "random")].set_index("rows")["us"]
    # nothing is faster than moving its bytes once
    assert all(us > roofline(rows, bandwidth_of(PUBLISHED / "kernels-h200")) for rows, us in ours.items())


def test_one_changed_digit_of_a_published_table_is_found_and_named(tmp_path):
    copy = tmp_path / "published"
    shutil.copytree(PUBLISHED, copy, ignore=shutil.ignore_patterns("*.parquet", "*.svg", "*.pdf"))
    assert differences(copy, PUBLISHED) == {}
    path = copy / "nano/tables/headline.csv"
    path.write_text(path.read_text().replace("1", "2", 1))
    (copy / "nano/tables/gone.csv").write_text("a\n")
    # what a killed publication left
    shutil.copytree(copy / "nano", copy / ".nano.partial")
    assert copy / ".nano.partial" not in published_folders(copy) and copy / "nano" in published_folders(copy)
    found = differences(copy, PUBLISHED)
    assert set(found) == {"nano/tables/headline.csv", "nano/tables/gone.csv"}
    assert (
        found["nano/tables/headline.csv"].startswith("line ") and "no table of today" in found["nano/tables/gone.csv"]
    )


def test_every_published_table_lies_where_it_is_made_again():
    for folder in {path.relative_to(PUBLISHED).parts[0] for path in PUBLISHED.glob("*/**/*.csv")}:
        marks = (PLAN, "samples.json", ENGINE_RUN, MARK)
        assert any((PUBLISHED / folder / name).is_file() for name in marks), folder


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*/manifest.json.gz")), ids=lambda path: path.parent.name)
def test_a_published_manifest_names_the_files_beside_it(path):
    outputs = read_packed(path).get("outputs", {})
    here = {name: digest for name, digest in outputs.items() if (path.parent / name).is_file()}
    assert {name for name, digest in here.items() if sha256_file(path.parent / name) != digest} == set()


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in PUBLISHED.glob(f"*/{PLAN}")), ids=lambda path: path.name
)
def test_a_published_comparison_is_what_todays_rules_say(folder, tmp_path):
    summary, config = json.loads((folder / "summary.json").read_text()), read_plan(folder / PLAN)["config"]
    known = {"devices": devices_of(folder / "tables/headline.csv"), "dtype": config.get("dtype")}
    rows = compare(EXPECTED, summary, config["suite"], **known)
    write_comparison(rows, tmp_path / "compare.csv")
    assert (tmp_path / "compare.csv").read_bytes() == (folder / "compare.csv").read_bytes()


def test_damaged_records_stop_the_rebuild(tmp_path, capsys):
    copy = tmp_path / "published"
    shutil.copytree(PUBLISHED / "nano", copy / "nano", ignore=shutil.ignore_patterns("*.svg", "*.pdf"))
    data = (copy / "nano/steps.parquet").read_bytes()
    (copy / "nano/steps.parquet").write_bytes(data[:-1])
    words = ["--published", str(copy), "--expected", str(ROOT / "workflows/config/expected.yaml")]
    sys.argv = ["rebuild_published.py", *words, "--out", str(tmp_path / "out")]
    assert main() == 2 and "steps.parquet is damaged" in capsys.readouterr().err


def test_papers_tables_hold_the_numbers_of_the_csv_files(nano, tmp_path):
    source = PUBLISHED / "nano/tables"
    assert write_paper(source, nano.config, tmp_path) == ["headline", "results", "kernels"]
    text, frame = (tmp_path / "headline.tex").read_text(), pd.read_csv(source / "headline.csv")
    for row in frame.to_dict("records"):
        assert f"{row['tau']:.2f} [{row['tau_low']:.2f}, {row['tau_high']:.2f}]" in text, row["variant"]
    assert "\\toprule" in text and text.count("\\begin{table}") == text.count("\\end{table}") == 1
    results, sets = (tmp_path / "results.tex").read_text(), pd.read_csv(source / "per_set.csv")
    body = results.partition("\\midrule")[2].partition("\\bottomrule")[0]
    lines = [line for line in body.splitlines() if "&" in line]
    assert len(lines) == sets.groupby(["dataset", "setting"]).ngroups
    assert {line.count("&") for line in lines} == {2 * sets["variant"].nunique()}


# --- the inventory


def test_nothing_of_the_inventory_is_absent():
    entries = inventory(EXPECTED, PUBLISHED)
    assert [entry["row"] for entry in entries] == list(range(1, 31))
    keys = {
        "row",
        "what",
        "item",
        "run",
        "paper",
        "ours",
        "low",
        "high",
        "n",
        "unit",
        "status",
        "reason",
        "source",
        "items",
    }
    for entry in entries:
        assert set(entry) == keys and entry["status"] in library.STATUSES
        # whatever is not a pass says why, and what is open says what it needs
        assert entry["status"] == "pass" or entry["reason"], entry
        assert entry["status"] != "open" or "needs" in entry["reason"], entry
    assert set(to_frame(entries)["item"]) == {item["item"] for item in EXPECTED["items"]}


def test_the_published_inventory_is_the_one_of_the_published_runs():
    expected = inventory(EXPECTED, PUBLISHED)
    command = (
        "inventory.py --expected workflows/config/expected.yaml --published results/published --out results/published"
    )
    message = f"inventory.json is older than a published run: python workflows/scripts/{command}"
    assert json.loads((PUBLISHED / "inventory.json").read_text()) == json.loads(json.dumps(expected)), message


def test_a_gpu_run_stands_before_a_cpu_run_and_both_are_shown():
    rows = {item["item"]: item for entry in inventory(EXPECTED, PUBLISHED) for item in entry["items"]}
    kernel = rows["gdn_speedup_64"]
    assert (
        kernel["run"] == "kernels-h200"
        and kernel["status"] == "not comparable"
        and "not the paper's B200" in kernel["reason"]
    )
    assert [other["run"] for other in kernel["also"]] == ["nano"]
    published = json.loads((PUBLISHED / "kernels-h200/summary.json").read_text())["recurrent_over_fused_T64"]
    # the same samples resampled by another seed
    assert kernel["ours"] == pytest.approx(published["value"], rel=1e-3)
    assert kernel["low"] < kernel["ours"] < kernel["high"]
    assert rows["gdn_error_float32"]["status"] == "pass"


def write_suite(folder, name: str, summary: dict, **config) -> None:
    (folder / name).mkdir(parents=True)
    write_packed(folder / name / PLAN, {"config": {**suite.resolve(NANO), "suite": name, **config}, "cells": []})
    (folder / name / "summary.json").write_text(json.dumps(summary))


def entry(value, **more) -> dict:
    return {"value": value, "low": None, "high": None, "n": 9, "unit": "x"} | more


def test_a_row_is_no_better_than_its_worst_item(tmp_path):
    write_suite(tmp_path, "paper", {"same_as_ar_share": entry(1), "excess_traversal": entry(0.6, low=0.5, high=0.7)})
    row = next(one for one in inventory(EXPECTED, tmp_path) if one["row"] == 14)
    assert row["status"] == "fail" and row["ours"] == 1
    assert row["reason"].startswith("excess_traversal: the interval 0.5 to 0.7")


def test_an_item_of_one_type_takes_its_number_from_a_run_in_that_type(tmp_path):
    """In bfloat16 near ties part outputs: no failure of losslessness, and no proof of it either."""
    for name, dtype, share in (("paper", "bfloat16", 0.74), ("mini", "float32", 1)):
        write_suite(tmp_path, name, {"same_as_ar_share": entry(share)}, dtype=dtype)
    item = next(one for one in inventory(EXPECTED, tmp_path) if one["row"] == 14)["items"][0]
    assert (item["run"], item["ours"], item["status"]) == ("mini", 1, "pass")
    other = item["also"][0]
    assert (other["run"], other["ours"], other["status"]) == ("paper", 0.74, "not comparable")
    assert other["reason"] == "decoded in bfloat16, asked of float32"
    shutil.rmtree(tmp_path / "mini")
    row = next(one for one in inventory(EXPECTED, tmp_path) if one["row"] == 14)
    assert row["ours"] == 0.74 and row["items"][0]["status"] == "not comparable"


def test_a_run_that_is_not_ordered_comes_first_and_the_others_stay(tmp_path):
    for name, value in (("nano", 3), ("paper", 4), ("a-new-one", 5)):
        write_suite(tmp_path, name, {"sweep_points_budget_tfm": entry(value)})
    assert [path.name for path in run_folders(tmp_path, EXPECTED)] == ["a-new-one", "paper", "nano"]
    item = next(one for one in inventory(EXPECTED, tmp_path) if one["row"] == 21)["items"][0]
    assert item["run"] == "a-new-one" and item["ours"] == 5 and item["status"] == "pass"
    assert [(other["run"], other["ours"], other["status"]) for other in item["also"]] == [
        ("paper", 4, "pass"),
        ("nano", 3, "fail"),
    ]


def test_the_inventory_of_nothing_is_open_and_says_what_it_needs(tmp_path):
    (tmp_path / "published").mkdir()
    entries = write_inventory(EXPECTED, tmp_path / "published", tmp_path)
    assert {entry["status"] for entry in entries} == {"open", "not comparable"}
    assert len(pd.read_csv(tmp_path / "inventory.csv")) == len(EXPECTED["items"])
    assert (tmp_path / "inventory.md").read_text().count("\n| ") >= 30


def test_a_kernel_run_says_what_its_readme_says():
    summary = kernel_summary(load_kernel_run(PUBLISHED / "kernels-h200"))
    printed = json.loads((PUBLISHED / "kernels-h200/summary.json").read_text())
    for rows in (16, 32, 64, 65, 128):
        assert summary[f"kernel_us_fused_cuda_{rows}"]["value"] == pytest.approx(printed[f"fused_us_T{rows}"], rel=1e-3)
        ours, theirs = summary[f"kernel_ratio_fused_cuda_{rows}"], printed[f"recurrent_over_fused_T{rows}"]
        assert ours["value"] == pytest.approx(theirs["value"], rel=2e-3)
        assert ours["low"] == pytest.approx(theirs["low"], rel=5e-3)
    assert summary["kernel_ratio_recurrent_triton_64"]["value"] == 1


def test_one_rule_makes_everything_published_again_and_needs_no_cell():
    assert jobs(snakemake(ROOT, "-n", "rebuild_published", "-R", "rebuild_published")) == {"rebuild_published": 1}


def test_energy_a_token_is_of_cells_that_were_metered_whole():
    """A resumed cell has the joules of its second run and the tokens of both: such a cell is left out."""
    from engine_tables import from_cells
    from publish import load_published

    records, variants = load_published(PUBLISHED / "graft-h200"), {"ar", "tfm-b64-w4"}
    whole = from_cells(records, variants)["joule_per_token_tfm"]
    cut = next(cell for cell in records.cells if cell["cell"]["variant"] == "tfm-b64-w4")
    cut["energy"] = {"joule": 1.0, "prompts": 1}
    found = from_cells(records, variants)["joule_per_token_tfm"]
    assert found["n"] == whole["n"] - 1 and found["value"] == pytest.approx(whole["value"], rel=0.1)
