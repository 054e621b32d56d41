"""The CUDA kernels on a CPU, thread for thread in random order: right without a GPU, and a missing wait is seen."""

import contextlib
import dataclasses
import math
import types

import pytest
import torch
from cuda_cases import DIM, TREES, definition, draw_inputs, nan_outputs, random_tree, relative
from cuda_emulation import MAX_ROWS, build

from tfm_kernels.gdn import deferred, fused_cuda, mixer_cuda

TOLERANCE = 3e-5  # as on a GPU (cuda_cases)


HANDOVERS = ("none", "copies", "segments", "scales", "scales_of_threads", "writes", "writes_of_lanes")
# the kernel's handovers with a switch: emulator::missing = i leaves the wait of HANDOVERS[i] out
SWITCHES = {
    "tree_stage.cuh": [("  sync_warps_or(3,", "  if (emulator::missing != 2) sync_warps_or(3,")],
    "tree_verify.cuh": [
        ("  sync_warps(1, S::WORKERS);\n}", "  if (emulator::missing != 1) sync_warps(1, S::WORKERS);\n}"),
        ("sync_warps_or(3, S::THREADS,", "sync_warps_or(3, emulator::missing == 2 ? S::WORKERS : S::THREADS,"),
        ("  barrier_wait(&s.scaled);", "  if (emulator::missing != 3) barrier_wait(&s.scaled);"),
        ("(&s.scaled, S::TREE);", "(&s.scaled, emulator::missing == 4 ? S::TREE / 32 : S::TREE);"),
        ("    barrier_arrive(&s.scaled);", "    if (emulator::missing != 4 || lane == 0) barrier_arrive(&s.scaled);"),
        ("    barrier_wait(&s.ready[j", "    if (emulator::missing != 5) barrier_wait(&s.ready[j"),
        ("(&s.ready[thread], 32);", "(&s.ready[thread], emulator::missing == 6 ? 1 : 32);"),
        ("    barrier_arrive(&s.ready", "    if (emulator::missing != 6 || lane == 0) barrier_arrive(&s.ready"),
    ],
}


@pytest.fixture(autouse=True)
def cpu_stands_for_a_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(fused_cuda, "_check_rows", lambda *sizes: None)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return build(tmp_path_factory.mktemp("plain") / "csrc", edits=SWITCHES)


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    return build(tmp_path_factory.mktemp("deferred") / "csrc", deferred=True)


def inputs_of(trees, seed=0, decay=0.3):
    return draw_inputs(trees, seed=seed, heads=1, decay=decay, device="cpu")


def verify(lib, inputs, pending=fused_cuda.NO_PENDING, seed=0, missing="none"):
    outputs = nan_outputs(inputs)
    lib.emulator_order(seed, HANDOVERS.index(missing))
    fused_cuda.launch_verify(lib, (*inputs, *outputs), pending)
    return outputs


def pending_of(path, inputs, outputs):
    """The tensors of a pending path and what tfm_tree_verify takes of them."""
    pending = deferred.Pending(path, inputs[1], outputs[1], outputs[2])
    pointers = [x.data_ptr() for x in (pending.path, pending.k, pending.u, pending.path_log_decay)]
    return pending, (*pointers, path.shape[1], pending.k.shape[1])


def commit(lib, state, pending, window, rows):
    layer = [state, pending.k, pending.u, pending.path_log_decay, window, rows]
    table = torch.tensor([x.data_ptr() for x in layer])
    sizes = (*pending.path.shape, *pending.k.shape[1:3], pending.u.shape[2])
    width = window.shape[2] * 2
    assert lib.tfm_commit(table.data_ptr(), 1, pending.path.data_ptr(), *sizes, width, width, 0) == 0


@pytest.mark.parametrize("nodes", [1, 16, 17, MAX_ROWS])
def test_the_sources_equal_the_definition(plain, nodes):
    for tree, decay in ((random_tree(nodes, 1), 0.3), (TREES["chain"](nodes), 20.0)):
        inputs = inputs_of(tree, seed=nodes, decay=decay)
        out, u, path = verify(plain, inputs)
        expected = definition(inputs)
        assert relative(out, expected[0]) < TOLERANCE and relative(u, expected[1]) < TOLERANCE
        assert relative(path, expected[2]) < 1e-12


@pytest.mark.parametrize("nodes", [16, 33])
def test_any_order_of_threads_gives_the_same_bits(plain, nodes):
    inputs = inputs_of(random_tree(nodes, 2))
    first = verify(plain, inputs)
    for seed in range(1, 7):
        assert all(torch.equal(x, y) for x, y in zip(verify(plain, inputs, seed=seed), first, strict=True))


@pytest.mark.parametrize("handover", HANDOVERS[1:])
def test_a_missing_wait_is_seen(plain, handover):
    """Each handover of the kernel without its wait: some order of threads then reads what is not there yet."""
    inputs = inputs_of(random_tree(33, 2))
    expected = definition(inputs)
    errors = []
    for seed in range(24):
        outputs = verify(plain, inputs, seed=seed, missing=handover)
        errors.append(max(relative(x, y) for x, y in zip(outputs[:2], expected[:2], strict=True)))
        if not errors[-1] < 1e-3:
            return
    pytest.fail(f"{handover}: errors {errors} of {len(errors)} orders")


