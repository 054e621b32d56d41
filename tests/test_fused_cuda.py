"""The CUDA kernels against their definitions in float64, and what is refused before anything is launched."""

import math
import re

import pytest
import torch

from tfm_kernels import conv
from tfm_kernels.gdn import fused_cuda, mixer_cuda, naive

HEADS, GROUP, DIM = 2, 3, 128
# 16 bits of mantissa in every operand: measured errors are below 6e-6 of the norm, a wrong row costs 1e-2
TOLERANCE = 3e-5


def random_tree(nodes, seed=0, depth=16):
    generator, parents, depths = torch.Generator().manual_seed(seed), [-1], [0]
    while len(parents) < nodes:
        parent = int(torch.randint(0, len(parents), (1,), generator=generator))
        if depths[parent] < depth - 1:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return torch.tensor(parents)


TREES = {
    "random": random_tree,
    "chain": lambda nodes: torch.arange(-1, nodes - 1),
    "wide": lambda nodes: torch.tensor([-1, *((i - 1) // 4 for i in range(1, nodes))]),
    "mixed": lambda nodes: torch.tensor([-1, *(max(i - 4, 0) for i in range(1, nodes))]),
    "star": lambda nodes: torch.tensor([-1] + [0] * (nodes - 1)),
    "roots": lambda nodes: torch.tensor([-1] * nodes),
}


def draw_inputs(parents, *, seed=0, decay=0.3, heads=HEADS, group=GROUP, device="cuda"):
    parents = parents if parents.dim() == 2 else parents[None]
    generator = torch.Generator().manual_seed(seed)
    requests, nodes = parents.shape
    value_heads = heads * group

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    q, k = (torch.nn.functional.normalize(draw(requests, nodes, heads, DIM), dim=-1) for _ in range(2))
    log_decay = -decay * draw(requests, nodes, value_heads).abs().clamp(min=0.01)
    inputs = [(q * DIM**-0.5).bfloat16(), k.bfloat16(), draw(requests, nodes, value_heads, DIM).bfloat16(), log_decay]
    inputs += [draw(requests, nodes, value_heads).sigmoid(), parents, draw(requests, value_heads, DIM, DIM)]
    return [x.to(device) for x in inputs]


def nan_outputs(inputs, out_dtype=torch.float32):
    v = inputs[2]
    return [
        torch.full(v.shape, math.nan, dtype=out_dtype, device=v.device),
        torch.full(v.shape, math.nan, device=v.device),
        torch.full(v.shape[:3], math.nan, dtype=torch.float64, device=v.device),
    ]


def run(inputs, **options):
    outputs = nan_outputs(inputs)
    fused_cuda.tree_verify_into(*inputs, *outputs, **options)
    return outputs


def definition(inputs):
    doubles = [x.double() if x.is_floating_point() else x.clamp(min=-1) for x in inputs]
    return naive.naive_tree_verify(*doubles)


def relative(got, expected):
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def assert_equals_definition(inputs, tolerance=TOLERANCE):
    out, u, path = run(inputs)
    expected = definition(inputs)
    assert relative(out, expected[0]) < tolerance
    assert relative(u, expected[1]) < tolerance
    assert relative(path, expected[2]) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(1, id="root_alone"),
        pytest.param(16, id="one_block"),
        pytest.param(33, id="first_shape_of_all_heads_in_a_warp"),
        pytest.param(65, id="one_row_into_fifth_block"),
        pytest.param(129, id="one_row_into_ninth_block"),
    ],
)
def test_equals_definition_for_tree_shapes(nodes, tree):
    assert_equals_definition(draw_inputs(TREES[tree](nodes), seed=nodes))


@pytest.mark.gpu
def test_equals_definition_for_every_size():
    """No size is special: T = 1 to 144, a random tree each."""
    for nodes in range(1, fused_cuda.MAX_ROWS + 1):
        assert_equals_definition(draw_inputs(random_tree(nodes, nodes), seed=nodes, heads=1))


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [0.0, 1.0, 5.0, 20.0, 100.0, math.inf])
@pytest.mark.parametrize("nodes", [16, 65, 129])
def test_equals_definition_for_any_decay(nodes, decay):
    """transformers#47625, fla#463: the ratio of decays is formed for ancestors only, so nothing overflows."""
    for tree in ("random", "chain"):
        assert_equals_definition(draw_inputs(TREES[tree](nodes), seed=nodes, decay=decay))


