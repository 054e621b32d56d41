"""Tables and the inventory beside the paper, on records small enough to check by hand."""

import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from test_metrics import arm, request
from workflow_runs import ROOT

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import probe_tables
import sanity
import summary
import tables
from compare_paper import compare, to_markdown
from input_files import read_plan
from make_tables import readable
from probe_records import Probe
from publish import load_published

from tfm import metrics
from tfm.cells import Records

EXPECTED = yaml.safe_load((ROOT / "workflows/config/expected.yaml").read_text())


# --- the inventory


def names_of(item: dict) -> list[str]:
    return item["ours"] if isinstance(item["ours"], list) else [item["ours"]]


def status_of(summary: dict, suite: str, devices=frozenset({"NVIDIA B200"})) -> dict[str, tuple[str, str]]:
    rows = compare(EXPECTED, summary, suite, devices=devices)
    return {row["item"]: (row["status"], row["reason"]) for row in rows}


def test_the_fastest_method_of_a_set_is_looked_for_among_the_papers_four():
    """dartree and the adaptive budget are no bars of the paper; where nothing was timed there is no count."""
    names = ["ar", "dflash", "ddtree-b64", "tfm-b64-w4", "dartree-b64-w12", "adaptive-b64"]
    speeds = {"one": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "two": [1.0, 5.0, 3.0, 4.0, 9.0, 9.0]}
    rows = [
        (name, tok_s, dataset) for dataset, of_set in speeds.items() for name, tok_s in zip(names, of_set, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["variant", "tok_s", "dataset"]).assign(setting="t1", tau=1.0)
    found = summary._sets(frame)["tfm_fastest_sets_T1"]
    assert (found["value"], found["n"]) == (1, 2)
    assert summary._sets(frame.drop(columns="tok_s"))["tfm_fastest_sets_T1"]["value"] is None


def test_every_item_of_the_inventory_is_there_with_its_source():
    rows = compare(EXPECTED, {}, "nano")
    assert [row["row"] for row in rows] == sorted(row["row"] for row in rows)
    assert {row["row"] for row in rows} == set(range(1, 31)) == set(EXPECTED["rows"])
    assert all(row["source"] and row["what"] for row in rows) and len({row["item"] for row in rows}) == len(rows)
    # without a single number everything is open with what it needs, or has no data
    assert all(row["status"] in ("open", "not comparable") and len(row["reason"]) > 5 for row in rows)
    assert to_markdown(rows).count("\n") == len(rows) + 2


def test_only_the_papers_suite_compares_with_the_paper():
    printed = [item for item in EXPECTED["items"] if isinstance(item["paper"], float) and item["per"] != "any"]
    summary = {name: {"value": item["paper"]} for item in printed for name in names_of(item)}
    for suite, status, words in [
        ("paper", "pass", ""),
        ("mine", "not comparable", "suite mine is not the paper's"),
        ("nano", "not comparable", "another target"),
    ]:
        found = status_of(summary, suite)
        wrong = {item["item"]: found[item["item"]] for item in printed if found[item["item"]][0] != status}
        assert not wrong and all(words in found[item["item"]][1] for item in printed)


def test_the_papers_headline_is_compared_with_reasoning_on():
    thinking = {name for item in EXPECTED["items"] for name in names_of(item) if name and "_T1" in name}
    assert len(thinking) > 10 and all("_T1_THINK" in name for name in thinking)
    without = {name.replace("_T1_THINK", "_T1"): {"value": 1.0} for name in thinking}
    items = [item["item"] for item in EXPECTED["items"] if names_of(item)[0] in thinking]
    assert {status_of(without, "paper")[item][0] for item in items} == {"open"}
    # another suite shows what it has, and never as comparable
    assert {status_of(without, "nano")[item][0] for item in items} == {"not comparable"}


@pytest.mark.parametrize("devices", [{"NVIDIA H200"}, {"NVIDIA H200", "NVIDIA B200"}, set()])
def test_times_are_compared_on_the_papers_card_only(devices):
    names = {"tok_s_tfm_T1_THINK": {"value": 392.8}, "speedup_tfm_T1_THINK": {"value": 4.37}}
    found = status_of(names, "paper", devices)
    assert found["tok_s_tfm"][0] == "not comparable" and "not of a B200" in found["tok_s_tfm"][1]
    assert found["speedup_tfm"][0] == "pass" and status_of(names, "paper")["tok_s_tfm"][0] == "pass"


@pytest.mark.parametrize(
    ("item", "entry", "status", "words"),
    [
        ("gdn_error_float64", {"value": 1e-15}, "pass", ""),
        ("gdn_error_float64", {"value": 1e-9}, "fail", "outside: at most 1e-12"),
        ("weaver_parameters", {"value": 56694784}, "pass", ""),
        ("weaver_parameters", {"value": 56694785}, "fail", "outside: 56694784"),
        ("same_as_ar_share", {"value": 0.999}, "fail", "at least 1"),
        ("excess_traversal", {"value": 0.1, "low": -0.1, "high": 0.3}, "pass", ""),
        ("excess_traversal", {"value": 0.6, "low": 0.5, "high": 0.7}, "fail", "interval not above 0"),
        ("excess_legacy_traversal", {"value": 0.6, "low": 0.5, "high": 0.7}, "pass", ""),
        ("weaver_over_ceiling_on_text", {"value": 0.1, "low": -0.1, "high": 0.3}, "open", "more prompts"),
        ("weaver_over_ceiling_on_text", {"value": -0.2, "low": -0.3, "high": -0.1}, "fail", "interval above 0"),
        ("weaver_over_ceiling_on_text", {"value": 0.2, "low": None, "high": None}, "open", "no interval"),
        ("width_loss", {"value": 0.98}, "not comparable", "another target"),
    ],
)
def test_what_the_code_decides_passes_or_fails_in_any_suite(item, entry, status, words):
    ours = next(one["ours"] for one in EXPECTED["items"] if one["item"] == item)
    found = status_of({ours: {"low": None, "high": None, "n": 9} | entry}, "nano")[item]
    assert found[0] == status and words in found[1]


def test_the_first_measured_kernel_stands_in_the_inventory():
    summary = {f"kernel_ratio_{name}_64": {"value": value} for name, value in [("solve", 9.0), ("fused_cuda", 4.5)]}
    row = next(row for row in compare(EXPECTED, summary, "paper") if row["item"] == "gdn_speedup_64")
    assert (row["ours"], row["status"]) == (4.5, "pass")


# --- what a reader should doubt


class Data:
    """What sanity reads of a suite."""

    def __init__(self, requests, steps, probes=None):
        self.requests, self.records, self.probes = requests, Records([], requests, steps, None, {}), probes or {}


def flags(data, per_set=None) -> dict[str, str]:
    frame = sanity.sanity(data, pd.DataFrame() if per_set is None else per_set)
    assert (frame["limit"].notna()).all() and len(frame) == 5
    return frame.set_index("check")["flag"].to_dict()


def test_a_long_run_of_steps_that_accept_nothing_is_flagged():
    """vllm#55357: 60 steps in a row accepted nothing while the mean looked healthy."""
    table, steps = arm([request("a", [4] * 200 + [0] * 60 + [4] * 40)])
    assert (steps["accepted"] + 1).mean() == pytest.approx(4.2)
    assert "60 is above 50" in flags(Data(table, steps))["steps in a row that accepted nothing"]
    table, steps = arm([request("a", [4] * 200 + ([0] * 40 + [4]) * 2), request("b", [0] * 20, index=1)])
    assert not any(flags(Data(table, steps)).values())


def test_an_unlikely_speedup_and_repeated_prompts_are_flagged():
    per_set = pd.DataFrame({"variant": ["tfm", "ar"], "dataset": "set", "setting": "t1", "speedup": [21.0, 1.0]})
    table, steps = arm([request("a", [0] * 3, depth=0), request("b", [0] * 3, depth=0)], method="ar")
    found = flags(Data(table, steps), per_set)
    assert "tfm, set, t1: 21 is above 20" in found["speedup over ar"]
    assert "1 is above 0" in found["prompts that a set holds twice"]
    assert not flags(Data(table, steps), per_set.assign(speedup=0.5))["speedup over ar"]


def test_a_check_that_saw_nothing_is_not_passed():
    """Of a served tree no depth is known, and a ceiling may be of a setting at which no draft was made."""
    table, steps = arm([request("a", [4, 0, 4])], method="dflash")
    steps = steps.assign(method="dflash", variant="dflash", setting="t1")
    anchors = pd.DataFrame({"drafter": ["dflash_argmax"], "position": [1], "overlap": [0.5]})

    def row(name, steps, setting="t1", overlap=0.5):
        found = Probe({"settings": {"setting": setting}}, {"anchors": anchors.assign(overlap=overlap)})
        frame = sanity.sanity(Data(table, steps, {"ceiling": found}), pd.DataFrame())
        return frame[frame["check"].str.startswith(name)].iloc[0]

    assert row("accepted drafts", steps)["n"] == 3 and pd.isna(row("accepted drafts", steps)["reason"])
    unknown = row("accepted drafts", steps.assign(depth=np.nan))
    assert unknown["n"] == 0 and "depth is known" in unknown["reason"]
    live = row("dflash's first draft", steps)
    assert live["value"] == pytest.approx(2 / 3 / 0.5) and pd.isna(live["reason"])
    for change in ({"setting": "t0"}, {"overlap": 0.0}):
        assert "no live draft" in row("dflash's first draft", steps, **change)["reason"]


@pytest.mark.parametrize(("live", "is_flagged"), [(0.05, True), (0.29, True), (0.31, False), (0.7, False)])
def test_a_first_draft_far_below_the_offline_guess_names_template_and_offset(live, is_flagged):
    found = sanity.compare_first_draft(live, 0.6)["flag"]
    assert bool(found) == is_flagged
    assert not is_flagged or ("template" in found and "off by one" in found)


# --- tables of what is measured beside the cells


def kernel_probe(us: dict[str, list[float]], *, passed: bool = True) -> Probe:
    samples = [
        {"backend": backend, "shape": "mixed", "rows": 64, "round": number // 2, "order": number, "us": value}
        for backend, values in us.items()
        for number, value in enumerate(values)
    ]
    checks = [
        {"backend": backend, "op": "verify", "dtype": "float32", "error": 1e-6, "passed": True, "reason": ""}
        for backend in us
    ]
    checks += (
        [] if passed else [{"backend": "bad", "dtype": "float32", "error": 1.0, "passed": False, "reason": "wrong"}]
    )
    backends = {backend: "" for backend in us} | ({} if passed else {"bad": ""}) | {"fused_cuda": "needs a GPU"}
    facts = {"settings": {"shapes": ["mixed"], "rows": [64]}, "backends": backends, "baseline": "naive"}
    return Probe(facts, {"samples": pd.DataFrame(samples), "checks": pd.DataFrame(checks)})


def test_the_kernel_table_pairs_rounds_and_stands_beside_the_paper():
    data = Data(None, pd.DataFrame())
    data.probes = {"kernels": kernel_probe({"naive": [10, 30, 100, 300], "solve": [4, 6, 40, 60]}, passed=False)}
    table = probe_tables.kernels(data).set_index("backend")
    # rounds of 20 and 200 against 5 and 50: each is 4 times as fast, whatever the machine did between them
    assert table.loc["solve", ["ratio", "ratio_low", "ratio_high"]].tolist() == [4, 4, 4]
    assert table.loc["naive", "us"] == 110 and table.loc["naive", "n"] == 2
    assert table.loc["naive", "paper_us"] == 195.0 and table.loc["solve", "paper_us"] == 42.8
    assert table.loc["solve", "paper_ratio"] == 4.56
    assert summary._kernels(data, table.reset_index())["kernel_ratio_solve_64"]["value"] == 4
    # a backend that is wrong, or not here, has a reason and no time
    assert table["reason"].to_dict() == {"naive": "", "solve": "", "bad": "wrong", "fused_cuda": "needs a GPU"}
    assert table.loc[["bad", "fused_cuda"], "us"].isna().all()


def anchor_rows(values: dict[str, list[tuple[float, float]]]) -> pd.DataFrame:
    """Rows of two prompts from drafter -> (reached, accepted) a position; overlap is accepted / reached."""
    rows = []
    for prompt in ("a", "b"):
        for drafter, curve in values.items():
            for position, (reached, accepted) in enumerate(curve, start=1):
                row = {"dataset": "set", "id": prompt, "anchor": 1, "drafter": drafter, "position": position}
                row |= {"reached": 4 * reached, "accepted": 4 * accepted, "alive": 1.0, "overlap": accepted / reached}
                rows.append(row | {"accepted_above": 4 * accepted, "overlap_above": accepted / reached})
    return pd.DataFrame(rows)


def test_claims_answer_yes_and_no_with_their_numbers():
    curves = {
        "oracle": [(1, 1), (1, 0.5), (0.5, 0.1), (0.1, 0.05), (0.05, 0.01), (0.01, 0.002)],
        "oracle_argmax": [(1, 0.8), (0.8, 0.6), (0.6, 0.5), (0.5, 0.4), (0.4, 0.3), (0.3, 0.2)],
        "dflash": [(1, 0.4), (0.4, 0.1), (0.1, 0.02), (0.02, 0.004), (0.004, 0.0004), (0.0004, 0.00004)],
        "dflash_argmax": [(1, 0.4)] * 6,
        "weaver": [(1, 0.7), (0.7, 0.5), (0.5, 0.3), (0.3, 0.2), (0.2, 0.1), (0.1, 0.05)],
    }
    data = Data(None, pd.DataFrame())
    facts = {"settings": {"setting": "t1"}}
    data.probes, data.config = {"ceiling": Probe(facts, {"anchors": anchor_rows(curves)})}, {}
    claims = probe_tables.ceiling_claims(data).set_index("key")
    assert claims.loc["weaver_overlap_5", "answer"] == "yes" and claims.loc["dflash_overlap_5", "answer"] == "no"
    assert claims.loc["weaver_overlap_5", "value"] == pytest.approx(0.5 - 0.2)
    assert claims.loc["weaver_accepted_5", "value"] == pytest.approx(0.15 / 0.3 - 0.012 / 0.06)
    # survival 1, .5 against .8, .6: they cross two thirds of the way from 1 to 2
    assert claims.loc["crossover_survival", "value"] == pytest.approx(1 + 2 / 3)
    assert claims.loc["crossover_survival", "answer"] == "no"
    # sums 1, 1.5, 1.6 against .8, 1.4, 1.9
    assert claims.loc["crossover_length", "value"] == pytest.approx(2 + 0.1 / 0.4)
    table = probe_tables.ceiling(data)
    oracle = table[table["drafter"] == "oracle"]
    assert oracle["length"].tolist()[:3] == pytest.approx([4, 6, 6.4])  # anchors stand for four paths each here
    assert (oracle["over_ceiling"].dropna() == 0).all()
    # below four paths' worth nothing is said of acceptance given earlier acceptance, with the reason
    thin = table[(table["drafter"] == "dflash") & (table["position"] == 4)].iloc[0]
    assert pd.isna(thin["acceptance"]) and "fewer than 4" in thin["reason"] and thin["on_text"] == pytest.approx(0.2)


def test_a_probe_that_was_not_run_leaves_its_reason():
    data = Data(None, pd.DataFrame())
    data.config = {"methods": ["ar", "dflash"], "temperatures": [1], "ceiling": {}, "kernels": None}
    assert "add ar and tfm to methods" in probe_tables.ceiling(data)["reason"].iloc[0]
    assert "null in the config" in probe_tables.kernels(data)["reason"].iloc[0]
    data.config |= {"methods": ["ar", "tfm"], "temperatures": [0]}
    assert "add a temperature above 0" in probe_tables.ceiling_claims(data)["reason"].iloc[0]


def test_small_numbers_are_not_rounded_to_zero():
    frame = pd.DataFrame({"error": [2.4e-16, 0.0, 0.25], "us": [1.0, 2.5, None], "us_low": 1.0, "us_high": 3.0})
    assert readable(frame)["error"].tolist() == ["2.4e-16", "0", "0.250"]


def test_a_sweep_that_runs_everywhere_is_a_mean_over_sets_and_the_others_name_the_side_set():
    published = ROOT / "results/published/nano"
    plan, records = read_plan(published / "plan.json.gz"), load_published(published)
    assert set(tables.sweeps(tables.Suite.of(plan, records))["dataset"]) == {"mtbench"}
    plan["config"]["everywhere"] = ["budgets"]
    data = tables.Suite.of(plan, records)
    found = tables.sweeps(data)
    assert set(found.loc[found["sweep"] == "budget", "dataset"]) == {"macro"}
    assert set(found.loc[found["sweep"] != "budget", "dataset"]) == {"mtbench"}
    row = found[(found["sweep"] == "budget") & (found["variant"] == "tfm-b64-w4")].iloc[0]
    arm = data.arm("tfm-b64-w4", setting=row["setting"], seed=0)
    assert arm["dataset"].nunique() == 8 and row["tau"] == metrics.mean(arm, "tau").value


def test_a_ceiling_without_a_place_to_draft_at_says_so():
    """Answers of one token have no anchor: all tables of such a suite failed on a NaN."""
    anchors = pd.DataFrame(columns=["dataset", "id", "anchor", "position", "drafter", "accepted", "overlap", "reached"])
    data = SimpleNamespace(probes={"ceiling": SimpleNamespace(frames={"anchors": anchors})}, config={})
    for table in (probe_tables.ceiling, probe_tables.ceiling_claims):
        assert table(data)["reason"].tolist() == ["no anchor: no answer of ar is long enough to draft at"]
