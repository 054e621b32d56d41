"""Cells inside SGLang, with a fake server in its place: the records, and everything that can go wrong with a server."""

import json
import os

import pyarrow.parquet as pq
import pytest
from fake_server import token
from served import (
    fake_python,
    fault,
    mark,
    nothing_runs,
    on_cpu,
    place_for,
    processes_of,
    resolved,
    rows,
    serve,
    write_prompts,
)
from workflow_runs import ROOT, checkout, jobs, snakemake

from baselines.serving.cell import Place, Session
from baselines.serving.wire import ServerError
from baselines.sglang.flags import VERSION
from baselines.sglang.runner import completed

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def place(tmp_path, monkeypatch):
    return place_for(VERSION, tmp_path, monkeypatch)


def sent(place):
    return [json.loads(line) for line in (place.folder / "requests.jsonl").read_text().splitlines()]


def test_a_chain_cell_has_the_counts_of_its_server(place, tmp_path, tiny_weights):
    facts = serve(resolved("sglang", "dflash", weights=tiny_weights, max_new_tokens=12), place, tmp_path)
    for number, row in enumerate(rows(tmp_path, "requests")):
        assert row["output_tokens"] == [token(20 + number + place, 0) for place in range(12)]
        # 1 at prefill, then 4, 1, 3 and 3 of 4, cut at the cap
        assert (row["new_tokens"], row["steps"], row["finish_reason"]) == (12, 4, "length")
        assert row["wall_us"] == pytest.approx(row["prefill_us"] + row["decode_us"]) and row["prefill_us"] > 0
    steps = [step for step in rows(tmp_path, "steps") if step["request"] == 0]
    assert [step["accepted_untrimmed"] for step in steps] == [3, 0, 2, 3]
    assert [step["committed"] for step in steps] == [4, 1, 3, 3] and [step["accepted"] for step in steps] == [
        3,
        0,
        2,
        3,
    ]
    assert [step["context"] for step in steps] == [21, 25, 26, 29]
    assert {(step["nodes"], step["depth"]) for step in steps} == {(16, 15)}
    assert facts["engine"]["counters"] == "per request, with a histogram" and facts["warm_up"]["prompts"] == 2
    assert facts["engine"]["requests_with_unordered_steps"] == 0 and nothing_runs(place)
    assert "/secret" not in json.dumps(facts["engine"]) and facts["engine"]["memory_gib"]["weight"] == 1.5


def test_ar_has_one_token_a_step_and_no_counter(place, tmp_path, tiny_weights):
    serve(resolved("sglang", "ar", weights=tiny_weights, max_new_tokens=6), place, tmp_path)
    assert [row["steps"] for row in rows(tmp_path, "requests")] == [5, 5, 5]
    assert {(row["accepted"], row["committed"], row["nodes"]) for row in rows(tmp_path, "steps")} == {(0, 1, 1)}


def test_a_tree_cell_verifies_its_budget_and_the_root(place, tmp_path, tiny_weights):
    serve(resolved("sglang", "tfm", weights=tiny_weights, max_new_tokens=8, budget=32, width=2), place, tmp_path)
    assert {(row["nodes"], row["depth"]) for row in rows(tmp_path, "steps")} == {(33, None)}


def test_warm_up_requests_are_no_measured_prompts(place, tmp_path, tiny_weights):  # C028
    serve(resolved("sglang", "dflash", weights=tiny_weights, max_new_tokens=6), place, tmp_path)
    bodies = sent(place)
    assert len(bodies) == 2 + 3 and len(rows(tmp_path, "requests")) == 3
    assert bodies[0]["input_ids"] == bodies[2]["input_ids"][::-1]


def test_what_is_sampled_is_what_was_asked_for(place, tmp_path, tiny_weights):  # C060
    for setting, temperature in (("t0", 0.0), ("t1", 1.0)):
        serve(
            resolved("sglang", "dflash", setting=setting, weights=tiny_weights, max_new_tokens=4),
            place,
            tmp_path,
            setting,
        )
        sampling = sent(place)[-1]["sampling_params"]
        assert sampling["temperature"] == temperature and sampling["ignore_eos"] is False
        assert (sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (1.0, -1, 0.0)
        assert not {"repetition_penalty", "presence_penalty", "regex", "json_schema"} & set(sampling)


@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "tfm"])
def test_every_arm_ends_at_the_same_tokens(method, place, tmp_path, tiny_weights):  # C052
    serve(resolved("sglang", method, weights=tiny_weights, max_new_tokens=4), place, tmp_path, count=1)
    assert sent(place)[-1]["sampling_params"]["stop_token_ids"] == [2]


