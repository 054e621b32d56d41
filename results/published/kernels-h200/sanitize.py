"""Launch the kernels once on small cases, for compute-sanitizer and ncu: no kernel runs here but ours.

Inputs are drawn on the CPU and copied. `--kind` takes a variant of bench_more.EDITS instead of the committed sources.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import bench_more
import torch

sys.path.append(str(Path(__file__).parents[3] / "tests"))
from cuda_cases import DIM, draw_inputs, random_tree  # noqa: E402
from test_deferred import paths_of  # noqa: E402

from tfm_kernels.gdn import deferred, deferred_cuda, fused_cuda, mixer_cuda  # noqa: E402


def on_device(*shape, dtype=torch.bfloat16, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def outputs_of(inputs) -> list[torch.Tensor]:
    shape = inputs[2].shape
    return [torch.zeros(shape).cuda(), torch.zeros(shape).cuda(), torch.zeros(shape[:3], dtype=torch.float64).cuda()]


def verify(nodes: int, heads: int, kind: str) -> None:
    inputs = draw_inputs(random_tree(nodes, nodes), heads=heads)
    fused_cuda.launch_verify(bench_more.library(kind), (*inputs, *outputs_of(inputs)))


def deferred_verify(nodes: int, heads: int, length: int = 5) -> None:
    tree = random_tree(nodes, nodes)
    before = draw_inputs(tree, heads=heads)
    pending = deferred.Pending(paths_of(tree[None], (length,), 17).cuda(), before[1], *outputs_of(before)[1:])
    inputs = draw_inputs(tree, heads=heads, seed=1)
    deferred_cuda.deferred_verify_into(*inputs, *outputs_of(inputs), pending)


def mixer_case(nodes: int, heads: int) -> tuple:
    value_heads, channels = 3 * heads, 5 * heads * DIM
    scalars = (on_device(1, nodes, value_heads, seed=2), on_device(1, nodes, value_heads, seed=3))
    inputs = mixer_cuda.MixerInputs(
        on_device(1, nodes, channels), on_device(1, nodes, value_heads, DIM, seed=1), *scalars,
        random_tree(nodes, nodes)[None].cuda(), on_device(1, 3, channels, seed=4),
        on_device(1, value_heads, DIM, DIM, dtype=torch.float32, seed=5),
    )  # fmt: skip
    fp32 = [on_device(value_heads, dtype=torch.float32, seed=seed) for seed in (6, 7)]
    weights = mixer_cuda.MixerWeights(on_device(channels, 4, seed=8), *fp32, on_device(DIM, seed=9), 1e-6)
    return inputs, weights, mixer_cuda.MixerBuffers.empty(1, nodes, heads, value_heads, torch.device("cuda"))


def mixer(nodes: int, heads: int) -> None:
    """The mixer, then the deferred one after a path of its tree."""
    inputs, weights, buffers = mixer_case(nodes, heads)
    mixer_cuda.mixer_into(inputs, weights, buffers)
    _, _, own = mixer_case(nodes, heads)
    path = paths_of(inputs.parents.cpu(), (5,), 17).cuda()
    pending = deferred.Pending(path, buffers.k, buffers.u, buffers.path_log_decay, inputs.mixed)
    mixed = on_device(*inputs.mixed.shape, seed=10)
    deferred_cuda.deferred_mixer_into(dataclasses.replace(inputs, mixed=mixed), weights, own, pending)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("verify", "deferred", "mixer"), nargs="+")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 65])
    parser.add_argument("--heads", type=int, default=1, help="key heads; each has three value heads")
    parser.add_argument("--kind", choices=tuple(bench_more.EDITS), default="default")
    options = parser.parse_args()
    for nodes in options.nodes:
        for what in options.what:
            if what == "verify":
                verify(nodes, options.heads, options.kind)
            elif what == "deferred":
                deferred_verify(nodes, options.heads)
            else:
                mixer(nodes, options.heads)
            torch.cuda.synchronize()
            print("ran", what, nodes, flush=True)


if __name__ == "__main__":
    main()
