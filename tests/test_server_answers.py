"""What a server may answer instead of a request's tokens and counts, byte by byte: refused by name, never recorded."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest

from baselines.serving.cell import _room
from baselines.serving.reply import Arm, Watcher, to_trace
from baselines.serving.wire import ServerError, get_json
from baselines.sglang import runner as sglang
from baselines.vllm import runner as vllm
from tfm.config import DecodeConfig
from tfm.decode import Prompt

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
TOKENS, DONE = [5, 6, 7, 8, 9, 10, 11, 12], b"data: [DONE]\n\n"
TWO_STEPS = [0, 0, 1, 1]  # of 2 and 3 drafts: 7 tokens after the first
ARM, CONFIG = Arm(True, 16, 15), DecodeConfig(method="dflash", max_new_tokens=8, eos_tokens=(2,))
PATIENCE = 0.5


@contextlib.contextmanager
def answering(script):
    """Serve on a port: `script(path)` yields bytes to send and seconds to wait."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

        def answer(connection):
            with contextlib.suppress(OSError), connection:
                data = connection.recv(1 << 20)
                while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < length_of(data):
                    data += connection.recv(1 << 20)
                for item in script(data.split()[1].decode()):
                    time.sleep(item) if isinstance(item, float) else connection.sendall(item)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def length_of(data: bytes) -> int:
    found = re.search(rb"content-length: (\d+)", data, re.IGNORECASE)
    return int(found[1]) if found else 0


def event(value) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(tokens, steps=None, histogram=None, finish=None, without=(), **meta) -> bytes:
    """A chunk as SGLang sends it: the whole output so far."""
    facts = {"prompt_tokens": 3, "completion_tokens": len(tokens), "cached_tokens": 0}
    facts |= {"finish_reason": {"type": finish} if finish else None}
    facts |= {} if steps is None else {"spec_verify_ct": steps, "spec_correct_drafts_histogram": histogram}
    facts = {key: value for key, value in (facts | meta).items() if key not in without}
    return event({"output_ids": tokens, "meta_info": facts})


def ending(steps=2, histogram=TWO_STEPS, **more) -> list[bytes]:
    """A stream whose last chunk is as given."""
    return [HEAD, chunk(TOKENS[:1]), chunk(TOKENS[:5], 1, [0, 0, 0, 1]), chunk(TOKENS, steps, histogram, **more), DONE]


def record(generate, port, arm=ARM):
    watcher, prompt = Watcher(CONFIG, str), Prompt("q1", 0, [1, 3, 4])
    return to_trace(prompt, generate(port, prompt, watcher, timeout=PATIENCE), watcher, arm)


def test_the_answer_that_the_others_are_made_of_is_a_record():
    with answering(lambda path: ending(finish="length")) as port:
        trace = record(sglang.generate, port)
    assert [(step.accepted_untrimmed, step.committed) for step in trace.steps] == [(3, 4), (2, 3)]
    assert trace.output_tokens == TOKENS


def test_an_error_of_null_is_none_and_a_line_may_come_in_pieces():
    with_null = [part.replace(b"data: {", b'data: {"error": null, ') for part in ending()[1:-1]]
    pieces = [piece for part in with_null for piece in (part[:9], 0.01, part[9:])]
    with answering(lambda path: [HEAD, *pieces, DONE]) as port:
        assert record(sglang.generate, port).output_tokens == TOKENS


