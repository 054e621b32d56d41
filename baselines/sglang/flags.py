"""The launch flags of SGLang's servers: the same for all arms, or the paper's own, which are unequal.

Flags are those of sglang 0.5.17 without dashes; True stands for a switch. Needs neither torch nor sglang.
"""

import math

VERSION = "0.5.17"
ALGORITHM = "DFLASH_TFM"  # what baselines/sglang/plugin.py registers
TREES = ("ddtree", "dartree", "tfm")  # the methods that need it
# gdn_backend of a cell -> the plugin's verify kernel: ours, in two forms, or SGLang's own
KERNELS = {"fused_triton": "fused_triton", "fused_cuda": "fused_cuda", "recurrent_triton": "recurrent"}

# one request at a time, nothing kept from one to the next, every pass of the decode phase in a CUDA graph
SAME = {
    "skip-tokenizer-init": True,
    "tp-size": 1,
    "page-size": 1,
    "max-running-requests": 1,
    "cuda-graph-max-bs-decode": 1,
    "disable-prefill-cuda-graph": True,
    "disable-radix-cache": True,
    "disable-overlap-schedule": True,  # tree arms need it, so no arm has it
    "chunked-prefill-size": 2048,
    "mem-fraction-static": 0.8,
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "attention-backend": "triton",
    "stream-interval": 1,
    "log-level": "info",
}
# the authors' reproduction script: a backend for each phase and arm, overlap scheduling off for trees alone
PAPER = {
    "skip-tokenizer-init": True,
    "tp-size": 1,
    "page-size": 64,
    "max-running-requests": 1,
    "cuda-graph-max-bs-decode": 32,
    "disable-radix-cache": True,
    "mem-fraction-static": 0.75,
    "stream-interval": 1,
    "log-level": "info",
}
PAPER_ARMS = {
    "ar": {"decode-attention-backend": "trtllm_mha", "prefill-attention-backend": "flashinfer"},
    "dflash": {"attention-backend": "trtllm_mha", "speculative-draft-attention-backend": "fa4"},
    "trees": {
        "decode-attention-backend": "trtllm_mha",
        "prefill-attention-backend": "flashinfer",
        "speculative-draft-attention-backend": "fa4",
        "disable-overlap-schedule": True,
    },
}


def server_of(cell: dict, *, draft_rows: int | None, context: int, paper: bool, flags: dict) -> dict:
    """Return what decides a cell's server: its flags (model paths left out), the plugin's settings, the draft rows.

    `flags` are the suite's own, over those of every arm.
    """
    method, decode = cell["decode"]["method"], cell["decode"]
    arm = PAPER_ARMS["trees" if method in TREES else method] if paper else {}
    chosen = {**(PAPER if paper else SAME), **arm, "dtype": cell["dtype"], "context-length": context}
    chosen |= {"random-seed": cell["seed"], **flags}
    plugin = None
    if method == "dflash":
        rows = decode["depth"] or draft_rows
        chosen |= {"speculative-algorithm": "DFLASH", "speculative-dflash-block-size": rows and rows + 1}
    elif method in TREES:
        chosen |= {"speculative-algorithm": ALGORITHM}
        plugin = {"proposal": method, "kernel": KERNELS[decode["gdn_backend"]]}
        keys = ("budget", "width", "children", "candidates", "depth", "residual", "depth_bonus")
        plugin |= {key: decode[key] for key in keys}
        plugin["width"] = decode["width"] or math.ceil(decode["budget"] / 16)
    return {"flags": chosen, "plugin": plugin, "draft_rows": draft_rows, "version": VERSION}


def problems(cell: dict) -> str | None:
    """Return why SGLang cannot run a cell, as key, value, allowed values and remedy; None when it can."""
    decode = cell["decode"]
    if decode["method"] in TREES and decode["gdn_backend"] not in KERNELS:
        return (
            f"gdn_backend: {decode['gdn_backend']!r} is not allowed with engine {cell['engine']} (allowed: "
            f"{', '.join(KERNELS)}); choose this project's kernel or, with recurrent_triton, SGLang's own"
        )
    return None


def arguments(flags: dict) -> list[str]:
    """Return flags as words of a command line."""
    words = []
    for key, value in flags.items():
        if value is True:
            words.append(f"--{key}")
        elif value is not None and value is not False:
            words += [f"--{key}", str(value)]
    return words


def plugin_module(method: str) -> str | None:
    """Return the module that decodes a method inside SGLang; None for those that SGLang has itself."""
    return "baselines.sglang.plugin" if method in TREES else None
