"""The oracle probe: its records are the search's own, its table and summary follow from them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "workflows/scripts"))

import probe_tables
import summary
from estimate_oracle import STEPS, _rows
from probe_records import Probe, run_probe

from baselines import probes
from tfm import oracle
from tfm.manifest import write_json


def answers_of(entropies: dict[str, list[float]]) -> pd.DataFrame:
    rows = [
        {"dataset": name, "id": f"{name}/{at}", "seed": 0, "entropy": value}
        for name, values in entropies.items()
        for at, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def steps_of(values: dict[tuple[str, str], list[tuple[float, float]]]) -> pd.DataFrame:
    rows = [
        {"dataset": name, "id": f"{name}/{at}", "seed": 0, "variant": variant, "expected_accepted": own, "limit": best}
        for (name, variant), pairs in values.items()
        for at, (own, best) in enumerate(pairs)
    ]
    return pd.DataFrame(rows)


@pytest.fixture
def data():
    steps = steps_of(
        {
            ("a", "tfm-b64-w4"): [(3.0, 4.0), (5.0, 6.0)],
            ("b", "tfm-b64-w4"): [(1.0, 2.0), (2.0, 4.0)],
            ("a", "dflash"): [(2.0, 4.0), (2.0, 6.0)],
            ("b", "dflash"): [(1.0, 2.0), (1.0, 4.0)],
        }
    )
    frames = {"steps": steps, "answers": answers_of({"a": [0.2, 0.4], "b": [0.5, 0.7]})}
    return SimpleNamespace(
        probes={"oracle": Probe({"settings": {"setting": "t1"}}, frames)}, config={"datasets": ["a", "b"]}
    )


def test_shares_are_ratios_of_macro_means_and_the_summary_names_them(data):
    table = probe_tables.oracle(data)
    macro = table[table["dataset"] == "macro"].set_index("variant")
    assert macro.loc["tfm-b64-w4", "expected_accepted"] == pytest.approx((4.0 + 1.5) / 2)
    assert macro.loc["tfm-b64-w4", "limit"] == pytest.approx((5.0 + 3.0) / 2)
    assert macro.loc["tfm-b64-w4", "share"] == pytest.approx(5.5 / 8)
    assert macro.loc["dflash", "share"] == pytest.approx(3.0 / 8)
    assert macro.loc["ar", "entropy_nats"] == pytest.approx(0.45) and macro.loc["ar", "n"] == 4
    assert (table["dataset"] == "b").sum() == 3
    found = summary._oracle(table)
    assert found["oracle_share_tfm_T1"]["value"] == pytest.approx(5.5 / 8)
    assert found["target_entropy_nats"]["value"] == pytest.approx(0.45)


def test_without_records_the_table_says_why(data):
    data.probes, data.config = {}, {"oracle": None}
    assert "null in the config" in probe_tables.oracle(data)["reason"].iloc[0]
    data.config = {"oracle": {}, "methods": ["ar"], "temperatures": [1]}
    assert "methods that draft" in probes.why_not("oracle", data.config)
    data.config = {"oracle": {}, "methods": ["ar", "tfm"], "temperatures": [0]}
    assert "above 0" in probes.why_not("oracle", data.config)


def test_rows_hold_nothing_where_a_chain_has_no_budget():
    row = dict.fromkeys(STEPS.names, 1) | {"budget": float("nan")}
    assert _rows(pd.DataFrame([row]), STEPS)[0]["budget"] is None


def test_entropy_is_of_the_laws_of_the_answers_tokens():
    law = torch.randn(9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def target(tokens):
        return SimpleNamespace(logits=law[tokens])  # the next token's law depends on the last token alone

    target.embed_weight = law
    answers = pd.DataFrame([{"dataset": "a", "id": "a/0", "temperature": 0.5, "output_tokens": [4, 7, 2]}])
    (found,) = oracle.answer_entropies(answers, target, {"a": {"a/0": [1, 3]}})
    laws = (law[[3, 4, 7]] / 0.5).softmax(-1)  # 2 is the last token: what follows it was never drawn
    assert found == pytest.approx(float(-(laws * laws.log()).sum(-1).mean()))


def test_a_probe_is_told_its_commit_where_there_is_no_checkout(tmp_path, monkeypatch):
    def run(settings: dict, out: Path) -> dict:
        facts = {"steps": 1, "seconds": 0.1, "environment": {"git": {"commit": None, "dirty": None}}}
        write_json(out / "oracle.json", facts)
        return facts

    monkeypatch.setattr(sys, "argv", ["x", "--settings", "{}", "--out", str(tmp_path), "--commit", "abc"])
    assert run_probe("oracle", "x", run, fact="steps") == 0
    assert json.loads((tmp_path / "oracle.json").read_text())["environment"]["git"]["commit"] == "abc"
