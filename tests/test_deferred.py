"""The deferred commit against commit, then verify: in PyTorch anywhere, in CUDA C++ on a GPU."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from cuda_cases import DIM, GROUP, HEADS, TREES, draw_inputs, nan_outputs, random_tree, relative
from test_mixer_cuda import mixer_case

from tfm_kernels import conv
from tfm_kernels.gdn import deferred, deferred_cuda, fused_cuda, mixer_cuda, ops

SIZES = [1, 2, 17, 33, 64, 65, 128, 129]


def path_to(tree, depth):
    """The first `depth` nodes on the way to the deepest node of `tree`."""
    return max((walk(tree, node) for node in range(len(tree))), key=len)[:depth]


def walk(tree, node):
    nodes = []
    while node >= 0:
        nodes.insert(0, node)
        node = int(tree[node])
    return nodes


def paths_of(trees, depths, length):
    path = torch.full((len(trees), length), -1)
    for row, tree, depth in zip(path, trees, depths, strict=True):
        nodes = path_to(tree, depth)
        row[: len(nodes)] = torch.tensor(nodes, dtype=torch.int64)
    return path


# --- the definition


def cpu_case(nodes, rows, requests=2, seed=0):
    """A verified tree of `rows` rows and the inputs of the next verify, in float64, with a few small heads."""
    generator = torch.Generator().manual_seed(seed + nodes)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def inputs(count, state):
        trees = torch.stack([random_tree(count, seed + i) for i in range(requests)])
        k = torch.nn.functional.normalize(draw(requests, count, 2, 8), dim=-1)
        scalars = (-draw(requests, count, 4).abs(), draw(requests, count, 4).sigmoid())
        return [draw(requests, count, 2, 8), k, draw(requests, count, 4, 6), *scalars, trees, state]

    before = inputs(rows, draw(requests, 4, 8, 6))
    return before, inputs(nodes, before[6].clone())


@pytest.mark.parametrize("backend", ["naive", "solve"])
@pytest.mark.parametrize("nodes", SIZES)
def test_deferred_verify_equals_commit_then_verify(nodes, backend):
    before, after = cpu_case(nodes, rows=33)
    _, u, path_log_decay = ops.tree_verify(*before, backend="solve")
    for depths in ((0, 0), (1, 0), (4, 16), (16, 1)):
        path = paths_of(before[5], depths, 17)
        state = ops.commit(before[6], before[1], u, path_log_decay, path)
        expected = ops.tree_verify(*after[:6], state, backend="solve")
        pending = deferred.Pending(path, before[1], u, path_log_decay)
        got_state = before[6].clone()
        got = deferred.deferred_verify(*after[:6], got_state, pending, backend=backend)
        for x, y in zip((*got, got_state), (*expected, state), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)
        assert (got_state[0] == before[6][0]).all() == (depths[0] == 0)


def test_naive_commit_equals_the_state_of_the_definition():
    before, _ = cpu_case(1, rows=33)
    states = deferred.naive.naive_states(*before)[1]
    _, u, path_log_decay = ops.tree_verify(*before, backend="naive")
    for node in range(33):
        path = torch.full((2, 17), -1)
        for request in range(2):
            nodes = walk(before[5][request], node)
            path[request, : len(nodes)] = torch.tensor(nodes)
        got = deferred.naive_commit(before[6], before[1], u, path_log_decay, path)
        torch.testing.assert_close(got, states[:, node], rtol=1e-9, atol=1e-11)


def test_the_first_step_has_nothing_pending_whatever_the_buffers_hold():
    before, after = cpu_case(17, rows=5)
    nan = [torch.full_like(x, math.nan) for x in (before[1], before[2], before[3])]
    for backend in ("naive", "solve"):
        state = after[6].clone()
        got = deferred.deferred_verify(*after[:6], state, deferred.Pending.nothing(*nan), backend=backend)
        expected = ops.tree_verify(*after, backend=backend)
        assert torch.equal(state, after[6]) and all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_naive_window_equals_the_commit_of_the_convolution():
    trees = torch.stack([random_tree(33, 1), TREES["chain"](33)])
    generator = torch.Generator().manual_seed(0)
    window, inputs = (torch.randn(2, rows, 10, generator=generator) for rows in (3, 33))
    index = conv.window_index(trees, 4)
    for depths in ((0, 1), (2, 3), (4, 16), (16, 0)):
        path = paths_of(trees, depths, 17)
        assert torch.equal(deferred.naive_window(window, inputs, path), conv.commit(inputs, window, index, path))


def test_what_is_not_a_path_is_refused_by_name():
    before, after = cpu_case(3, rows=5)
    u, decays = torch.zeros_like(before[2]), torch.zeros_like(before[3])
    for nodes, message in (([0, 5], "nodes 0 to 4"), ([2, 1], "ascending"), ([0] * 40, "path")):
        pending = deferred.Pending(torch.tensor([nodes] * 2), before[1], u, decays)
        with pytest.raises(ValueError, match=message):
            deferred.deferred_verify(*after, pending, backend="solve")
    long = deferred.Pending(torch.full((2, 33), -1), before[1], u, decays)
    with pytest.raises(ValueError, match="33 nodes are not allowed .*1 to 32"):
        deferred.deferred_verify(*after, long, backend="solve")
    with pytest.raises(ValueError, match="fused_triton has no deferred commit .*naive, solve, fused_cuda"):
        deferred.deferred_verify(*after, deferred.Pending.nothing(before[1], u, decays), backend="fused_triton")


# --- in CUDA C++


def verified(trees, seed, **options):
    """Inputs of a step and the Pending that it leaves, for `trees` on the GPU; the path is empty."""
    inputs = draw_inputs(trees, seed=seed, **options)
    outputs = nan_outputs(inputs)
    fused_cuda.tree_verify_into(*inputs, *outputs)
    return inputs, deferred.Pending.nothing(inputs[1], *outputs[1:])


def with_path(pending, path):
    return dataclasses.replace(pending, path=path.cuda())


def commit_launch(state, pending):
    """`state` after the pending path, by the commit of its own launch."""
    nodes = torch.zeros(*pending.k.shape[:2], 8, dtype=torch.bfloat16, device="cuda")
    window = nodes[:, :1].repeat(1, 3, 1)
    layer = mixer_cuda.CommitLayer(state.clone(), pending.k, pending.u, pending.path_log_decay, window, nodes)
    mixer_cuda.Commit([layer])(pending.path)
    return layer.state


def run_deferred(inputs, pending, **options):
    outputs = nan_outputs(inputs)
    deferred_cuda.deferred_verify_into(*inputs, *outputs, pending, **options)
    return outputs


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", SIZES)
def test_one_launch_equals_the_definition_in_float64(nodes):
    trees = torch.stack([random_tree(65, 3), TREES["chain"](65), TREES["mixed"](65)])
    before, pending = verified(trees, seed=1)
    for depths in ((0, 1, 2), (4, 17, 0), (16, 32, 17)):
        pending = with_path(pending, paths_of(trees, depths, 32))
        after = draw_inputs(torch.stack([random_tree(nodes, i) for i in range(3)]), seed=2)
        after[6] = before[6].clone()
        doubles = [x.double() if x.is_floating_point() else x for x in after]
        *expected, state = deferred.naive_deferred_verify(*doubles, pending)
        out, u, path_log_decay = run_deferred(after, pending)
        assert relative(after[6], state) < 3e-6
        assert relative(out, expected[0]) < 3e-5 and relative(u, expected[1]) < 3e-5
        assert relative(path_log_decay, expected[2]) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 16, 33, 65, 129])
def test_one_launch_gives_the_bits_of_commit_then_verify(nodes):
    """Same products, same order of sums: nothing may differ but where the state lies in between."""
    trees = torch.stack([random_tree(65, 5), TREES["chain"](65)])
    before, pending = verified(trees, seed=3)
    after = draw_inputs(torch.stack([random_tree(nodes, 7), random_tree(nodes, 8)]), seed=4)
    for depths in ((0, 0), (1, 3), (8, 16), (16, 29)):
        pending = with_path(pending, paths_of(trees, depths, 32))
        committed = commit_launch(before[6], pending)
        after[6] = committed.clone()
        expected = nan_outputs(after)
        fused_cuda.tree_verify_into(*after, *expected)
        after[6] = before[6].clone()
        got = run_deferred(after, pending)
        assert torch.equal(after[6], committed)
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
        assert torch.equal(committed[0], before[6][0]) == (depths[0] == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [0.0, 5.0, 100.0, math.inf])
def test_strong_decays_on_the_pending_path_stay_finite(decay):
    trees = TREES["chain"](33)[None]
    before, pending = verified(trees, seed=5, decay=decay)
    pending = with_path(pending, torch.arange(17)[None])
    after = draw_inputs(random_tree(65, 1), seed=6)
    after[6] = before[6].clone()
    doubles = [x.double() if x.is_floating_point() else x for x in after]
    *_, state = deferred.naive_deferred_verify(*doubles, pending)
    run_deferred(after, pending)
    assert torch.isfinite(after[6]).all() and relative(after[6], state) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("group", fused_cuda.GROUPS)
def test_other_numbers_of_value_heads(group):
    trees = TREES["wide"](17)[None]
    before, pending = verified(trees, seed=7, group=group)
    pending = with_path(pending, paths_of(trees, (3,), 5))
    after = draw_inputs(random_tree(33, 2), seed=8, group=group)
    after[6] = before[6].clone()
    committed = commit_launch(before[6], pending)
    doubles = [x.double() if x.is_floating_point() else x for x in after]
    *expected, exact = deferred.naive_deferred_verify(*doubles, pending)
    out, _, _ = run_deferred(after, pending)
    assert relative(after[6], exact) < 3e-6 and relative(out, expected[0]) < 3e-5
    assert torch.equal(committed, after[6])


@pytest.mark.gpu
def test_the_first_step_reads_no_buffer_and_leaves_the_state():
    inputs = draw_inputs(random_tree(65, 1))
    nan = [torch.full_like(inputs[1], math.nan), *nan_outputs(inputs)[1:]]
    state = inputs[6].clone()
    got = run_deferred(inputs, deferred.Pending.nothing(*nan))
    expected = nan_outputs(inputs)
    fused_cuda.tree_verify_into(*inputs, *expected)
    assert torch.equal(inputs[6], state)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.gpu
def test_a_graph_commits_the_path_that_its_buffer_holds():
    """Captured once with an empty path; replays follow path, pending rows and tree as device data."""
    trees = random_tree(65, 2)[None]
    before, pending = verified(trees, seed=9)
    pending = with_path(pending, torch.full((1, 17), -1))
    after = draw_inputs(random_tree(65, 3), seed=10)
    after[6] = before[6].clone()
    outputs = nan_outputs(after)
    deferred_cuda.deferred_verify_into(*after, *outputs, pending)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        deferred_cuda.deferred_verify_into(*after, *outputs, pending)
    for depth, tree in ((1, random_tree(65, 4)), (16, TREES["wide"](65)), (0, TREES["chain"](65))):
        pending.path.copy_(paths_of(trees, (depth,), 17))
        after[5][0] = tree
        after[6].copy_(before[6])
        graph.replay()
        got = [x.clone() for x in (*outputs, after[6])]
        after[6].copy_(before[6])
        fresh = run_deferred(after, pending)
        assert all(torch.equal(x, y) for x, y in zip(got, (*fresh, after[6]), strict=True))


@pytest.mark.gpu
def test_a_hundred_runs_are_equal_bit_for_bit():
    trees = random_tree(65, 1)[None]
    before, pending = verified(trees, seed=11, heads=16)
    pending = with_path(pending, paths_of(trees, (16,), 17))
    after = draw_inputs(random_tree(65, 6), seed=12, heads=16)
    first = None
    for _ in range(100):
        after[6] = before[6].clone()
        got = (*run_deferred(after, pending), after[6])
        first = first or got
        assert all(torch.equal(x, y) for x, y in zip(got, first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [3, 17, 65])
def test_steps_of_the_deferred_mixer_equal_steps_that_commit(nodes):
    """Four steps with paths of 0 to 16 nodes: states, windows and outputs bit for bit, with two sets of buffers."""
    plain, weights, _ = mixer_case(nodes)
    late = dataclasses.replace(plain, state=plain.state.clone(), window=plain.window.clone())
    requests, channels = plain.mixed.shape[0], plain.mixed.shape[2]
    make = mixer_cuda.MixerBuffers.empty
    sets = [make(requests, nodes, HEADS, HEADS * GROUP, torch.device("cuda")) for _ in range(2)]
    own = make(requests, nodes, HEADS, HEADS * GROUP, torch.device("cuda"))
    inputs = [torch.full_like(plain.mixed, math.nan) for _ in range(2)]
    pending = deferred.Pending.nothing(sets[1].k, sets[1].u, sets[1].path_log_decay, inputs[1])
    generator = torch.Generator().manual_seed(nodes)
    for step, depths in enumerate(((2, 16), (0, 1), (3, 0), (16, 4))):
        mixed = torch.randn(requests, nodes, channels, generator=generator).bfloat16().cuda()
        mixer_cuda.mixer_into(dataclasses.replace(plain, mixed=mixed), weights, own)
        inputs[step % 2].copy_(mixed)
        turn = sets[step % 2]
        deferred_cuda.deferred_mixer_into(dataclasses.replace(late, mixed=inputs[step % 2]), weights, turn, pending)
        for name in ("q", "k", "v", "log_decay", "beta", "u", "path_log_decay", "normed"):
            assert torch.equal(getattr(own, name), getattr(turn, name)), (step, name)
        assert torch.equal(late.state, plain.state) and torch.equal(late.window, plain.window)
        path = paths_of(plain.parents.cpu(), depths, 17).cuda()
        layer = mixer_cuda.CommitLayer(plain.state, own.k, own.u, own.path_log_decay, plain.window, mixed)
        mixer_cuda.Commit([layer])(path)
        pending = deferred.Pending(path, turn.k, turn.u, turn.path_log_decay, inputs[step % 2])


@pytest.mark.gpu
def test_rows_that_the_verify_overwrites_are_refused():
    inputs = draw_inputs(random_tree(17))
    outputs = nan_outputs(inputs)
    pending = deferred.Pending.nothing(inputs[1].clone(), outputs[1], outputs[2].clone())
    with pytest.raises(ValueError, match="u: the pending rows lie where .*two sets"):
        deferred_cuda.deferred_verify_into(*inputs, *outputs, pending)
    wide = dataclasses.replace(pending, u=pending.u.clone(), k=inputs[1].float())
    with pytest.raises(ValueError, match="pending k: .*float32 is not allowed"):
        deferred_cuda.deferred_verify_into(*inputs, *outputs, wide)
    assert inputs[0].shape[-1] == DIM


def test_the_benchs_variants_fit_the_sources(tmp_path, monkeypatch):
    """bench_more.py replaces named lines of the committed sources: each must be there once."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "results/published/kernels-h200"))
    import bench_more

    for kind, edits in bench_more.EDITS.items():
        bench_more.edit_sources(kind, tmp_path / kind)
        for name in edits:
            assert (tmp_path / kind / name).read_text() != (fused_cuda.SOURCES / name).read_text()
    assert set(bench_more.VERIFY_KINDS + bench_more.MIXER_KINDS) == set(bench_more.EDITS)
