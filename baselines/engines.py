"""The engines that run the PyTorch decoders of a cell: the reference loop, and the same loop on static memory."""

import dataclasses
import importlib
from collections.abc import Callable

import torch

from baselines.engine_names import STATIC
from baselines.methods import resolve
from tfm.clock import Clock
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, decode


def make_loop(cell: dict, models: Models, config: DecodeConfig, where: torch.device, *, longest: int) -> Callable:
    """Return a function (prompts, max_new_tokens=None, **watchers of tfm.decode.decode) that decodes with the engine.

    `longest` is the number of tokens of the longest prompt that will come.
    """
    if cell["engine"] == STATIC:
        return _static_loop(cell, models, config, longest)
    proposer, clock = resolve(config.method)(config, models), Clock(cell["clock"], where)

    def run(prompts: list[Prompt], *, max_new_tokens: int | None = None, **watchers) -> None:
        # shortens only: a prompt may leave no more room than the cap's
        cap = config.max_new_tokens if max_new_tokens is None else min(max_new_tokens, config.max_new_tokens)
        settings = dataclasses.replace(config, max_new_tokens=cap)
        decode(prompts, models, settings, proposer=proposer, clock=clock, **watchers)

    return run


def _static_loop(cell: dict, models: Models, config: DecodeConfig, longest: int) -> Callable:
    forms_module, loop, methods = (
        importlib.import_module(name) for name in ("tfm.engine.forms", "tfm.engine.loop", "baselines.static_methods")
    )
    forms = forms_module.Forms() if cell["forms"] == "torch" else forms_module.Forms.fast()
    if cell["forms"] == "fast-whole-prefill":
        forms = dataclasses.replace(forms, prefill=forms_module.TORCH)
    engine = loop.Engine(
        models,
        config,
        proposer=methods.make_static_proposer(config, models, forms),
        capacity=longest + config.max_new_tokens,
        forms=forms,
        clock=cell["clock"],
    )
    return engine.decode