AGAIN, NEW = chunk(TOKENS[:1]), [chunk(TOKENS[1:5], 1, [0, 0, 0, 1]), chunk(TOKENS[5:], 2, TWO_STEPS, "length")]
PAST = [chunk([5, 6, 2, 8, 9], 1, [0, 0, 0, 1]), chunk([5, 6, 2, 8, 9, 10, 11, 12], 2, TWO_STEPS, "length")]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param([HEAD, b'{"object": "error",\n "message": "too long"}'], "it said .*too long", id="error_body"),
        pytest.param([HEAD, b"<html>no</html>"], "before its end.*<html>no", id="page_of_a_proxy"),
        pytest.param([HEAD, event({"object": "error", "message": "boom"})], "boom", id="error_object"),
        pytest.param([HEAD, event([1, 2])], r"/generate: \[1, 2\]", id="no_object"),
        pytest.param([HEAD, b"data: " + b"[" * 200_000 + b"\n\n"], "RecursionError", id="nested_without_end"),
        pytest.param([HEAD, AGAIN, *[b": ping\n\n", 0.1] * 40], "no chunk for 0.5 s, only : ping", id="kept_alive"),
        pytest.param([HEAD, AGAIN, *[b"x", 0.1] * 40], "no chunk for 0.5 s, only", id="a_line_without_end"),
        pytest.param([HEAD, AGAIN, *[AGAIN, 0.1] * 40], "no token for .* s, 1 before", id="empty_chunks"),
        pytest.param([HEAD, AGAIN, *NEW, DONE], "does not begin with the 1 sent before", id="new_tokens_alone"),
        pytest.param([HEAD, AGAIN, chunk([7, 8], 1, [0, 1])], "does not begin with the 1 sent", id="taken_back"),
        pytest.param([HEAD, event({"output_ids": TOKENS, "meta_info": [1]})], "a chunk without", id="facts_as_a_list"),
        pytest.param(ending(without=["cached_tokens"]), "a chunk without 'cached_tokens'", id="cache_unknown"),
        pytest.param(ending(without=["completion_tokens"]), "without 'completion_tokens'", id="count_unknown"),
    ],
)
def test_what_is_no_stream_of_tokens_is_quoted_and_never_waited_for(script, words):
    """A server may answer 200 with an error, or keep a connection alive for ever."""
    start = time.monotonic()
    with answering(lambda path: script) as port, pytest.raises(ServerError, match=words):
        record(sglang.generate, port)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param([HEAD, AGAIN, *PAST, DONE], "3 tokens in chunks behind .*stop.*same ends", id="past_the_end"),
        pytest.param([HEAD, chunk([5.0, *TOKENS[1:]], 1, [0] * 7 + [1], "length"), DONE], "no token id", id="floats"),
        pytest.param([HEAD, chunk([-1, *TOKENS[1:]], 1, [0] * 7 + [1], "length"), DONE], "-1, which", id="negative"),
        pytest.param(ending(2, [1, -1, 1, 1]), "counted -1 steps", id="negative_entry"),
        pytest.param(ending(2, [0, 0, 1.5, 0.5]), "counted 1.5 steps", id="fraction"),
        pytest.param(ending(2, [None, 2]), "counted None steps", id="null_entry"),
        pytest.param(ending("2"), "counted '2' steps", id="text"),
        pytest.param([HEAD, AGAIN, chunk(TOKENS, 1, [0] * 20 + [1]), DONE], "20 drafts.*verifies 15", id="too_deep"),
        pytest.param(ending(completion_tokens=9), "counted 9 tokens, 8 were sent", id="another_count"),
    ],
)
def test_an_answer_that_contradicts_itself_is_no_record(script, words):
    with answering(lambda path: script) as port, pytest.raises(ValueError, match=f"prompt q1: .*{words}"):
        record(sglang.generate, port)


def totals(drafts=10.0, accepted=20.0, places=(9.0, 7.0, 4.0), engine=0, first=0) -> str:
    labels, name = f'engine="{engine}"', "vllm:spec_decode_num_"
    lines = [f"{name}drafts_total{{{labels}}} {drafts}", f"{name}accepted_tokens_total{{{labels}}} {accepted}"]
    lines += [
        f'{name}accepted_tokens_per_pos_total{{{labels},position="{place}"}} {count}'
        for place, count in enumerate(places, start=first)
    ]
    return "\n".join(lines) + "\n"


BEFORE, AFTER = totals(), totals(12.0, 25.0, (11.0, 9.0, 5.0))  # two steps, of 2 and of 3 drafts
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 8, "prompt_tokens_details": None}}


