"""Cells' engines by name, what they refuse, and the code that decides their tokens. Needs no torch."""

import importlib

from baselines.methods import METHODS
from tfm.config import DecodeConfig
from tfm.manifest import modules_digest, source_digest
from tfm_kernels.gdn.backends import BACKENDS, backend_modules

REFERENCE, STATIC = "torch", "torch-static"
BFLOAT16_BACKEND = "fused_cuda"  # takes no other type
# serving engines -> the package with their flags and runner; sglang-paper has the paper's own, unequal launch flags
SERVED = {"sglang": "baselines.sglang", "sglang-paper": "baselines.sglang", "vllm": "baselines.vllm"}
ENGINES = (REFERENCE, STATIC, *SERVED)
# of the static engine: PyTorch's; Triton, graphs, measured products, prefill in chunks; the same without the chunks
FORMS = ("torch", "fast", "fast-whole-prefill")
STATIC_RULES = ("greedy", "target_only")
SERVED_METHODS = ("ar", "dflash", "ddtree", "dartree", "tfm")
STATIC_METHODS = (*SERVED_METHODS, "adaptive")  # the others' proposers wait for the host


def check_engine(engine: str, forms: str | None, config: DecodeConfig) -> None:
    """Raise ValueError for settings that an engine does not run; needs no torch device and loads nothing."""
    if engine != STATIC and forms is not None:
        raise ValueError(f"forms: {forms!r} is not allowed with engine {engine} (allowed: null); leave it out")
    if engine == REFERENCE:
        # its normalised keys and queries are float32, whatever the weights are
        if config.gdn_backend == BFLOAT16_BACKEND:
            raise ValueError(
                f"gdn_backend: {config.gdn_backend!r} is not allowed with engine {engine} (allowed: "
                f"{', '.join(name for name in BACKENDS if name != BFLOAT16_BACKEND)}), whose rows are float32; use "
                f"another, or engine {STATIC}"
            )
        return
    if engine == STATIC and forms not in FORMS:
        raise ValueError(f"forms: {forms!r} is not allowed (allowed: {', '.join(FORMS)}); {STATIC} needs one of them")
    for key, value, allowed in (
        ("method", config.method, STATIC_METHODS if engine == STATIC else SERVED_METHODS),
        ("head", config.head, (DecodeConfig.head,)),
    ):
        if value not in allowed:
            names = ", ".join(allowed)
            raise ValueError(
                f"{key}: {value!r} is not allowed with engine {engine} (allowed: {names}); use engine {REFERENCE}"
            )
    if config.requests != 1:
        raise ValueError(f"requests: {config.requests} is not allowed with engine {engine} (allowed: 1); set it to 1")
    if config.rule not in STATIC_RULES:
        allowed = ", ".join(STATIC_RULES)
        raise ValueError(
            f"rule: {config.rule!r} is not allowed with engine {engine} (allowed: {allowed}); leave the audit out, or "
            f"use engine {REFERENCE}"
        )


def is_served(engine: str) -> bool:
    """Return whether cells of an engine are decoded by a server of another environment."""
    return engine in SERVED


def runner_of(engine: str):
    """Return the module that launches a serving engine and reads what it says."""
    return importlib.import_module(f"{SERVED[engine]}.runner")


def served_settings(cell: dict, config: dict, *, draft_rows: int | None) -> dict:
    """Return what decides the server of a resolved cell; raises ValueError for what its engine cannot run.

    `config` is the suite's.
    """
    engine, settings = cell["engine"], importlib.import_module(f"{SERVED[cell['engine']]}.flags")
    refused = [
        ("device", cell["device"], "cuda", cell["device"] != "cuda" and engine != "vllm", "SGLang serves on a GPU"),
        ("stages", True, "false", cell["clock"] == "stages", "a server does not time the stages of a step"),
        (
            "siblings",
            cell["decode"]["siblings"],
            "top",
            cell["decode"]["siblings"] != "top",
            "trees hold the best",
        ),
        ("graft", "a shape", "null", cell.get("graft") is not None, "a server reads its weights from a folder"),
    ]
    for key, value, allowed, is_wrong, why in refused:
        if is_wrong:
            raise ValueError(f"{key}: {value!r} is not allowed with engine {engine} (allowed: {allowed}); {why}")
    if problem := settings.problems(cell):
        raise ValueError(problem)
    more = {"context": config["context"], "paper": engine.endswith("-paper"), "flags": config["server_flags"]}
    return settings.server_of(cell, draft_rows=draft_rows, **more)


def source_of(cell: dict) -> str:
    """Return the source digest of a cell: the code that decides its tokens."""
    method, backend = METHODS[cell["decode"]["method"]].factory, cell["decode"]["gdn_backend"]
    if is_served(cell["engine"]):
        return _source_of_served(cell["engine"], cell["decode"]["method"], backend)
    if cell["engine"] != STATIC:
        return source_digest(method, gdn_backend=backend)
    modules = ["baselines.static_methods", "tfm.engine.loop", method.partition(":")[0]]
    static = importlib.import_module("baselines.static_methods")
    own = static.STATIC_FACTORIES | (static.FAST_FACTORIES if cell["forms"] != "torch" else {})
    modules += [own[name].partition(":")[0] for name in (cell["decode"]["method"],) if name in own]
    if cell["forms"] != "torch":
        modules += [f"tfm_kernels.{name}_triton" for name in ("tree_attention", "rows", "sampling", "linear")]
        modules += ["tfm_kernels.best_first_triton"] if cell["decode"]["method"] == "ddtree" else []
    if backend == "fused_cuda":
        modules.append("tfm_kernels.gdn.mixer_cuda")
    return modules_digest(sorted({*modules, *backend_modules(backend)}))


def _source_of_served(engine: str, method: str, backend: str) -> str:
    """Return the digest of what reads a server's answers, and for a plugin's method of what decodes in the server."""
    modules = [f"{SERVED[engine]}.runner", "baselines.serving.cell"]
    plugin = importlib.import_module(f"{SERVED[engine]}.flags").plugin_module(method)
    if plugin is not None:
        modules += [plugin, METHODS[method].factory.partition(":")[0], *backend_modules(backend)]
    return modules_digest(sorted(set(modules)))
