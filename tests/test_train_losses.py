"""Losses of training, the optimizer and its schedule."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tfm.drafter import Drafter
from tfm.target import Target
from tfm.train.losses import leading_matches, lk_loss, next_token_loss, row_weights
from tfm.train.optim import MuonAdamW, orthogonalise, takes_muon
from tfm.train.settings import Schedule, load_settings
from tfm.weaver import Weaver

NANO = Path(__file__).parents[1] / "workflows/config/train_nano.yaml"


def test_alpha_weight_and_loss_by_hand():
    target_law = torch.tensor([[0.5, 0.3, 0.2], [1.0 - 2e-9, 1e-9, 1e-9]]).double().log()
    draft_law = torch.tensor([[0.2, 0.6, 0.2], [0.25, 0.5, 0.25]]).double().log()
    terms = lk_loss(target_law, draft_law, torch.tensor([1.0, 3.0]), kl_scale=0.8, kl_decay=2.0)
    alpha = (0.7 * 1 + 0.25 * 3) / 4
    kl_first = 0.5 * np.log(0.5 / 0.2) + 0.3 * np.log(0.3 / 0.6)
    kl = (kl_first * 1 + np.log(4) * 3) / 4
    kl_weight = 0.8 * np.exp(-2.0 * alpha)
    assert terms.alpha_rows.tolist() == pytest.approx([0.7, 0.25], abs=1e-6)
    assert float(terms.alpha) == pytest.approx(alpha, abs=1e-6)
    assert float(terms.kl_weight) == pytest.approx(kl_weight, abs=1e-6)
    assert float(terms.loss) == pytest.approx(kl_weight * kl + (1 - kl_weight) * (1 - alpha), abs=1e-6)


def test_gradient_equals_finite_differences_with_the_weight_held():
    generator = torch.Generator().manual_seed(0)
    target_law = torch.randn(3, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)

    def terms_of(values):
        return lk_loss(target_law, values.log_softmax(-1), weights, kl_scale=1.0, kl_decay=1.0)

    terms = terms_of(logits)
    terms.loss.backward()
    held = float(terms.kl_weight)
    for place in ((0, 0), (1, 3), (2, 5)):
        step = torch.zeros_like(logits)
        step[place] = 1e-6
        high, low = terms_of(logits.detach() + step), terms_of(logits.detach() - step)
        slope = (held * (high.kl - low.kl) - (1 - held) * (high.alpha - low.alpha)) / 2e-6
        assert float(logits.grad[place]) == pytest.approx(float(slope), abs=1e-7)


def test_candidates_are_compared_with_the_full_mass_and_kl_with_the_renormalised_law():
    target_law = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()
    draft_law = torch.tensor([0.8, 0.2]).log()
    terms = lk_loss(target_law[:2], draft_law, torch.ones(()), kl_scale=1.0, kl_decay=0.0)
    assert float(terms.alpha) == pytest.approx(0.4 + 0.1)
    assert float(terms.kl) == pytest.approx(0.0, abs=1e-6)


def test_next_token_loss_ignores_padding():
    generator = torch.Generator().manual_seed(0)
    tokens, logits = torch.tensor([[1, 2, 3, 0]]), torch.randn(1, 4, 5, generator=generator)
    short = next_token_loss(logits[:, :3], tokens[:, :3], torch.tensor([3]))
    torch.testing.assert_close(next_token_loss(logits, tokens, torch.tensor([3])), short)


@pytest.mark.parametrize(("flags", "accepted"), [([1, 0, 1], 1), ([0, 1, 1], 0), ([1, 1, 0, 1], 2), ([1, 1, 1], 3)])
def test_chain_length_ends_at_the_first_miss(flags, accepted):
    tokens = torch.tensor(flags)
    assert int(leading_matches(torch.ones_like(tokens), tokens, torch.ones_like(tokens, dtype=torch.bool))) == accepted


def test_rows_past_the_end_weigh_nothing():
    weights = row_weights(torch.tensor([True, True, False]), gamma=2.0)
    assert weights.tolist() == pytest.approx([1.0, np.exp(-0.5), 0.0])


def test_orthogonalised_matrices_have_singular_values_near_one():
    matrices = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    for shaped in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalise(shaped))
        assert float(values.min()) > 0.3 and float(values.max()) < 1.3


def test_matrices_take_muon_and_lookups_do_not():
    settings = load_settings(NANO)
    with torch.device("meta"):
        models = (Target(settings.target_model), Drafter(settings.drafter_model), Weaver(settings.weaver_model))
    chosen = {name for model in models for name, p in model.named_parameters() if takes_muon(name, p)}
    assert "layers.0.mlp.up_proj.weight" in chosen and "token_in.weight" in chosen and "fc.weight" in chosen
    left = {"embed_tokens.weight", "pos_emb", "layers.0.linear_attn.in_proj_a.weight", "layers.0.linear_attn.A_log"}
    assert not chosen & left and not any("norm" in name for name in chosen)


def test_vectors_are_updated_as_adamw_does():
    start, gradients = torch.linspace(-1, 1, 5), torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.ParameterList([start.clone()]), torch.nn.Parameter(start.clone())
    optimiser = MuonAdamW(ours, muon_lr=0.0, adam_lr=0.1, weight_decay=0.3, clip=1e9)
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    optimiser.set_scale(1.0)
    for gradient in gradients:
        ours[0].grad, theirs.grad = gradient.clone(), gradient.clone()
        optimiser.step()
        reference.step()
    torch.testing.assert_close(ours[0], theirs, rtol=1e-5, atol=1e-6)


def test_schedule_warms_up_holds_and_decays_to_the_end():
    schedule = Schedule(steps=100, tokens_per_step=1, warmup_steps=10, decay_fraction=0.5)
    assert [schedule.scale(step) for step in (0, 9, 30, 49)] == [0.1, 1.0, 1.0, 1.0]
    assert schedule.scale(75) == pytest.approx(0.5) and schedule.scale(99) == pytest.approx(0.02)
    # more steps do not change what was run before the decay
    assert replace(schedule, steps=200).scale(49) == schedule.scale(49)
