"""The bench of builders on the nano family: equal sets, counted calls, and shares of the oracle tree."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "workflows/scripts"))
import builder_tables
from probe_records import load_probes

ROOT = Path(__file__).parents[1]
ARMS = ["dartree-b8-w3", "dartree-b8-w8", "heap-b8", "ddtree-b8", "dflash", "headchain", "tfm-b8-w2", "headddtree-b8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A suite's folder with the bench of two prompts in builders/."""
    out = tmp_path_factory.mktemp("bench")
    python, scripts = sys.executable, ROOT / "workflows/scripts"
    prepare = [python, scripts / "prepare_prompts.py", "--dataset", "sample-math", "--source", "embedded"]
    prepare += ["--tokenizer", "tfm/weights/nano/target", "--target", "nano", "--out", out / "sample-math.jsonl"]
    prepare += ["--context", "2048", "--max-new-tokens", "48", "--limit", "2"]
    config = out / "small.yaml"
    text = (ROOT / "workflows/config/nano.yaml").read_text()
    config.write_text(text.replace("budget: 64", "budget: 8").replace("methods: [", "methods: [headchain, heap, "))
    run = [python, scripts / "bench_builders.py", "--config", config, "--prompts", out / "sample-math.jsonl"]
    run += ["--variants", ",".join(ARMS), "--out", out / "builders", "--steps", "6", "--every", "2", "--threads", "1"]
    for command in (prepare, run):
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def samples(folder) -> pd.DataFrame:
    return pd.read_parquet(folder / "builders/samples.parquet")


@pytest.fixture(scope="module")
def table(folder) -> pd.DataFrame:
    return builder_tables.builders(SimpleNamespace(probes=load_probes(folder), config={"suite": "nano"}))


def test_every_variant_builds_at_every_context(samples):
    assert set(samples["variant"]) == set(ARMS)
    counts = samples.groupby("variant")[["id", "step"]].apply(lambda part: len(part.drop_duplicates()))
    assert counts.nunique() == 1 and 2 <= counts.iloc[0] <= 6 and (samples["build_us"] > 0).all()


def test_calls_of_the_head_are_those_of_the_schedule(samples):
    calls = samples.groupby("variant")["calls"].unique().map(list).to_dict()
    # one a depth, one a node, one for every two nodes
    assert all(calls[name] == [15] for name in ("dartree-b8-w3", "dartree-b8-w8", "headchain", "headddtree-b8"))
    assert calls["heap-b8"] == [8] and calls["tfm-b8-w2"] == [4] and calls["ddtree-b8"] == calls["dflash"] == [0]


def test_no_tree_passes_the_oracle_of_its_budget(samples):
    trees = samples[samples["nodes"] <= 8]
    assert len(trees) and (trees["accepted"] <= trees["limit"] + 1e-6).all()


def test_the_heap_and_a_width_of_the_budget_choose_the_same_nodes(samples, table):
    rows = table.set_index("variant")
    assert rows.loc["dartree-b8-w8", "same_nodes_as_heap"] == rows.loc["heap-b8", "same_nodes_as_heap"] == 1
    assert rows.loc["ddtree-b8", "same_nodes_as_heap"] < 1
    means = samples.groupby("variant")["accepted"].mean()
    assert means["heap-b8"] == pytest.approx(means["dartree-b8-w8"], rel=1e-6)


def test_the_table_and_the_summary_are_of_the_samples(samples, table):
    by_prompt = samples[samples["variant"] == "tfm-b8-w2"].groupby("id")[["accepted", "limit"]].mean()
    share = by_prompt["accepted"].sum() / by_prompt["limit"].sum()
    row = table.set_index("variant").loc["tfm-b8-w2"]
    assert row["oracle_share"] == pytest.approx(share) and row["oracle_share_low"] <= share <= row["oracle_share_high"]
    found = builder_tables.values(table, 8)
    times = samples.groupby("variant")["build_us"].median()
    assert found["build_us_sequential"]["value"] == times["heap-b8"]
    assert found["build_us_depthwise"]["value"] == times["dartree-b8-w8"]
    assert found["build_us_depthwise_headline"]["value"] == times["dartree-b8-w3"]
    ratio = times["heap-b8"] / times["dartree-b8-w8"]
    assert found["depthwise_over_sequential"]["value"] == pytest.approx(ratio)
    best = found["oracle_share_best_T1"]
    assert best["value"] == table["oracle_share"].max() and set(best) == {"value", "low", "high", "n", "unit"}


def test_a_changed_sample_is_refused_and_none_is_said(folder, tmp_path):
    none = builder_tables.builders(SimpleNamespace(probes={}, config={"suite": "dense"}))
    assert "bench_builders.py --out results/dense/builders" in none["reason"].iloc[0]
    assert builder_tables.values(none, 8) == {}
    shutil.copytree(folder / "builders", tmp_path / "builders")
    with (tmp_path / "builders/samples.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="samples.parquet is missing or damaged"):
        load_probes(tmp_path)