def test_an_end_of_text_inside_a_run_cuts_ids_and_counts(place, tmp_path, tiny_weights, monkeypatch):  # C051
    import serve_cell

    # the third token of the second step
    ending = token(20 + 1 + 2, 0)
    config = serve_cell.decode_config
    monkeypatch.setattr(serve_cell, "decode_config", lambda cell, tokenizer: config(with_end(cell, ending), tokenizer))
    serve(resolved("sglang", "dflash", weights=tiny_weights, max_new_tokens=12), place, tmp_path, count=1)
    (row,), (step,) = rows(tmp_path, "requests"), rows(tmp_path, "steps")
    assert row["output_tokens"] == [token(20 + place, 0) for place in range(4)] and row["finish_reason"] == "stop"
    assert (step["accepted_untrimmed"], step["accepted"], step["committed"]) == (3, 3, 3)


def with_end(cell, ending, stop=()):
    return {**cell, "decode": {**cell["decode"], "eos_tokens": [ending], "stop": list(stop)}}


def test_a_stop_string_ends_ids_with_the_token_that_completes_it(place, tmp_path, tiny_weights, monkeypatch):
    import serve_cell

    config = serve_cell.decode_config

    class Numbers:
        decode = staticmethod(lambda tokens: " ".join(map(str, tokens)))

    monkeypatch.setattr(serve_cell, "load_tokenizer", lambda folder: Numbers())
    monkeypatch.setattr(
        serve_cell,
        "decode_config",
        lambda cell, tokenizer: config(with_end(cell, 5, stop=[str(token(23, 0))]), tokenizer),
    )
    serve(resolved("sglang", "dflash", weights=tiny_weights, max_new_tokens=40), place, tmp_path, count=1)
    (row,) = rows(tmp_path, "requests")
    assert row["output_tokens"] == [token(20 + place, 0) for place in range(4)] and row["finish_reason"] == "stop"
    assert row["steps"] == 1 and sum(step["committed"] for step in rows(tmp_path, "steps")) == 3


def test_one_new_token_is_no_step(place, tmp_path, tiny_weights):
    serve(resolved("sglang", "tfm", weights=tiny_weights, max_new_tokens=1), place, tmp_path)
    assert [(row["new_tokens"], row["steps"]) for row in rows(tmp_path, "requests")] == [(1, 0)] * 3


def test_merged_chunks_keep_the_counts_and_lose_only_the_order(place, tmp_path, tiny_weights, monkeypatch):
    fault(monkeypatch, merge=2)
    facts = serve(resolved("sglang", "dflash", weights=tiny_weights, max_new_tokens=12), place, tmp_path)
    steps = [step for step in rows(tmp_path, "steps") if step["request"] == 0]
    assert sorted(step["accepted_untrimmed"] for step in steps) == [0, 2, 3, 3]
    assert sum(step["committed"] for step in steps) == 11 and {step["context"] for step in steps} == {None}
    assert facts["engine"]["requests_with_unordered_steps"] == 3


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"without": ["spec_verify_ct"]}, "no verify steps; without it nothing is known of its steps"),
        ({"without": ["spec_correct_drafts_histogram"]}, "no histogram of accepted drafts"),
        ({"cached": 19}, "19 prompt tokens came from the server's cache"),
        ({"finish": "abort"}, "the server ended it with 'abort'"),
    ],
    ids=["steps", "histogram", "cache", "abort"],
)
def test_an_answer_that_lacks_a_count_is_an_error(faults, message, place, tmp_path, tiny_weights, monkeypatch):
    fault(monkeypatch, **faults)
    with pytest.raises(ValueError, match=message):
        serve(resolved("sglang", "dflash", weights=tiny_weights, max_new_tokens=12), place, tmp_path)
    assert not (tmp_path / "cell/cell.json").exists() and nothing_runs(place)


def test_a_drafting_server_is_refused_as_ar(place, tmp_path, tiny_weights):
    cell = resolved("sglang", "ar", weights=tiny_weights, max_new_tokens=6)
    cell["server"]["flags"]["speculative-algorithm"] = "DFLASH"
    with pytest.raises(ValueError, match="verify steps of a server that must draft nothing"):
        serve(cell, place, tmp_path)


def test_another_version_is_refused_by_what_the_server_says(place, tmp_path, tiny_weights, monkeypatch):
    fault(monkeypatch, version="0.5.18")
    with pytest.raises(ServerError, match="the server is SGLang 0.5.18.*0.5.17"):
        serve(resolved("sglang", "ar", weights=tiny_weights), place, tmp_path)


def test_another_version_is_refused_before_a_server_starts(tmp_path, tiny_weights):
    place = Place(tmp_path / "server", fake_python(tmp_path, "0.5.16"), start_seconds=120)
    with pytest.raises(ValueError, match="has sglang 0.5.16, 0.5.17 is needed"):
        serve(resolved("sglang", "ar", weights=tiny_weights), place, tmp_path)
    assert not (place.folder / "server.log").exists()


def test_cells_of_one_server_share_it(place, tmp_path, tiny_weights):
    from serve_cell import run_cell

    prompts = write_prompts(tmp_path)
    with Session(place) as session:
        ports = []
        for setting in ("t0", "t1"):
            cell = on_cpu(resolved("sglang", "dflash", setting=setting, weights=tiny_weights, max_new_tokens=4))
            run_cell(cell, prompts=prompts, out=tmp_path / setting, session=session, commit="test")
            ports.append(session.server.port)
        run_cell(
            on_cpu(resolved("sglang", "ar", weights=tiny_weights, max_new_tokens=4)),
            prompts=prompts,
            out=tmp_path / "ar",
            session=session,
            commit="test",
        )
        assert ports[0] == ports[1] and len(processes_of(mark(place))) >= 1
    assert nothing_runs(place)


