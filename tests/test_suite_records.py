"""What the records of a finished suite say: every headline number can be computed again from them by hand."""

import json
import sys

import pandas as pd
import pytest
from test_workflow import CELL
from workflow_runs import ROOT

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import sanity

TFM = "tfm-b8-w2/t1/seed0"


def facts_of(folder) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("results/nano/cells/*/*/*/*/*/*/cell.json"))]


def test_warm_up_is_counted_and_left_out_of_every_number(finished):
    """sglang#16694: three warm-up requests with a high acceptance length were averaged with the measured ones."""
    facts = json.loads((finished / CELL / TFM / "cell.json").read_text())
    rows = pd.read_parquet(finished / CELL / TFM / "requests.parquet")
    prompts = [json.loads(line) for line in (finished / "results/nano/prompts/nano/sample-math.jsonl").open()]
    assert facts["warm_up"]["prompts"] == 1 and rows["id"].tolist() == [prompt["id"] for prompt in prompts]
    tau = (rows["new_tokens"] / rows["steps"]).mean()
    table = pd.read_csv(finished / "results/nano/tables/headline.csv").set_index(["variant", "setting"])
    assert table.loc[("tfm-b8-w2", "t1"), "tau"] == pytest.approx(tau)


def test_headline_speed_is_tokens_over_measured_wall_and_nothing_is_modelled(finished):
    """SGLang's bench_speculative printed acceptance length / step time as if it were a measured speed."""
    rows = pd.read_parquet(finished / CELL / TFM / "requests.parquet")
    table = pd.read_csv(finished / "results/nano/tables/headline.csv").set_index(["variant", "setting"])
    speed = rows["new_tokens"].sum() / (rows["wall_us"].sum() / 1e6)
    assert table.loc[("tfm-b8-w2", "t1"), "tok_s"] == pytest.approx(speed)
    assert (rows["wall_us"] == rows["prefill_us"] + rows["decode_us"]).all()
    # the loop is the only source of counts: there is no replay whose rows could be mixed in
    kinds = {(cell["cell"]["engine"], cell["cell"]["clock"]) for cell in facts_of(finished)}
    assert kinds == {("torch", clock) for clock in ("wall", "stages", "off")}


def test_every_cell_says_what_made_it(finished):
    """sglang#4759, vllm#15600: commit, weights, versions, device, settings, seed and type of every number."""
    for cell in facts_of(finished):
        # the suite of this test runs outside a git checkout, and that is all that is missing
        assert sanity.lacking(cell) in ([], ["environment.git.commit"]), cell["cell"]["variant"]


def test_all_methods_decoded_the_same_prompts(finished):
    assert len({cell["prompts_sha256"] for cell in facts_of(finished)}) == 1


def test_records_split_by_category_with_the_manifest_alone(finished):
    """z-lab/dflash#7: results by language or subject, from what is published."""
    facts = json.loads((finished / "results/nano/manifest.json").read_text())["prompts"]["sample-math.manifest.json"]
    rows = pd.read_parquet(finished / CELL / TFM / "requests.parquet")
    assert set(rows["id"]) == set(facts["categories"])
    by_category = rows.groupby(rows["id"].map(facts["categories"]))["steps"].count()
    assert by_category.sum() == len(rows) == 2


def test_numbers_of_the_ceiling_come_from_its_rows(finished):
    anchors = pd.read_parquet(finished / "results/nano/ceiling/anchors.parquet")
    table = pd.read_csv(finished / "results/nano/tables/ceiling.csv").set_index(["drafter", "position"])
    part = anchors[(anchors["drafter"] == "weaver") & (anchors["position"] == 2)]
    assert table.loc[("weaver", 2), "on_text"] == pytest.approx(part["overlap"].sum() / part["alive"].sum())
    assert table.loc[("weaver", 2), "survival"] == pytest.approx(part["accepted"].mean())
    assert table.loc[("oracle", 1), "survival"] == pytest.approx(1, abs=1e-5)
