"""Time what bench.py leaves out: the deferred commit, the handovers that racecheck follows, the mixer's stages, the
per-branch form.

Same rules as bench.py beside it: graphs of all arms of a table replayed in turn, inputs rotated past the L2 cache, a
result compared with float64 before it is timed. A variant is the committed source with a few lines replaced, named in
EDITS and built into a library of its own. Writes more.json (samples and medians, us) under --out; --build only compiles
(for sm_90a).
"""

import argparse
import dataclasses
import functools
import json
import shutil
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import bench
import torch

from tfm_kernels.gdn import deferred, deferred_cuda, fused_cuda, mixer_cuda, recurrent_sglang

LENGTHS = (1, 4, 8, 16)
EDITS = {
    "default": {},
    # lane 0 says that its warp's part of U' is there, not every lane for its own
    "one_lane": {
        "tree_verify.cuh": [
            ("barrier_init(&s.ready[thread], 32);", "barrier_init(&s.ready[thread], 1);"),
            ("    barrier_arrive(&s.ready", "    __syncwarp();\n    if (lane == 0) barrier_arrive(&s.ready"),
        ]
    },
    # a word of shared memory, written just before the barrier, says whether decays span segments
    "segments_by_word": {
        "verify_types.cuh": [("  uint64_t scaled; ", "  int segmented;\n  uint64_t scaled; ")],
        "tree_stage.cuh": [
            (
                "  own.segmented = segmented;\n  sync_warps(2, S::TREE);",
                "  segmented = sync_warps_or(2, S::TREE, segmented);\n  if (thread == 0) s.segmented = segmented;",
            ),
            ("  sync_warps_or(3, S::THREADS, own.segmented);", "  sync_warps(3, S::THREADS);"),
        ],
        "tree_verify.cuh": [("= sync_warps_or(3, S::THREADS, false);", "= (sync_warps(3, S::THREADS), s.segmented);")],
    },
    # segments are written without a barrier of the tree's warps of their own behind them
    "one_barrier_less": {
        "tree_stage.cuh": [("  own.segmented = segmented;\n  sync_warps(2, S::TREE);", "  own.segmented = segmented;")]
    },
    # nothing is asked for before the parents are there
    "mixer_late": {
        "mixer.cu": [
            ("  float4 taps[WIDTH],", "  tfm::follow_previous_grid();\n  float4 taps[WIDTH],"),
            ("back == 0 ? own_rows[i] : load4", "load4"),
        ]
    },
    "mixer_2_rows": {"mixer.cu": [("EACH = 1", "EACH = 2")]},
    "mixer_4_rows": {"mixer.cu": [("EACH = 1", "EACH = 4")]},
    "mixer_8_warps": {"mixer.cu": [("WARPS = 4", "WARPS = 8")]},
}  # fmt: skip
RESULTS = ("q", "k", "v", "log_decay", "beta", "u", "normed")
VERIFY_KINDS, MIXER_KINDS = (
    ("default", "one_lane", "segments_by_word", "one_barrier_less"),
    tuple(x for x in EDITS if x[:5] in ("defau", "mixer")),
)


def edit_sources(kind: str, folder: Path) -> None:
    shutil.copytree(fused_cuda.SOURCES, folder)
    for name, edits in EDITS[kind].items():
        text = (folder / name).read_text()
        for old, new in edits:
            if text.count(old) != 1:
                raise SystemExit(f"{kind}: {name} has {text.count(old)} times {old!r}, 1 expected; adapt EDITS")
            text = text.replace(old, new)
        (folder / name).write_text(text)


@functools.cache
def library(kind: str, precision: str = fused_cuda.DEFAULT_PRECISION, arch: str = "90a"):
    """Return the loaded library of a variant; the committed sources where it has no edits."""
    committed = fused_cuda.SOURCES
    with tempfile.TemporaryDirectory() as folder:
        edit_sources(kind, Path(folder) / "csrc")
        fused_cuda.SOURCES = Path(folder) / "csrc"
        try:
            return fused_cuda.library.__wrapped__(arch, 3, precision, True)
        finally:
            fused_cuda.SOURCES = committed


def build(job: tuple) -> str:
    kind, options = job
    if kind is not None:
        library(kind, **options)
    else:
        fused_cuda.build("90a", **options)
    return f"{kind or ''} {options or ''}".strip()


def build_all() -> None:
    """Compile all that this file and the GPU tests load, side by side."""
    jobs = [(kind, {}) for kind in EDITS] + [(kind, {"precision": "bf16"}) for kind in VERIFY_KINDS]
    jobs += [(None, {"group": group, "deferred": late}) for group in fused_cuda.GROUPS for late in (False, True)]
    jobs += [(None, {"precision": precision}) for precision in fused_cuda.PRECISIONS]
    with ProcessPoolExecutor(12) as pool:
        print("built:", *pool.map(build, jobs), sep="\n  ")


def spined_tree(nodes: int, seed: int) -> list[int]:
    """Return a random tree whose first 16 nodes are a chain: any prefix of them is a path."""
    return bench.random_tree(nodes, seed, spine=16)


