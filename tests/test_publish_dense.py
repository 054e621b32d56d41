"""Suite dense as it comes back from a GPU machine: one call makes the published folder with DARTree's claims."""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from workflow_runs import ROOT

sys.path.insert(0, str(ROOT / "workflows/offline"))
sys.path.insert(0, str(ROOT / "workflows/scripts"))

from baselines import suite
from tfm import checkpoints
from tfm.heads import HeadConfig, build_head, init_head
from tfm.metrics import EMPTY, Estimate
from tfm.prompts import PreparedPrompt

EXPECTED = ROOT / "workflows/config/expected.yaml"
DENSE = yaml.safe_load((ROOT / "workflows/config/dense.yaml").read_text())
SMALL = {
    "suite": "dense-real",
    "device": "cpu",
    "datasets": ["sample-math", "sample-code"],
    "prompts": 2,
    "max_new_tokens": 6,
    "requests": 2,
    "torch_threads": 1,
    "seeds": [0],
    "budget": 8,
    "budgets": [4],
    "dartree_widths": [1, 8],
    "depth_bonuses": [0],
    "heads": ["markov"],
    "stages": False,
    "audit": [],
    "methods": ["ar", "dflash", "ddtree", "headchain", "dartree", "tfm"],
    "figures": ["tau"],
    **{key: [] for key in ("widths", "candidate_counts", "dartree_candidate_counts", "depths", "residuals")},
}
ARMS = "dartree-b8-w12,dartree-b8-w8,heap-b8,ddtree-b8,tfm-b8-w4"
FIELDS = {name: "x" for name in ("domain", "category", "template", "sha256")}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """The shipped nano family with a second head, which leaves the marginals as they are."""
    folder = tmp_path_factory.mktemp("weights")
    for part in ("target", "drafter", "weaver"):
        (folder / part).symlink_to(ROOT / "tfm/weights/nano" / part)
    width = json.loads((folder / "weaver/config.json").read_text())["d_model"]
    head = build_head(HeadConfig("markov", d_model=width, d_embed=width, rank=4))
    init_head(head, 0)
    checkpoints.save_head(head, folder / "markov")
    return folder


@pytest.fixture(scope="module")
def run(weights, tmp_path_factory) -> Path:
    """RUN as dense.sh and dense_budgets.sh leave it: cells, budgets timed afterwards, builders, lossless.json."""
    import bench_builders
    import check_lossless
    import run_paired
    import timed_budgets

    out = tmp_path_factory.mktemp("run")
    config = suite.resolve({**DENSE, **SMALL, "weights": str(weights)})
    cells, folder, files = suite.expand(config), out / "results/dense-real", []
    for name in config["datasets"]:
        own = FIELDS | {"dataset": name}
        rows = [PreparedPrompt(id=f"q{i}", index=i, tokens=list(range(20, 30 + i)), **own) for i in range(2)]
        files.append(folder / f"prompts/smollm2/{name}.jsonl")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        files[-1].write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    plan = {"config": config, "cells": cells, "draft_rows": suite.draft_rows(config)}
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.MonkeyPatch.context() as patch:
        words = ["--plan", str(folder / "plan.json"), "--out", str(out / "budgets.jsonl")]
        patch.setattr(sys, "argv", ["timed_budgets.py", *words])
        timed_budgets.main()
    given = {"out": out, "commit": "c0ffee", "part": None, "seconds": None, "again": False}
    for cells_file in (folder / "plan.json", out / "budgets.jsonl"):
        found = run_paired.run(argparse.Namespace(list=cells_file, **given))
        assert (found["left"], found["failed"]) == (0, {})
    small = out / "small.yaml"
    small.write_text(yaml.safe_dump({**DENSE, **SMALL, "weights": str(weights)}))
    prompts = ["--prompts", *map(str, files)]
    words = ["--config", str(small), *prompts, "--variants", ARMS, "--heads", "weaver,markov", "--steps", "4"]
    words += ["--every", "2", "--threads", "1", "--commit", "c0ffee", "--out", str(folder / "builders")]
    assert bench_builders.main(words) == 0
    words = ["--weights", str(weights), *prompts, "--max-new-tokens", "4", "--requests", "4", "--budget", "6"]
    words += ["--threads", "1", "--methods", "dflash,dartree,tfm", "--out", str(out / "lossless.json")]
    assert check_lossless.main(words) == 0
    return out


