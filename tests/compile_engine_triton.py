"""Compile the static engine's Triton kernels at the paper's shapes without a GPU; prints shared memory a kernel.

Run by test_engine_triton.py in a process of its own: the interpreter's setting replaces the compiler for a process.
"""

import argparse
import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tfm_kernels import (
    best_first_triton,
    frontier_triton,
    linear_triton,
    lk_triton,
    rows_triton,
    sampling_triton,
    tree_attention_triton,
    weaver_triton,
)

LONG = [
    "token_p",
    "tokens_p",
    "places_p",
    "committed_p",
    "depths_p",
    "keys_hash_p",
    "drawn_p",
    "slot_p",
    "parent_p",
    "depth_p",
    "picks_p",
    "entry_p",
    "count_p",
    "lists_p",
    "candidates_p",
]
BF16 = [
    "x_p",
    "update_p",
    "update_bias_p",
    "sum_p",
    "normed_p",
    "both_p",
    "joined_p",
    "cos_p",
    "sin_p",
    "query_p",
    "keys_p",
    "values_p",
    "gate_p",
    "logits_p",
    "table_p",
]
BF16 += ["weight_p", "bias_p", "query_weight_p", "key_weight_p", "positions_p", "row_p", "mixed_p"]
SIZES = ("IN", "OUT", "WIDTH", "VOCAB", "INNER", "x_stride", "update_stride", "row_stride", "memory_stride")
FLOATS = ("eps", "offset", "scale", "temperature")
# what touches global memory, and what an early launch must do before any of it
TOUCHES, WAIT = re.compile(r"\b(?:ld|st|atom|red)\.\S*global\S*|\bcp\.async\S*"), "griddepcontrol.wait"


