"""Time the GDN tree-verify kernels: every arm on the same inputs, replays of CUDA graphs in turn, all samples kept.

A set is one layer's inputs and outputs; 24 sets are slices of one allocation a tensor (over 200 MB, past any L2), and a
graph launches an arm once on each. A sample is one replay over its launches. Before an arm is timed its result is
compared with the definition in float64; a kernel that fails stops the run. Reads nano_trees.json beside it; writes
samples.json and summary.json under --out.
"""

import argparse
import importlib.util
import json
import platform
import subprocess
from pathlib import Path

import torch

from tfm_kernels.gdn import fused_cuda, mixer_cuda, naive, recurrent_sglang

HEADS, VALUE_HEADS, DIM, SETS, LAYERS = 16, 48, 128, 24, 48
SIZES = (16, 17, 32, 33, 64, 65, 128, 129)
REPLAYS = 30
HAVE_TRITON = importlib.util.find_spec("triton") is not None and all(
    importlib.util.find_spec(f"tfm_kernels.gdn.{name}") for name in ("fused_triton", "recurrent_triton")
)


def random_tree(nodes: int, seed: int, depth: int = 16, spine: int = 1) -> list[int]:
    """Return parents: a chain of `spine` nodes, the others hung under random nodes above depth `depth`."""
    generator, first = torch.Generator().manual_seed(seed), min(spine, nodes)
    parents, depths = list(range(-1, first - 1)), list(range(first))
    while len(parents) < nodes:
        parent = int(torch.randint(0, len(parents), (1,), generator=generator))
        if depths[parent] < depth - 1:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents


def trees_of(shape: str, nodes: int) -> list[list[int]]:
    """Return a tree for each set: random (depth up to 16), the three shapes of the paper's bench, or recorded ones."""
    if shape == "nano":
        return json.loads((Path(__file__).parent / "nano_trees.json").read_text())
    make = {
        "random": lambda seed: random_tree(nodes, seed),
        "chain": lambda seed: list(range(-1, nodes - 1)),
        "wide": lambda seed: [-1, *((i - 1) // 4 for i in range(1, nodes))],
        "mixed": lambda seed: [-1, *(max(i - 4, 0) for i in range(1, nodes))],
    }[shape]
    return [make(seed) for seed in range(SETS)]


def draw_sets(trees: list[list[int]], decay: float = 0.3) -> list[tuple[torch.Tensor, ...]]:
    """Return (q, k, v, log_decay, beta, parents, state) a set, R = 1, each a slice of one allocation."""
    generator = torch.Generator("cuda").manual_seed(0)
    sets, nodes = len(trees), len(trees[0])

    def draw(*shape):
        return torch.randn(sets, 1, *shape, generator=generator, device="cuda")

    q, k = (torch.nn.functional.normalize(draw(nodes, HEADS, DIM), dim=-1).bfloat16() for _ in range(2))
    v, log_decay = draw(nodes, VALUE_HEADS, DIM).bfloat16(), -decay * draw(nodes, VALUE_HEADS).abs()
    beta, state = draw(nodes, VALUE_HEADS).sigmoid(), draw(VALUE_HEADS, DIM, DIM)
    parents = torch.tensor(trees, device="cuda")[:, None]
    return list(zip(q * DIM**-0.5, k, v, log_decay, beta, parents, state, strict=True))


def empty_outputs(sets) -> list[tuple[torch.Tensor, ...]]:
    shape = (len(sets), *sets[0][2].shape)
    out, u = (torch.full(shape, float("nan"), device="cuda") for _ in range(2))
    path = torch.full(shape[:4], float("nan"), dtype=torch.float64, device="cuda")
    return list(zip(out, u, path, strict=True))


def arms_of(sets, sglang=None) -> dict[str, list]:
    """Return arm -> a launch for each set; a launch returns (out, u, path_log_decay), or out alone."""
    outputs = empty_outputs(sets)

    def fused(arguments, into, **options):
        fused_cuda.tree_verify_into(*arguments, *into, **options)
        return into

    variants = {
        "fused_cuda": {},
        "fused_cuda_plain_launch": {"overlap": False},
        "fused_cuda_bf16": {"precision": "bf16"},
        "fused_cuda_bf16x3": {"precision": "bf16x3"},
    }
    arms = {
        name: [lambda a=a, o=o, k=options: fused(a, o, **k) for a, o in zip(sets, outputs, strict=True)]
        for name, options in variants.items()
    }
    if HAVE_TRITON:
        arms |= triton_arms(sets)
    if sglang is not None:
        arms["sglang"] = sglang_arm(sets, sglang)
    return arms


def sglang_arm(sets, kernel) -> list:
    states = torch.empty(1, sets[0][0].shape[1], VALUE_HEADS, DIM, DIM, device="cuda")
    return [recurrent_sglang.launch_of(kernel, arguments, states) for arguments in sets]


def triton_arms(sets) -> dict[str, list]:
    from tfm_kernels.gdn import fused_triton, ops, recurrent_triton

    nodes = sets[0][0].shape[1]
    states = torch.empty(1, nodes, VALUE_HEADS, DIM, DIM, device="cuda")
    fused_trees = [fused_triton.prepare_tree(s[5], ops.ancestor_mask(s[5])) for s in sets]
    return {
        "fused_triton": [
            lambda s=s, t=t: fused_triton.tree_verify(*s[:5], t, s[6]) for s, t in zip(sets, fused_trees, strict=True)
        ],
        "recurrent_triton": [lambda s=s: recurrent_triton.verify_states(*s, states=states)[:3] for s in sets],
    }


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


def definition(arguments) -> tuple[torch.Tensor, ...]:
    return naive.naive_tree_verify(*(x.double() if x.is_floating_point() else x for x in arguments))


def gate(arms: dict[str, list], sets) -> dict[str, list[float]]:
    """Return arm -> relative errors of out and u on the first set; stop the run where an arm is wrong."""
    expected, errors = definition(sets[0]), {}
    for name, launches in arms.items():
        got = launches[0]()
        torch.cuda.synchronize()
        errors[name] = [error(x, y) for x, y in zip(got[:2], expected[:2], strict=False)]
        if not max(errors[name]) < 1e-2:
            raise SystemExit(f"{name}: relative errors {errors[name]} at {sets[0][0].shape[1]} rows; nothing was timed")
    return errors


def capture(launches: list) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def time_arms(arms: dict[str, list], replays: int = REPLAYS) -> dict[str, list[float]]:
    """Return arm -> microseconds a launch, one sample a replay; the arms take turns."""
    graphs = {name: (capture(launches), len(launches)) for name, launches in arms.items()}
    for _ in range(3):
        for graph, _ in graphs.values():
            graph.replay()
    marks = {name: [] for name in arms}
    for _ in range(replays):
        for name, (graph, _) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) * 1e3 / graphs[name][1] for start, end in marks[name]] for name in arms}