def call(run: Path, out: Path, patch, *more: str) -> int:
    import publish_dense

    words = ["publish_dense.py", "--run", str(run), "--out", str(out), "--expected", str(EXPECTED), *more]
    patch.setattr(sys, "argv", words)
    patch.chdir(ROOT)
    return publish_dense.main()


@pytest.fixture(scope="module")
def published(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "dense-h200"
    folder.mkdir()
    (folder / "NOTES.md").write_text("written by hand\n")
    (folder / "README.md").write_text("of an earlier call\n")
    readme = folder.parent / "readme.md"
    readme.write_text("before\n<!-- table: dense -->\nold\n<!-- end of table: dense -->\nafter\n")
    with pytest.MonkeyPatch.context() as patch:
        words = ["--lossless", *[str(run / "lossless.json")] * 2, "--readme", str(readme)]
        assert call(run, folder, patch, *words) == 0
    return folder


def test_one_call_gives_every_name_that_the_suite_is_asked_for(published):
    summary = json.loads((published / "summary.json").read_text())
    names = [f"{what}_{method}_T{t}" for what in ("tau", "speedup") for method in SMALL["methods"] for t in (0, 1)]
    names += ["build_us_sequential", "build_us_depthwise"]
    names += [f"oracle_share_{name}_T1" for name in ("ddtree", "dartree", "tfm", "best")]
    assert [name for name in names if summary.get(name, {}).get("value") is None] == []
    assert summary["tau_ar_T0"]["value"] == 1
    assert (summary["lossless_wrong"]["value"], summary["lossless_same"]["value"]) == (0, 4 * 2 * 5)
    assert json.loads((published / "lossless/lossless.json").read_text())["compared"] == 40


def test_every_claim_of_the_authors_has_a_row_and_a_verdict(published):
    frame = pd.read_csv(published / "tables/dartree_claims.csv")
    authors = frame[frame["said_by"] == "DARTree"]
    kinds = ["its head's chain", "over dflash", "sequential heap", "smallest width", "highest tokens a second"]
    assert [kind for kind in kinds if not authors["claim"].str.contains(kind).any()] == []
    allowed = {"reproduced", "smaller", "refuted", "undecided", "open"}
    assert set(authors["verdict"]) <= allowed and authors["paper"].notna().all()
    # 1.279 is asked of the chain of both heads
    assert set(authors.loc[authors["paper"] == 1.279, "head"]) == {"weaver", "markov"}
    summary = json.loads((published / "summary.json").read_text())
    assert sum(summary[f"dartree_claims_{name}"]["value"] for name in allowed) == len(authors)


def test_numbers_of_claims_are_those_of_the_other_tables(published):
    claims, paired, sweeps, builders = (
        pd.read_csv(published / f"tables/{name}.csv") for name in ("dartree_claims", "paired", "sweeps", "builders")
    )
    one = claims[
        (claims["claim"] == "tau of dartree over its head's chain") & claims["where"].str.contains("T = 0, mean")
    ]
    rows = paired[(paired["pair"] == "dartree - headchain") & (paired["metric"] == "tau") & (paired["setting"] == "t0")]
    macro = rows[rows["dataset"] == "macro"].iloc[0]
    assert one["value"].iloc[0] == pytest.approx(macro["ratio"]) and one["value_low"].iloc[0] == macro["ratio_low"]
    heap = claims[claims["claim"].str.startswith("build of") & (claims["head"] == "markov")].iloc[0]
    row = builders[builders["variant"] == "dartree-b8-w8-markov"].iloc[0]
    assert heap["value"] == row["faster_than_heap"] and row["same_nodes_as_heap"] == 1
    assert row["faster_than_heap_low"] <= heap["value"] <= row["faster_than_heap_high"]
    widths = sweeps[(sweeps["sweep"] == "width") & (sweeps["method"] == "dartree")].set_index("value")["tau"]
    wide = min(width for width, tau in widths.items() if tau >= 0.99 * widths.iloc[-1])
    assert claims.loc[claims["claim"].str.startswith("smallest width"), "value"].iloc[0] == wide


def test_budgets_are_timed_afterwards_and_the_plan_says_so(published, run):
    from packing import read_packed

    claims = pd.read_csv(published / "tables/dartree_claims.csv")
    row = claims[claims["claim"] == "budget of the highest tokens a second"].iloc[0]
    assert row["value"] in (4, 8) and 4 <= row["value_low"] <= row["value_high"] <= 8
    cells = {cell["path"]: cell for cell in read_packed(published / "plan.json.gz")["cells"]}
    budgets = [cell for cell in cells.values() if cell["part"] == "budgets"]
    clocks = {cell["decode"]["method"]: cell["clock"] for cell in budgets}
    assert clocks["dartree"] == "wall" and clocks["tfm"] == "off"


def test_texts_hold_the_numbers_of_the_tables(published):
    readme = (published.parent / "readme.md").read_text()
    folder = (published / "README.md").read_text()
    assert readme.startswith("before\n<!-- table: dense -->\n| method |") and readme.endswith("-->\nafter\n")
    assert "old" not in readme and "earlier call" not in folder
    assert (published / "NOTES.md").read_text() == "written by hand\n"
    frame = pd.read_csv(published / "tables/dartree_claims.csv")
    for row in frame[frame["said_by"] == "DARTree"].to_dict("records"):
        start = f"| {row['claim']} | {row['head']} | {row['where']} |"
        line = next(line for line in folder.splitlines() if line.startswith(start))
        assert f"**{row['verdict']}**" in line, row
    headline = pd.read_csv(published / "tables/headline.csv").set_index(["variant", "setting"])
    tau = headline.loc[("dartree-b8-w12", "t0"), "tau"]
    assert f"| DARTree | {tau:.2f} [" in readme and "40 of 40 outputs are ar's" in readme
    # the second file of the call
    assert "`lossless/lossless-1.json`): 40 of 40 outputs, 4 prompts" in folder
    assert "Alpaca" in folder and "Q4_1" in folder


def test_the_report_names_what_was_measured_beside_the_cells(published):
    from make_report import provenance
    from packing import read_packed

    text = "".join(provenance(read_packed(published / "manifest.json.gz")))
    assert "beside the cells, lossless" in text and "samples.parquet sha256" in text


def test_what_is_published_is_made_again_from_itself(published, tmp_path):
    from rebuild_published import differences, rebuild

    rebuild(published.parent, yaml.safe_load(EXPECTED.read_text()), tmp_path, figures=False)
    assert differences(published.parent, tmp_path) == {}
    again, kept = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "dense-h200", published))
    assert again == kept


