"""Attention over SGLang's pool, and drafts ahead, without SGLang.

The Triton form runs where triton is installed, in its interpreter (TRITON_INTERPRET=1) or on a CUDA device.
"""

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baselines.sglang import ahead, hooks, pool_attention, shared_state
from baselines.sglang.attention import PoolAttention
from baselines.sglang.pool_attention import PoolRows
from baselines.sglang.settings import Settings
from tfm_kernels import tree_attention
from tfm_kernels.gdn.ops import ancestor_mask

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
WIDTH, REQUEST = 230, 2  # of a request's row of places, and which row

CASES = [
    # nodes, heads, key heads, committed, window
    pytest.param(1, 4, 2, 1, None, id="one_row_after_one_token"),
    pytest.param(16, 4, 2, 70, 17, id="block_with_window"),
    pytest.param(65, 3, 1, 5, None, id="tree_longer_than_its_context"),
    pytest.param(65, 6, 1, 130, None, id="tree"),
]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def problem(nodes, heads, kv_heads, committed, window, *, dim=32, dtype=torch.float32):
    """Return query, pool and rows of a request whose places are strewn over the pool; the rest is NaN."""
    generator = torch.Generator().manual_seed(nodes)
    parents = [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes))]
    own = ancestor_mask(torch.tensor([parents], device=DEVICE))[0].contiguous()
    own = own if window is None else torch.ones_like(own).tril()
    places = torch.zeros(4, WIDTH, dtype=torch.int32)
    places[REQUEST] = torch.randperm(3 * WIDTH, generator=generator)[:WIDTH].to(torch.int32)
    slots = places[REQUEST, : committed + nodes].long()
    pool = []
    for seed in (1, 2):
        rows = torch.full((3 * WIDTH, kv_heads, dim), torch.nan)
        rows[slots] = torch.randn(len(slots), kv_heads, dim, generator=torch.Generator().manual_seed(seed))
        pool.append(rows.to(DEVICE, dtype))
    lengths = (torch.tensor([number], device=DEVICE) for number in (REQUEST, committed))
    return draw(nodes, heads, dim, dtype=dtype), *pool, PoolRows(places.to(DEVICE), *lengths, own, window)


@pytest.mark.parametrize(("nodes", "heads", "kv_heads", "committed", "window"), CASES)
def test_attention_over_strewn_places_is_that_over_one_memory(nodes, heads, kv_heads, committed, window):
    query, keys, values, rows = problem(nodes, heads, kv_heads, committed, window)
    slots = rows.places[REQUEST, : committed + nodes].long()
    mask = tree_attention.TreeMask(rows.committed, rows.own, torch.arange(nodes, device=DEVICE), window)
    memory = (x[slots].transpose(0, 1) for x in (keys, values))
    dense = tree_attention.dense(mask, len(slots))
    expected = tree_attention.attend(query.transpose(0, 1), *memory, dense)
    got = pool_attention.attend(query, keys, values, rows, query.shape[2] ** -0.5)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


TRITON = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton, and TRITON_INTERPRET=1 or a CUDA device"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]


def marked(function):
    for mark in TRITON:
        function = mark(function)
    return function


@marked
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "heads", "kv_heads", "committed", "window"), CASES)
def test_the_triton_form_is_the_definition(nodes, heads, kv_heads, committed, window, dtype):
    from baselines.sglang import pool_attention_triton
    from tfm_kernels.tree_attention_triton import Tiling

    # a GPU takes rows of 128 bytes or more
    dim = 32 if INTERPRETED or dtype == torch.float32 else 64
    query, keys, values, rows = problem(nodes, heads, kv_heads, committed, window, dim=dim, dtype=dtype)
    # rows of a joined product, as SGLang hands them over, and another scale than the usual
    query = torch.cat([query, query], 1)[:, heads:]
    expected = pool_attention.attend(query, keys, values, rows, 0.2)
    cut = pool_attention_triton.choose(heads // kv_heads * nodes, kv_heads, dim)
    # uneven splits, and more of them than there are tiles of keys; the interpreter is slow
    cuts = (3, 32) if dtype == torch.float32 else ()
    for tiling in (None, *(Tiling(cut.rows, 16, splits, cut.warps, cut.stages) for splits in cuts)):
        got = pool_attention_triton.attend(query, keys, values, rows, 0.2, tiling=tiling)
        # bf16: two roundings of the last of eight bits
        limit = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, expected, rtol=limit, atol=limit)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_launch_follows_lengths_places_and_masks():
    """At the 27B's heads: what a replay reads is what the buffers hold by then."""
    from baselines.sglang import pool_attention_triton

    shape = {"dim": 256, "dtype": torch.bfloat16}
    problems = [problem(65, 24, 4, committed, None, **shape) for committed in (3, 150)]
    query, keys, values, rows = problems[0]
    buffers = (query, keys, values, rows.places, rows.committed, rows.own)
    pool_attention_triton.attend(query, keys, values, rows, 0.0625)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pool_attention_triton.attend(query, keys, values, rows, 0.0625)
    for query, keys, values, rows in problems:
        expected = pool_attention.attend(query, keys, values, rows, 0.0625)
        for buffer, value in zip(buffers, (query, keys, values, rows.places, rows.committed, rows.own), strict=True):
            buffer.copy_(value)
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


