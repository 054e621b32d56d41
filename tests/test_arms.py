"""How methods were run is stated and compared: what differs, what was tuned, what is not claimed; and the controls."""

import copy
import sys

import numpy as np
import pandas as pd
import pytest
import yaml
from test_metrics import arm, request
from workflow_runs import NANO, ROOT

from baselines import suite
from tfm.cells import Records

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import arms
import captions
import controls
import summary
import tables

PAPER = yaml.safe_load((ROOT / "workflows/config/paper.yaml").read_text())


@pytest.fixture(scope="module")
def plan():
    return suite.expand(suite.resolve(dict(NANO)))


def data_of(cells: list[dict], *, config=None) -> tables.Suite:
    requests = pd.DataFrame({"device_name": ["a cpu"], "dataset": ["sample-chat"], "id": ["a"]})
    return tables.Suite(config or suite.resolve(dict(NANO)), cells, Records([], requests, None, None, {}), requests)


def changed(plan: list[dict], method: str, **fields) -> list[dict]:
    cells = copy.deepcopy(plan)
    for cell in cells:
        if cell["decode"]["method"] == method:
            cell.update(fields)
    return cells


# --- what differs between methods


def test_methods_of_one_suite_differ_in_their_own_knobs_alone(plan):
    """The public fork's launch script gave its arms other flags (overlap schedule, attention backend) than it named."""
    launches = arms.launches_of(plan)
    assert list(launches) == NANO["methods"] and arms.unfair(launches) == []
    for key, values in arms.differing(launches).items():
        assert any(arms.is_own(method, key) for method in values), f"{key} differs: {values}"


@pytest.mark.parametrize(
    ("field", "value"),
    [("cuda_graph", True), ("dtype", "bfloat16"), ("device", "cuda"), ("threads", 8), ("engine", "x")],
)
def test_a_setting_that_one_method_alone_has_is_named_and_marks_the_table(plan, field, value):
    """vllm#42910: one method ran with CUDA graphs and the other without, and the table compared them."""
    cells = changed(plan, "tfm", **{field: value})
    words = arms.unfair(arms.launches_of(cells))
    assert len(words) == 1 and words[0].startswith(f"{field} differs (ar ") and f"tfm {value}" in words[0]
    for name in ("headline", "per_set", "paired"):
        marked, plain = (captions.caption(name, data_of(one)) for one in (cells, plan))
        assert (
            f"{field} differs (ar " in marked.casefold().replace(field.casefold(), field) and "differs (" not in plain
        )
    assert set(arms.arms(data_of(cells))["reason"]) == set(words)


def test_a_parts_sizes_are_compared_between_the_methods_that_have_it(plan):
    """ar has no drafter: the drafter's sizes are no difference of its, and a table of them hid what did differ."""
    sizes = {"seed": 0, "target": {"hidden_size": 8}, "drafter": {"head_dim": 4, "layers": [0, 1]}}
    cells = [cell | {"graft": {key: sizes[key] for key in ("seed", *cell["weights"]) if key in sizes}} for cell in plan]
    launches = arms.launches_of(cells)
    assert not any(key.startswith(arms.GRAFT) for key in arms.differing(launches))
    launches["tfm"][f"{arms.GRAFT}drafter.head_dim"] = 5
    found = arms.differing(launches)[f"{arms.GRAFT}drafter.head_dim"]
    assert found == {"dflash": 4, "ddtree": 4, "dartree": 4, "tfm": 5}
    # a default of a setting that a method does not take is no setting of it
    assert "candidates" not in launches["ar"] and arms.differing(launches)["width"] == {"dartree": 12, "tfm": 4}


def test_the_static_engines_fast_forms_replay_graphs(plan):
    words = arms.unfair(arms.launches_of(changed(plan, "tfm", engine="torch-static", forms="fast")))
    assert words[0].startswith("cuda_graph differs (ar False") and {word.split()[0] for word in words} == {
        "cuda_graph",
        "engine",
        "forms",
    }
    cells = [cell | {"engine": "torch-static", "forms": "fast"} for cell in plan]
    assert arms.unfair(arms.launches_of(cells)) == [] and set(arms.arms(data_of(cells))["cuda_graph"]) == {"on"}


def test_the_graph_state_of_every_method_stands_in_a_row(plan):
    table = arms.arms(data_of(changed(plan, "dflash", cuda_graph=True))).set_index("method")
    assert table["cuda_graph"].to_dict() == {name: "on" if name == "dflash" else "off" for name in NANO["methods"]}


def test_every_flag_in_which_the_papers_servers_differ_is_listed():
    found = arms.server_differences(PAPER["servers"])
    assert set(found) == {
        "algorithm", "block_size", "draft_tokens", "draft_attention", "prefill_attention", "overlap_schedule",
        "proposal", "reference", "tree_budget", "gdn_verify",
    }  # fmt: skip
    assert found["prefill_attention"] == {
        "ar": "flashinfer", "dflash": "trtllm_mha", "ddtree": "flashinfer", "tfm": "flashinfer",
    }  # fmt: skip
    assert arms.differing({"a": {"x": 1}, "b": {"x": 1, "y": None}}) == {}


