"""Cells of engine torch-static: the records of engine torch under another name, and what that engine refuses."""

import json
import sys
from dataclasses import asdict, replace

import engine_models
import pyarrow.parquet as pq
import pytest
import torch
from workflow_runs import NANO, ROOT

from baselines import suite
from baselines.engine_names import source_of
from baselines.engines import make_loop
from tfm.config import DecodeConfig
from tfm.decode import Prompt
from tfm.prompts import PreparedPrompt

sys.path.insert(0, str(ROOT / "workflows/scripts"))
FIELDS = {name: "x" for name in ("dataset", "domain", "category", "template", "sha256")}
SMALL = {"datasets": ["sample-math"], "prompts": 2, "max_new_tokens": 8, "requests": 1, "seeds": [0]}


def resolved(engine: str, method: str, **more) -> dict:
    config = suite.resolve({**NANO, **SMALL, "engine": engine, **more})
    variant = next(entry.name(config) for entry in suite.headline(config) if entry.method == method)
    return suite.resolve_cell(config, dataset="sample-math", variant=variant, setting="t1", seed=0)


@pytest.mark.parametrize("method", ["tfm"])
def test_both_engines_write_the_same_records(method, tmp_path):
    from decode_cell import run_cell

    prompts = tmp_path / "prompts.jsonl"
    rows = [PreparedPrompt(id=f"q{i}", index=i, tokens=list(range(20, 40 + i)), **FIELDS) for i in range(2)]
    prompts.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    tables = {}
    for engine, more in (("torch", {}), ("torch-static", {"forms": "torch"})):
        cell = {**resolved(engine, method, **more), "clock": "wall"}
        cell["decode"]["stop"] = ["of no answer"]  # the warm-up of a timed cell knew no tokenizer and failed it
        manifest = run_cell(cell, prompts=prompts, out=tmp_path / engine, commit="test")
        assert manifest["source_digest"] == source_of(cell)
        tables[engine] = {
            kind: pq.read_table(tmp_path / engine / f"{kind}.parquet").to_pylist() for kind in ("requests", "steps")
        }
    for one, other in zip(tables["torch"]["requests"], tables["torch-static"]["requests"], strict=True):
        timed = ("prefill_us", "decode_us", "wall_us")
        assert {key: one[key] for key in one if key not in timed} == {k: other[k] for k in other if k not in timed}
        assert other["wall_us"] > 0
    for one, other in zip(tables["torch"]["steps"], tables["torch-static"]["steps"], strict=True):
        assert one.pop("expected_accepted") == pytest.approx(other.pop("expected_accepted"), abs=1e-4, nan_ok=True)
        assert one == other


@pytest.mark.parametrize("engine", ["torch", "torch-static"])
def test_the_warm_up_of_a_cell_is_no_longer_than_its_answers(engine):
    """Eight tokens where a prompt fills the context up to a cap of three failed a timed cell (llama.cpp#26894)."""
    models, done = engine_models.random_family(), []
    models.target.config = replace(models.target.config, max_position_embeddings=20)
    cell = {"engine": engine, "forms": "torch", "clock": "wall"}
    models = replace(models, drafter=None, weaver=None)
    run = make_loop(cell, models, DecodeConfig("ar", max_new_tokens=3), torch.device("cpu"), longest=17)
    run([Prompt("warm-up", 0, [7] * 17)], max_new_tokens=8, on_finish=done.append)
    assert len(done[0].output_tokens) == 3


def test_an_engine_has_a_digest_of_its_own():
    assert source_of(resolved("torch", "tfm")) != source_of(resolved("torch-static", "tfm", forms="torch"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "torch-static"}, "forms: None .*torch, fast"),
        ({"engine": "torch", "forms": "fast"}, "forms: 'fast' .*engine torch .*null"),
        ({"engine": "torch-static", "forms": "torch", "requests": 2, "timed": False}, "requests: 2 .*allowed: 1"),
    ],
)
def test_what_an_engine_does_not_run_is_refused_when_the_cell_is_resolved(settings, message):
    with pytest.raises(ValueError, match=message):
        resolved(settings.pop("engine"), "tfm", **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "torchh"}, "engine: 'torchh' is not allowed .*did you mean torch"),
        ({"dtype": "float16"}, "dtype: 'float16' is not allowed"),
        ({"threads": 0}, "threads: 0 is not allowed"),
        ({"weights": ...}, "--cell: lacks weights; take one of the suite's plan.json"),
        ({"decode.method": ...}, "--cell: lacks decode.method"),
        ({"decode.method": "tree"}, "method: 'tree' is not allowed"),
        ({"decode.buget": 3}, "knows no decode.buget"),
        ({"decode.stop": "END"}, "stop: 'END' is not allowed .allowed: a list"),
        ({"decode.eos_tokens": None}, "eos_tokens: None is not allowed .allowed: a list"),
    ],
)
def test_a_cell_written_by_hand_is_refused_by_key(tmp_path, change, message):
    """An unknown engine ran the loop under its name, and a stop string ended answers at each of its letters."""
    from decode_cell import decode_config, run_cell

    from tfm.tokenizer import load_tokenizer

    cell = resolved("torch", "ar")
    for key, value in change.items():
        place, name = (cell["decode"], key.removeprefix("decode.")) if key.startswith("decode.") else (cell, key)
        if value is ...:
            del place[name]
        else:
            place[name] = value
    with pytest.raises(ValueError, match=message):
        if {"decode.stop", "decode.eos_tokens"} & set(change):
            decode_config(cell, load_tokenizer(ROOT / "tfm/weights/nano/target"))
        else:
            run_cell(cell, prompts=tmp_path / "none.jsonl", out=tmp_path / "cell")
