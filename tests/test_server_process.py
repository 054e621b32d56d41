"""The server of served cells as a process, a fake one in its place: starts, crashes, ports, orphans, kills."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from served import fault, mark, nothing_runs, on_cpu, place_for, processes_of, resolved, rows, serve, write_prompts
from test_metrics import arm
from workflow_runs import ROOT, environment_of

from baselines.serving import keeper, server
from baselines.serving.cell import Place
from baselines.serving.reply import Arm, Reply, Watcher, to_trace
from baselines.serving.wire import ServerError
from baselines.sglang.flags import VERSION
from tfm import metrics
from tfm.config import DecodeConfig
from tfm.decode import Prompt

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def place(tmp_path, monkeypatch):
    return place_for(VERSION, tmp_path, monkeypatch)


def test_a_chunk_of_several_tokens_is_one_step_and_not_one_gap_between_tokens():
    """sglang#12064, vllm#7242: times are of the first chunk and of all the rest, never of a gap between chunks."""
    sent = [1000.0 + seconds for seconds in (0.0, 0.5, 0.6, 0.7)]
    reply = Reply(sent[0], list(range(8)), chunks=[(sent[1], 1), (sent[2], 5), (sent[3], 8)], finish="length")
    reply.prompt_tokens, reply.completion_tokens, reply.verify_steps, reply.histogram = 4, 8, 2, [0, 0, 1, 1]
    watcher = Watcher(DecodeConfig(method="dflash", max_new_tokens=8), str)
    watcher.take(reply.tokens)
    trace = to_trace(Prompt("p", 0, [9] * 4), reply, watcher, Arm(speculative=True, nodes=16, depth=15))
    assert (trace.prefill_us, trace.decode_us) == pytest.approx((0.5e6, 0.2e6))
    assert [step.committed for step in trace.steps] == [4, 3] and [step.accepted for step in trace.steps] == [3, 2]
    # 7 tokens in 0.2 s after the first: 0.0286 s each, where the gaps between chunks are 0.1 s
    table, _ = arm([trace], method="dflash")
    assert metrics.mean(table, "decode_tok_s").value == pytest.approx(7 / 0.2)
    assert metrics.mean(table, "tok_s").value == pytest.approx(8 / 0.7)


def test_a_slow_start_is_waited_for_and_a_slower_one_named(place, tmp_path, tiny_weights, monkeypatch):
    fault(monkeypatch, start_seconds=1.5)
    serve(resolved("sglang", "ar", weights=tiny_weights, max_new_tokens=4), place, tmp_path)
    fault(monkeypatch, start_seconds=60)
    slow = Place(place.folder, place.python, start_seconds=1.5)
    with pytest.raises(ServerError, match="server_seconds: 1.5 is not enough"):
        serve(resolved("sglang", "ar", weights=tiny_weights, max_new_tokens=4), slow, tmp_path, "slow")
    assert nothing_runs(place)


def test_a_server_that_does_not_start_shows_its_last_words(place, tmp_path, tiny_weights, monkeypatch):
    fault(monkeypatch, exit_at_start=3)
    with pytest.raises(ServerError, match="status 3(.|\n)*out of memory on this card"):
        serve(resolved("sglang", "ar", weights=tiny_weights), place, tmp_path)


def test_a_crash_in_mid_request_keeps_finished_requests_and_the_next_run_goes_on(
    place, tmp_path, tiny_weights, monkeypatch
):
    cell = resolved("sglang", "dflash", weights=tiny_weights, max_new_tokens=12)
    fault(monkeypatch, pace=0.05)
    # two warm-ups and a prompt, then in the middle of the next prompt
    calls = count_requests(monkeypatch, die_in=4)
    with pytest.raises(ServerError, match="broke off.*the server ended with status"):
        serve(cell, place, tmp_path)
    assert len((tmp_path / "cell/done.jsonl").read_text().splitlines()) == 2 and nothing_runs(place)
    calls += [None] * 100
    facts = serve(cell, place, tmp_path)
    assert facts["resumed_requests"] == 1 and len(rows(tmp_path, "requests")) == 3