@pytest.mark.gpu
def test_equals_definition_where_decay_stops_halfway():
    """tt-metal#56550: two steps of -90, then none."""
    inputs = draw_inputs(TREES["chain"](65))
    inputs[3].zero_()
    inputs[3][:, :2] = -90.0
    assert_equals_definition(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [16, 65])
def test_repeated_keys_stay_accurate(nodes):
    """Equal keys, write strength 1, no decay: a product of powers of X would cancel terms of C(15, 7) = 6435."""
    inputs = draw_inputs(TREES["chain"](nodes))
    inputs[1][:] = inputs[1][:, :1]
    inputs[3].zero_()
    inputs[4].fill_(1.0)
    assert_equals_definition(inputs, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("group", fused_cuda.GROUPS)
def test_takes_other_numbers_of_value_heads(group):
    for nodes in (16, 65):
        assert_equals_definition(draw_inputs(random_tree(nodes), group=group))


@pytest.mark.gpu
def test_precisions_are_as_exact_as_they_say():
    inputs = draw_inputs(random_tree(65))
    expected = definition(inputs)
    for precision, bound in {"bf16": 1e-2, "bf16x2": TOLERANCE, "bf16x3": 3e-6}.items():
        out, u, _ = run(inputs, precision=precision)
        assert relative(out, expected[0]) < bound
        assert relative(u, expected[1]) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [16, 65, 129])
def test_requests_have_their_own_trees_and_padding_changes_nothing(nodes):
    """Ragged requests in one launch; rows of padding hold NaN, give 0 and leave every other bit as it is."""
    trees = torch.stack([random_tree(nodes, 5), TREES["chain"](nodes), TREES["wide"](nodes)])
    lengths = (nodes, nodes // 2, nodes - 3)
    for row, length in zip(trees, lengths, strict=True):
        row[length:] = -2
    inputs = draw_inputs(trees)
    expected = definition(inputs)
    padding = (trees == -2).cuda()
    for tensor in inputs[:5]:
        tensor[padding] = math.nan
    outputs = run(inputs)
    for got, exact in zip(outputs[:2], expected[:2], strict=True):
        assert relative(got[~padding], exact[~padding]) < TOLERANCE
        assert torch.equal(got[padding], torch.zeros_like(got[padding]))
    for request, length in enumerate(lengths):
        alone = [x[request : request + 1, :length].contiguous() for x in inputs[:6]] + [
            inputs[6][request : request + 1]
        ]
        if (length + 15) // 16 == (nodes + 15) // 16:
            assert all(torch.equal(x[request, :length], y[0]) for x, y in zip(outputs, run(alone), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [16, 65, 129])
def test_a_hundred_runs_are_equal_bit_for_bit(nodes):
    inputs = draw_inputs(random_tree(nodes), heads=16)
    first = run(inputs)
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(run(inputs), first, strict=True))


@pytest.mark.gpu
def test_a_graph_replays_with_another_tree():
    """flashinfer#5015: the tree is device data, so a captured launch must follow it."""
    inputs = draw_inputs(random_tree(65, 1))
    outputs = nan_outputs(inputs)
    fused_cuda.tree_verify_into(*inputs, *outputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_cuda.tree_verify_into(*inputs, *outputs)
    for tree, real in ((TREES["chain"](65), 65), (random_tree(65, 9), 37)):
        inputs[5][0] = tree
        inputs[5][0, real:] = -2
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(outputs, run(inputs), strict=True))


@pytest.mark.gpu
def test_the_op_is_registered():
    inputs = draw_inputs(random_tree(17))
    torch.library.opcheck(fused_cuda.tree_verify, tuple(inputs), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        pytest.param(0, lambda x: x.float(), "q: .*float32 is not allowed", id="dtype"),
        pytest.param(6, lambda x: x.transpose(2, 3), "state: strides", id="not_contiguous"),
        pytest.param(3, lambda x: x[:, :-1], "log_decay: ", id="shape"),
        pytest.param(5, lambda x: x.cpu(), "parents: on cpu", id="device"),
    ],
)
def test_refuses_before_the_launch(index, change, message):
    inputs = draw_inputs(random_tree(16))
    inputs[index] = change(inputs[index])
    with pytest.raises(ValueError, match=message):
        fused_cuda.tree_verify_into(*inputs, *nan_outputs(draw_inputs(random_tree(16))))


@pytest.mark.gpu
def test_refuses_more_rows_than_it_has():
    """tokenspeed#700: checked in Python, not by a fault in the kernel."""
    with pytest.raises(ValueError, match="takes 1 to 144 rows, not 145"):
        run(draw_inputs(random_tree(145)))


