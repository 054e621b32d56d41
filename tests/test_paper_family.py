"""Checkpoints of suite paper's formats, decoded: beyond the drafter's window, in the paper's dtype, fused or split."""

from pathlib import Path

import pytest
import torch

from baselines.methods import METHODS, resolve
from tfm import checkpoints
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, decode
from tfm.sampling import gumbel

pytest.importorskip("transformers")
import paper_family  # noqa: E402, needs transformers


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    paper_family.write_target(folder / "target")
    paper_family.write_drafter(folder / "drafter")
    paper_family.write_weaver(folder / "weaver/qwen36_27b_weaver.pth", fused=False)
    return folder


def decoded(weights: Path, prompts: list[Prompt], dtype: torch.dtype, methods) -> dict:
    """The tokens of each method at T = 1, 12 a prompt, and the target under "target"."""
    drafter = checkpoints.load_drafter(weights / "drafter", dtype=dtype)
    taps = drafter.config.target_layer_ids
    target = checkpoints.load_target(weights / "target", dtype=dtype, tap_layers=taps)
    models = Models(target, drafter, checkpoints.load_weaver(weights / "weaver", dtype=dtype))
    outputs = {"target": target}
    for method in methods:
        knobs = {knob: n for knob, n in (("budget", 64), ("candidates", 512)) if knob in METHODS[method].knobs}
        config, done = DecodeConfig(method=method, temperature=1.0, max_new_tokens=12, **knobs), []
        decode(prompts, models, config, proposer=resolve(method)(config, models), on_finish=done.append)
        outputs[method] = [trace.output_tokens for trace in done]
    return outputs


def drawn_prompts(*lengths: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(f"p{length}", index, torch.randint(6, 2048, (length,), generator=generator).tolist())
        for index, length in enumerate(lengths)
    ]


def test_a_prompt_that_crosses_the_drafters_window_decodes_to_ars_tokens(weights):
    """The window of 2,048 ends inside the answer; the target holds more (vllm#24662, exllamav2#274)."""
    outputs = decoded(weights, drawn_prompts(2043), torch.float32, ("ar", "dflash", "tfm"))
    assert outputs["dflash"] == outputs["tfm"] == outputs["ar"] and len(outputs["ar"][0]) == 12


def test_in_bfloat16_a_first_difference_is_a_tie_that_the_dtype_cannot_tell_apart(weights):
    prompts, methods = drawn_prompts(5, 14, 60), ("ar", "dflash", "tfm")
    low = decoded(weights, prompts, torch.bfloat16, methods)
    exact = checkpoints.load_target(weights / "target")
    differences = 0
    for method in methods[1:]:
        for prompt, ours, ars in zip(prompts, low[method], low["ar"], strict=True):
            at = next((i for i, (a, b) in enumerate(zip(ours, ars, strict=True)) if a != b), None)
            if at is None:
                continue
            line = torch.tensor([prompt.tokens + ars[:at]])
            truth, rounded = exact(line).logits[0, -1], low["target"](line).logits[0, -1].float()
            noise = gumbel(0, torch.tensor([prompt.index]), torch.tensor([[line.shape[1]]]), truth.shape[0])[0, 0]
            scores, error = truth + noise, (truth - rounded).abs().max()
            gap = (scores[ars[at]] - scores[ours[at]]).abs()
            print(f"{method} {prompt.id} at {at}: gap {gap:.4f}, bfloat16 is off by up to {error:.4f}")
            assert gap <= 2 * error and scores.max() - scores[ours[at]] <= 2 * error
            differences += 1
    assert differences < len(prompts) * 2  # not all of them


def test_fused_and_split_projections_are_one_weaver(tmp_path):
    for name, fused in (("a.pth", True), ("b.pth", False)):
        paper_family.write_weaver(tmp_path / name, fused=fused)
    one, other = (checkpoints.load_weaver(tmp_path / name).state_dict() for name in ("a.pth", "b.pth"))
    assert all((one[name] == other[name]).all() for name in one)