def compile_kernel(kernel, constants: dict, kinds: dict, *, warps: int, stages: int, capability: int) -> int:
    """Return the shared memory of a kernel compiled with `constants`; other pointers are float32, numbers int32.

    Raises ValueError for a kernel that touches memory before it waits for the previous grid, or never waits.
    """
    signature, attributes = {}, {}
    constants = constants | {name: True for name in ("PDL",) if name in kernel.arg_names}
    for i, name in enumerate(kernel.arg_names):
        kind = kinds.get(name) or ("*i64" if name in LONG else "*bf16" if name in BF16 else "*fp32")
        if not name.endswith("_p"):
            kind = "fp32" if name in FLOATS else "i32"
        signature[name] = "constexpr" if name in constants else kind
        # the paper's sizes are multiples of 16, which is what lets loads be vectors in flight
        if signature[name].startswith("*") or name in SIZES:
            attributes[(i,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": warps, "num_stages": stages}
    source = ASTSource(kernel, signature, places, attributes)
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    before, wait, _ = compiled.asm["ptx"].partition(WAIT)
    if "PDL" in constants and (not wait or TOUCHES.search(before)):
        raise ValueError(f"{kernel.__name__}: {TOUCHES.findall(before)} stand before {WAIT}")
    return compiled.metadata.shared


def cases():
    """Yield name, kernel, constants, kinds of arguments, warps and stages at the paper's shapes."""
    norm = {"HAS_UPDATE": True, "HAS_UPDATE_BIAS": False, "HAS_BIAS": False, "BLOCK": 8192}
    yield "add_norm", rows_triton._add_norm_kernel, norm, {}, 8, 3
    yield "bias_gelu", rows_triton._bias_gelu_kernel, {"BLOCK": 512}, {"out_p": "*bf16"}, 4, 3
    yield "swiglu", rows_triton._swiglu_kernel, {"BLOCK": 1024}, {"out_p": "*bf16"}, 4, 3
    heads = {"H": 24, "KV": 4, "D": 256, "ROTARY": 64, "HAS_GATE": True, "HAS_NORM": True}
    yield "split_heads", rows_triton._split_heads_kernel, heads, {}, 2, 3
    for nodes, (h, kv, dim, window) in ((1, (24, 4, 256, 0)), (65, (24, 4, 256, 0)), (16, (32, 8, 128, 2048))):
        cut = tree_attention_triton.choose_tiling(h // kv * nodes, kv, dim)
        shape = {"G": h // kv, "D": dim}
        tile = shape | {"WINDOW": window, "BM": cut.rows, "BN": cut.keys}
        kernel, kinds = tree_attention_triton._split_kernel, {"own_p": "*u8"}
        yield f"attention_{nodes}_{dim}", kernel, tile, kinds, cut.warps, cut.stages
        join = shape | {"H": h, "SPLITS": cut.splits, "SPLITS_BLOCK": 32, "HAS_GATE": window == 0}
        yield f"join_{nodes}_{dim}", tree_attention_triton._join_kernel, join, {"out_p": "*bf16"}, 4, 3
    chunk = {"CHUNK": sampling_triton.CHUNK, "BLOCK": sampling_triton.BLOCK, "HAS_NOISE": True}
    yield "draw_chunks", sampling_triton._chunk_kernel, chunk, {"keys_p": "*i64"}, 4, 3
    yield "draw_rows", sampling_triton._row_kernel, {"BLOCK": 32}, {}, 1, 3
    for rows in (1, 16, 65):
        first, second = linear_triton.token_blocks(rows)
        tile = {"FIRST": first, "SECOND": second or 16, "HAS_SECOND": second > 0, "BN": 64, "BK": 128, "AHEAD": 4}
        yield f"linear_{rows}", linear_triton._linear_kernel, tile, {}, 4, 4
        tile = tile | {"BN": 128, "BK": 64}
        yield f"stream_{rows}", linear_triton._stream_kernel, tile, {"out_p": "*bf16"}, 8, 4
        width = {"TOKENS": first + (second or 16), "WIDTH": max(16, 1 << (rows - 1).bit_length()), "BN": 128}
        if not triton.__version__.startswith("3.9"):  # its ahead-of-time form refuses this signature: argument index
            yield f"stream_sum_{rows}", linear_triton._stream_sum_kernel, width, {"out_p": "*bf16"}, 8, 3
    yield "linear_sum", linear_triton._sum_kernel, {"SPLITS": 2, "BLOCK": 1024}, {"out_p": "*bf16"}, 4, 3
    yield "heap", best_first_triton._heap_kernel, {"BLOCK": 128}, {}, 1, 3
    frontier = {"C": 8, "W": 4, "KB": 512, "F": 1024}
    fp32 = {"logits_p": "*fp32"}
    yield "frontier", frontier_triton._expand_kernel, frontier, fp32, 1, 3
    yield "embed_norm", weaver_triton._embed_norm_kernel, {"BLOCK": 2048}, {}, 4, 3
    path = {"H": 16, "HEAD": 128, "D": 128, "PREFIX": 16, "LEVELS": 15, "ROWS": 32}
    yield "path_attention", weaver_triton._path_attention_kernel, path, {"out_p": "*bf16"}, 4, 3
    logits = {"target_p": "*bf16", "draft_p": "*bf16", "grad_p": "*bf16"}
    for name in ("forward", "backward"):
        yield f"lk_{name}", getattr(lk_triton, f"_lk_{name}_kernel"), {"BLOCK": lk_triton.BLOCK}, logits, 8, 3
    yield "row_lse", lk_triton._lse_kernel, {"BLOCK": lk_triton.BLOCK}, {}, 8, 3
    yield "candidates", weaver_triton._candidate_kernel, {"BK": 32, "BW": 256}, {}, 4, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, required=True, help="for example 90")
    options = parser.parse_args()
    shared = {}
    for name, kernel, constants, kinds, warps, stages in cases():
        try:
            shared[name] = compile_kernel(
                kernel, constants, kinds, warps=warps, stages=stages, capability=options.capability
            )
        except Exception as error:
            raise RuntimeError(f"{name} did not compile") from error
    print(json.dumps(shared))
    return 0


if __name__ == "__main__":
    sys.exit(main())
