"""Cells' engines by name, what they refuse, and the code that decides their tokens. Needs no torch."""

import importlib

from baselines.methods import METHODS
from tfm.config import DecodeConfig
from tfm.manifest import modules_digest, source_digest
from tfm_kernels.gdn.backends import backend_modules

REFERENCE, STATIC = "torch", "torch-static"
ENGINES = (REFERENCE, STATIC)
FORMS = ("torch", "fast")  # of the static engine: PyTorch's, or Triton, graphs and measured products
STATIC_RULES = ("greedy", "target_only")


def check_engine(engine: str, forms: str | None, config: DecodeConfig) -> None:
    """Raise ValueError for settings that an engine does not run; needs no torch device and loads nothing."""
    if engine != STATIC:
        if forms is not None:
            raise ValueError(f"forms: {forms!r} is not allowed with engine {engine} (allowed: null); leave it out")
        return
    if forms not in FORMS:
        raise ValueError(f"forms: {forms!r} is not allowed (allowed: {', '.join(FORMS)}); {STATIC} needs one of them")
    if config.requests != 1:
        raise ValueError(f"requests: {config.requests} is not allowed with engine {STATIC} (allowed: 1); set it to 1")
    if config.rule not in STATIC_RULES:
        allowed = ", ".join(STATIC_RULES)
        raise ValueError(
            f"rule: {config.rule!r} is not allowed with engine {STATIC} (allowed: {allowed}); leave the audit out, or "
            f"use engine {REFERENCE}"
        )


def source_of(cell: dict) -> str:
    """Return the source digest of a cell: the code that decides its tokens."""
    method, backend = METHODS[cell["decode"]["method"]].factory, cell["decode"]["gdn_backend"]
    if cell["engine"] != STATIC:
        return source_digest(method, gdn_backend=backend)
    modules = ["baselines.static_methods", "tfm.engine.loop", method.partition(":")[0]]
    static = importlib.import_module("baselines.static_methods")
    own = static.STATIC_FACTORIES | (static.FAST_FACTORIES if cell["forms"] == "fast" else {})
    modules += [own[name].partition(":")[0] for name in (cell["decode"]["method"],) if name in own]
    if cell["forms"] == "fast":
        modules += [f"tfm_kernels.{name}_triton" for name in ("tree_attention", "rows", "sampling", "linear")]
        modules += ["tfm_kernels.best_first_triton"] if cell["decode"]["method"] == "ddtree" else []
    if backend == "fused_cuda":
        modules.append("tfm_kernels.gdn.mixer_cuda")
    return modules_digest(sorted({*modules, *backend_modules(backend)}))
