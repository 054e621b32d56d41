"""Suite graft: its cells say what they are grafted from and to, and one of a small shape decodes as its source does."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from graft_family import MIDDLE

from baselines import suite
from baselines.parts import PARTS
from tfm import graft, graft_shape
from tfm.cells import load_cells
from tfm.drafter import Drafter, DrafterConfig
from tfm.prompt_sources import load_prompt_set
from tfm.prompts import Preparation, prepare, write_prepared
from tfm.target import Target, TargetConfig
from tfm.tokenizer import load_tokenizer
from tfm.weaver import Weaver, WeaverConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "workflows/scripts"))

NAMES = ("graft", "nano", "train_mini")
GRAFT, NANO, MINI = (yaml.safe_load((ROOT / f"workflows/config/{name}.yaml").read_text()) for name in NAMES)


@pytest.fixture(scope="module")
def cells() -> list[dict]:
    return suite.expand(suite.resolve(GRAFT))


def test_a_cell_holds_the_shape_of_its_parts_and_the_seed(cells):
    for cell in cells:
        assert set(cell["graft"]) == {"seed", *cell["weights"]}
        assert cell["weights"]["target"] == "tfm/weights/mini/target"
        assert all(cell["graft"][part] == GRAFT["graft"][part] for part in cell["weights"])
    assert all("graft" not in cell for cell in suite.expand(suite.resolve(NANO)))


def test_the_suite_has_the_paper_s_shape_and_mini_fits_it():
    """Sizes of the public config.json files of Qwen3.6-27B and its drafter, and of the released Weaver."""
    shape = GRAFT["graft"]
    target, drafter, weaver = (shape[part] for part in PARTS)
    assert (target["num_hidden_layers"], target["hidden_size"], target["intermediate_size"]) == (64, 5120, 17408)
    assert (target["num_attention_heads"], target["num_key_value_heads"], target["head_dim"]) == (24, 4, 256)
    assert (target["linear_num_key_heads"], target["linear_num_value_heads"]) == (16, 48)
    assert target["vocab_size"] == 248320 and drafter["target_layer_ids"] == [1, 16, 31, 46, 61]
    assert (drafter["num_attention_heads"], drafter["num_key_value_heads"], len(drafter["layer_types"])) == (32, 8, 5)
    assert (weaver["d_rank"], weaver["num_heads"], weaver["mlp_dim"]) == (2048, 16, 2048)
    assert weaver["candidate_pool_size"] == 512
    assert graft_shape.problems({part: MINI[part]["model"] for part in PARTS}, shape) == []


def test_the_shape_has_as_many_weights_as_the_released_models():
    """56,694,784 in the Weaver file, 1.73 billion in the drafter's, and 51.25 GB in bfloat16 that a pass of the target
    reads: all of it but the embedding. No memory is taken."""
    shape, target = GRAFT["graft"], TargetConfig.from_dict(MINI["target"]["model"])
    width = shape["target"]["hidden_size"]
    drafter, weaver = DrafterConfig.from_dict(MINI["drafter"]["model"]), WeaverConfig.from_dict(MINI["weaver"]["model"])
    with torch.device("meta"):
        wide = Target(graft.target_config(target, shape["target"]))
        parts = [Drafter(graft.drafter_config(drafter, shape["drafter"], width))]
        parts.append(Weaver(graft.weaver_config(weaver, shape["weaver"], width)))
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (wide, *parts)]
    assert counts[2] == 56_694_784
    assert round(counts[1] / 1e9, 2) == 1.73
    assert round((counts[0] - wide.embed_weight.numel()) * 2 / 1e9, 2) == 51.25


def test_every_method_decodes_eight_prompts_a_set_and_sweeps_run_on_one(cells):
    """128 tokens, 8 prompts a set, three seeds where sampled; sweeps of budget and width on one set."""
    headline = [cell for cell in cells if cell["part"] == "headline"]
    assert {(cell["prompts"], cell["decode"]["max_new_tokens"]) for cell in cells} == {(8, 128)}
    assert {cell["decode"]["requests"] for cell in cells} == {1}
    assert {(cell["setting"], cell["seed"]) for cell in headline} == {("t0", 0), ("t1", 0), ("t1", 1), ("t1", 2)}
    assert {cell["decode"]["method"] for cell in headline} == {"ar", "dflash", "ddtree", "dartree", "tfm", "adaptive"}
    assert {cell["dataset"] for cell in cells if cell["part"] != "headline"} == {"sample-chat"}
    budgets = {cell["decode"]["budget"] for cell in cells if cell["decode"]["method"] == "tfm"}
    assert budgets == {8, 16, 32, 64, 128} and {cell["clock"] for cell in cells} == {"wall", "stages"}
    assert all(cell["decode"]["budget"] == 64 for cell in cells if cell["decode"]["method"] == "adaptive")
    assert len(GRAFT["real"]["datasets"]) == 4


def test_a_family_that_the_shape_cannot_hold_is_refused_with_every_reason():
    with pytest.raises(ValueError, match="nothing was run") as error:
        suite.resolve({**GRAFT, "weights": str(ROOT / "tfm/weights/nano")})
    for key in ("target.head_dim: 256", "target.linear_key_head_dim: 128", "target.layers", "weaver.num_heads: 16"):
        assert f"graft.{key}" in str(error.value)
    wrong = {**GRAFT["graft"], "target": {**GRAFT["graft"]["target"], "hiden_size": 5120, "vocab_size": 0}}
    with pytest.raises(ValueError, match="nothing was run") as error:
        suite.resolve({**GRAFT, "graft": wrong})
    assert "graft.target.hiden_size: unknown key; did you mean hidden_size?" in str(error.value)
    assert "graft.target.vocab_size: 0 is not allowed (allowed: an integer >= 1)" in str(error.value)


def test_a_grafted_cell_decodes_what_its_source_decodes_and_its_record_says_what_it_was(tmp_path):
    from decode_cell import run_cell

    small = {"datasets": ["sample-math"], "prompts": 2, "requests": 2, "max_new_tokens": 6, "timed": False}
    rows = load_prompt_set(suite.pins(), source="embedded", name="sample-math").rows
    tokenizer = load_tokenizer(ROOT / "tfm/weights/nano/target")
    prepared = prepare(rows, tokenizer, Preparation(max_new_tokens=6, context=2048))[0][:2]
    write_prepared(tmp_path / "prompts.jsonl", tmp_path / "prompts.manifest.json", prepared, {})
    records = []
    for name, shape in (("plain", None), ("grafted", {"seed": 3, **MIDDLE})):
        config = suite.resolve({**NANO, **small, "weights": str(ROOT / "tfm/weights/nano"), "graft": shape})
        cell = suite.resolve_cell(config, dataset="sample-math", variant="tfm-b8-w2", setting="t1", seed=1)
        run_cell(cell, prompts=tmp_path / "prompts.jsonl", out=tmp_path / name)
        records.append(load_cells([tmp_path / name]))
    plain, grafted = records
    assert plain.requests["output_tokens"].map(list).tolist() == grafted.requests["output_tokens"].map(list).tolist()
    assert plain.steps["accepted"].tolist() == grafted.steps["accepted"].tolist()
    one, other = plain.cells[0], grafted.cells[0]
    assert other["cell"]["graft"] == {"seed": 3, **MIDDLE} and "graft" not in one["cell"]
    assert other["cell"]["weights_sha256"] == one["cell"]["weights_sha256"]
    assert other["source_digest"] == one["source_digest"] and other["cell_digest"] != one["cell_digest"]


def test_captions_say_whose_function_and_whose_cost():
    from captions import _weights

    assert _weights(suite.resolve(GRAFT)) == " (grafted: function of mini, cost of 27B)"
    assert _weights(suite.resolve(NANO)) == "" == _weights({"suite": "a plan of before this key"})


def test_the_check_on_a_device_passes_a_graft_and_finds_padding_that_is_not_masked(tmp_path, monkeypatch):
    import check_graft

    config = {**GRAFT, "weights": str(ROOT / "tfm/weights/nano"), "graft": {"seed": 0, **MIDDLE}, "context": 200}
    config |= {"methods": ["ar", "tfm"], "budget": 5, "width": 2, "budgets": [], "widths": [], "candidates": 32}
    config |= {"tables": ["headline", "per_set"], "figures": ["tau"], "torch_threads": 1}
    config = suite.resolve(config)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"config": config, "cells": suite.expand(config)}))
    words = ["check_graft.py", "--plan", str(plan), "--device", "cpu", "--shallow-layers", "4"]
    words += ["--prompts", "1", "--max-new-tokens", "4", "--out", str(tmp_path / "check.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert check_graft.main() == 0
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["float32"]["built"]["layers"] == 4 and found["bfloat16"]["built"]["layers"] == 8
    run = found["float32"]["runs"]["tfm-b5-w2 t1"]
    assert run["same_as_source"] == 1 and run["logits"]["steps"] > 0 and 0 < run["logits"]["largest"] < 1e-3
    monkeypatch.setattr(graft.GraftedTarget, "head", Target.head)
    assert check_graft.main() == 1