def counted(before: str, after: str, *, arm=ARM, usage=(USAGE,)):
    """The record of one request of vLLM's, with the server's totals before and after it."""
    sent = []
    parts = [
        {"choices": [{"token_ids": TOKENS[start:end], "finish_reason": finish}]}
        for start, end, finish in ((0, 1, None), (1, 5, None), (5, 8, "length"))
    ]

    def script(path):
        if path != "/metrics":
            sent.append(path)
            return [HEAD, *map(event, (*parts, *usage)), DONE]
        return [HEAD, (after if sent else before).encode()]

    with answering(script) as port:
        return record(vllm.generate, port, arm)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(vllm, "SETTLE_SECONDS", 0.05)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(BEFORE, AFTER, id="one_engine"),
        pytest.param(BEFORE + totals(7.0, 1.0, (1.0,), 1), AFTER + totals(7.0, 1.0, (1.0,), 1), id="two_engines"),
    ],
)
def test_totals_around_a_request_are_its_counts(before, after):
    assert [(step.accepted, step.committed) for step in counted(before, after).steps] == [(3, 4), (2, 3)]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        pytest.param(BEFORE, totals(2.0, 5.0, (2.0, 2.0, 1.0)), "none ever falls.*started again", id="reset"),
        pytest.param(BEFORE, totals(2.0, 25.0, (11.0, 9.0, 5.0)), "none ever falls", id="one_total_reset"),
        pytest.param(BEFORE, totals(12.0, 25.0, (11.0, 9.0, 5.0, 0.0)), "none ever falls", id="another_depth"),
        pytest.param(BEFORE, totals("NaN"), "drafts is NaN; a count is a whole number", id="nan"),
        pytest.param(BEFORE, totals("+Inf"), r"drafts is \+Inf", id="infinite"),
        pytest.param(BEFORE, totals(-3.0), "drafts is -3.0", id="negative"),
        pytest.param(BEFORE, totals(12.5), "drafts is 12.5", id="fraction"),
        pytest.param(totals(first=1), AFTER, "per_pos of 0; .*no zero", id="no_first_position"),
        pytest.param(BEFORE, totals(12.0, 25.0, (11.0, 9.0, 4.0)), "contradict each other", id="another_sum"),
        pytest.param(BEFORE, totals(12.0, 25.0, (9.0, 10.0, 6.0)), "contradict each other", id="deeper_more_often"),
        pytest.param(BEFORE.replace('position="1"', 'place="1"'), AFTER, "without a position", id="no_label"),
    ],
)
def test_totals_that_are_no_counts_are_refused(before, after, words, impatient):
    with pytest.raises(ServerError, match=words):
        counted(before, after)


def test_tokens_of_no_counted_step_are_allowed_at_the_end_of_the_room_alone(impatient):
    """A step drafts nothing where its drafts would not fit; anywhere else the totals stayed behind."""
    behind = totals(11.0, 23.0, (10.0, 8.0, 5.0))  # one step of three drafts, of 7 tokens
    at_the_end = counted(BEFORE, behind, arm=Arm(True, 4, 3, room=11))
    assert sorted(step.accepted for step in at_the_end.steps) == [0, 0, 0, 3]
    with pytest.raises(ValueError, match="3 of 7 tokens after the first are of no step .* at most 0 may be"):
        counted(BEFORE, behind, arm=Arm(True, 4, 3, room=2048))


def test_an_answer_without_its_usage_is_no_record():
    with pytest.raises(ValueError, match="no prompt_tokens; a count that is missing"):
        counted(BEFORE, AFTER, usage=())


def test_the_room_is_the_context_or_the_drafters_when_that_is_shorter(tmp_path):
    cell = {"server": {"flags": {"max-model-len": 64}}, "weights": {"drafter": tmp_path}}
    for fields, room in (({}, 64), ({"max_position_embeddings": 32}, 32), ({"max_position_embeddings": 4096}, 64)):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert _room(cell) == room
    assert _room({"server": {"flags": {}}}) is None


def test_an_object_nested_without_end_is_no_answer():
    with answering(lambda path: [HEAD, b"[" * 200_000]) as port, pytest.raises(ServerError, match="status 200"):
        get_json(port, "/server_info")