def draw_mixers(nodes: int, sets: int = 16) -> list[tuple]:
    generator = torch.Generator("cuda").manual_seed(0)
    channels = (2 * HEADS + VALUE_HEADS) * DIM

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    trees = torch.tensor([random_tree(nodes, seed) for seed in range(sets)], device="cuda")[:, None]
    cases = []
    for tree in trees:
        inputs = mixer_cuda.MixerInputs(
            draw(1, nodes, channels), draw(1, nodes, VALUE_HEADS, DIM), draw(1, nodes, VALUE_HEADS),
            draw(1, nodes, VALUE_HEADS), tree, draw(1, 3, channels),
            draw(1, VALUE_HEADS, DIM, DIM, dtype=torch.float32),
        )  # fmt: skip
        a_log = torch.empty(VALUE_HEADS, device="cuda").uniform_(0.01, 16, generator=generator).log()
        weights = mixer_cuda.MixerWeights(
            draw(channels, 4), a_log, torch.ones(VALUE_HEADS, device="cuda"), draw(DIM), 1e-6
        )
        cases.append((inputs, weights, mixer_cuda.MixerBuffers.empty(1, nodes, HEADS, VALUE_HEADS, "cuda")))
    return cases


def commit_arms(nodes: int = 65, lengths=(1, 4, 8, 16)) -> dict[str, list]:
    """Return arms that commit a path of each length in all layers; paths of a chain, which any length fits."""
    channels = (2 * HEADS + VALUE_HEADS) * DIM
    layers = []
    for arguments in draw_sets([list(range(-1, nodes - 1))] * LAYERS, decay=0.05):
        _, u, path = (outputs := empty_outputs([arguments]))[0]
        fused_cuda.tree_verify_into(*arguments, *outputs[0])
        window, inputs = (torch.randn(1, n, channels, device="cuda").bfloat16() for n in (3, nodes))
        layers.append(mixer_cuda.CommitLayer(arguments[6], arguments[1], u, path, window, inputs))
    commit, arms = mixer_cuda.Commit(layers), {}
    for length in lengths:
        path = torch.full((1, 17), -1, device="cuda")
        path[0, :length] = torch.arange(length)
        arms[f"commit_48_layers_path{length}"] = [lambda p=path: commit(p)]
    return arms


