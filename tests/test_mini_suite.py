"""Suite mini before its weights exist: its cells resolve, none is timed, and they are the runs that it promises."""

from pathlib import Path

import pytest
import yaml

from baselines import suite

CONFIG = Path(__file__).parents[1] / "workflows" / "config" / "mini.yaml"


@pytest.fixture(scope="module")
def cells() -> list[dict]:
    return suite.expand(suite.resolve(yaml.safe_load(CONFIG.read_text())))


def test_requests_are_decoded_together_and_no_cell_has_a_clock(cells):
    assert {cell["clock"] for cell in cells} == {"off"}
    assert {cell["decode"]["requests"] for cell in cells} == {16}


def test_headline_has_every_method_at_each_temperature_with_three_seeds_above_zero(cells):
    headline = [cell for cell in cells if cell["part"] == "headline"]
    found = {(cell["decode"]["method"], cell["setting"], cell["seed"]) for cell in headline}
    drawn = {(setting, seed) for setting in ("t0.6", "t1") for seed in (0, 1, 2)} | {("t0", 0)}
    assert found == {(method, *one) for method in ("ar", "dflash", "ddtree", "dartree", "tfm") for one in drawn}
    assert {cell["decode"]["budget"] for cell in headline} == {64, None}


def test_side_set_has_budgets_the_residual_ablation_and_the_audit_at_temperature_one(cells):
    side = [cell for cell in cells if cell["part"] != "headline"]
    assert {cell["setting"] for cell in side} == {"t1"} and {cell["dataset"] for cell in side} == {"sample-chat"}
    settings = [cell["decode"] for cell in side]
    assert {16, 32, 128} <= {one["budget"] for one in settings}
    assert any(not one["residual"] for one in settings)
    assert {"traversal", "legacy_traversal"} <= {one["rule"] for one in settings}


def test_a_suite_is_timed_unless_it_says_otherwise():
    config = yaml.safe_load(CONFIG.read_text())
    del config["timed"]
    timed = [cell for cell in suite.expand(suite.resolve(config)) if cell["clock"] == "wall"]
    assert {cell["seed"] for cell in timed} == {0} and {cell["decode"]["requests"] for cell in timed} == {1}


def test_on_the_real_sets_budgets_and_the_residual_run_everywhere_and_other_sweeps_on_the_side_set(tmp_path):
    for pin in suite.pins()["local"].values():
        (tmp_path / pin["file"]).touch()
    config = yaml.safe_load(CONFIG.read_text()) | {"data": str(tmp_path)}
    cells = suite.expand(suite.resolve(config))
    sets = {part: {cell["dataset"] for cell in cells if cell["part"] == part} for part in ("budgets", "residuals")}
    assert all(len(found) == 8 for found in sets.values())
    assert {cell["dataset"] for cell in cells if cell["part"] in ("widths", "depths", "audit")} == {"mtbench"}
