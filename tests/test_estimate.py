"""The estimate of hours and disk: its constants against the models' shapes, its sum against a hand calculation."""

import pytest
import torch
import yaml

from baselines import estimate, suite
from tfm.drafter import Drafter, DrafterConfig
from tfm.target import Target
from tfm.target_config import TargetConfig
from tfm.weaver import Weaver, WeaverConfig

CONFIG = suite.resolve(yaml.safe_load((estimate.WORKFLOWS / "config/paper.yaml").read_text()))
EXPECTED = yaml.safe_load(estimate.EXPECTED.read_text())
QWEN = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def parameters(build) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def test_weight_sizes_are_those_of_models_of_the_papers_shapes():
    layers = ("sliding_attention",) * 4 + ("full_attention",)
    drafter = DrafterConfig(5120, 17408, 32, 8, 128, layers, (1, 16, 31, 46, 61), 248070, sliding_window=2048)
    assert parameters(lambda: Drafter(drafter)) * 2 == pytest.approx(estimate.WEIGHT_BYTES["drafter"], rel=0.005)
    weaver = WeaverConfig(d_model=5120, d_embed=5120, d_rank=2048, num_heads=16, mlp_dim=2048)
    assert parameters(lambda: Weaver(weaver)) * 4 == 56_694_784 * 4
    assert pytest.approx(estimate.WEIGHT_BYTES["weaver"], rel=0.001) == 56_694_784 * 4
    # the text model alone; the checkpoint holds a vision tower and an MTP layer too
    text = parameters(lambda: Target(TargetConfig.from_dict(QWEN)))
    assert 0.9 < text * 2 / estimate.WEIGHT_BYTES["target"] < 1


def test_hours_are_tokens_over_the_papers_speed_plus_loading():
    result = estimate.estimate(CONFIG, EXPECTED, tokens=1000)
    assert result["prompts"] == 1462
    # four settings of all sets, on mtbench's 80 prompts the stage-timed cell, and for tfm two other rules
    assert result["hours"]["ar"]["decode"] == pytest.approx((4 * 1462 + 80) * 1000 / 89.9 / 3600)
    assert result["hours"]["tfm"]["decode"] == pytest.approx((4 * 1462 + 3 * 80) * 1000 / 392.8 / 3600)
    assert result["hours"]["ar"]["load"] == pytest.approx(33 * 55.56e9 / 2e9 / 3600)
    assert result["hours"]["ddtree"]["decode"] > result["hours"]["tfm"]["decode"]


def test_more_tokens_than_the_cap_are_refused():
    with pytest.raises(ValueError, match="tokens: 5000 is not allowed .allowed: 1 to 4096"):
        estimate.estimate(CONFIG, EXPECTED, tokens=5000)


def test_the_readme_quotes_the_estimate():
    text = (estimate.WORKFLOWS.parent / "README.md").read_text()
    for tokens in (4096, 1500):
        result = estimate.estimate(CONFIG, EXPECTED, tokens=tokens)
        whole = round(sum(row["decode"] + row["load"] for row in result["hours"].values()))
        assert f"| {tokens} | {whole} h |" in text
