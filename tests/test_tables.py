"""Tables and the inventory beside the paper, on records small enough to check by hand."""

import copy
import re
import sys
from types import SimpleNamespace

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
from make_tables import mixed, read_plan, readable, to_latex
from make_tables import to_markdown as table_to_markdown
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


# --- rows that no table may be made of


def records(**changes) -> Records:
    """One tfm cell of three requests, with columns of one request or of its steps replaced."""
    table, steps = arm([request(name, [2, 1], index=i, us=1e6, prefill=1e5) for i, name in enumerate("abc")])
    table, steps = table.copy(), steps.copy()
    table["output_tokens"], steps["method"] = table["output_tokens"].map(list), "tfm"
    for name, value in changes.items():
        frame = (
            table if name in table and name not in ("accepted", "accepted_untrimmed", "expected_accepted") else steps
        )
        frame[name] = frame.get(name, pd.Series(0, index=frame.index)).astype(object)
        frame.loc[frame.index[1], name] = value
    return Records([], table, steps, pd.DataFrame(), {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "tokens without a verify pass"),
        ({"steps": None}, "without a count of steps"),
        ({"accepted_untrimmed": 5}, "accepted deeper than its tree"),
        ({"committed": 9}, "emitted more than it accepted and a bonus"),
        ({"accepted_untrimmed": float("nan")}, "a step without a count"),
        ({"accepted_untrimmed": 0}, "emitted drafts which it refused"),
        ({"nodes": 1}, "accepted more than it drafted"),
        ({"committed": 1}, "another count of tokens than its steps emitted"),
        ({"new_tokens": 5}, "another count of tokens than its steps emitted"),
        ({"new_tokens": 49}, "more tokens than the cap"),
        ({"steps": 3}, "another count of steps than it has"),
        ({"id": "a"}, "a request that its cell holds twice"),
        ({"decode_us": -1.0}, "a time below 0 .decode_us."),
        ({"wall_us": None}, "no time in a timed cell .wall_us."),
        ({"prefill_us": float("inf")}, "no time in a timed cell .prefill_us."),
        ({"wall_us": 9e6}, "a wall that is not prefill and decode"),
        ({"wall_us": 0.0, "prefill_us": 0.0, "decode_us": 0.0}, "a wall of 0"),
        ({"output_tokens": (1, 2)}, "another count of tokens than its text has"),
        ({"output_sha256": "0"}, "a hash that is not its text's"),
        ({"finish_reason": "abort"}, "an end that is neither stop nor length"),
        ({"finish_reason": "length"}, "an end at the cap before the cap"),
        ({"prompt_tokens": 0}, "a prompt without a token"),
        ({"step": 0}, "a step that its request holds twice"),
        ({"nodes": 66}, "a tree larger than its budget"),
        ({"depth": 5}, "a tree deeper than its nodes"),
        ({"expected_accepted": None}, "no lossless bound where the cell's other steps have one"),
        ({"expected_accepted": float("inf")}, "a bound outside 0 to its depth"),
        ({"expected_accepted": -1.0}, "a bound outside 0 to its depth"),
    ],
)
def test_a_missing_or_impossible_count_is_never_averaged(change, words):
    """sglang#29329: a row without verify count became a MAL of 1; more than depth + 1 a step is a counting error."""
    sanity.check_rows(records())
    with pytest.raises(ValueError, match=f"cells/torch/toy/set/tfm/t1/seed0: .*{words}.* request .*snakemake"):
        sanity.check_rows(records(**change))


def test_what_several_rows_must_agree_in_is_checked_between_them():
    one, other = records(), records(prompt_tokens=6)
    other.requests["cell"], other.steps["cell"] = 1, 1
    both = Records(
        [], *(pd.concat(pair, ignore_index=True) for pair in zip(frames(one), frames(other), strict=True)), {}
    )
    with pytest.raises(ValueError, match="another prompt_tokens than the same prompt of another arm"):
        sanity.check_rows(both)
    one.steps["method"], one.requests["method"] = "ar", "ar"
    with pytest.raises(ValueError, match="a draft of ar, which has none"):
        sanity.check_rows(one)
    staged = records()
    staged.requests["clock"], staged.steps["clock"], staged.steps["verify_us"] = "stages", "stages", 5.0
    sanity.check_rows(staged)
    staged.steps.loc[1, "verify_us"] = None
    with pytest.raises(ValueError, match="no time of a stage that others have .verify_us."):
        sanity.check_rows(staged)
    lost = Records([{"path": "results/toy/cell"}], *frames(records()), {})
    lost.steps.loc[1, "id"] = None
    with pytest.raises(ValueError, match="results/toy/cell: 1 steps of requests that it has not"):
        sanity.check_rows(lost)


def frames(found: Records) -> tuple[pd.DataFrame, ...]:
    return found.requests, found.steps, found.trees


PUBLISHED = ROOT / "results/published/nano"