COMPILE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from compile_engine_triton import compile_kernel
from baselines.sglang.pool_attention_triton import _split_kernel, choose

kinds = {"places_p": "*i32", "request_p": "*i64", "own_p": "*u8"}
for nodes, heads, kv_heads, dim, window in ((65, 24, 4, 256, 0), (16, 32, 8, 128, 2048), (16, 32, 8, 128, 0)):
    group = heads // kv_heads
    cut = choose(group * nodes, kv_heads, dim)
    tile = {"G": group, "D": dim, "WINDOW": window, "BM": cut.rows, "BN": cut.keys}
    print(json.dumps(compile_kernel(_split_kernel, tile, kinds, warps=cut.warps, stages=cut.stages, capability=90)))
"""


@marked
def test_it_compiles_for_a_gpu_that_is_not_here():
    """At the 27B's heads and the drafter's; shared memory of an H200 block is 227 KiB."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(0 < int(line) <= 227 * 1024 for line in done.stdout.split())


class Layer(SimpleNamespace):
    """A RadixAttention's facts."""

    def __init__(self, **more):
        plain = {"layer_id": 3, "is_cross_attention": False, "logit_cap": 0.0, "xai_temperature_len": -1}
        plain |= {"v_head_dim": 32, "qk_head_dim": 32, "sliding_window_size": -1, "tp_q_head_num": 4, "scaling": 0.2}
        super().__init__(**plain | more)


def backend_of(pool, rows, **more):
    plain = {"is_draft_runner": False, "use_sliding_window_kv_pool": False, "_translate_kv_loc": None}
    plain |= {"req_to_token": rows.places, "token_to_kv_pool": SimpleNamespace(get_kv_buffer=lambda layer: pool)}
    return SimpleNamespace(**plain | more)


def pass_of(rows, *, verify=True, **more):
    mode = SimpleNamespace(is_target_verify=lambda: verify)
    plain = {"batch_size": 1, "forward_mode": mode, "spec_info": object(), "out_cache_loc": None}
    return SimpleNamespace(**plain | {"req_pool_indices": rows.request, "seq_lens": rows.committed} | more)


def settings(**more):
    return Settings.from_dict(
        {"proposal": "ddtree", "budget": 16, "attention": "torch", "draft_attention": "torch", **more}
    )


def test_only_trees_and_blocks_whose_attention_is_ours_are_taken():
    *_, rows = problem(17, 4, 2, 9, None)
    target, drafter = backend_of(None, rows), backend_of(None, rows, is_draft_runner=True)
    ours = PoolAttention(settings(draft_attention="sglang"), block=16, device=DEVICE)
    assert ours.takes(target, pass_of(rows)) and not ours.takes(drafter, pass_of(rows))
    assert not ours.takes(target, pass_of(rows, verify=False)) and not ours.takes(target, pass_of(rows, spec_info=None))
    assert not ours.takes(target, None)
    theirs = PoolAttention(settings(attention="sglang"), block=16, device=DEVICE)
    assert theirs.takes(drafter, pass_of(rows)) and not theirs.takes(target, pass_of(rows))


def test_a_replay_is_prepared_for_sglangs_attention_alone(monkeypatch):
    """What ours does not read is neither listed nor masked; a capture and every other pass are SGLang's as before."""
    *_, rows = problem(17, 4, 2, 9, None)
    seen, backend, verify = [], backend_of(None, rows), pass_of(rows)
    original = lambda backend, batch, in_capture: seen.append((batch, in_capture))  # noqa: E731
    ours = PoolAttention(settings(), block=16, device=DEVICE)
    monkeypatch.setattr(shared_state, "attention", ours)
    hooks.prepare_replay(original, backend, verify)
    assert seen == []
    decode = pass_of(rows, verify=False)
    hooks.prepare_replay(original, backend, verify, in_capture=True)
    hooks.prepare_replay(original, backend, decode)
    monkeypatch.setattr(shared_state, "attention", None)  # a stock arm
    hooks.prepare_replay(original, backend, verify)
    assert seen == [(verify, True), (decode, False), (verify, False)]