def test_a_dry_run_lists_served_cells(tmp_path, tiny_weights):
    folder = checkout(tmp_path, tiny_weights)
    arguments = ["-n", "--configfile", "workflows/config/engines.yaml"]
    config = [f"weights={tiny_weights}", "methods=ar,dflash,ddtree,tfm", "datasets=sample-math"]
    counts = jobs(snakemake(folder, *arguments, config=config))
    assert counts["serve_cell"] == 8 and "decode_cell" not in counts
    text = snakemake(folder, *arguments, config=[*config, "engine=vllm"], expect=1)
    assert "method: 'ddtree' is not allowed with engine vllm" in text and "no tree attention" in text


@pytest.mark.slow
def test_the_workflow_serves_a_cell_once(place, tmp_path, tiny_weights, monkeypatch):
    folder = checkout(tmp_path / "code", tiny_weights)
    config = [f"weights={tiny_weights}", "methods=ar,dflash", "datasets=sample-math", "prompts=2", "temperatures=0"]
    config += ["max_new_tokens=6", f"server_python={place.python}", "dtype=float32"]
    path = "results/engines/cells/sglang/mini/sample-math"
    # nvidia-smi of a machine with a card
    write_smi(tmp_path, monkeypatch)
    arguments = ["--configfile", "workflows/config/engines.yaml"]
    target = f"{path}/dflash/t0/seed0/requests.parquet"
    snakemake(folder, target, *arguments, config=config)
    facts = json.loads((folder / path / "dflash/t0/seed0/cell.json").read_text())
    assert facts["device"]["name"] == "NVIDIA Fake" and facts["cell"]["server"]["flags"]["page-size"] == 1
    steps = pq.read_table(folder / path / "dflash/t0/seed0/steps.parquet").to_pylist()
    assert steps and {step["nodes"] for step in steps} == {16}
    assert "Nothing to be done" in snakemake(folder, "-n", target, *arguments, config=config)
    # where the server lives and how long it may take to start decides no record: cells are not run again for it
    (folder / "python").symlink_to(place.python)
    elsewhere = [word for word in config if not word.startswith("server_python=")]
    elsewhere += [f"server_python={folder / 'python'}", "server_seconds=1200", "server_port=34567"]
    assert "Nothing to be done" in snakemake(folder, "-n", target, *arguments, config=elsewhere)


def write_smi(tmp_path, monkeypatch) -> None:
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho GPU-0123-fake-$$, NVIDIA Fake, 1000, 9.0, 580.1\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("family", ["nano", "mini"])
def test_shipped_configs_say_what_sglang_does_not_derive(family, tmp_path):
    folders = {part: ROOT / f"tfm/weights/{family}" / part for part in ("target", "drafter")}
    found = completed(folders, tmp_path)
    target, drafter = (json.loads((found[part] / "config.json").read_text()) for part in ("target", "drafter"))
    layers = len(target["layer_types"])
    every = [place for place in range(1, layers + 1) if place % target["full_attention_interval"] == 0]
    assert every == [i + 1 for i, kind in enumerate(target["layer_types"]) if kind == "full_attention"]
    assert drafter["num_target_layers"] == layers > max(drafter["dflash_config"]["target_layer_ids"])
    assert {path.name for path in found["target"].iterdir()} == {path.name for path in folders["target"].iterdir()}
    # what says it already stays where it is
    assert completed(found, tmp_path) == {}


def test_a_pattern_of_layers_that_sglang_has_no_word_for_is_named(tmp_path):
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": kinds, "num_hidden_layers": 4}))
    with pytest.raises(ValueError, match="layer_types: .*every n-th layer.*another engine"):
        completed({"target": tmp_path}, tmp_path)


def test_arms_of_one_engine_differ_in_nothing_but_their_own_flags(tiny_weights):  # C081, C082
    from arms import differing, launch_of, unfair

    def launches(engine):
        return {method: launch_of(resolved(engine, method, weights=tiny_weights)) for method in ("ar", "dflash", "tfm")}

    same, paper = launches("sglang"), launches("sglang-paper")
    served = {key for key in differing(same) if key.startswith("server.")}
    assert served == {"server.speculative-algorithm", "server.speculative-dflash-block-size"} and not unfair(same)
    assert all(launch["cuda_graph"] for launch in same.values())
    # the paper's own flags are unequal, and a comparison says so
    words = " ".join(unfair(paper))
    assert "server.disable-overlap-schedule differs" in words and "server.attention-backend differs" in words
    graphs = {
        **same,
        "ar": launch_of(resolved("sglang", "ar", weights=tiny_weights, server_flags={"disable-cuda-graph": True})),
    }
    assert "cuda_graph differs" in " ".join(unfair(graphs))
