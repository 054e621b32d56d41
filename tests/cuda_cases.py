"""Trees, inputs and comparisons of the CUDA kernels' tests."""

import math

import torch

from tfm_kernels.gdn import fused_cuda, naive

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
