"""The bench of builders on the nano family: equal sets, counted calls, and shares of the oracle tree."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
ARMS = ["dartree-b8-w3", "dartree-b8-w8", "heap-b8", "ddtree-b8", "dflash", "headchain", "tfm-b8-w2", "headddtree-b8"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> tuple[dict, pd.DataFrame]:
    """(builders.json, samples) of two prompts."""
    out = tmp_path_factory.mktemp("bench")
    python, scripts = sys.executable, ROOT / "workflows/scripts"
    prepare = [python, scripts / "prepare_prompts.py", "--dataset", "sample-math", "--source", "embedded"]
    prepare += ["--tokenizer", "tfm/weights/nano/target", "--target", "nano", "--out", out / "sample-math.jsonl"]
    prepare += ["--context", "2048", "--max-new-tokens", "48", "--limit", "2"]
    config = out / "small.yaml"
    text = (ROOT / "workflows/config/nano.yaml").read_text()
    config.write_text(text.replace("budget: 64", "budget: 8").replace("methods: [", "methods: [headchain, heap, "))
    run = [python, scripts / "bench_builders.py", "--config", config, "--prompts", out / "sample-math.jsonl"]
    run += ["--variants", ",".join(ARMS), "--out", out / "bench", "--steps", "6", "--every", "2", "--threads", "1"]
    for command in (prepare, run):
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return json.loads((out / "bench/builders.json").read_text()), pd.read_parquet(out / "bench/samples.parquet")


def test_every_variant_builds_at_every_context(bench):
    report, samples = bench
    assert list(report["variants"]) and set(report["variants"]) == set(ARMS)
    counts = samples.groupby("variant")["context"].nunique()
    assert counts.nunique() == 1 and 2 <= counts.iloc[0] <= 6


def test_calls_of_the_head_are_those_of_the_schedule(bench):
    calls = {name: entry["calls"] for name, entry in bench[0]["variants"].items()}
    assert calls["dartree-b8-w3"] == calls["dartree-b8-w8"] == calls["headchain"] == calls["headddtree-b8"] == 15
    assert calls["heap-b8"] == 8 and calls["tfm-b8-w2"] == 4 and calls["ddtree-b8"] == calls["dflash"] == 0


def test_the_heap_and_a_width_of_the_budget_choose_the_same_nodes(bench):
    assert bench[0]["same_nodes"]["heap-b8 = dartree-b8-w8"]["share"] == 1


def test_no_tree_passes_the_oracle_and_the_heads_best_first_set_leads_the_chain(bench):
    _, samples = bench
    trees = samples[samples["nodes"] <= 8]
    assert (trees["accepted"] <= trees["limit"] + 1e-6).all()
    means = samples.groupby("variant")["accepted"].mean()
    assert means["heap-b8"] == pytest.approx(means["dartree-b8-w8"], rel=1e-6)
    assert (samples["build_us"] > 0).all()
    shares = bench[0]["variants"]
    assert all(0 < shares[name]["oracle_share"]["value"] <= 1 for name in ("heap-b8", "ddtree-b8", "tfm-b8-w2"))