# --- what a baseline and a table claim


def test_every_baseline_states_its_configuration_and_whether_it_was_tuned(plan):
    """z-lab/dflash#3: a baseline was reported without its settings, and nobody could say whether it was tuned."""
    table = arms.arms(data_of(plan)).set_index("method")
    assert table["configuration"].notna().all() and table["tuned"].notna().all()
    assert "budget 64" in table.loc["ddtree", "configuration"] and "width 12" in table.loc["dartree", "configuration"]
    assert table.loc["ar", "tuned"] == "nothing to tune"
    assert "swept beside it: budget, depth" in table.loc["ddtree", "tuned"]
    bare = suite.resolve({**NANO, "budgets": [], "depths": []})
    assert (
        "nothing swept"
        in arms.arms(data_of(suite.expand(bare), config=bare)).set_index("method").loc["ddtree", "tuned"]
    )


def test_a_table_states_its_concurrency(plan):
    """z-lab/dflash#55: a speedup at one request at a time was read as one of a loaded server."""
    assert "timed cells decode one request at a time" in captions.caption("headline", data_of(plan))
    assert set(arms.arms(data_of(plan))["concurrency"]) == {1}


def test_a_caption_says_which_seeds_are_timed(plan):
    """Suite graft times all its seeds, and its caption said the first."""
    every = suite.resolve({**NANO, "timed": "all", "requests": 1})
    for config, words in ((None, "prefill included, first seed;"), (every, "prefill included, all seeds;")):
        assert words in captions.caption("per_set", data_of(plan, config=config))


def test_chat_maths_and_code_stand_apart_and_maths_alone_is_no_headline(plan):
    """z-lab/dflash#119: a mean over maths sets alone stood for all text."""
    assert {cell["domain"] for cell in plan} == {"chat", "math", "code"}
    assert "ONE DOMAIN" not in captions.caption("headline", data_of(plan))
    maths = suite.resolve({**NANO, "datasets": ["sample-math"]})
    text = captions.caption("headline", data_of(suite.expand(maths), config=maths))
    assert "ONE DOMAIN (math alone): no claim beyond it" in text


def test_a_new_prompt_set_is_one_entry_of_the_pins():
    """z-lab/dflash#21: adding a set took changes in many places; here a pin with its fields is all that code reads."""
    pins = suite.pins()
    for source in ("embedded", "local", "hub"):
        assert all("domain" in entry for entry in pins[source].values()), source


# --- controls of the timing


def timed(us: list[float], variant: str = "ar", cell: int = 0) -> pd.DataFrame:
    table, _ = arm([request(f"p{i}", [0] * 4, index=i, us=value, depth=0) for i, value in enumerate(us)], method="ar")
    return table.assign(variant=variant, cell=cell, dataset="sample-chat", setting="t1")


def controls_of(*parts: pd.DataFrame, cells=()) -> dict[str, dict]:
    data = data_of([])
    data.requests = pd.concat(parts)
    data.records = Records(list(cells), data.requests, None, None, {})
    frame = controls.controls(data)
    return {row["control"]: row for row in frame.to_dict("records")} | {"frame": frame}


NOISE = np.random.default_rng(0).normal(1, 0.02, size=(2, 24))


@pytest.mark.parametrize(("factor", "held"), [(1.0, "yes"), (1.08, "no"), (0.92, "no")])
def test_ar_against_ar_holds_one_unless_the_machine_drifted(factor, held):
    first, again = 4000 * NOISE[0], 4000 * NOISE[1] * factor
    found = controls_of(timed(list(first)), timed(list(again), "ar-null", 1))
    row = found[controls.RATE]
    assert row["held"] == held and row["value"] == pytest.approx(1 / factor, abs=0.02)
    assert row["value_low"] < row["value"] < row["value_high"] and row["n"] == 24
    assert found[controls.SAME]["value"] == 24 and found[controls.SAME]["held"] == "yes"
    assert summary._controls(found["frame"])["null_tok_s_ar"]["value"] == row["value"]


