"""Records and plans that no table may be made of, and those of the published suites, which it may."""

import copy
import re
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from test_metrics import arm, request
from workflow_runs import ROOT

sys.path.insert(0, str(ROOT / "workflows/scripts"))
import sanity
import tables
from input_files import read_plan
from make_tables import mixed, readable, to_latex
from make_tables import to_markdown as table_to_markdown
from publish import load_published

from tfm.cells import Records


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


@pytest.mark.parametrize("text", ["[]", '{"config": {}, "cells": []}', '{"config": 3, "cells": []}', "[" * 100_000])
def test_a_plan_that_is_no_suites_is_refused_with_the_command_that_makes_it(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(
        ValueError,
        match="plan.json(:.* is not allowed|:.*missing key| is damaged).*--cores all .*plan.json",
    ):
        read_plan(tmp_path / "plan.json")