def count_requests(monkeypatch, *, die_in: int) -> list:
    """Kill the server in the middle of the stream of its request number `die_in`."""
    from baselines.sglang import runner

    real, calls = runner.stream, []

    def stream(port, path, body, **options):
        calls.append(path)
        for number, chunk in enumerate(real(port, path, body, **options)):
            if len(calls) == die_in and number == 2:
                listener = next(
                    p
                    for p in processes_of(keeper.MARK)
                    if f"--port\0{port}\0" in cmdline(p) and "keeper" not in cmdline(p)
                )
                os.kill(listener, signal.SIGKILL)
            yield chunk

    monkeypatch.setattr(runner, "stream", stream)
    return calls


def cmdline(process: int) -> str:
    try:
        return open(f"/proc/{process}/cmdline").read()
    except OSError:
        return ""


def test_a_taken_port_is_named(place, tmp_path, tiny_weights):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = Place(place.folder, place.python, port=taken.getsockname()[1], start_seconds=120)
        with pytest.raises(ServerError, match=f"server_port: {busy.port} is not allowed .*leave server_port out"):
            serve(resolved("sglang", "ar", weights=tiny_weights), busy, tmp_path)


def test_two_runs_do_not_share_a_folder(place, tmp_path):
    launch = server.Launch((sys.executable, str(ROOT / "tests/fake_server.py"), "sglang"))
    with server.Server(launch, folder=place.folder, start_seconds=120) as first:
        with pytest.raises(BlockingIOError), server.Server(launch, folder=place.folder):
            pass
        assert first.is_alive()


def test_children_that_ignore_the_polite_signal_end_too(place, tmp_path, tiny_weights, monkeypatch):
    fault(monkeypatch, spawn=True)
    monkeypatch.setattr(keeper, "GRACE", 0.5)
    serve(resolved("sglang", "ar", weights=tiny_weights, max_new_tokens=4), place, tmp_path, count=1)
    assert nothing_runs(place)


def run_script(cell, place, tmp_path, prompts):
    call = [sys.executable, "workflows/scripts/serve_cell.py", "--cell", json.dumps(on_cpu(cell))]
    call += ["--prompts", str(prompts), "--out", str(tmp_path / "cell"), "--log", str(tmp_path / "log")]
    call += ["--server-python", place.python, "--server-folder", str(place.folder), "--commit", "test"]
    return subprocess.Popen(call, cwd=ROOT, env=environment_of(ROOT), stderr=subprocess.PIPE, text=True)


def test_a_killed_runner_takes_its_server_along(place, tmp_path, tiny_weights, monkeypatch):
    fault(monkeypatch, start_seconds=600, spawn=True)
    runner = run_script(resolved("sglang", "ar", weights=tiny_weights), place, tmp_path, write_prompts(tmp_path))
    try:
        wait_for(lambda: (place.folder / "server.json").exists() and len(processes_of(mark(place))) >= 3)
        word = mark(place)
    finally:
        runner.kill()
        runner.wait()
    # the keeper asks, waits and kills
    wait_for(lambda: not processes_of(word), seconds=120)


def wait_for(condition, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.05)


def test_an_orphan_of_an_earlier_run_ends_before_the_next_server_starts(place, tmp_path, tiny_weights):
    place.folder.mkdir()
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, keeper.MARK: "lost"}
    )
    (place.folder / "server.json").write_text(json.dumps({"token": "lost"}))
    serve(resolved("sglang", "ar", weights=tiny_weights, max_new_tokens=4), place, tmp_path, count=1)
    assert orphan.wait(timeout=5) == -signal.SIGTERM


def test_a_failing_cell_exits_with_a_status_and_says_why(place, tmp_path, tiny_weights, monkeypatch):  # C099
    fault(monkeypatch, exit_at_start=3)
    runner = run_script(resolved("sglang", "ar", weights=tiny_weights), place, tmp_path, write_prompts(tmp_path))
    _, text = runner.communicate(timeout=300)
    assert runner.returncode == 1 and "out of memory on this card" in text and "Traceback" not in text
