"""The CUDA kernels around tree verify against float64 definitions: commit of all layers, the stages of the mixer."""

import dataclasses

import pytest
import torch
from cuda_cases import DIM, GROUP, HEADS, TREES, draw_inputs, random_tree, relative, run

from tfm_kernels import conv
from tfm_kernels.gdn import mixer_cuda, naive


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


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 17, 65])
def test_inputs_that_are_columns_of_one_product_change_no_bit(nodes):
    inputs, weights, buffers = mixer_case(nodes, heads=4)
    parts = (inputs.mixed, inputs.gate.flatten(2), inputs.write, inputs.decay)
    joined = torch.cat(parts, dim=-1)
    mixed, gate, write, decay = joined.split([part.shape[-1] for part in parts], dim=-1)
    views = dict(mixed=mixed, gate=gate.unflatten(-1, (-1, DIM)), write=write, decay=decay)
    assert not mixed.is_contiguous() or nodes == 1
    mixer_cuda.mixer_into(inputs, weights, buffers)
    again = mixer_cuda.MixerBuffers.empty(2, nodes, 4, 4 * GROUP, torch.device("cuda"))
    mixer_cuda.mixer_into(dataclasses.replace(inputs, **views), weights, again)
    for field in dataclasses.fields(buffers):
        assert torch.equal(getattr(buffers, field.name), getattr(again, field.name)), field.name
    path = torch.tensor([[0, -1], [-1, -1]], device="cuda")
    windows = []
    for rows in (inputs.mixed, mixed):
        state, window = inputs.state.clone(), inputs.window.clone()
        layer = mixer_cuda.CommitLayer(state, buffers.k, buffers.u, buffers.path_log_decay, window, rows)
        mixer_cuda.Commit([layer])(path)
        windows.append(window)
    assert torch.equal(windows[0], windows[1])
    assert torch.equal(windows[0][0, -1], inputs.mixed[0, 0])


@pytest.mark.gpu
def test_rows_at_a_distance_that_breaks_vectors_are_refused():
    inputs, weights, buffers = mixer_case(3)
    channels = inputs.mixed.shape[-1]
    wide = torch.cat([inputs.mixed, inputs.mixed[..., :4]], dim=-1)[..., :channels]
    with pytest.raises(ValueError, match="mixed: strides .*16-byte aligned"):
        mixer_cuda.mixer_into(dataclasses.replace(inputs, mixed=wide), weights, buffers)
