"""The Triton kernels against the definition in float64: under Triton's interpreter on a CPU, for real on a GPU.

Runs where triton is installed and TRITON_INTERPRET=1 is set (.ci/run does both, in a venv of its own) or a CUDA device
is there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="triton is not installed: .ci/run tests it in a venv of its own")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or a CUDA device", allow_module_level=True)

from tfm_kernels.gdn import fused_triton, ops, recurrent_triton, selftest  # noqa: E402

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
HEADS, VALUE_HEADS, DIM = (1, 2, 16) if INTERPRETED else (2, 6, 128)
BACKENDS = ("recurrent_triton", "fused_triton")


def random_parents(nodes, seed, requests=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes))] for _ in range(requests)
    ]
    return torch.tensor(rows)


SHAPES = {
    "chain": lambda nodes: torch.arange(-1, nodes - 1)[None],
    "star": lambda nodes: torch.tensor([[-1] + [0] * (nodes - 1)]),
    "wide": lambda nodes: ((torch.arange(nodes) - 1) // 4)[None],
    "mixed": lambda nodes: torch.cat([torch.tensor([-1]), (torch.arange(1, nodes) - 4).clamp(min=0)])[None],
    "random": lambda nodes: random_parents(nodes, nodes),
    "deep": lambda nodes: (torch.arange(nodes) - 1 - (torch.arange(nodes) % 3 == 2).long())[None],
}


def make_inputs(parents, *, rows=torch.float32, seed=0, decay=0.3):
    """q, k, v, log_decay, beta, parents, state on the device; q, k, v rounded to `rows`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    requests, nodes = parents.shape
    q, k = (torch.nn.functional.normalize(draw(requests, nodes, HEADS, DIM), dim=-1) for _ in range(2))
    v, state = draw(requests, nodes, VALUE_HEADS, DIM), draw(requests, VALUE_HEADS, DIM, DIM)
    log_decay = -decay * draw(requests, nodes, VALUE_HEADS).abs()
    beta = draw(requests, nodes, VALUE_HEADS).sigmoid()
    inputs = ((q * DIM**-0.5).to(rows), k.to(rows), v.to(rows), log_decay, beta, parents, state)
    return tuple(x.to(DEVICE) for x in inputs)


def doubles(inputs):
    return [x.double() if x.is_floating_point() else x for x in inputs]


def error(got, expected):
    return (got.double() - expected.double()).abs().max().item()


def assert_equals_naive(inputs, backend, tolerance=1e-4):
    """Outputs, writes and path sums against the definition in float64."""
    out, u, path_log_decay = ops.tree_verify(*inputs, backend=backend)
    expected_out, expected_u, expected_path = ops.tree_verify(*doubles(inputs), backend="naive")
    assert out.dtype == u.dtype == torch.float32 and path_log_decay.dtype == torch.float64
    assert torch.isfinite(out).all() and torch.isfinite(u).all()
    assert error(out, expected_out) < tolerance
    assert error(u, expected_u) < tolerance
    assert error(path_log_decay, expected_path) <= 1e-12 * (1 + expected_path.abs().max().item())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("nodes", [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 81, 96])
def test_every_ragged_size_equals_the_recurrence(nodes, backend):
    """tilelang-ascend#855 (C087): sizes on both sides of each block, as a random tree and as a chain."""
    for shape in ("random", "chain"):
        assert_equals_naive(make_inputs(SHAPES[shape](nodes), seed=nodes), backend)


@pytest.mark.parametrize("nodes", [65, 97, 127, 128, 129, 145, 192])
def test_bf16_rows_equal_the_recurrence_up_to_three_blocks(nodes):
    """float32 rows stop at 96; of bf16 rows the error is the precision's."""
    inputs = make_inputs(SHAPES["random"](nodes), rows=torch.bfloat16, seed=nodes)
    assert_equals_naive(inputs, "fused_triton", tolerance=2e-3)


def test_the_recurrent_form_has_no_limit_of_rows():
    assert_equals_naive(make_inputs(SHAPES["random"](193)), "recurrent_triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_tree_equals_the_recurrence(shape, backend):
    assert_equals_naive(make_inputs(SHAPES[shape](65), seed=1), backend)


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from([1, 3]))
def test_random_trees_of_several_requests_equal_the_recurrence(seed, nodes, requests):
    inputs = make_inputs(random_parents(nodes, seed, requests), seed=seed)
    for backend in BACKENDS:
        assert_equals_naive(inputs, backend)


