"""The launch flags of vLLM's servers, and why trees do not run in it. Flags are those of vllm 0.26.0 without dashes.

Needs neither torch nor vllm.
"""

VERSION = "0.26.0"
METHODS = ("ar", "dflash")
# one request at a time, nothing kept from one to the next
SAME = {
    "tensor-parallel-size": 1,
    "max-num-seqs": 1,
    "no-enable-prefix-caching": True,
    "gpu-memory-utilization": 0.8,
    "skip-tokenizer-init": True,
    "generation-config": "vllm",  # no sampling defaults from the checkpoint's folder
    "served-model-name": "target",
}


def server_of(cell: dict, *, draft_rows: int | None, context: int, paper: bool, flags: dict) -> dict:
    """Return what decides a cell's server: its flags (model paths left out), the drafts a step, the draft rows."""
    del paper  # the paper's run has no vLLM arm
    decode, chosen = cell["decode"], {**SAME, "dtype": cell["dtype"], "max-model-len": context, "seed": cell["seed"]}
    drafts = (decode["depth"] or draft_rows) if decode["method"] == "dflash" else None
    return {"flags": {**chosen, **flags}, "drafts": drafts, "draft_rows": draft_rows, "version": VERSION}


def problems(cell: dict) -> str | None:
    """Return why vLLM cannot run a cell, as key, value, allowed values and remedy; None when it can."""
    method = cell["decode"]["method"]
    if method not in METHODS:
        return (
            f"method: {method!r} is not allowed with engine vllm (allowed: {', '.join(METHODS)}); vLLM {VERSION} has "
            "no tree attention (its tree backend was removed upstream in May 2026, pull request 42121) and keeps one "
            "recurrent state for each draft of a chain, so a tree can be neither attended nor committed; run trees "
            "with engine sglang or torch-static"
        )
    return None


def plugin_module(method: str) -> str | None:
    """Return None: both methods are vLLM's own."""
    del method