def test_a_run_without_a_part_or_with_wrong_outputs_is_refused_by_name(published, run, tmp_path, monkeypatch, capsys):
    before = sorted(path.name for path in published.iterdir())
    assert call(run, published, monkeypatch) == 2 and "--lossless: missing" in capsys.readouterr().err
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(json.loads((run / "lossless.json").read_text()) | {"wrong": 3}))
    assert call(run, published, monkeypatch, "--lossless", str(wrong)) == 2
    assert "3 outputs" in capsys.readouterr().err
    assert sorted(path.name for path in published.iterdir()) == before


# --- verdicts


@pytest.mark.parametrize(
    ("rule", "interval", "verdict"),
    [
        pytest.param(("gain", 1.279), (1.1, 1.3), "reproduced", id="holds_the_printed_gain"),
        pytest.param(("gain", 1.279), (1.3, 1.4), "reproduced", id="more_than_printed"),
        pytest.param(("gain", 1.279), (1.1, 1.2), "smaller", id="a_gain_below_it"),
        pytest.param(("gain", 1.279), (0.9, 1.3), "undecided", id="perhaps_no_gain"),
        pytest.param(("gain", 1.279), (0.8, 1.0), "refuted", id="no_gain"),
        pytest.param(("least", 2), (2.0, 2.4), "reproduced", id="at_least"),
        pytest.param(("least", 2), (1.5, 1.9), "refuted", id="less"),
        pytest.param(("least", 2), (1.5, 2.1), "undecided", id="perhaps_less"),
        pytest.param(("above", 1), (1.0, 1.2), "undecided", id="the_end_is_no_gain"),
        pytest.param(("above", 1), (1.01, 1.2), "reproduced", id="above"),
        pytest.param(("within", 8, 16), (8, 12), "reproduced", id="within"),
        pytest.param(("within", 8, 16), (4, 12), "undecided", id="across_an_end"),
        pytest.param(("within", 8, 16), (2, 4), "refuted", id="below_it"),
        pytest.param(("none",), (1, 2), "measured", id="nothing_was_said"),
    ],
)
def test_a_verdict_is_of_the_interval(rule, interval, verdict):
    from dartree_claims import Rule

    found = Estimate(sum(interval) / 2, *interval, 8)
    assert Rule(*rule).verdict(found, "reproduced") == verdict
    assert Rule(*rule).verdict(EMPTY, "reproduced") == "open"
    bare = replace(found, low=float("nan"), high=float("nan"))
    assert Rule(*rule).verdict(bare, "reproduced") == ("measured" if rule == ("none",) else "open")