def test_few_prompts_are_judged_by_students_t_and_seldom_wrongly():
    """The bootstrap over n values spreads by sqrt((n - 1) / n) times the sample's standard error."""
    alarms = {n: [] for n in (2, 4, 7, 8)}
    for n, found in alarms.items():
        draws = np.random.default_rng(n).normal(1, 0.05, size=(4000, n))
        for mean, spread in zip(draws.mean(1), draws.std(1) / n**0.5, strict=True):
            found.append(not controls.holds_one(mean, mean - 1.96 * spread, mean + 1.96 * spread, n)[0])
    assert all(np.mean(alarms[n]) < 0.02 for n in (2, 4, 7)) and 0.04 < np.mean(alarms[8]) < 0.12
    # as it came: a cell decoded by itself at another time, and one beside ar
    assert not controls.holds_one(0.6264, 0.6125, 0.639, 4)[0]
    holds, wanted = controls.holds_one(1.0652, 1.0380, 1.0908, 4)
    assert holds and wanted == "1.00 within 0.096 of it (99 % by Student's t for 4 prompts)"
    assert controls.holds_one(1.0652, 1.0380, 1.0908, 8) == (False, "an interval that holds 1.00")
    assert controls.holds_one(1.0, None, None, 1) == (False, "an interval that holds 1.00")


def test_a_step_that_gets_slower_over_a_cell_is_a_drift():
    steady, drifting = 4000 * NOISE[0], 4000 * np.linspace(1, 1.3, 24)
    assert controls_of(timed(list(steady)))[controls.STEPS]["held"] == "yes"
    row = controls_of(timed(list(drifting)))[controls.STEPS]
    assert row["held"] == "no" and row["value"] == pytest.approx(1.15, abs=0.02)


def clocked(after: int, *, throttle=()) -> dict:
    """A timed cell's cell.json, as far as clocks are read from it."""
    reading = {"energy_mj": 1, "power_mw": 9, "memory_mhz": 2619, "temperature_c": 40, "throttle": []}
    pair = {"before": reading | {"sm_mhz": 1980}, "after": reading | {"sm_mhz": after, "throttle": list(throttle)}}
    return {"device": {"clocks": pair}, "cell": {"clock": "wall"}}


def test_clocks_are_compared_where_the_card_tells_them():
    row = controls_of(timed([1.0] * 4), cells=[clocked(1980), clocked(1970)])[controls.CLOCKS]
    assert row["held"] == "yes" and row["n"] == 2 and row["value"] == pytest.approx(1970 / 1980)
    row = controls_of(timed([1.0] * 4), cells=[clocked(1980), clocked(1200)])[controls.CLOCKS]
    assert row["held"] == "no" and row["value"] == pytest.approx(1200 / 1980) and "1980 to 1200 MHz" in row["reason"]
    row = controls_of(timed([1.0] * 4), cells=[clocked(1980, throttle=("thermal",))])[controls.CLOCKS]
    assert row["held"] == "no" and row["reason"] == "throttled: thermal"


@pytest.mark.parametrize(("before", "after"), [(0, 1980), (1980, 0), (None, 1980), (1980, None)])
def test_a_card_that_does_not_tell_its_clock_divides_by_nothing(before, after):
    silent = clocked(after)
    silent["device"]["clocks"]["before"]["sm_mhz"] = before
    assert controls_of(timed([1.0] * 4), cells=[silent])[controls.CLOCKS]["held"] == ""
    assert controls.clock_doubts(silent) == []


def test_no_clock_is_no_held_control_and_says_why():
    untimed = clocked(1200) | {"cell": {"clock": "off"}}
    cpu = {"device": {"name": "a cpu", "clocks": None}, "cell": {"clock": "wall"}}
    unread = {"device": {"clocks": {"reason": "NVML does not answer"}}, "cell": {"clock": "wall"}}
    for cell, words in ((untimed, "no clock"), (cpu, "no clock"), (unread, "NVML does not answer")):
        row = controls_of(timed([1.0] * 4), cells=[cell])[controls.CLOCKS]
        assert row["held"] == "" and words in row["reason"]


def test_a_cell_whose_card_slowed_down_is_flagged_in_every_table_of_speeds():
    data = data_of([])
    data.records = Records([clocked(1980), clocked(1500, throttle=("power_brake",))], data.requests, None, None, {})
    arm = pd.concat([timed([1.0] * 4), timed([1.0] * 4, cell=1)]).assign(clock="wall")
    assert tables._disturbed(data, arm[arm["cell"] == 0]) == ""
    assert tables._disturbed(data, arm) == "sample-chat clock 1980 to 1500 MHz; sample-chat throttled: power_brake"


def test_the_null_control_is_one_more_cell_of_the_same_work():
    plain, more = (suite.expand(suite.resolve({**NANO, "null_control": on})) for on in (False, True))
    assert [cell["variant"] for cell in more[len(plain) :]] == ["ar-null"] and more[: len(plain)] == plain
    null = more[-1]
    first = next(cell for cell in plain if (cell["variant"], cell["setting"]) == ("ar", "t1"))
    place = ("variant", "path", "part")
    assert {k: v for k, v in null.items() if k not in place} == {k: v for k, v in first.items() if k not in place}
    config = suite.resolve(dict(NANO))
    assert suite.parse_variant("ar-null", config).name(config) == "ar-null"
    missing = controls_of(timed([1.0] * 4))
    assert "needs null_control" in missing[controls.RATE]["reason"] and summary._controls(missing["frame"]) == {}
