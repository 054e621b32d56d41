"""The methods of the comparison. Names map to strings, so that importing one method reaches no other."""

import importlib

METHODS = {
    "ar": "baselines.ar:make_proposer",
    "dflash": "baselines.dflash:make_proposer",
    "ddtree": "baselines.ddtree:make_proposer",
    "dartree": "baselines.dartree:make_proposer",
    "tfm": "tfm.builder:make_proposer",
}


def resolve(name: str):
    """Return the factory (config, models) -> proposer of a method; raises ValueError on an unknown name."""
    if name not in METHODS:
        raise ValueError(
            f"method: {name!r} is not allowed (allowed: {', '.join(sorted(METHODS))}); choose one of them or add it to "
            "METHODS in baselines/__init__.py"
        )
    module, factory = METHODS[name].split(":")
    return getattr(importlib.import_module(module), factory)