def copy_arm() -> dict[str, list]:
    source = torch.ones(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return {"copy_4_GiB": [lambda: torch.mul(source, 1.0, out=target)]}


def environment(commit: str) -> dict:
    release = subprocess.run([fused_cuda.compiler(), "--version"], capture_output=True, text=True).stdout
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver_and_clocks_after": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "nvcc": release.split("release ")[1].split(",")[0],
        "triton": __import__("triton").__version__ if HAVE_TRITON else None,
        "python": platform.python_version(),
        "commit": commit,
    }


def quantile(samples: list[float], share: float) -> float:
    return torch.tensor(samples, dtype=torch.float64).quantile(share).item()


def ratio(base: list[float], ours: list[float]) -> dict[str, float]:
    """Return the ratio of medians with a 95 % bootstrap interval over paired replays."""
    pairs = torch.tensor([base, ours], dtype=torch.float64)
    picks = torch.randint(0, pairs.shape[1], (2000, pairs.shape[1]), generator=torch.Generator().manual_seed(0))
    drawn = pairs[:, picks].median(dim=2).values
    ratios = drawn[0] / drawn[1]
    return {
        "value": (pairs[0].median() / pairs[1].median()).item(),
        "low": ratios.quantile(0.025).item(),
        "high": ratios.quantile(0.975).item(),
        "n": pairs.shape[1],
    }


def summarise(samples: dict, errors: dict, facts: dict) -> dict:
    """Return the flat summary: medians in microseconds, ratios with intervals, errors, and what produced them."""
    summary = {"environment": facts, "relative_error_of_out_and_u_T65": errors}
    names = {"fused_cuda": "fused_us", "fused_cuda_plain_launch": "fused_plain_launch_us"}
    names |= {"fused_triton": "fused_triton_us", "recurrent_triton": "recurrent_us", "sglang": "sglang_us"}
    for key, arms in samples.items():
        for arm, values in arms.items():
            if key.startswith("random-T"):
                summary[f"{names.get(arm, arm + '_us')}_{key.removeprefix('random-')}"] = quantile(values, 0.5)
        for arm, name in (("recurrent_triton", "recurrent"), ("sglang", "sglang")):
            if key.startswith("random-T") and arm in arms:
                summary[f"{name}_over_fused_{key.removeprefix('random-')}"] = ratio(arms[arm], arms["fused_cuda"])
    summary["mixer_us_T65"] = quantile(samples["mixer-T65"]["mixer"], 0.5)
    for arm, values in samples["commit"].items():
        summary[f"{arm.replace('commit', 'commit_us')}"] = quantile(values, 0.5)
    summary["commit_us_48_layers"] = quantile(samples["commit"]["commit_48_layers_path8"], 0.5)
    summary["copy_tb_s"] = 2 * 4 * 2**30 / quantile(samples["copy"]["copy_4_GiB"], 0.5) / 1e6
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for samples.json and summary.json")
    parser.add_argument("--commit", required=True, help="commit of the code that is measured")
    parser.add_argument("--shapes-at", type=int, nargs="*", default=[16, 65, 128], help="rows of the other tree shapes")
    parser.add_argument("--sglang", type=Path, help="folder of an unpacked sglang wheel: its kernel is timed too")
    options = parser.parse_args()
    sglang = recurrent_sglang.load(options.sglang) if options.sglang else None
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        warm @ warm
    samples, errors = {}, {}
    cases = [("random", nodes) for nodes in SIZES]
    cases += [(shape, nodes) for nodes in options.shapes_at for shape in ("chain", "wide", "mixed")] + [("nano", 65)]
    for shape, nodes in cases:
        sets = draw_sets(trees_of(shape, nodes))
        arms = arms_of(sets, sglang)
        if shape != "random":
            kept = ("fused_cuda", "fused_triton", "recurrent_triton", "sglang")
            arms = {name: arms[name] for name in kept if name in arms}
        found = gate(arms, sets)
        errors = found if (shape, nodes) == ("random", 65) else errors
        key = f"{shape}-T{nodes}"
        samples[key] = time_arms(arms)
        print(key, {name: round(quantile(values, 0.5), 2) for name, values in samples[key].items()}, flush=True)
        del sets, arms
    mixers = draw_mixers(65)
    samples["mixer-T65"] = time_arms({"mixer": [lambda case=case: mixer_cuda.mixer_into(*case) for case in mixers]})
    del mixers
    samples["commit"] = time_arms(commit_arms())
    samples["copy"] = time_arms(copy_arm(), replays=10)
    summary = summarise(samples, errors, environment(options.commit))
    options.out.mkdir(parents=True, exist_ok=True)
    rounded = {key: {arm: [round(x, 4) for x in v] for arm, v in arms.items()} for key, arms in samples.items()}
    (options.out / "samples.json").write_text(json.dumps(rounded))
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: summary[key] for key in summary if key not in ("environment",)}))


if __name__ == "__main__":
    main()