def path_of(length: int) -> torch.Tensor:
    path = torch.full((1, 17), -1, device="cuda")
    path[0, :length] = torch.arange(length)
    return path


def step(launches: list) -> list:
    """One launch for time_arms: a whole step of all layers."""
    return [lambda: [launch() for launch in launches]]


def gate_deferred(arguments, outputs, pending) -> dict[str, float]:
    """Return relative errors of state, out and u after a path of 8; stop the run where one is wrong."""
    doubles = [x.double() if x.is_floating_point() else x.clone() for x in arguments]
    *expected, state = deferred.naive_deferred_verify(*doubles, pending)
    own = [*arguments[:6], arguments[6].clone()]
    deferred_cuda.deferred_verify_into(*own, *outputs, pending)
    pairs = zip(("state", "out", "u"), (own[6], *outputs[:2]), (state, *expected[:2]), strict=True)
    errors = {name: bench.error(got, exact) for name, got, exact in pairs}
    if not max(errors.values()) < 1e-4:
        raise SystemExit(
            f"deferred_verify: relative errors {errors} at {arguments[0].shape[1]} rows; nothing was timed"
        )
    return errors


def deferred_arms(nodes: int, errors: dict) -> dict[str, list]:
    """Return arms of one step of 48 layers, verify and state only: verify; verify and commit; deferred verify."""
    layers = bench.draw_sets([spined_tree(nodes, seed) for seed in range(bench.LAYERS)], decay=0.05)
    own, before = bench.empty_outputs(layers), bench.empty_outputs(layers)
    keys = torch.stack([arguments[1] for arguments in layers])
    for arguments, outputs in zip(layers, before, strict=True):
        fused_cuda.tree_verify_into(*arguments, *outputs)
    window, inputs = (torch.zeros(1, rows, 8, dtype=torch.bfloat16, device="cuda") for rows in (3, nodes))
    commits = [mixer_cuda.CommitLayer(a[6], a[1], o[1], o[2], window, inputs) for a, o in zip(layers, own, strict=True)]
    commit = mixer_cuda.Commit(commits)
    verify = [lambda a=a, o=o: fused_cuda.tree_verify_into(*a, *o) for a, o in zip(layers, own, strict=True)]
    arms = {"verify": step(verify)}
    for length in LENGTHS:
        path = path_of(length)
        pendings = [deferred.Pending(path, k, o[1], o[2]) for k, o in zip(keys, before, strict=True)]
        if length == 8:
            errors[f"deferred-T{nodes}"] = gate_deferred(layers[0], own[0], pendings[0])
        late = [
            lambda a=a, o=o, p=p: deferred_cuda.deferred_verify_into(*a, *o, p)
            for a, o, p in zip(layers, own, pendings, strict=True)
        ]
        arms[f"verify_then_commit_{length}"] = step([*verify, lambda p=path: commit(p)])
        arms[f"deferred_{length}"] = step(late)
    return arms


def mixer_step_arms(nodes: int) -> dict[str, list]:
    """The same of the whole mixer, window included."""
    cases, turns = (bench.draw_mixers(nodes, bench.LAYERS) for _ in range(2))
    trees = torch.tensor([spined_tree(nodes, seed) for seed in range(bench.LAYERS)], device="cuda")[:, None]
    cases = [(dataclasses.replace(x, parents=t), w, b) for (x, w, b), t in zip(cases, trees, strict=True)]
    turns = [(dataclasses.replace(x, parents=t), w, b) for (x, w, b), t in zip(turns, trees, strict=True)]
    for case in turns:
        mixer_cuda.mixer_into(*case)
    commit = mixer_cuda.Commit(
        [mixer_cuda.CommitLayer(x.state, b.k, b.u, b.path_log_decay, x.window, x.mixed) for x, _, b in cases]
    )
    plain, arms = [lambda case=case: mixer_cuda.mixer_into(*case) for case in cases], {}
    for length in LENGTHS:
        path = path_of(length)
        pendings = [deferred.Pending(path, b.k, b.u, b.path_log_decay, x.mixed) for x, _, b in turns]
        late = [
            lambda case=case, p=p: deferred_cuda.deferred_mixer_into(*case, p)
            for case, p in zip(cases, pendings, strict=True)
        ]
        arms[f"mixer_then_commit_{length}"] = step([*plain, lambda p=path: commit(p)])
        arms[f"deferred_mixer_{length}"] = step(late)
    return {"mixer": step(plain), **arms}


def verify_kind_arms(nodes: int, precision: str, errors: dict) -> dict[str, list]:
    sets = bench.draw_sets(bench.trees_of("random", nodes))
    outputs = bench.empty_outputs(sets)

    def launch(kind, arguments, into):
        fused_cuda.launch_verify(library(kind, precision), (*arguments, *into))
        return into

    arms = {
        kind: [lambda k=kind, a=a, o=o: launch(k, a, o) for a, o in zip(sets, outputs, strict=True)]
        for kind in VERIFY_KINDS
    }
    errors[f"handover-{precision}-T{nodes}"] = bench.gate(arms, sets)
    return arms


