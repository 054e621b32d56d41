"""The first check of a serving engine: texts judged against the target's own, with fake servers and planted tokens."""

import json
import sys
from dataclasses import asdict

import pytest
import torch
from served import fake_python, fault, on_cpu, resolved
from workflow_runs import ROOT, write_tiny_family

from baselines.sglang.flags import VERSION
from tfm.checkpoints import load_target
from tfm.prompts import PreparedPrompt

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import check_serving  # noqa: E402

NANO = ROOT / "tfm/weights/nano"
PROMPT = [10, 20, 30, 40, 50, 60, 70]


@pytest.fixture(scope="module")
def targets():
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {name: load_target(NANO / "target", dtype=dtype).eval() for name, dtype in types.items()}


def test_a_text_is_equal_or_differs_where_a_token_was_planted(targets):
    wanted = check_serving.greedy(targets["float32"], PROMPT, 12, (2,))
    assert check_serving.judge(targets, PROMPT, wanted, list(wanted)) == {"verdict": "equal", "tokens": 12}
    assert check_serving.judge(targets, PROMPT, wanted, wanted[:5])["verdict"] == "other length"
    planted = [*wanted[:7], (wanted[7] + 1) % 2048, *wanted[8:]]
    found = check_serving.judge(targets, PROMPT, wanted, planted)
    assert (found["verdict"], found["at"]) == ("different", 7) and found["gap"] > 2 * found["moved"] > 0


def test_the_runner_up_of_a_close_choice_is_a_near_tie(targets):
    """The closest choice of a text, told by scores of both types."""
    wanted = check_serving.greedy(targets["float32"], PROMPT, 24, (2,))
    with torch.inference_mode():
        scores = targets["float32"](torch.tensor([[*PROMPT, *wanted[:-1]]])).logits[0, len(PROMPT) - 1 :]
    best = scores.topk(2)
    at = int((best.values[:, 0] - best.values[:, 1]).argmin())
    other = [*wanted[:at], int(best.indices[at, 1]), *wanted[at + 1 :]]
    found = check_serving.judge(targets, PROMPT, wanted, other)
    assert found["at"] == at and (found["verdict"] == "near tie") == (abs(found["gap"]) <= 2 * found["moved"])


def test_servers_that_say_other_tokens_are_found_out_and_a_failed_one_is_named(tmp_path, monkeypatch):
    fault(monkeypatch)
    weights = write_tiny_family(tmp_path / "family")
    cells = [on_cpu(resolved("sglang", method, weights=weights)) for method in ("ar", "tfm")]
    cells = [{**cell, "path": f"results/s/cells/{number}", "part": "headline"} for number, cell in enumerate(cells)]
    (tmp_path / "plan.json").write_text(json.dumps({"cells": cells}))
    prompts = check_serving.prompts_file(cells[0], tmp_path)
    prompts.parent.mkdir(parents=True)
    fields = {name: "x" for name in ("dataset", "domain", "category", "template", "sha256")}
    rows = [PreparedPrompt(id=f"q{i}", index=i, tokens=list(range(20, 30 + i)), **fields) for i in range(3)]
    prompts.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    words = ["--list", str(tmp_path / "plan.json"), "--root", str(tmp_path), "--count", "2", "--new-tokens", "8"]
    words += ["--server-folder", str(tmp_path / "servers"), "--out", str(tmp_path / "out.json")]
    words += ["--server-python", fake_python(tmp_path, VERSION)]
    result = check_serving.run(check_serving.parse(words))
    assert set(result["verdicts"]) == {"ar", "tfm"} and not result["failed"]
    assert "different" in result["verdicts"]["tfm"]
    record = json.loads((tmp_path / "out.json").read_text())
    assert [row["id"] for row in record["arms"]["tfm"]] == ["q0", "q1"]
    with pytest.raises(ValueError, match="methods: 'dflash' has no served cell .*ar, tfm"):
        check_serving.run(check_serving.parse([*words, "--methods", "dflash"]))
    fault(monkeypatch, version="0.0")
    assert check_serving.run(check_serving.parse(words))["failed"] == ["ar", "tfm"]
