"""Families trained apart: gathered from their cells, held against the shipped one over the same prompts."""

import json
import shutil
import sys

import pandas as pd
import pytest
import yaml
from workflow_runs import ROOT

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import compare_families
import family_tables
import tables
from input_files import read_plan
from probe_records import load_probes

from tfm.cells import load_cells

TFM = "tfm"
ACCEPTED = {"ar": 0.0, "dflash": 2.0, "ddtree": 3.0, "dartree": 4.0, "tfm": 5.0}


@pytest.fixture(scope="module")
def run(finished, tmp_path_factory):
    """A finished suite's plan, a family of the same cells and one of a weaver alone, gathered beside it."""
    root = tmp_path_factory.mktemp("families")
    suite = root / "results/nano"
    shutil.copytree(finished / "results/nano", suite)
    plan = json.loads((suite / "plan.json").read_text())
    for name in ("again", "weaver"):
        kept = [c for c in compare_families.headline(plan) if name == "again" or c["decode"]["method"] == TFM]
        for cell in kept:
            shutil.copytree(root / cell["path"], root / cell["path"].replace("results/nano/", f"results/nano-{name}/"))
        (root / name / "weights").mkdir(parents=True)
        recipe = {"seed": 1, "sample": {"conversations": 64}}
        recipe["weaver"] = {"model": {"d_rank": 8}, "train": {"steps": 5}}
        (root / name / "train.yaml").write_text(yaml.safe_dump(recipe))
        (root / name / "weights/weaver_curve.csv").write_text("step,loss,val_alpha\n0,1,\n5,0.5,0.25\n6,0.4,\n")
    (root / "again/weights/drafter_curve.csv").write_text("step,val_alpha,val_chain\n5,0.2,1.5\n")
    return root, plan


def gathered(run, monkeypatch, *families) -> dict:
    root, _ = run
    monkeypatch.chdir(root)
    words = [word for name in families for word in ("--family", f"{name}={name}")]
    assert compare_families.main(["--plan", "results/nano/plan.json", *words, "--out", "results/nano/families"]) == 0
    return load_probes(root / "results/nano")


def table_of(run, probes) -> pd.DataFrame:
    """The table; accepted drafts are set by method, since weights this small accept none."""
    root, plan = run
    cells = [root / cell["path"] for cell in plan["cells"]]
    data = tables.Suite.of(read_plan(root / "results/nano/plan.json"), load_cells(cells), probes)
    for rows in (data.requests, probes["families"].frames["requests"]):
        rows["accepted"] = rows["method"].map(ACCEPTED)
    return family_tables.families(data)


def test_the_same_cells_give_the_same_numbers(run, monkeypatch):
    table = table_of(run, gathered(run, monkeypatch, "again", "weaver")).set_index(["family", "metric"])
    headline = pd.read_csv(run[0] / "results/nano/tables/headline.csv").set_index(["variant", "setting"])
    assert table.loc[("again", "tau_tfm"), "value"] == pytest.approx(headline.loc[("tfm-b8-w2", "t1"), "tau"])
    again = table.loc["again"]
    assert again["over_shipped"].to_numpy() == pytest.approx(1) and (again["inside"] == "yes").all()
    assert again.loc["accepted_ratio_tfm_dflash", "value"] == 2.5 and len(again) == 6
    assert (again["drafter_chain"] == 1.5).all() and (again["weaver_alpha"] == 0.25).all()
    assert (again["seed"] == 1).all() and (again["answers"] == 64).all() and (again["d_rank"] == 8).all()


def test_a_weaver_alone_is_held_against_the_chain_of_its_own_target_and_drafter(run, monkeypatch):
    probes = gathered(run, monkeypatch, "again", "weaver")
    table = table_of(run, probes).set_index(["family", "metric"])
    assert "tau_dflash" not in table.loc["weaver"].index
    ratio = table.loc[("weaver", "accepted_ratio_tfm_dflash")]
    assert ratio["value"] == pytest.approx(table.loc[("again", "accepted_ratio_tfm_dflash"), "value"])
    for family in probes["families"].facts["families"].values():
        family["weights_sha256"]["drafter"] = family["methods"][0]
    assert "accepted_ratio_tfm_dflash" not in table_of(run, probes).set_index(["family", "metric"]).loc["weaver"].index


def test_a_family_that_accepts_more_lies_outside(run, monkeypatch):
    probes = gathered(run, monkeypatch, "again")
    rows = probes["families"].frames["requests"]
    rows["new_tokens"] *= 2
    table = table_of(run, probes).set_index(["family", "metric"])
    row = table.loc[("again", "tau_tfm")]
    assert row["over_shipped"] == pytest.approx(2) and row["over_shipped_low"] == pytest.approx(2)
    assert row["inside"] == "no" and table.loc[("again", "accepted_ratio_tfm_ddtree"), "inside"] == "yes"
    entry = family_tables.values(table.reset_index())["tau_tfm_family_again"]
    assert entry["value"] == pytest.approx(row["value"]) and entry["unit"] == "tokens a step"


def lose_the_cells(root, plan):
    shutil.rmtree(root / "results/nano-again")


def plan_another_set(root, plan):
    more = [{**cell, "path": cell["path"].replace("sample-math", "sample-code")} for cell in plan["cells"]]
    (root / "results/nano/plan.json").write_text(json.dumps({**plan, "cells": plan["cells"] + more}))


def lose_the_recipe(root, plan):
    (root / "again/train.yaml").unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose_the_cells, "no cells in results/nano-again"),
        (plan_another_set, "of its cells are missing, first results/nano-again/"),
        (lose_the_recipe, "train.yaml is missing"),
    ],
)
def test_what_lacks_is_named(run, tmp_path, monkeypatch, capsys, spoil, words):
    shutil.copytree(run[0], tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    spoil(tmp_path / "copy", run[1])
    call = ["--plan", "results/nano/plan.json", "--family", "again=again", "--out", "out"]
    assert compare_families.main(call) == 2 and words in capsys.readouterr().err


def test_none_says_what_makes_them():
    data = type("Data", (), {"probes": {}, "config": {"suite": "mini-real"}})()
    table = family_tables.families(data)
    assert "compare_families.py --out results/mini-real/families" in table["reason"].iloc[0]
    assert family_tables.values(table) == {}