def mixer_arms(nodes: int) -> dict[str, list]:
    cases = bench.draw_mixers(nodes)
    arms = {
        f"mixer {kind}": [lambda k=kind, c=c: mixer_cuda.launch_mixer(library(k), *c) for c in cases]
        for kind in MIXER_KINDS
    }
    for kind in MIXER_KINDS:
        arms[f"prepare {kind}"] = [lambda k=kind, c=c: mixer_cuda.launch_prepare(library(k), *c) for c in cases]
    arms["norm"] = [lambda c=c: mixer_cuda.launch_norm(library("default"), *c) for c in cases]
    verify = lambda x, w, b: fused_cuda.tree_verify_into(  # noqa: E731
        b.q, b.k, b.v, b.log_decay, b.beta, x.parents, x.state, b.out, b.u, b.path_log_decay
    )
    arms["verify"] = [lambda c=c: verify(*c) for c in cases]
    gate_mixers(arms, cases[0][2])
    return arms


def gate_mixers(arms: dict[str, list], buffers) -> None:
    """Stop the run where a variant changes a bit of what the committed mixer gives."""
    expected = None
    for kind in MIXER_KINDS:
        for name in RESULTS:
            getattr(buffers, name).fill_(float("nan"))
        arms[f"mixer {kind}"][0]()
        got = [getattr(buffers, name).clone() for name in RESULTS]
        expected = expected or got
        for name, x, y in zip(RESULTS, got, expected, strict=True):
            if not torch.equal(x, y):
                raise SystemExit(f"mixer: {kind} changes {name}; nothing was timed")


def recurrent_arms(shape: str, nodes: int, errors: dict, sglang) -> dict[str, list]:
    sets = bench.draw_sets(bench.trees_of(shape, nodes))
    arms = bench.arms_of(sets, sglang)
    arms = {name: arms[name] for name in ("fused_cuda", "recurrent_triton", "sglang") if name in arms}
    errors[f"{shape}-T{nodes}"] = bench.gate(arms, sets)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for more.json")
    parser.add_argument("--commit", help="commit of the code that is measured")
    parser.add_argument("--sglang", type=Path, help="folder of an unpacked sglang wheel: its kernel is timed too")
    parser.add_argument("--build", action="store_true", help="compile the variants and stop")
    options = parser.parse_args()
    if options.build:
        return build_all()
    if not (options.out and options.commit):
        parser.error("--out and --commit are needed where something is timed")
    sglang = recurrent_sglang.load(options.sglang) if options.sglang else None
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        warm @ warm
    samples, errors = {}, {}
    jobs = {f"step-T{nodes}": functools.partial(deferred_arms, nodes, errors) for nodes in (65, 17, 129)}
    jobs["mixer-step-T65"] = functools.partial(mixer_step_arms, 65)
    for precision, nodes in (("bf16x2", 16), ("bf16x2", 65), ("bf16x2", 128), ("bf16", 16)):
        jobs[f"handover-{precision}-T{nodes}"] = functools.partial(verify_kind_arms, nodes, precision, errors)
    jobs["mixer-T65"] = functools.partial(mixer_arms, 65)
    cases = [("random", nodes) for nodes in (16, 65, 128, 32, 64)] + [("chain", 65), ("mixed", 65)]
    for shape, nodes in cases:
        jobs[f"{shape}-T{nodes}"] = functools.partial(recurrent_arms, shape, nodes, errors, sglang)
    options.out.mkdir(parents=True, exist_ok=True)
    facts = bench.environment(options.commit)
    failed = []
    for key, arms in jobs.items():
        try:
            samples[key] = bench.time_arms(arms())
        except (Exception, SystemExit):  # the other tables do not hang on this one
            failed.append(key)
            print(key, traceback.format_exc(), flush=True)
            continue
        medians = {name: round(bench.quantile(values, 0.5), 2) for name, values in samples[key].items()}
        print(key, json.dumps(medians), flush=True)
        write(options.out / "more.json", samples, errors, facts)
    if failed:
        raise SystemExit(f"not timed: {', '.join(failed)}")


def write(path: Path, samples: dict, errors: dict, facts: dict) -> None:
    """Write what there is after each table, so that a run cut short keeps what it measured."""
    medians = {key: {arm: bench.quantile(v, 0.5) for arm, v in arms.items()} for key, arms in samples.items()}
    ratios = {}
    for key, arms in samples.items():
        for plain, late in (("verify_then_commit", "deferred"), ("mixer_then_commit", "deferred_mixer")):
            for length in LENGTHS:
                if f"{late}_{length}" in arms:
                    pair = (arms[f"{plain}_{length}"], arms[f"{late}_{length}"])
                    ratios[f"{key} {plain}_{length} over {late}_{length}"] = bench.ratio(*pair)
    rounded = {key: {arm: [round(x, 4) for x in v] for arm, v in arms.items()} for key, arms in samples.items()}
    result = {"environment": facts, "medians_us": medians, "ratios": ratios, "errors": errors, "samples_us": rounded}
    path.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