def test_a_layer_attends_where_its_model_says(monkeypatch):
    """The tree's own mask in the target; in the drafter a chain with SGLang's window, or the whole block."""
    kinds = SimpleNamespace(AttentionType=SimpleNamespace(DECODER="decoder"))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.radix_attention", kinds)
    monkeypatch.setitem(
        sys.modules, "sglang.srt.mem_cache.memory_pool", SimpleNamespace(KVWriteLoc=lambda place: place)
    )
    ours, written = PoolAttention(settings(), block=17, device=DEVICE), []
    monkeypatch.setattr(shared_state, "attention", ours)
    query, keys, values, rows = problem(17, 4, 2, 40, None)
    ours.own.copy_(rows.own)
    whole = torch.ones_like(rows.own)
    cases = [
        (False, "encoder", -1, rows.own, None),
        (True, "encoder", -1, whole, None),
        (True, "decoder", 19, whole.tril(), 20),
    ]
    for is_draft_runner, kind, size, own, window in cases:
        backend = backend_of((keys, values), rows, is_draft_runner=is_draft_runner)
        backend._set_kv_buffer = lambda *found: written.append(found)
        layer, verify = Layer(attn_type=kind, sliding_window_size=size), pass_of(rows)
        got = hooks.attend(None, backend, query.flatten(1), "k", "v", layer, verify, save_kv_cache=True)
        expected = pool_attention.attend(query, keys, values, dataclasses.replace(rows, own=own, window=window), 0.2)
        assert torch.equal(got, expected) and written.pop() == (verify, layer, None, "k", "v")


@pytest.mark.parametrize(
    ("layer", "pool", "more", "message"),
    [
        ({"logit_cap": 30.0}, {}, {}, "does not take a cap of its scores .layer 3.; set it to sglang"),
        ({"is_cross_attention": True}, {}, {}, "cross-attention"),
        ({"v_head_dim": 64}, {}, {}, "values of another width"),
        ({"sliding_window_size": 40}, {}, {}, "a window of 41 positions"),
        ({}, {"use_sliding_window_kv_pool": True}, {}, "a pool with places of its own"),
        ({}, {}, {"sinks": torch.ones(4)}, "sinks"),
    ],
    ids=["cap", "cross", "width", "window", "pool", "sinks"],
)
def test_what_the_form_does_not_know_is_refused_by_name(layer, pool, more, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.memory_pool", SimpleNamespace(KVWriteLoc=tuple))
    query, keys, values, rows = problem(17, 4, 2, 9, None)
    ours = PoolAttention(settings(), block=16, device=DEVICE)
    with pytest.raises(ValueError, match=f"attention: .*{message}"):
        ours.attend(
            backend_of((keys, values), rows, **pool), query.flatten(1), None, None, Layer(**layer), pass_of(rows),
            save_kv_cache=False, **more,
        )  # fmt: skip
    with pytest.raises(ValueError, match="batch_size: 2 .*--max-running-requests 1"):
        ours.attend(backend_of((keys, values), rows), query, None, None, Layer(), pass_of(rows, batch_size=2))


def test_a_draft_runs_ahead_only_into_places_that_are_reserved_and_exist():
    room = ahead.Room(nodes=65, block=16, path=16, context=100)
    assert room.holds(committed=68, tokens_left=2)
    # the request ends with this step
    assert not room.holds(committed=68, tokens_left=1)
    # 69 + 16 emitted + 16 drafted reach beyond position 99
    assert not room.holds(committed=69, tokens_left=2)
    # SGLang reserves 2 * 13 behind the step's start; it may emit 13, and the block behind takes 16
    assert not ahead.Room(nodes=13, block=16, path=16, context=100).holds(committed=5, tokens_left=9)
    assert ahead.Room(nodes=16, block=16, path=16, context=100).holds(committed=5, tokens_left=9)


def test_work_aside_waits_for_the_stream_it_follows_and_is_waited_for(monkeypatch):
    calls = []

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    current = [Stream("main")]

    @contextlib.contextmanager
    def stream(chosen):
        current.append(chosen)
        yield
        current.pop()

    # of another priority than SGLang's: torch may hand out one of its own again
    streams = {0: current[0], -1: Stream("side")}
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: streams[priority])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    aside = ahead.Aside(torch.device("cuda"))
    with aside.behind():
        calls.append(f"launch on {current[-1].name}")
    aside.join()
    assert calls == ["side waits for main", "launch on side", "main waits for side"]
    with ahead.Aside(torch.device("cpu")).behind():
        calls.append(current[-1].name)
    assert calls[-1] == "main"