def commit_layer(trees, seed):
    inputs = draw_inputs(trees, seed=seed)
    _, u, path_log_decay = run(inputs)
    generator, channels = torch.Generator().manual_seed(seed), 8 * DIM
    requests, nodes = trees.shape
    window = torch.randn(requests, 3, channels, generator=generator).bfloat16().cuda()
    nodes_in = torch.randn(requests, nodes, channels, generator=generator).bfloat16().cuda()
    return inputs, mixer_cuda.CommitLayer(inputs[6].clone(), inputs[1], u, path_log_decay, window, nodes_in)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17, 65])
def test_commit_of_every_layer_equals_replay(length):
    trees = torch.stack([random_tree(65, 3), TREES["chain"](65), TREES["wide"](65)])
    both = [commit_layer(trees, seed) for seed in range(3)]
    path = torch.full((3, length), -1)
    walk = [-1] * 65
    for node in range(65):
        walk[node] = (walk[int(trees[0, node])] if node else 0) + 1
    deepest = min(length, max(walk))
    node = walk.index(deepest)
    for at in reversed(range(deepest)):
        path[0, at], node = node, int(trees[0, node])
    path[1] = torch.arange(length)
    path = path.cuda()  # the third request keeps its state
    windows = conv.window_index(trees.cuda(), 4)
    expected = [conv.commit(layer.inputs, layer.window, windows, path) for _, layer in both]
    untouched = [(layer.state[2].clone(), layer.window[2].clone()) for _, layer in both]
    mixer_cuda.Commit([layer for _, layer in both])(path)
    for (inputs, layer), window, kept in zip(both, expected, untouched, strict=True):
        doubles = [x.double() if x.is_floating_point() else x for x in inputs]
        states = naive.naive_states(*doubles)[1]
        for request in range(2):
            leaf = int(path[request].max())
            assert relative(layer.state[request], states[request, leaf]) < 1e-5
        assert torch.equal(layer.window, window)
        assert torch.equal(layer.state[2], kept[0])
        assert torch.equal(layer.window[2], kept[1])


@pytest.mark.gpu
def test_512_commits_do_not_drift():
    """uzu#609: random accepted paths, the committed state against a replay in float64 on the same bf16 inputs."""
    errors, generator = [], torch.Generator().manual_seed(0)
    exact = None
    state = None
    for step in range(512):
        inputs = draw_inputs(random_tree(17, step), seed=step, heads=1)
        state, exact = (inputs[6], inputs[6].double()) if state is None else (state, exact)
        inputs[6] = state
        _, u, path_log_decay = run(inputs)
        leaf, path = int(torch.randint(0, 17, (1,), generator=generator)), []
        while leaf >= 0:
            path.insert(0, leaf)
            leaf = int(inputs[5][0, leaf])
        nodes = torch.zeros(1, 17, 8, dtype=torch.bfloat16, device="cuda")
        layer = mixer_cuda.CommitLayer(state, inputs[1], u, path_log_decay, nodes[:, :3].contiguous(), nodes)
        mixer_cuda.Commit([layer])(torch.tensor([path], device="cuda"))
        along = [x[:, path].double() for x in inputs[:5]]
        chain = torch.arange(-1, len(path) - 1, device="cuda")[None]
        exact = naive.naive_states(*along, chain, exact)[1][:, -1]
        errors.append(relative(state, exact))
    assert max(errors) < 1e-4
    assert sum(errors[-64:]) < 3 * sum(errors[64:128])


def mixer_case(nodes, heads=HEADS):
    generator = torch.Generator().manual_seed(nodes)
    value_heads, channels = heads * GROUP, heads * (2 + GROUP) * DIM

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to(dtype).cuda()

    trees = torch.stack([random_tree(nodes), TREES["chain"](nodes)]).cuda()
    inputs = mixer_cuda.MixerInputs(
        mixed=draw(2, nodes, channels),
        gate=draw(2, nodes, value_heads, DIM),
        decay=draw(2, nodes, value_heads),
        write=draw(2, nodes, value_heads),
        parents=trees,
        window=draw(2, 3, channels),
        state=draw(2, value_heads, DIM, DIM, dtype=torch.float32),
    )
    weights = mixer_cuda.MixerWeights(
        conv=draw(channels, 4),
        a_log=draw(value_heads, dtype=torch.float32),
        dt_bias=draw(value_heads, dtype=torch.float32),
        norm=draw(DIM),
        eps=1e-6,
    )
    return inputs, weights, mixer_cuda.MixerBuffers.empty(2, nodes, heads, value_heads, torch.device("cuda"))


