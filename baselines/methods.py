"""The methods of the comparison: the one place that names them. A new method is one entry here and one in the schema.

Factories are strings and no method imports this module, so that the source digest of one method reaches no other.
"""

import dataclasses
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

from tfm.config import HEADS


@dataclass(frozen=True)
class Method:
    """What a suite must know about a method before it imports it."""

    factory: str  # "module:function" of (config, models) -> proposer
    parts: tuple[str, ...] = ()  # what it decodes with beside the target
    knobs: tuple[str, ...] = ()  # numbers of DecodeConfig that it takes, in the order that a variant's name spells them
    options: tuple[str, ...] = ()  # other fields of DecodeConfig that it takes
    costs: str = ""  # file of the repository whose measured budgets it chooses among, for one request at a time

    def parts_for(self, config) -> tuple[str, ...]:
        """Return the parts that these settings need: the head they name for the weaver, none with a residual of 0."""
        parts = (config.head if part == "weaver" else part for part in self.parts)
        return tuple(part for part in parts if part not in HEADS or config.residual)


METHODS = {
    "ar": Method("baselines.ar:make_proposer"),
    "dflash": Method("baselines.dflash:make_proposer", parts=("drafter",), knobs=("depth",)),
    "ddtree": Method("baselines.ddtree:make_proposer", parts=("drafter",), knobs=("budget", "depth")),
    "dartree": Method(
        "baselines.dartree:make_proposer",
        parts=("drafter", "weaver"),
        knobs=("budget", "width", "candidates", "children", "depth"),
        options=("residual", "head", "depth_bonus"),
    ),
    "tfm": Method(
        "tfm.builder:make_proposer",
        parts=("drafter", "weaver"),
        knobs=("budget", "width", "candidates", "children", "depth"),
        options=("residual", "siblings", "head"),
    ),
    # tfm-adaptive; budget is the largest that a step may have
    "adaptive": Method(
        "tfm.adaptive:make_proposer",
        parts=("drafter", "weaver"),
        knobs=("budget", "candidates", "children", "depth"),
        options=("residual", "head"),
        costs="tfm/adaptive_costs.json",
    ),
    "headchain": Method(
        "baselines.headchain:make_proposer",
        parts=("drafter", "weaver"),
        knobs=("candidates", "depth"),
        options=("head",),
    ),
    "headddtree": Method(
        "baselines.headddtree:make_proposer",
        parts=("drafter", "weaver"),
        knobs=("budget", "candidates", "depth"),
        options=("head",),
    ),
    "dartfixed": Method(
        "baselines.dartfixed:make_proposer",
        parts=("drafter", "weaver"),
        knobs=("budget", "candidates", "children", "depth"),
        options=("residual", "head"),
    ),
    "heap": Method(
        "baselines.heap:make_proposer",
        parts=("drafter", "weaver"),
        knobs=("budget", "candidates", "children", "depth"),
        options=("residual", "head", "depth_bonus"),
    ),
    "overgrown": Method(
        "baselines.overgrown:make_proposer",
        parts=("drafter", "weaver"),
        knobs=("budget", "width", "candidates", "children", "depth"),
        options=("residual", "head"),
    ),
}

# list of a suite's config -> the field of DecodeConfig that it varies, and the methods that it varies it for
SWEEPS = {
    # of adaptive a budget is only the most that it may choose
    "budgets": ("budget", tuple(name for name in METHODS if "budget" in METHODS[name].knobs and name != "adaptive")),
    "widths": ("width", ("tfm",)),
    "dartree_widths": ("width", ("dartree",)),
    "candidate_counts": ("candidates", ("tfm",)),
    "dartree_candidate_counts": ("candidates", ("dartree",)),
    "depth_bonuses": ("depth_bonus", ("dartree",)),
    "heads": ("head", tuple(name for name, method in METHODS.items() if "head" in method.options)),
    "children_counts": ("children", ("tfm",)),
    "depths": ("depth", tuple(name for name, method in METHODS.items() if "depth" in method.knobs)),
    "residuals": ("residual", ("tfm",)),
}


def method_of(name: str) -> Method:
    """Return a method's entry; raises ValueError on an unknown name."""
    if name not in METHODS:
        raise ValueError(
            f"method: {name!r} is not allowed (allowed: {', '.join(METHODS)}); choose one of them or add it to "
            "METHODS in baselines/methods.py"
        )
    return METHODS[name]


def resolve(name: str):
    """Return the factory (config, models) -> proposer of a method; raises ValueError on an unknown name."""
    module, factory = method_of(name).factory.split(":")
    return getattr(importlib.import_module(module), factory)


def check(config, draft_rows: int | None = None):
    """Return `config`, a DecodeConfig, checked alone and against its method. Use it before loading models.

    Raises ValueError as `DecodeConfig.check` does, and for a setting that the method lacks or does not take.
    """
    method = method_of(config.method)
    config.check(draft_rows)
    if "budget" in method.knobs and config.budget is None:
        raise ValueError(
            f"budget: None is not allowed (allowed: an integer >= 1); {config.method} needs the number of drafted "
            "nodes, for example 64"
        )
    if method.costs:
        _check_costs(config, method)
    of_methods = {name for entry in METHODS.values() for name in (*entry.knobs, *entry.options)}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in of_methods - {*method.knobs, *method.options} and value != field.default:
            raise ValueError(
                f"{field.name}: {value!r} is not allowed (allowed: {field.default!r}); {config.method} takes none, "
                "leave it out"
            )
    return config


def _check_costs(config, method: Method) -> None:
    if config.requests != 1:
        raise ValueError(
            f"requests: {config.requests} is not allowed for method {config.method} (allowed: 1), which follows one "
            "request at a time; set it to 1"
        )
    found = json.loads((Path(__file__).parents[1] / method.costs).read_text(encoding="utf-8"))
    least = min(map(int, found["ms"]))
    if config.budget < least:
        raise ValueError(
            f"budget: {config.budget} is not allowed for method {config.method} (allowed: {least} or more, the "
            "smallest measured step); raise it"
        )
