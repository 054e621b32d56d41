"""The plugin inside SGLang 0.5.17's real scheduler, workers, attention backends and graph runners, on a CPU.

One server a case, as the runner launches it, in a process of its own (sglang_cpu.py): its tokens and its counts are
those of this project's own loop on the same weights. Needs SGLang's environment and is skipped without it.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from served import on_cpu, resolved
from workflow_runs import ROOT

from baselines.loading import load_models
from baselines.methods import METHODS, resolve
from baselines.serving.cell import Place
from baselines.serving.reply import Arm, Watcher, to_trace
from baselines.serving.server import Launch, Server
from baselines.serving.wire import stream
from baselines.sglang import runner
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, decode

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed; run these in its environment", allow_module_level=True)

NANO = ROOT / "tfm/weights/nano"
NEW, CONTEXT = 8, 64
# the interpreter takes minutes for a server's decode in Triton
PLAIN = {"attention": "torch", "draft_attention": "torch", "ahead": "draft"}
TRITON = {"attention": "triton", "draft_attention": "triton"}
SGLANG = {"attention": "sglang", "draft_attention": "sglang", "ahead": "none"}
FIRST, SECOND = [10, 20, 30, 40, 50, 60, 70], [11, 21, 31, 300, 301, 302, 303, 304, 305, 306]
# what the runner's flags say of a card's memory and kernels; the last word of a flag counts
CPU = ["--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.1", "--max-total-tokens", "512"]


def cell_of(method: str, backend: str = "solve", **settings) -> dict:
    """Return a cell of the shipped family; `backend` solve is no cell's, and is put into the plugin's settings."""
    trees = {} if method == "ar" else {"budget": 16, "candidates": 64}
    cell = on_cpu(resolved("sglang", method, weights=NANO, context=CONTEXT, max_new_tokens=NEW, **trees))
    if cell["server"]["plugin"] is not None:
        cell["server"]["plugin"] |= {"kernel": backend, "width": 3} | PLAIN | settings
    return cell


def serve(cell: dict, batches: list[list[dict]], folder: Path, *, forms: str = "torch") -> tuple[list[dict], dict]:
    """Return the replies of each batch of requests, and how often each model's graph was replayed."""
    launch = runner.launch(cell, place=Place(folder, sys.executable), environment={})
    words = [*launch.command[launch.command.index("sglang.launch_server") + 1 :], *CPU]
    job = {"words": words, "batches": batches, "triton_forms": forms == "triton"}
    (folder / "job.json").write_text(json.dumps(job))
    environment = {key: value for key, value in os.environ.items() if key not in launch.cleared}
    environment |= {**dict(launch.environment), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests/sglang_cpu.py", folder / "job.json"],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    replies = [json.loads(text) for word, _, text in lines if word == "REPLY"]
    return replies, json.loads(next(text for word, _, text in lines if word == "REPLAYS"))


SITE = "import sys\nsys.path.append({tests!r})\nimport sglang_cpu\nsglang_cpu.import_without_kernels()\n"
PLUGIN = "[sglang.srt.plugins]\ncpu = sglang_cpu:register\n"


def on_this_cpu(launch: Launch, folder: Path) -> Launch:
    """Return a server's launch with what it needs to run on a CPU in all its processes."""
    note = folder / "cpu-1.dist-info"
    note.mkdir(parents=True)
    (note / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu\nVersion: 1\n")
    (note / "entry_points.txt").write_text(PLUGIN)
    (folder / "sitecustomize.py").write_text(SITE.format(tests=str(ROOT / "tests")))
    known = dict(launch.environment)
    paths = {"PYTHONPATH": f"{folder}{os.pathsep}{known['PYTHONPATH']}", "TRITON_INTERPRET": "1"}
    plugins = {"SGLANG_PLUGINS": f"{known['SGLANG_PLUGINS']},cpu"}
    environment = tuple(sorted((known | paths | plugins).items()))
    return dataclasses.replace(launch, command=(*launch.command, *CPU), environment=environment)


def request(name: str, tokens: list[int], *, temperature=0.0, index=0, new=NEW, abort=None, **sampling) -> dict:
    sampling |= {"temperature": temperature, "max_new_tokens": new, "ignore_eos": True}
    return {
        "id": name,
        "tokens": tokens,
        "abort": abort,
        "sampling": {**sampling, "custom_params": {"tfm_index": index}},
    }


@cache
def models() -> Models:
    folders = {part: NANO / part for part in ("target", "drafter", "weaver")}
    return load_models(folders, device=torch.device("cpu"), dtype=torch.float32)


def reference(cell: dict, tokens: list[int], *, temperature=0.0, index=0, new=NEW) -> tuple[list[int], list[int]]:
    """Return the tokens of this project's own loop, and the drafts that each step accepted."""
    method, plugin = cell["decode"]["method"], cell["server"]["plugin"] or {}
    known = {field.name for field in dataclasses.fields(DecodeConfig)}
    more = {key: value for key, value in plugin.items() if key in known}
    more = {key: value for key, value in more.items() if key != "width" or method != "ddtree"}
    config = DecodeConfig(method=method, temperature=temperature, seed=0, max_new_tokens=new, eos_tokens=(), **more)
    parts, done = METHODS[method].parts_for(config), []
    kept = Models(models().target, *(getattr(models(), p) if p in parts else None for p in ("drafter", "weaver")))
    proposer = resolve(method)(config, kept)
    decode([Prompt("p", index, tokens)], kept, config, proposer=proposer, on_finish=done.append)
    return done[0].output_tokens, [step.accepted_untrimmed for step in done[0].steps]


def check(reply: dict, cell: dict, tokens: list[int], *, temperature=0.0, **more) -> None:
    """Tokens are the loop's, and greedy ones come in the loop's steps; a sampled first token is SGLang's own draw."""
    if temperature:
        first = reply["tokens"][0]
        wanted, _ = reference(cell, [*tokens, first], temperature=temperature, new=NEW - 1, **more)
        assert reply["tokens"] == [first, *wanted]
    else:
        wanted, accepted = reference(cell, tokens, **more)
        assert reply["tokens"] == wanted
        emitted = [1, *(number + 1 for number in accepted)]
        assert reply["chunks"][:-1] == emitted[:-1] and reply["chunks"][-1] == len(wanted) - sum(emitted[:-1])
        assert reply["histogram"] == [accepted.count(number) for number in range(max(accepted) + 1)]
    assert reply["steps"] == len(reply["chunks"]) - 1


@pytest.mark.parametrize(
    ("method", "backend", "forms", "settings"),
    [
        pytest.param("ddtree", "solve", "torch", {}, id="ddtree"),
        pytest.param("dartree", "solve", "torch", SGLANG, id="dartree_as_sglang_does"),
        pytest.param("tfm", "fused_triton", "triton", TRITON, id="tfm_in_triton"),
        pytest.param("ddtree", "recurrent", "torch", {"draft_attention": "sglang"}, id="ddtree_recurrent"),
        pytest.param("tfm", "solve", "torch", {"budget": 12}, id="tfm_without_room_ahead"),
        pytest.param("tfm", "solve", "torch", {"ahead": "verify", "depth": 2}, id="tfm_with_verify_ahead"),
    ],
)
def test_a_tree_server_decodes_what_the_loop_decodes(method, backend, forms, settings, tmp_path):
    """Greedy and sampled, through the replayed graphs of both models; a draft ahead is the next step's, or the last."""
    cell = cell_of(method, backend, **settings)
    asked = [request("greedy", FIRST), request("sampled", SECOND, temperature=1.0, index=5)]
    (greedy, sampled), replays = serve(cell, [[one] for one in asked], tmp_path, forms=forms)
    check(greedy["greedy"], cell, FIRST)
    check(sampled["sampled"], cell, SECOND, temperature=1.0, index=5)
    replies = greedy["greedy"], sampled["sampled"]
    steps = sum(reply["steps"] for reply in replies)
    is_ahead = settings.get("ahead") != "none" and settings.get("budget", 16) >= 15
    # a draft ahead is in vain where a request ends that might have gone on; a verify, where its length did not tell
    left = [NEW - sum(reply["chunks"][:-1]) for reply in replies]
    wasted = sum(number > 1 for number in left) if is_ahead else 0
    longest = settings["depth"] + 1 if settings.get("ahead") == "verify" else NEW
    assert replays == {"draft": steps + wasted, "target": steps + sum(number > longest for number in left)}


def test_an_autoregressive_server_is_not_changed_by_the_plugin(tmp_path):
    (found,), replays = serve(cell_of("ar"), [[request("greedy", FIRST)]], tmp_path)
    assert found["greedy"]["tokens"] == reference(cell_of("ar"), FIRST)[0]
    assert found["greedy"]["chunks"] == [1] * NEW and replays == {"target": NEW - 1}


def test_a_server_outlives_what_its_requests_do(tmp_path):
    """Abort in mid-stream, two at once, one token, stop inside a run, end of the context, and what is refused."""
    cell, stop = cell_of("ddtree"), reference(cell_of("ddtree"), FIRST)[0][4]
    long = [7 + i % 50 for i in range(CONTEXT - 12)]
    (aborted, pair, single, stopped, full, refused, last), _ = serve(
        cell,
        [
            [request("aborted", SECOND, temperature=1.0, index=5, new=40, abort=3)],
            [request("sampled", SECOND, temperature=1.0, index=5), request("greedy", FIRST)],
            [request("single", FIRST, new=1)],
            [
                request("stopped", FIRST, new=30)
                | {"sampling": {"temperature": 0, "max_new_tokens": 30, "stop_token_ids": [stop]}}
            ],
            [request("full", long, new=40)],
            [request("law", FIRST, top_p=0.9), request("long", long + long)],
            [request("greedy", FIRST)],
        ],
        tmp_path,
    )
    assert aborted["aborted"]["finish"]["type"] == "abort" and len(aborted["aborted"]["tokens"]) < 40
    check(pair["sampled"], cell, SECOND, temperature=1.0, index=5)
    for found in (pair, last):
        check(found["greedy"], cell, FIRST)
    assert (single["single"]["tokens"], single["single"]["steps"]) == (reference(cell, FIRST, new=1)[0], 0)
    assert stopped["stopped"]["tokens"] == reference(cell, FIRST)[0][:5]
    assert stopped["stopped"]["finish"] == {"type": "stop", "matched": stop}
    # SGLang's own room behind a prompt is smaller than the context; a tree's rows reach beyond both
    count = len(full["full"]["tokens"])
    assert 4 < count < 12 and full["full"]["finish"]["type"] == "length"
    assert full["full"]["tokens"] == reference(cell, long, new=count)[0]
    assert "top_p: 0.9 is not allowed" in refused["law"]["finish"]["message"]
    assert "exceeds the maximum allowed length" in refused["long"]["finish"]["message"]


def test_forced_acceptance_gives_every_step_its_drafts(tmp_path):
    """What the bench of random models relies on."""
    cell = cell_of("tfm")
    cell["server"]["plugin"]["simulate_accept"] = 2
    (found,), _ = serve(cell, [[request("greedy", FIRST, new=10)]], tmp_path)
    assert found["greedy"]["chunks"] == [1, 3, 3, 3] and found["greedy"]["histogram"] == [0, 0, 3]


def test_a_whole_server_is_read_by_the_runner(tmp_path):
    """HTTP and all: health, facts, a stream's chunks and counters, and a stream closed early in between."""
    cell, config = cell_of("tfm"), DecodeConfig(method="tfm", temperature=0.0, max_new_tokens=NEW)
    place = Place(tmp_path / "server", sys.executable, start_seconds=500)
    launch = on_this_cpu(runner.launch(cell, place=place, environment={}), tmp_path / "cpu")
    wanted, accepted = reference(cell, FIRST)
    with Server(launch, folder=place.folder, start_seconds=place.start_seconds) as server:
        assert runner.facts(server.port, cell)["effective"]["speculative_num_draft_tokens"] == 17
        for _ in range(2):
            watcher = Watcher(config, str)
            reply = runner.generate(server.port, Prompt("p", 0, FIRST), watcher, timeout=200)
            trace = to_trace(Prompt("p", 0, FIRST), reply, watcher, Arm(speculative=True, nodes=17, depth=None))
            assert trace.output_tokens == wanted and trace.finish_reason == "length"
            assert [step.accepted_untrimmed for step in trace.steps] == accepted
            asked = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
            chunks = stream(
                server.port, "/generate", {"input_ids": SECOND, "sampling_params": asked, "stream": True}, timeout=200
            )
            next(chunks)
            chunks.close()
        assert runner.memory(server.port)["memory_gib"] is not None