@pytest.mark.parametrize("nodes", [1, 33])
def test_deferred_verify_gives_the_bits_of_commit_then_verify(plain, late, nodes):
    trees = torch.stack([random_tree(33, 5), TREES["chain"](33)])
    before = inputs_of(trees, seed=3)
    outputs = verify(plain, before)
    after = inputs_of(torch.stack([random_tree(nodes, 7), random_tree(nodes, 8)]), seed=4)
    window, rows = (torch.zeros(2, count, 8, dtype=torch.bfloat16) for count in (3, 33))
    for lengths in ((0, 1), (4, 32)):
        path = torch.full((2, 32), -1)
        path[0, : lengths[0]] = torch.tensor([0, *random_path(trees[0])][: lengths[0]], dtype=torch.int64)
        path[1, : lengths[1]] = torch.arange(lengths[1])
        pending, arguments = pending_of(path, before, outputs)
        committed = before[6].clone()
        commit(plain, committed, pending, window, rows)
        after[6] = committed.clone()
        expected = verify(plain, after)
        for seed in range(2):
            after[6] = before[6].clone()
            got = verify(late, after, arguments, seed)
            assert torch.equal(after[6], committed)
            assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
        exact = deferred.naive_commit(before[6].double(), pending.k, pending.u, pending.path_log_decay, path)
        assert relative(committed, exact) < 3e-6
        assert torch.equal(committed[0], before[6][0]) == (lengths[0] == 0)


def random_path(tree):
    """Nodes below the root on the way to the last node of `tree`."""
    nodes, node = [], len(tree) - 1
    while node > 0:
        nodes.insert(0, node)
        node = int(tree[node])
    return nodes


def mixer_case(nodes):
    generator = torch.Generator().manual_seed(nodes)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    channels = 5 * DIM
    trees = torch.stack([random_tree(nodes), TREES["chain"](nodes)])
    inputs = mixer_cuda.MixerInputs(
        draw(2, nodes, channels).bfloat16(), draw(2, nodes, 3, DIM).bfloat16(), draw(2, nodes, 3).bfloat16(),
        draw(2, nodes, 3).bfloat16(), trees, draw(2, 3, channels).bfloat16(), draw(2, 3, DIM, DIM),
    )  # fmt: skip
    weights = mixer_cuda.MixerWeights(
        draw(channels, 4).bfloat16(), draw(3).abs().log(), draw(3), draw(DIM).bfloat16(), 1e-6
    )
    return inputs, weights, [mixer_cuda.MixerBuffers.empty(2, nodes, 1, 3, "cpu") for _ in range(3)]


def run_mixer(lib, inputs, weights, b, pending=fused_cuda.NO_PENDING, window=mixer_cuda.NO_PENDING_WINDOW):
    mixer_cuda.launch_prepare(lib, inputs, weights, b, window)
    verify = (b.q, b.k, b.v, b.log_decay, b.beta, inputs.parents, inputs.state, b.out, b.u, b.path_log_decay)
    fused_cuda.launch_verify(lib, verify, pending)
    mixer_cuda.launch_norm(lib, inputs, weights, b, window)


def test_steps_of_the_deferred_mixer_equal_steps_that_commit(plain, late):
    """Paths of 0 to 9 nodes, shorter and longer than the window; two sets of buffers in turn."""
    nodes = 9
    inputs, weights, (own, *turns) = mixer_case(nodes)
    other = dataclasses.replace(inputs, state=inputs.state.clone(), window=inputs.window.clone())
    mixed = [torch.full_like(inputs.mixed, math.nan) for _ in range(2)]
    arguments, window = fused_cuda.NO_PENDING, mixer_cuda.NO_PENDING_WINDOW
    for step, length in enumerate((2, 0, 1, 9)):
        generator = torch.Generator().manual_seed(step)
        fresh = torch.randn(inputs.mixed.shape, generator=generator).bfloat16()
        run_mixer(plain, dataclasses.replace(inputs, mixed=fresh), weights, own)
        mixed[step % 2].copy_(fresh)
        turn = turns[step % 2]
        run_mixer(late, dataclasses.replace(other, mixed=mixed[step % 2]), weights, turn, arguments, window)
        for name in ("q", "k", "v", "log_decay", "beta", "u", "path_log_decay", "normed"):
            assert torch.equal(getattr(own, name), getattr(turn, name)), (step, name)
        assert torch.equal(other.state, inputs.state) and torch.equal(other.window, inputs.window)
        path = torch.full((2, 17), -1)  # read by the next step
        path[1, :length] = torch.arange(length)
        pending, arguments = pending_of(path, (None, turn.k), (None, turn.u, turn.path_log_decay))
        window = (path.data_ptr(), mixed[step % 2].data_ptr(), 17, nodes, inputs.mixed.shape[2])
        commit(plain, inputs.state, pending, inputs.window, fresh)
