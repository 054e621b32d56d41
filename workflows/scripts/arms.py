"""How each method of a comparison was run: its configuration, tuned or not, and every setting that differs."""

import json

import pandas as pd

from baselines.methods import METHODS, SWEEPS

# settings that decide speed beside the method: a comparison across two values of one is no comparison of methods
FAIRNESS = (
    "cuda_graph",
    "engine",
    "forms",
    "device",
    "dtype",
    "gdn_backend",
    "threads",
    "requests",
    "clock",
    "max_new_tokens",
)
SERVER, GRAFT = "server.", "graft."
OWN = sorted({key for method in METHODS.values() for key in (*method.knobs, *method.options)})
# what says where a cell stands, not how it ran
PLACE = (
    "suite",
    "target",
    "dataset",
    "domain",
    "variant",
    "setting",
    "seed",
    "path",
    "part",
    "weights",
    "weights_sha256",
)


def launch_of(cell: dict) -> dict:
    """Return all settings of a resolved cell in one flat mapping.

    CUDA graphs are on where the cell says so, runs the static engine's fast forms, which replay them, or a server that
    was not told otherwise. A server's launch flags are settings with SERVER before their names, a grafted part's sizes
    with GRAFT. What a method does not take is left out, whatever its default.
    """
    decode, others = cell["decode"], (key for key in cell if key not in (*PLACE, "decode", "server", "graft"))
    flat = {key: value for key, value in decode.items() if key not in OWN or is_own(decode["method"], key)}
    flat |= {key: cell[key] for key in others}
    for part, sizes in (cell.get("graft") or {}).items():
        flat |= {f"{GRAFT}{part}.{key}": size for key, size in sizes.items()} if isinstance(sizes, dict) else {}
    flags = cell["server"]["flags"] if "server" in cell else {}
    graphs = cell.get("forms") == "fast" or ("server" in cell and not flags.get("disable-cuda-graph"))
    flat |= {f"{SERVER}{key}": value for key, value in flags.items()}
    return {"cuda_graph": graphs, **flat, "weights": "+".join(sorted(cell["weights"]))}


def differing(launches: dict[str, dict]) -> dict[str, dict]:
    """Return setting -> {method: value} of every setting that is not the same for all methods.

    Knobs, and sizes of a grafted part, are compared between the methods that take them.
    """
    values: dict[str, dict] = {}
    for key in sorted({key for launch in launches.values() for key in launch}):
        optional = key in OWN or key.startswith(GRAFT)
        values[key] = {name: one.get(key) for name, one in launches.items() if key in one or not optional}
    return {key: found for key, found in values.items() if len({json.dumps(v) for v in found.values()}) > 1}


def unfair(launches: dict[str, dict]) -> list[str]:
    """Return in words each difference that makes methods incomparable; empty when there is none."""
    found = differing(launches)
    served = [key for key in found if key.startswith(SERVER) and not key.startswith(f"{SERVER}speculative-")]
    return [f"{key} differs ({_values(found[key])})" for key in (*FAIRNESS, *served) if key in found]


def launches_of(plan: list[dict]) -> dict[str, dict]:
    """Return method -> launch of its first headline cell: the methods of one set, setting and seed."""
    launches: dict[str, dict] = {}
    for cell in plan:
        if cell.get("part") == "headline":
            launches.setdefault(cell["decode"]["method"], launch_of(cell))
    return launches


def is_own(method: str, key: str) -> bool:
    """Return whether a setting is one that the method takes, or its name and parts."""
    entry = METHODS[method]
    return key in (*entry.knobs, *entry.options, "method", "weights")


def arms(data) -> pd.DataFrame:
    """Return one row a method: its configuration, tuned or not and over what, and what makes it incomparable."""
    launches, rows = launches_of(data.plan), []
    wrong = "; ".join(unfair(launches))
    for method, launch in launches.items():
        own = {key: launch[key] for key in (*METHODS[method].knobs, *METHODS[method].options) if key in launch}
        row = {"method": method, "variant": data.headline.get(method, method), "configuration": _values(own) or "none"}
        row |= {"tuned": tuned(method, data.config), "cuda_graph": "on" if launch["cuda_graph"] else "off"}
        rows.append(row | {"concurrency": launch["requests"], "reason": wrong})
    return pd.DataFrame(rows)


def tuned(method: str, config: dict) -> str:
    """Return whether a method's configuration was chosen by a sweep of this suite, and over which settings."""
    swept = [knob for key, (knob, methods) in SWEEPS.items() if method in methods and config.get(key)]
    if not METHODS[method].knobs:
        return "nothing to tune"
    if not swept:
        return "untuned: the paper's proportions, nothing swept in this suite"
    return f"untuned: the paper's proportions; swept beside it: {', '.join(swept)}"


def server_differences(servers: dict) -> dict[str, dict]:
    """Return the launch flags in which the paper's own servers differ from each other (section servers of a config)."""
    common = servers.get("common", {})
    return differing({name: {**common, **flags} for name, flags in servers.items() if name != "common"})


def domain_note(domains: set[str]) -> str:
    """Say that a table of one kind of text is no headline; empty where chat, maths and code stand side by side."""
    return f"ONE DOMAIN ({next(iter(domains))} alone): no claim beyond it" if len(domains) == 1 else ""


def _values(found: dict) -> str:
    return ", ".join(f"{key} {'none' if value is None else value}" for key, value in found.items())