def test_a_suite_without_the_chain_says_what_the_claims_need():
    from types import SimpleNamespace

    from dartree_claims import dartree_claims, values

    frame = dartree_claims(SimpleNamespace(headline={"dartree": "dartree-b64-w12"}))
    assert "headchain" in frame["reason"].iloc[0] and values(frame) == {}


def test_sets_and_temperatures_that_were_not_run_are_open_and_in_no_mean():
    from publish_dense import only_run

    asked = {"datasets": ["gsm8k", "mbpp"], "temperatures": [0, 1], "open": [{"item": "x", "needs": "y"}]}
    cells = [
        {"part": "headline", "dataset": "gsm8k", "decode": {"temperature": 1}},
        {"part": "budgets", "dataset": "mbpp", "decode": {"temperature": 0}},
    ]
    found = only_run(asked, cells)
    assert (found["datasets"], found["temperatures"]) == (["gsm8k"], [1])
    assert [one["item"] for one in found["open"]] == ["x", "sets mbpp", "temperatures 0"]
    assert only_run(asked, [one | {"part": "headline"} for one in cells])["open"] == asked["open"]


def test_what_is_printed_of_a_temperature_that_was_not_run_is_open(published):
    from dartree_claims import PRINTED, dartree_claims
    from input_files import read_plan
    from packing import PLAN
    from probe_records import load_probes
    from publish import load_published
    from tables import Suite

    plan, records = read_plan(published / PLAN), load_published(published)
    plan["cells"] = [cell for cell in plan["cells"] if cell["setting"] != "t0"]
    records.requests, records.steps = (frame[frame["setting"] != "t0"] for frame in (records.requests, records.steps))
    frame = dartree_claims(Suite.of(plan, records, load_probes(published)))
    rows = frame[frame["where"].str.startswith("T = 0") & (frame["said_by"] == "DARTree")]
    # one place of PRINTED is a set that this run lacks
    assert len(rows) == len(PRINTED) - 1 and set(rows["verdict"]) == {"open"}
    assert set(rows["reason"]) == {"T = 0 was not run"} and rows["value"].isna().all()
