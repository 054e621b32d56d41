"""Compile the Triton kernels for one GPU architecture, without a GPU; prints registers and shared memory a kernel.

Run by test_triton.py in a process of its own: the interpreter's setting replaces the compiler for a whole process.
"""

import argparse
import json
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tfm_kernels.gdn import fused_triton, recurrent_triton

POINTERS = {"tree_p": "*i64", "parents_p": "*i64", "path_p": "*fp64", "q_p": "*bf16", "k_p": "*bf16", "v_p": "*bf16"}
SHAPE = {"H": 16, "HV": 48, "K": 128, "V": 128}


def compile_kernel(kernel, constants: dict, warps: int, capability: int):
    """Return the compiled kernel, its remaining arguments int32 or float32 pointers aligned to 16 bytes."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = POINTERS.get(name, "*fp32") if name.endswith("_p") else "i32"
        signature[name] = "constexpr" if name in constants else kind
        if signature[name].startswith("*"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, required=True, help="for example 90")
    parser.add_argument("--nodes", type=int, nargs="+", default=[16])
    options = parser.parse_args()
    shared = {}
    for nodes in options.nodes:
        sizes = dict(zip(("SIZE0", "SIZE1", "SIZE2"), fused_triton.block_sizes(nodes), strict=True))
        cut = fused_triton.choose_tiling(nodes, 128, "mixed")
        constants = SHAPE | sizes | {"WORDS": (nodes + 63) // 64, "BV": cut.values, "PRECISION": "mixed"}
        solve = compile_kernel(fused_triton._solve_kernel, constants, cut.warps, options.capability)
        prefix = constants | {"ROWS": fused_triton.PREFIX_ROWS}
        compile_kernel(fused_triton._prefix_kernel, prefix, 4, options.capability)
        shared[f"solve_{nodes}"] = solve.metadata.shared
    cut = recurrent_triton.choose_tiling(128)
    recurrent = compile_kernel(recurrent_triton._recurrent_kernel, SHAPE | {"BV": cut.values}, 1, options.capability)
    shared["recurrent"] = recurrent.metadata.shared
    print(json.dumps(shared))
    return 0


if __name__ == "__main__":
    sys.exit(main())