@pytest.mark.parametrize(
    "folder", sorted((ROOT / "results/published").glob("*/plan.json.gz")), ids=lambda p: p.parent.name
)
def test_published_records_are_their_plans_and_no_row_is_refused(folder):
    assert mixed(read_plan(folder), load_published(folder.parent)) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda r: r["cell"]["weights_sha256"].update(target="f"), "weights_sha256 .*'f'", id="weights"),
        pytest.param(lambda r: r["cell"]["decode"].update(children=2), "children 8 in the plan, 2 in", id="children"),
        pytest.param(lambda r: r["cell"]["decode"].update(temperature=0.5), "temperature .*0.5 in", id="temperature"),
        pytest.param(
            lambda r: r["cell"]["decode"].update(eos_tokens=[7]), "eos_tokens and stop: ..2., ...*7", id="eos"
        ),
        pytest.param(lambda r: r["cell"].update(prompts=99), "prompts 24 in the plan, 99 in", id="prompts"),
        pytest.param(lambda r: r.update(prompts=99), "requests with a record 99 in the plan, 24 in", id="in_part"),
        pytest.param(lambda r: r["cell"].update(variant="tfm-b7-w1"), "ar/t0/seed0: is not in the plan", id="foreign"),
        pytest.param(
            lambda r: r["device"].update(torch_threads=9), "torch_threads of timed cells: 1 and 9", id="threads"
        ),
    ],
)
def test_a_cell_of_other_settings_than_the_plans_is_in_no_table(change, words):
    """Weights made again, a changed default, another end of text: such a cell's path is the plan's all the same."""
    plan, found = read_plan(PUBLISHED / "plan.json.gz"), load_published(PUBLISHED)
    change(next(cell for cell in found.cells if cell["cell"]["clock"] == "wall"))
    problems = sanity.differing(plan["cells"], found) + tables.check_one_kind(found)
    assert len(problems) == 1 and re.search(words, problems[0]), problems


def test_a_speedup_over_part_of_the_prompts_says_over_how_many():
    """A set whose ar is missing leaves the speedup and stays in tokens a second: the row has to say so."""
    rows = pd.concat(
        [
            arm([request(name, [2], us=1e6, index=i) for i, name in enumerate("abc"[:count])], method=method)[0]
            for method, count in (("ar", 2), ("tfm", 3))
        ]
    )
    data = SimpleNamespace(
        records=SimpleNamespace(cells=[{}]),
        arm=lambda name, **_: rows[rows["method"] == name],
        missing=lambda name, **_: "",
    )
    found = tables._speed_and_acceptance(data, "tfm")
    assert found["n"] == 3 and "speedup of 2 of 3 timed prompts" in found["flag"]
    assert tables._speed_and_acceptance(data, "ar")["flag"] == ""


def test_text_of_any_kind_is_plain_in_latex_and_stays_one_row_in_markdown():
    frame = pd.DataFrame({"a_b": ["x^2 ~ \\input{y} <&> 50% #1 $z$ | w", "one\ntwo"], "value": [float("inf"), 1.5]})
    tex, markdown = to_latex(readable(frame), "T_1 > 0", "name"), table_to_markdown(readable(frame), "caption")
    row = (
        r"x\textasciicircum{}2 \textasciitilde{} \textbackslash{}input\{y\} \textless{}\&\textgreater{} 50\% \#1 \$z\$"
    )
    assert (
        row + r" \textbar{} w & inf \\" in tex and r"\caption{T\_1 \textgreater{} 0}" in tex and r"a\_b & value" in tex
    )
    assert r"50% #1 $z$ \| w | inf |" in markdown and "| one two | 1.500 |" in markdown


def test_more_reasoning_tokens_than_tokens_are_refused():
    """sglang#39826: an end of text inside an accepted run left reasoning_tokens above completion_tokens."""
    one = records()
    one.requests["reasoning_tokens"] = one.requests["new_tokens"]
    sanity.check_rows(one)
    one.requests.loc[2, "reasoning_tokens"] += 1
    with pytest.raises(ValueError, match="more reasoning tokens than new tokens"):
        sanity.check_rows(one)


def test_arms_that_decoded_other_prompts_are_refused():
    """vllm-ascend#16166: methods were compared on prompts that were not the same."""
    one, other = records(), records()
    other.requests["prompts_sha256"], other.requests["cell"] = "another", 1
    sanity.check_prompts(one)
    one.requests = pd.concat([one.requests, other.requests])
    with pytest.raises(ValueError, match="prompts of set: cells decoded 2 prompt files .another, p"):
        sanity.check_prompts(one)


COMPLETE = {
    "environment": {"git": {"commit": "c"}, "packages": {"torch": "2"}, "python": "3"},
    "device": {"name": "cpu"},
    "prompts_sha256": "p",
    "source_digest": "s",
    "cell": {"seed": 0, "dtype": "float32", "reasoning": False, "decode": {"method": "ar"}, "template": "paper"}
    | {"weights_sha256": {"target": "w"}},
}


@pytest.mark.parametrize(
    "path",
    ["environment.git.commit", "environment.packages.torch", "device.name", "prompts_sha256", "cell.seed", "cell.dtype"]
    + ["cell.reasoning", "cell.decode", "cell.weights_sha256.target"],
)
def test_a_cell_that_does_not_say_what_made_it_counts_as_incomplete(path):
    """sglang#4759: a number without commit, weights, versions, device, settings, seed and type cannot be checked."""
    assert sanity.complete_share([COMPLETE]) == 1 and sanity.complete_share([]) is None
    lacking = copy.deepcopy(COMPLETE)
    *parents, last = path.split(".")
    inner = lacking
    for key in parents:
        inner = inner[key]
    inner[last] = None
    assert sanity.lacking(lacking) == [path]
    assert sanity.complete_share([COMPLETE, lacking]) == 0.5


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


@pytest.mark.parametrize("text", ["[]", '{"config": {}, "cells": []}', '{"config": 3, "cells": []}', "[" * 100_000])
def test_a_plan_that_is_no_suites_is_refused_with_the_command_that_makes_it(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="plan.json (lacks|has|is damaged).*snakemake --cores all .*plan.json"):
        read_plan(tmp_path / "plan.json")
