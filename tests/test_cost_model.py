"""The cost model recovers what made its samples, never says that more work costs less, and names what it lacks."""

import numpy as np
import pytest

from baselines.cost_model import CostModel, Sample, _non_negative, fit, other_card

TRUE = CostModel(
    {
        "step": 12.0,
        "row": 0.02,
        "context": 0.05,
        "row_context": 0.001,
        "draft": 1.3,
        "draft_context": 0.01,
        "heap_node": 0.002,
        "expansion": 0.03,
        "expansion_node": 0.001,
        "supertree": 0.9,
    }
)


def grid():
    for context in (512, 2048, 8192):
        yield Sample("ar", 1, context)
        yield Sample("dflash", 16, context)
        for budget in (16, 32, 64):
            yield Sample("ddtree", budget + 1, context)
            yield Sample("dartree", budget + 1, context)
        for budget, width in ((16, 1), (32, 2), (64, 4), (64, 8), (128, 8)):
            yield Sample("tfm", budget + 1, context, -(-budget // width), width)


def measured(noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    for sample in grid():
        ms = TRUE.ms(sample) * (1 + noise * generator.standard_normal())
        yield Sample(**{**vars(sample), "ms": ms})


def test_exact_samples_give_the_coefficients_that_made_them():
    model = fit(list(measured()))
    assert model.coefficients == pytest.approx(TRUE.coefficients, rel=1e-6)
    assert max(map(abs, model.left_out_errors)) < 1e-9 and len(model.left_out_errors) == len(list(grid()))


def test_noise_of_a_percent_is_an_error_of_about_a_percent():
    model = fit(list(measured(noise=0.01)))
    assert 0.002 < np.sqrt(np.mean(np.square(model.left_out_errors))) < 0.02
    assert all(value >= 0 for value in model.coefficients.values())


def test_no_coefficient_is_negative_where_a_plain_fit_has_one():
    generator = np.random.default_rng(3)
    for _ in range(20):
        rows, wanted = generator.standard_normal((12, 5)), generator.standard_normal(12)
        found = _non_negative(rows, wanted)
        assert (found >= 0).all()
        # no step into the allowed region gets closer
        gradient = rows.T @ (wanted - rows @ found)
        assert (gradient[found == 0] <= 1e-8).all() and np.abs(gradient[found > 0]).max(initial=0) < 1e-8


def test_a_method_without_a_measured_step_is_refused_by_name():
    model = fit([sample for sample in measured() if sample.method in ("ar", "dflash", "ddtree")])
    with pytest.raises(ValueError, match="method: tfm needs expansion, expansion_node.*measure a step of it"):
        model.ms(Sample("tfm", 65, 512, 16, 4))
    with pytest.raises(ValueError, match="samples: 2 steps .*measure more"):
        fit(list(measured())[:2])


def test_speed_follows_tau_and_the_ratio_of_steps():
    tree = Sample("tfm", 65, 512, 16, 4)
    assert TRUE.speedup(tree, 6.7) == pytest.approx(6.7 * TRUE.ms(Sample("ar", 1, 512)) / TRUE.ms(tree))


def test_another_card_scales_everything_or_only_what_is_read():
    assert other_card(15.0, 12.0, 2.0) == (7.5, 9.0)
