"""The methods' proposers for the static engine: those that never wait for the host, and device forms of the others.

Apart from baselines/methods.py, so that no method's source digest reaches the engine.
"""

import importlib

from baselines.methods import METHODS, check
from tfm.engine.forms import TRITON, Forms

# factories of (config, models, forms) -> proposer; the other methods' own proposers work on the device as they are
STATIC_FACTORIES = {
    "ddtree": "baselines.static_ddtree:make_proposer",
    "dartree": "baselines.static_dartree:make_proposer",
    "tfm": "tfm.engine.builder:make_proposer",
    "adaptive": "tfm.engine.builder:make_adaptive_proposer",
}
FAST_FACTORIES = {
    "tfm": "tfm.engine.fast_builder:make_proposer",
    "adaptive": "tfm.engine.fast_builder:make_adaptive_proposer",
}


def make_static_proposer(config, models, forms: Forms):
    """Return the proposer of config.method; raises ValueError as baselines.methods.check and the factories do."""
    check(config)
    name = config.method
    own = STATIC_FACTORIES | (FAST_FACTORIES if forms.growth == TRITON else {})
    module, factory = own.get(name, METHODS[name].factory).split(":")
    make = getattr(importlib.import_module(module), factory)
    return make(config, models, forms) if name in own else make(config, models)
