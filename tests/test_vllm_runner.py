"""Cells inside vLLM, with a fake server in its place: its totals turned into a request's counts, and what it lacks."""

import json

import pytest
from fake_server import token
from served import fault, place_for, resolved, rows, serve

from baselines.serving import wire
from baselines.serving.site import with_vocabulary
from baselines.serving.wire import ServerError
from baselines.vllm import runner
from baselines.vllm.flags import VERSION

SMALL = {"methods": ["ar", "dflash"], "max_new_tokens": 12}


@pytest.fixture
def place(tmp_path, monkeypatch):
    return place_for(VERSION, tmp_path, monkeypatch)


def test_differences_of_totals_are_a_requests_counts(place, tmp_path, tiny_weights):
    facts = serve(resolved("vllm", "dflash", weights=tiny_weights, **SMALL), place, tmp_path)
    for number, row in enumerate(rows(tmp_path, "requests")):
        # the fake's tokens hang on the request's seed, which differs by prompt
        assert len(row["output_tokens"]) == 12 and row["output_tokens"][0] == token(20 + number, 0)
        assert (row["steps"], row["finish_reason"]) == (4, "length")
    steps = [step for step in rows(tmp_path, "steps") if step["request"] == 2]
    assert [step["accepted_untrimmed"] for step in steps] == [3, 0, 2, 3]
    assert facts["engine"]["counters"].startswith("totals of the server only")


def test_ar_counts_nothing(place, tmp_path, tiny_weights):
    serve(resolved("vllm", "ar", weights=tiny_weights, **SMALL), place, tmp_path)
    assert [row["steps"] for row in rows(tmp_path, "requests")] == [11, 11, 11]


@pytest.mark.parametrize("method", ["ddtree", "dartree", "tfm"])
def test_trees_are_refused_with_the_reason_before_anything_runs(method, tiny_weights):
    with pytest.raises(ValueError, match=f"method: '{method}' is not allowed with engine vllm .*no tree attention"):
        resolved("vllm", method, weights=tiny_weights)


def test_a_missing_total_is_an_error(place, tmp_path, tiny_weights, monkeypatch):  # C027
    fault(monkeypatch, without=["metrics"])
    with pytest.raises(ServerError, match="no counter of drafts in /metrics, the cell asks for 15"):
        serve(resolved("vllm", "dflash", weights=tiny_weights, **SMALL), place, tmp_path)


def test_a_total_without_the_others_is_an_error(monkeypatch):
    text = b'vllm:spec_decode_num_drafts_total{engine="0"} 3.0\n'
    monkeypatch.setattr(runner, "call", lambda *_: (200, text))
    with pytest.raises(ServerError, match="no vllm:spec_decode_num_accepted_tokens, .*per_pos; .*no zero"):
        runner.totals(1)


def test_totals_that_stay_behind_are_an_error(place, tmp_path, tiny_weights, monkeypatch):
    monkeypatch.setattr(runner, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(runner, "totals", lambda port: {"drafts": 7, "accepted_tokens": 9, "by_position": [5, 4]})
    with pytest.raises(ServerError, match="11 tokens after the first and not one step counted"):
        serve(resolved("vllm", "dflash", weights=tiny_weights, **SMALL), place, tmp_path)


def test_a_step_that_drafted_nothing_is_counted_as_a_step(monkeypatch):
    before = {"drafts": 10, "accepted_tokens": 20, "by_position": [9, 8, 3]}
    after = {"drafts": 12, "accepted_tokens": 24, "by_position": [11, 10, 3]}
    monkeypatch.setattr(runner, "totals", lambda port: after)
    monkeypatch.setattr(runner, "SETTLE_SECONDS", 0.0)
    reply = runner.Reply(sent=0.0, tokens=list(range(1 + 3 + 3 + 1 + 1)))
    runner._count(reply, before, 0)
    # two steps of two drafts, and two more that drafted nothing
    assert reply.verify_steps == 4 and reply.histogram == [2, 0, 2, 0]


def test_metrics_are_read_from_prometheus_text(monkeypatch):
    text = (
        "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.\n"
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 1.2e+01\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 180.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 31.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 11.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0\n'
    )
    monkeypatch.setattr(runner, "call", lambda *_: (200, text.encode()))
    assert runner.totals(1) == {"drafts": 12, "accepted_tokens": 31, "by_position": [12, 11]}


def test_a_server_that_answers_with_an_error_is_quoted(monkeypatch, place, tmp_path, tiny_weights):
    real = wire.call
    monkeypatch.setattr(
        runner, "call", lambda port, method, path: (500, b"") if path == "/metrics" else real(port, method, path)
    )
    with pytest.raises(ServerError, match="GET /metrics: status 500"):
        serve(resolved("vllm", "dflash", weights=tiny_weights, **SMALL), place, tmp_path)


def test_a_drafter_without_a_vocabulary_gets_its_targets(tmp_path, tiny_weights):
    found = with_vocabulary(tiny_weights / "drafter", tiny_weights / "target", tmp_path)
    fields = json.loads((found / "config.json").read_text())
    assert fields["vocab_size"] == json.loads((tiny_weights / "target/config.json").read_text())["vocab_size"]
    assert (found / "model.safetensors").resolve() == (tiny_weights / "drafter/model.safetensors").resolve()
    # one that says it is taken as it is
    assert with_vocabulary(found, tiny_weights / "target", tmp_path) == found