def mixer_definition(inputs, weights, heads=HEADS):
    cpu = [x.double().cpu() for x in (inputs.mixed, weights.conv, inputs.window)]
    x = conv.naive_tree_conv(*cpu, inputs.parents.cpu()).cuda()
    q, k, v = (y.unflatten(-1, (-1, DIM)) for y in x.split([heads * DIM, heads * DIM, heads * GROUP * DIM], dim=-1))
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    softplus = torch.nn.functional.softplus(inputs.decay.double() + weights.dt_bias)
    log_decay, beta = -weights.a_log.double().exp() * softplus, inputs.write.double().sigmoid()
    out, u, path = naive.naive_tree_verify(q * DIM**-0.5, k, v, log_decay, beta, inputs.parents, inputs.state.double())
    normed = torch.nn.functional.rms_norm(out, (DIM,), weights.norm.double(), weights.eps)
    gated = normed * torch.nn.functional.silu(inputs.gate.double())
    return dict(q=q * DIM**-0.5, k=k, v=v, log_decay=log_decay, beta=beta, u=u, path_log_decay=path, normed=gated)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 3, 17, 65])
def test_mixer_equals_definition_stage_by_stage(nodes):
    inputs, weights, buffers = mixer_case(nodes)
    mixer_cuda.mixer_into(inputs, weights, buffers)
    expected = mixer_definition(inputs, weights)
    # q, k, v are rounded to bf16 once (2^-9 each), and what follows carries that
    bounds = dict(q=3e-3, k=3e-3, v=3e-3, log_decay=1e-6, beta=1e-6, u=1e-2, path_log_decay=1e-6, normed=1e-2)
    for name, bound in bounds.items():
        assert relative(getattr(buffers, name), expected[name]) < bound, name


def test_cache_is_keyed_by_sources_flags_and_architecture(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(fused_cuda, "_compile", lambda flags, target: (built.append(flags), target.write_text("")))
    names = {
        fused_cuda.build(arch, group=group, precision=precision, cache=tmp_path).name
        for arch, group, precision in (("80", 3, "bf16"), ("90a", 3, "bf16"), ("80", 1, "bf16"), ("80", 3, "bf16x2"))
    }
    assert len(names) == len(built) == 4
    fused_cuda.build("80", group=3, precision="bf16", cache=tmp_path)
    assert len(built) == 4
    sources = tmp_path / "csrc"
    sources.mkdir()
    for path in fused_cuda.SOURCES.iterdir():
        (sources / path.name).write_bytes(path.read_bytes() + b"\n")
    monkeypatch.setattr(fused_cuda, "SOURCES", sources)
    fused_cuda.build("80", group=3, precision="bf16", cache=tmp_path)
    assert len(built) == 5


def test_names_the_remedy_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_cuda.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="nvcc .* install the CUDA toolkit, or use fused_triton"):
        fused_cuda.build("90a", cache=tmp_path)


def test_shows_what_the_compiler_said(tmp_path, monkeypatch):
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 2\n")
    fake.chmod(0o755)
    monkeypatch.setattr(fused_cuda, "compiler", lambda: str(fake))
    with pytest.raises(RuntimeError, match="did not compile .*\n.*no such thing"):
        fused_cuda.build("90a", cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_refuses_an_architecture_nobody_compiled_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=re.escape("compute capability 7.5 (allowed: 8.0, 9.0, 10.0, 12.0)")):
        fused_cuda.architecture("cuda")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 128, 128, torch.bfloat16), "takes 1 to 144 rows, not 0"),
        ((145, 128, 128, torch.bfloat16), "takes 1 to 144 rows, not 145"),
        ((65, 96, 128, torch.bfloat16), "takes heads of 128, not 96 and 128"),
        ((65, 128, 128, torch.float32), "takes q, k, v in bfloat16, not torch.float32"),
    ],
)
def test_refuses_sizes_and_types_it_does_not_have(shape, message):
    with pytest.raises(ValueError, match=message):
        fused_cuda.check_shape(*shape)


def test_refuses_a_device_or_state_it_does_not_run_on():
    with pytest.raises(ValueError, match="needs a CUDA device, not cpu"):
        fused_cuda.check_device(torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="keeps its state in float32, not torch.float64"):
        fused_cuda.check_device(torch.device("cuda"), torch.float64)
