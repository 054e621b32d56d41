"""DARTree for the static engine: its own proposer, which never waits for the host, with a scorer in the chosen form."""

import importlib

from baselines import dartree
from tfm.config import DecodeConfig
from tfm.engine.forms import TRITON, Forms


def make_proposer(config: DecodeConfig, models, forms: Forms) -> dartree.DARTreeProposer:
    """Return the proposer of method dartree; needs what baselines.dartree.make_proposer needs."""
    if forms.growth != TRITON:
        return dartree.make_proposer(config, models)
    # lazy: needs Triton
    fast = importlib.import_module("tfm.engine.fast_builder")
    return dartree.DARTreeProposer(config, fast.make_scorer(config, models, forms))
