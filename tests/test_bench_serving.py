"""The bench of serving arms with fake servers: forced acceptance, one server an arm, a failed arm beside good ones."""

import json
import os
import sys

import pytest
from served import fake_python, fault
from workflow_runs import ROOT

from baselines.serving.reply import Reply
from baselines.sglang.flags import VERSION

sys.path.insert(0, str(ROOT / "workflows/scripts"))
SMI = """#!/bin/sh
case "$1" in *memory.used*) echo 1234 ;; *) echo GPU-bench-$$, NVIDIA Fake, 1000, 9.0, 580.1 ;; esac
"""
SHAPE = """
weights: tfm/weights/mini
graft:
  target: {num_hidden_layers: 8, full_attention_interval: 4, layers: [0]}
  drafter: {layer_types: [sliding_attention, full_attention], target_layer_ids: [0, 2, 4, 6, 7], layers: [0]}
  weaver: {K: 15, layers: [0]}
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    import bench_serving

    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    (tmp_path / "shape.yaml").write_text(SHAPE)

    def run(*more):
        words = ["--config", str(tmp_path / "shape.yaml"), "--server-python", fake_python(tmp_path, VERSION)]
        words += [
            "--server-folder",
            str(tmp_path / "servers"),
            "--out",
            str(tmp_path / "out.json"),
            "--new-tokens",
            "16",
        ]
        result = bench_serving.run(bench_serving.parse([*words, "--prompts", "12", "--budget", "16", *more]))
        return result, json.loads((tmp_path / "out.json").read_text())

    return run


def test_every_arm_is_timed_by_its_own_steps(bench, monkeypatch):
    fault(monkeypatch)
    result, record = bench("--arms", "ar", "dflash", "tfm", "--repeats", "2")
    assert set(result["step_ms"]) == {"ar", "dflash", "tfm"} and not result["failed"]
    # the fake accepts 3, 0, 2 drafts in turn: 16 tokens in 6 steps, and in 15 without drafts
    assert [row["steps"] for row in record["arms"]["ar"]["rows"]] == [15, 15]
    assert [row["steps"] for row in record["arms"]["tfm"]["rows"]] == [6, 6]
    assert all(row["step_ms"] > 0 for arm in record["arms"].values() for row in arm["rows"])
    assert record["arms"]["tfm"]["memory_used_mib"] == 1234 and record["device"]["name"] == "NVIDIA Fake"
    assert record["arms"]["tfm"]["cell"]["server"]["plugin"]["simulate_accept"] == 3


def test_settings_of_the_plugin_are_those_of_the_trees_alone(bench, monkeypatch):
    fault(monkeypatch)
    _, record = bench("--arms", "ar", "tfm", "--repeats", "1", "--plugin", "ahead=none", "attention=sglang")
    plugins = {arm: found["cell"]["server"]["plugin"] for arm, found in record["arms"].items()}
    assert plugins["ar"] is None
    assert (plugins["tfm"]["ahead"], plugins["tfm"]["attention"], plugins["tfm"]["simulate_accept"]) == (
        "none",
        "sglang",
        3,
    )
    result, record = bench("--arms", "tfm", "--repeats", "1", "--plugin", "ahead")
    assert result["failed"] == ["tfm"] and "--plugin: 'ahead' is not allowed" in record["failed"]["tfm"]


def test_state_sizes_are_read_from_what_sglang_logs():
    from bench_serving import state_gib

    log = (
        "[2026-01-01] Mamba Cache is allocated. max_mamba_cache_size: 1, conv_state size: 0.01GB, ssm_state size: "
        "0.28GB intermediate_ssm_state_cache size: 18.28GB intermediate_conv_window_cache size: 0.36GB \n"
        "[2026-01-01] DFLASH_TFM: 48 GDN layers verified by fused_cuda; 0.21 GiB in place of a state for every node\n"
    )
    wanted = {"conv_state": 0.01, "ssm_state": 0.28, "intermediate_ssm_state_cache": 18.28}
    assert state_gib(log) == {**wanted, "intermediate_conv_window_cache": 0.36, "plugin": 0.21}
    assert state_gib("nothing of it") == {}


def test_a_failed_arm_is_named_and_the_others_stay(bench, monkeypatch):
    import bench_serving

    fault(monkeypatch)
    real = bench_serving.cell_of

    def cell_of(arm, *rest):
        cell = real(arm, *rest)
        if arm == "dflash":
            cell["server"]["version"] = "0.5.99"
        return cell

    monkeypatch.setattr(bench_serving, "cell_of", cell_of)
    for arms in (["dflash", "ar"], ["ar", "dflash"]):
        result, record = bench("--arms", *arms, "--repeats", "1", "--commit", "c0ffee")
        assert result["failed"] == ["dflash"] and "0.5.99" in record["failed"]["dflash"]
        assert set(record["arms"]) == {"ar"} and record["git"] == {"commit": "c0ffee", "dirty": None}
    # an arm that failed alone leaves its reason too
    result, record = bench("--arms", "dflash", "--repeats", "1")
    assert set(record["failed"]) == {"dflash"} and record["arms"] == {}


def test_a_missing_counter_of_steps_fails_the_arm(bench, monkeypatch):
    fault(monkeypatch, without=["spec_verify_ct"])
    result, record = bench("--arms", "ar", "tfm", "--repeats", "1")
    assert result["failed"] == ["tfm"] and "spec_verify_ct" in record["failed"]["tfm"] and set(record["arms"]) == {"ar"}


def test_an_earlier_servers_states_are_not_this_ones(bench, monkeypatch, tmp_path):
    fault(monkeypatch)
    log = tmp_path / "servers/tfm/server.log"
    log.parent.mkdir(parents=True)
    log.write_text("Mamba Cache is allocated. intermediate_ssm_state_cache size: 18.28GB\n")
    result, record = bench("--arms", "tfm", "--repeats", "1")
    assert not result["failed"] and record["arms"]["tfm"]["state_gib"] == {}


@pytest.mark.parametrize(
    ("chunks", "words"), [([(1.0, 9)], "in one chunk"), ([(1.0, 1), (2.0, 9)], "counts None steps")]
)
def test_a_reply_that_shows_no_steps_gives_no_time_of_one(chunks, words):
    """One chunk has no time between its ends: 0 ms a step."""
    import bench_serving

    reply = Reply(sent=0.0, chunks=chunks, verify_steps=2 if len(chunks) == 1 else None)
    with pytest.raises(ValueError, match=words):
        bench_serving._timed(reply, is_ar=False)
