"""`tfm plan`: hours, card hours, energy and disk against sums by hand, and what it refuses."""

import json
import re

import pytest
from test_estimate import CONFIG, EXPECTED

from baselines import cli, estimate, planning
from baselines.estimate import CellEstimate


def cells(*hours: float) -> list[CellEstimate]:
    return [CellEstimate({"path": f"cell{i}"}, value, 0.0, 0.0) for i, value in enumerate(hours)]


@pytest.mark.parametrize(("gpus", "hours"), [(1, 15), (2, 8), (3, 5), (5, 5), (9, 5)])
def test_the_longest_cells_are_dealt_first(gpus, hours):
    assert planning.makespan(cells(1, 5, 4, 3, 2), gpus) == hours


def test_card_hours_do_not_depend_on_the_cards_and_the_longest_chain_bounds_the_hours():
    one, eight, many = (planning.plan(CONFIG, EXPECTED, gpus=gpus) for gpus in (1, 8, 1000))
    by_method = estimate.estimate(CONFIG, EXPECTED, tokens=4096)["hours"].values()
    whole = sum(row["decode"] + row["load"] for row in by_method)
    assert one.gpu_hours == eight.gpu_hours == pytest.approx(whole)
    assert one.hours == pytest.approx(whole + one.chain[0][1])
    assert whole / 8 < eight.hours < whole / 8 * 4 / 3
    # sharechat has the most prompts, and ar the fewest tokens a second
    name, hours = many.chain[-1]
    assert "/sharechat/ar/" in name and hours == pytest.approx(500 * 4096 / 89.9 / 3600 + 55.56e9 / 2e9 / 3600)
    assert many.hours == pytest.approx(many.chain_hours) and many.useful_gpus == 25
    assert eight.kilowatt_hours == pytest.approx(whole * 14.3 / 8)
    assert eight.gigabytes["target"] == pytest.approx(55.56) and eight.gigabytes["records"] < 1


def test_a_measured_speed_scales_every_method():
    slow = planning.plan(CONFIG, EXPECTED, gpus=1, tokens=100, ar_tok_s=89.9 / 2)
    paper = planning.plan(CONFIG, EXPECTED, gpus=1, tokens=100)
    loading = sum(cell.load for cell in estimate.estimate_cells(CONFIG, estimate.speeds(EXPECTED), tokens=100))
    assert slow.gpu_hours - loading == pytest.approx(2 * (paper.gpu_hours - loading))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "gpus: 0 is not allowed"),
        (["--tokens", "5000"], "tokens: 5000 is not allowed .allowed: 1 to 4096"),
        (["--suite", "papr"], "suite: 'papr'.*did you mean paper"),
        (["--suite", "nano"], "suite: 'nano' runs on a CPU"),
        (["--suite", "mini"], "ar_tok_s: missing for family 'mini'"),
        (["--ar-tok-s", "-1"], "ar_tok_s: -1.0 is not allowed"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(capsys, words, message):
    assert cli.main(["plan", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_report_says_that_it_is_an_estimate(capsys):
    assert cli.main(["plan", "--suite", "paper", "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert "167 cells, 1462 prompts" in text and "Estimates, not times" in text and "8 GPUs" in text
    for word in ("GPU-hours", "energy", "disk", "longest chain", "check_weights"):
        assert word in text
    assert cli.main(["plan", "--gpus", "8", "--tokens", "1500", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == 1500 and facts["chain_hours"] < facts["hours"] < facts["gpu_hours"]
