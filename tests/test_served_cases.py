"""Counts that other benchmarks got wrong, through both engines' runners: from a server's answer to the metrics."""

import pytest
from fake_server import token
from served import fault, place_for, resolved, rows, serve

from baselines.sglang import flags as sglang
from baselines.vllm import flags as vllm
from tfm import metrics
from tfm.cells import load_cells

VERSIONS = {"sglang": sglang.VERSION, "vllm": vllm.VERSION}
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(params=sorted(VERSIONS))
def engine(request):
    return request.param


def measured(engine, weights, folder, monkeypatch, *, accept, count=1, **more):
    """(requests with their metrics, steps) of one dflash cell whose server accepts `accept` drafts a step in turn."""
    place = place_for(VERSIONS[engine], folder, monkeypatch)
    fault(monkeypatch, accept=accept)
    serve(resolved(engine, "dflash", weights=weights, **more), place, folder, count=count)
    records = load_cells([folder / "cell"])
    return metrics.per_request(records.requests, records.steps), records.steps


@pytest.mark.parametrize(
    ("accept", "tokens", "length", "accepted"),
    [pytest.param(0, 11, 1.0, 0, id="all_refused"), pytest.param(4, 51, 5.0, 4, id="all_accepted")],
)
def test_ten_steps_have_the_length_with_the_bonus_and_the_drafts_without(
    engine, accept, tokens, length, accepted, tiny_weights, tmp_path, monkeypatch
):  # C024
    more = {"accept": [accept], "max_new_tokens": tokens, "depth": 4}
    table, steps = measured(engine, tiny_weights, tmp_path, monkeypatch, **more)
    assert len(steps) == 10
    assert metrics.mean(table, "tau_exact").value == length and metrics.mean(table, "accepted").value == accepted


def test_drafts_past_the_cap_are_counted_as_accepted_by_the_server_and_as_emitted(
    engine, tiny_weights, tmp_path, monkeypatch
):  # C026
    # 1 at prefill, 6, and 3 of the 9 that the second step makes
    table, steps = measured(engine, tiny_weights, tmp_path, monkeypatch, accept=[5, 8], max_new_tokens=10)
    assert table["new_tokens"].tolist() == [10] and steps["accepted_untrimmed"].tolist() == [5, 8]
    assert steps["accepted"].tolist() == [5, 3] and steps["committed"].tolist() == [6, 3]
    assert steps["nodes"].tolist() == [16, 16]


def test_two_of_five_drafts_are_a_share_of_two_fifths(engine, tiny_weights, tmp_path, monkeypatch):  # C029
    _, steps = measured(engine, tiny_weights, tmp_path, monkeypatch, accept=[2], max_new_tokens=31, depth=5)
    assert metrics.accept_rate(steps) == pytest.approx(0.4)
    assert metrics.acceptance_by_position(steps)["unconditional"].tolist() == [1, 1, 0, 0, 0]


def test_requests_that_are_drafted_much_and_nothing_keep_their_own_counts(engine, tiny_weights, tmp_path, monkeypatch):
    """C076, C077: the runner sends one request at a time, and no count of one reaches the next."""
    table, steps = measured(engine, tiny_weights, tmp_path, monkeypatch, accept=[0, 6, 0], max_new_tokens=10, count=3)
    assert table["steps"].tolist() == [3, 3, 3]
    for request, own in steps.groupby("request"):
        assert sorted(own["accepted_untrimmed"]) == [0, 0, 6], request
    # every prompt's own tokens, which the fake server makes of its length
    for number, row in enumerate(rows(tmp_path, "requests")):
        assert row["output_tokens"] == [token(20 + number + place, 0) for place in range(10)]