def test_40_random_trees_stay_within_1e_4():
    """C091: others ask for 1e-3 in float32."""
    parents = torch.cat([random_parents(16, i) for i in range(40)])
    assert_equals_naive(make_inputs(parents), "fused_triton")
    assert_equals_naive(make_inputs(parents[:5]), "recurrent_triton")


@pytest.mark.parametrize(
    "decays",
    [
        pytest.param([-20.0] * 64, id="every_node_forgets"),
        pytest.param([-90.0, -90.0, *[0.0] * 14], id="strong_then_none"),
        pytest.param([0.0] * 16, id="no_decay"),
        pytest.param([-200.0, -0.01] * 16, id="underflow_between_mild_ones"),
        pytest.param([-float("inf"), *[-0.5] * 15], id="minus_infinity_at_the_root"),
        pytest.param([*[-0.5] * 9, -float("inf"), *[-0.5] * 10], id="minus_infinity_inside"),
    ],
)
@pytest.mark.parametrize("shape", ["chain", "random"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strong_decay_is_finite_and_equals_the_recurrence(decays, shape, backend):
    """transformers#47625, fla#463, tt-metal#56550 (C085, C086): only ratios between ancestors exist."""
    inputs = list(make_inputs(SHAPES[shape](len(decays))))
    inputs[3] = torch.tensor(decays, device=DEVICE)[None, :, None].expand(1, -1, VALUE_HEADS)
    assert_equals_naive(inputs, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_of_every_output_is_written(backend, nan_filled_empty):
    for nodes in (1, 17, 65):
        assert_equals_naive(make_inputs(random_parents(nodes, 2, requests=2)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_change_no_other_row(backend):
    """vllm-ascend#11925 (C079, C089): 37 rows in a buffer of 65, the rest -1 and anything finite."""
    inputs = make_inputs(torch.cat([random_parents(37, 3), torch.full((1, 28), -1)], dim=1))
    cut = [x[:, :37] for x in inputs[:6]] + [inputs[6]]
    padded, plain = (ops.tree_verify(*x, backend=backend) for x in (inputs, cut))
    for full, part in zip(padded, plain, strict=True):
        assert error(full[:, :37], part) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_is_the_same_alone_and_among_others(backend):
    inputs = make_inputs(random_parents(33, 5, requests=3))
    together = ops.tree_verify(*inputs, backend=backend)
    for request in range(3):
        alone = ops.tree_verify(*(x[request : request + 1] for x in inputs), backend=backend)
        assert all(torch.equal(x[request], y[0]) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_and_transposed_inputs_give_the_result_of_copies(backend):
    q, k, v, log_decay, beta, parents, state = make_inputs(random_parents(20, 6, requests=2))
    views = (
        torch.cat([q, q], dim=3)[..., :DIM],
        k.transpose(2, 3).contiguous().transpose(2, 3),
        torch.cat([v, v], dim=2)[:, :, :VALUE_HEADS],
        log_decay.transpose(1, 2).contiguous().transpose(1, 2),
        beta[..., None].expand(*beta.shape, 2)[..., 1],
        parents.T.contiguous().T,
        state.mT.contiguous().mT,
    )
    expected = ops.tree_verify(q, k, v, log_decay, beta, parents, state, backend=backend)
    got = ops.tree_verify(*views, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_verify_never_writes_its_inputs():
    inputs = make_inputs(random_parents(20, 4))
    before = [x.clone() for x in inputs]
    for backend in BACKENDS:
        ops.tree_verify(*inputs, backend=backend)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


# --- stages


@pytest.mark.parametrize("nodes", [1, 16, 65, 129, 192])
def test_prepare_tree_packs_the_ancestors_and_the_depth_inside_the_block(nodes):
    parents = random_parents(nodes, nodes, requests=2)
    ancestors = ops.ancestor_mask(parents)
    tree = fused_triton.prepare_tree(parents, ancestors)
    for row in range(nodes):
        bits = [(int(tree[0, j // 64, row]) >> (j % 64)) & 1 for j in range(nodes)]
        assert bits == ancestors[0, row].long().tolist()
        inside = ancestors[0, row, row // 64 * 64 : row + 1]
        assert int(tree[0, -1, row]) == int(inside.sum()) - 1


def test_prefix_sums_the_decays_of_each_path():
    inputs = make_inputs(random_parents(65, 1, requests=2), decay=30.0)
    ancestors = ops.ancestor_mask(inputs[5])
    path, scalars = fused_triton.prefix(inputs[3], inputs[4], fused_triton.prepare_tree(inputs[5], ancestors))
    expected = ancestors.double() @ inputs[3].double()
    assert error(path, expected) < 1e-10
    assert error((scalars[:, :, 0].double() + scalars[:, :, 1]).transpose(1, 2), expected * 1.4426950408889634) < 1e-9
    assert torch.equal(scalars[:, :, 2].transpose(1, 2), inputs[4])


@pytest.mark.parametrize("nodes", range(1, 193))
def test_blocks_cover_the_rows_without_an_empty_one(nodes):
    sizes = [size for size in fused_triton.block_sizes(nodes) if size]
    assert sum(sizes) >= nodes and sum(sizes[:-1]) < nodes
    assert all(size == 64 for size in sizes[:-1]) and sum(sizes) - nodes < max(16, sizes[-1] / 2 + 1)


def test_repeated_keys_do_not_blow_the_inverse_up():
    """The powers of X have binomial coefficients here, 3432 at a path of 16 alone; the inverse has none."""
    inputs = list(make_inputs(SHAPES["chain"](64)))
    inputs[1] = inputs[1][:, :1].expand(-1, 64, -1, -1)
    inputs[3], inputs[4] = torch.zeros_like(inputs[3]), torch.ones_like(inputs[4])
    assert_equals_naive(inputs, "fused_triton")
    rounded = [x.bfloat16() if i < 3 else x for i, x in enumerate(inputs)]
    assert_equals_naive(rounded, "fused_triton", tolerance=3e-2)


PRECISION_CAPS = {"bf16": 5e-2, "mixed": 2e-3, "tf32": 1e-2, "tf32x3": 1e-4}


@pytest.mark.parametrize("precision", fused_triton.PRECISIONS)
def test_each_precision_stays_under_its_cap(precision):
    """C092: of bf16 rows, against float64 on the same rounded rows; bf16 operands are 10 times worse than the rest."""
    inputs = make_inputs(random_parents(65, 7), rows=torch.bfloat16)
    expected = ops.tree_verify(*doubles(inputs), backend="naive")
    tree = fused_triton.prepare_tree(inputs[5], ops.ancestor_mask(inputs[5]))
    got = fused_triton.tree_verify(*inputs[:5], tree, inputs[6], precision=precision)
    assert max(error(got[0], expected[0]), error(got[1], expected[1])) < PRECISION_CAPS[precision]


def test_states_of_the_recurrent_form_are_those_of_the_definition():
    """It keeps every node's state, [V, K] a head; a commit takes the accepted node's."""
    from tfm_kernels.gdn import naive

    inputs = make_inputs(random_parents(17, 8, requests=2))
    states = recurrent_triton.verify_states(*inputs)[3]
    assert error(states.mT, naive.naive_states(*doubles(inputs))[1]) < 1e-5


def test_64_rounds_of_random_accepted_paths_do_not_drift():
    """uzu#609 (C006): bf16 rows; the committed state against the sequential recurrence on the same rows in float64."""
    generator = torch.Generator().manual_seed(0)
    state = make_inputs(random_parents(1, 0))[6]
    exact, errors = state.double(), []
    for step in range(64):
        inputs = list(make_inputs(random_parents(12, step), rows=torch.bfloat16, seed=step))
        inputs[6] = state
        _, u, path_log_decay = ops.tree_verify(*inputs, backend="fused_triton")
        node, path = int(torch.randint(0, 12, (1,), generator=generator)), []
        while node >= 0:
            path.insert(0, node)
            node = int(inputs[5][0, node])
        path = torch.tensor([path], device=DEVICE)
        chain = [x[:, path[0]] for x in doubles(inputs[:5])] + [SHAPES["chain"](path.shape[1]).to(DEVICE), exact]
        _, exact_u, exact_path = ops.tree_verify(*chain, backend="naive")
        exact = ops.commit(exact, chain[1], exact_u, exact_path, chain[5] + 1)
        state = ops.commit(state, inputs[1], u, path_log_decay, path)
        errors.append(error(state, exact) / exact.abs().max().item())
    assert max(errors) < 1e-3
    assert max(errors[48:]) < 3 * max(errors[:16])


# --- for other GPUs

# bytes of shared memory that one program may have
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_the_kernels_compile_for(capability):
    """What the interpreter cannot see: Triton's compiler takes the code, and the tiles fit the GPU's shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_triton.py")
    command = [sys.executable, str(script), "--capability", str(capability)]
    command += ["--nodes", "16", "65"] if capability == 90 else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    assert max(shared.values()) <= SHARED_MEMORY[capability]


# --- limits


def test_what_a_kernel_does_not_take_is_refused_before_launch():
    """tokenspeed#700, vllm#37035, flashinfer#2679 (C088): by name, with what is allowed and what to use instead."""
    inputs = make_inputs(random_parents(97, 0))
    with pytest.raises(ValueError, match="fused_triton takes 1 to 96 rows of torch.float32, not 97; use solve"):
        ops.tree_verify(*inputs, backend="fused_triton")
    inputs = make_inputs(random_parents(193, 0), rows=torch.bfloat16)
    with pytest.raises(ValueError, match="fused_triton takes 1 to 192 rows of torch.bfloat16, not 193"):
        ops.tree_verify(*inputs, backend="fused_triton")
    q, k, *rest, state = make_inputs(random_parents(4, 0))
    for backend in BACKENDS:
        with pytest.raises(ValueError, match="heads of .*128, not key heads of 12; use solve"):
            ops.tree_verify(q[..., :12], k[..., :12], *rest, state[:, :, :12], backend=backend)
        with pytest.raises(ValueError, match="state in float32, not torch.float64; use solve"):
            ops.resolve_backend(backend, DEVICE, torch.float64)
    tree = fused_triton.prepare_tree(rest[3], ops.ancestor_mask(rest[3]))
    with pytest.raises(ValueError, match="precision: 'fp8' is not allowed .*mixed"):
        fused_triton.tree_verify(q, k, *rest[:3], tree, state, precision="fp8")


def test_the_self_test_passes_for_every_backend_that_runs_here():
    """fla#640, fla#826, fla#913 (C090): float64 reference at T = 16 and 65 on the device at hand."""
    results = selftest.run(DEVICE, heads=HEADS, value_heads=VALUE_HEADS, dim=DIM)
    ran = {result.backend for result in results if result.reason is None}
    assert set(BACKENDS) <= ran
    assert all(result.ok for result in results if result.reason is None)
    assert {result.nodes for result in results if result.reason is None} == {16, 65}


# --- on a GPU only

gpu_only = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")


@gpu_only
@pytest.mark.parametrize("backend", BACKENDS)
def test_100_repeats_are_bit_equal(backend):
    inputs = make_inputs(random_parents(65, 1), rows=torch.bfloat16)
    first = ops.tree_verify(*inputs, backend=backend)
    for _ in range(100):
        again = ops.tree_verify(*inputs, backend=backend)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@gpu_only
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_graph_follows_the_tree_it_is_given(backend):
    """flashinfer#6154, FastDeploy#7934 (C079, C080): captured at 65 rows, replayed on other trees, also one of 37."""
    inputs = make_inputs(random_parents(65, 1), rows=torch.bfloat16)
    module = ops.kernel_module(backend)
    tree = module.prepare_tree(inputs[5], ops.ancestor_mask(inputs[5])).clone()
    verify = lambda: module.tree_verify(*inputs[:5], tree, inputs[6])  # noqa: E731
    verify()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = verify()
    for seed, real in ((2, 65), (3, 65), (4, 37)):
        parents = torch.cat([random_parents(real, seed), torch.full((1, 65 - real), -1)], dim=1).to(DEVICE)
        tree.copy_(module.prepare_tree(parents, ops.ancestor_mask(parents)))
        graph.replay()
        fresh = ops.tree_verify(*inputs[:5], parents, inputs[6], backend=backend)
        assert all(torch.equal(x, y) for x, y in zip(got, fresh, strict=True))
