"""What the plugin is told, without SGLang: its settings, the server's flags, and the requests that trees decode."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from baselines.sglang import arguments
from baselines.sglang.flags import server_of
from baselines.sglang.settings import VARIABLE, Settings


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"proposal": "tfm"}, "budget: missing key"),
        ({"proposal": "beam", "budget": 8}, "proposal: 'beam' .*tfm, ddtree, dartree"),
        ({"proposal": "ddtree", "budget": 8, "kernel": "fast"}, "kernel: 'fast' .*recurrent"),
        ({"proposal": "ddtree", "budget": 8, "attention": "fa3"}, "attention: 'fa3' .*triton, torch, sglang"),
        ({"proposal": "ddtree", "budget": 8, "draft_attention": 1}, "draft_attention: 1 .*triton, torch, sglang"),
        ({"proposal": "ddtree", "budget": 8, "ahead": True}, "ahead: True .*none, draft, verify"),
        (
            {"proposal": "ddtree", "budget": 8, "ahead": "verify", "attention": "sglang"},
            "ahead: 'verify' .*attention sglang .allowed: none, draft",
        ),
        ({"proposal": "tfm", "budget": 8}, "weaver: null .*give it, or set residual to false"),
        ({"proposal": "ddtree", "budget": 0}, "budget: 0 .*an integer >= 1"),
        ({"proposal": "ddtree", "budget": 8, "buget": 9}, "buget: unknown key"),
    ],
)
def test_settings_that_are_not_allowed_are_named(found, message):
    with pytest.raises(ValueError, match=message):
        Settings.from_dict(found)


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"proposal": "ddtree", "budget": 8}))
    assert Settings.from_environment().budget == 8
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ValueError, match="DFLASH_TFM: not set"):
        Settings.from_environment()


def server_arguments(**more):
    known = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "max_running_requests": 1, "disable_overlap_schedule": True}
    known |= {"disable_radix_cache": True, "page_size": 1, "attention_backend": "triton"}
    known |= {"speculative_dflash_block_size": None, "speculative_num_draft_tokens": None}
    known |= {"speculative_eagle_topk": None, "speculative_draft_attention_backend": None}
    return SimpleNamespace(**{**known, **more})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tp_size", 2),
        ("pp_size", 2),
        ("max_running_requests", 8),
        ("disable_overlap_schedule", False),
        ("disable_radix_cache", False),
        ("page_size", 64),
        ("attention_backend", "fa3"),
    ],
)
def test_a_server_that_would_not_be_exact_is_refused_by_its_flag(flag, value, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"proposal": "ddtree", "budget": 8}))
    arguments.validate(server_arguments())
    with pytest.raises(ValueError, match=f"DFLASH_TFM: {flag}: {value!r} is not allowed"):
        arguments.validate(server_arguments(**{flag: value}))


FLASHINFER, DRAFT_FA4 = {"attention_backend": "flashinfer"}, {"speculative_draft_attention_backend": "fa4"}


@pytest.mark.parametrize(
    ("flags", "settings", "message"),
    [
        (FLASHINFER, {}, "attention: 'triton' .*'sglang'.; with .* backend flashinfer"),
        (FLASHINFER, {"attention": "sglang"}, "draft_attention: 'triton' .*flashinfer"),
        (DRAFT_FA4, {}, "draft_attention: 'triton' .*fa4"),
        (
            DRAFT_FA4,
            {"draft_attention": "sglang"},
            "ahead: 'draft' is not allowed .allowed: 'none'.; with .* fa4 it plans a draft from lengths",
        ),
        (FLASHINFER, {"attention": "sglang", "draft_attention": "sglang", "ahead": "none"}, None),
        (DRAFT_FA4, {"draft_attention": "sglang", "ahead": "none"}, None),
    ],
)
def test_an_attention_that_would_not_be_called_is_refused(flags, settings, message, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"proposal": "ddtree", "budget": 64, **settings}))
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        arguments.validate(server_arguments(**flags))


@pytest.mark.parametrize(("kernel", "topk"), [("fused_cuda", 1), ("recurrent", 2)])
def test_arguments_become_the_trees_for_the_target_and_keep_the_drafters_block(kernel, topk, monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"proposal": "ddtree", "budget": 64, "kernel": kernel}))
    server = server_arguments()

    def handle_dflash(found):  # as SGLang's: the block of the drafter's config unless one is given
        given = found.speculative_dflash_block_size
        found.speculative_num_draft_tokens, found.speculative_eagle_topk = given or 16, 1

    for _ in range(2):  # resolved twice, the same
        arguments.resolve(server, handle_dflash)
        assert (server.speculative_num_draft_tokens, server.speculative_dflash_block_size) == (65, 16)
        assert server.speculative_eagle_topk == topk


def test_a_depth_beyond_the_drafters_rows_is_refused_before_anything_loads(monkeypatch):
    monkeypatch.setenv(VARIABLE, json.dumps({"proposal": "ddtree", "budget": 64, "depth": 16}))

    def handle_dflash(found):
        found.speculative_num_draft_tokens = 16

    with pytest.raises(ValueError, match="depth: 16 .*1 to 15"):
        arguments.resolve(server_arguments(), handle_dflash)


def test_a_tree_too_small_for_the_memory_that_sglang_reserves_is_refused(monkeypatch):
    """Two trees behind the context must hold the drafter's block."""
    for budget, is_refused in ((6, True), (7, False)):
        monkeypatch.setenv(VARIABLE, json.dumps({"proposal": "ddtree", "budget": budget}))
        server = server_arguments(speculative_dflash_block_size=16)
        outcome = pytest.raises(ValueError, match="budget: 6 .*7 or more") if is_refused else contextlib.nullcontext()
        with outcome:
            arguments.resolve(server, lambda found: setattr(found, "speculative_num_draft_tokens", 16))


def request(**more):
    sampling = {"top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "top_k": 1 << 30}
    sampling |= {"repetition_penalty": 1.0, "min_new_tokens": 0, "logit_bias": None, "temperature": 1.0}
    sampling |= dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"))
    return SimpleNamespace(sampling_params=SimpleNamespace(**{**sampling, **more}), return_logprob=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 50),
        ("min_p", 0.1),
        ("repetition_penalty", 1.3),
        ("presence_penalty", 1.5),
        ("frequency_penalty", 0.5),
        ("regex", "[a-z]+"),
        ("json_schema", "{}"),
        ("logit_bias", {"5": -100.0}),
        ("min_new_tokens", 4),
    ],
)
def test_a_request_that_trees_would_not_decode_exactly_is_refused(key, value):  # C020
    assert arguments.refuse_request(request()) is None
    assert f"{key}:" in arguments.refuse_request(request(**{key: value}))


def test_the_runners_settings_are_settings_of_the_plugin():
    decode = {"budget": 64, "width": None, "children": 8, "candidates": 512, "depth": None, "residual": True}
    decode |= {"method": "tfm", "gdn_backend": "fused_cuda", "depth_bonus": 0.0}
    cell = {"decode": decode, "dtype": "bfloat16", "seed": 0}
    server = server_of(cell, draft_rows=15, context=2048, paper=False, flags={})
    settings = Settings.from_dict({**server["plugin"], "weaver": "folder"})
    assert (settings.width, settings.kernel, settings.is_fused) == (4, "fused_cuda", True)
