"""Whoever reads a plan, a manifest or expected.yaml refuses a bad one by file, key and value, or can work with it."""

import copy
import json
import sys

import pytest
import yaml
from workflow_runs import ROOT

from baselines import suite
from baselines.plans import read_cells

sys.path.insert(0, str(ROOT / "workflows/scripts"))
from input_files import read_expected, read_manifest, read_plan, read_summary
from make_report import METHODS, details, not_run, origin, page, provenance
from packing import read_packed
from publish import load_published
from report_arms import configurations
from tree_steps import packed, traced_cells, trees_of

NANO = ROOT / "results/published/nano"
EXPECTED = ROOT / "workflows/config/expected.yaml"
WRONG = [3.5]  # no value of any key


def keys_of(value, above=()):
    """Yield the path of every key, of a list's first entry, and of all below them."""
    keys = value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ()
    for key in keys:
        yield (*above, key)
        yield from keys_of(value[key], (*above, key))


def damaged(whole):
    """Yield (the keys above and at a change, the change, what came of it): each key dropped, and of another type."""
    for path in keys_of(whole):
        for change in ("drop", "type"):
            found = copy.deepcopy(whole)
            place = found
            for key in path[:-1]:
                place = place[key]
            if change == "type":
                place[path[-1]] = WRONG
            elif isinstance(place, dict):
                del place[path[-1]]
            else:
                continue
            yield path, change, found


def named(path) -> str:
    """Return a path as messages spell it."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


@pytest.fixture(scope="module")
def plan():
    """The published plan with two of its cells, one of them traced."""
    whole = read_packed(NANO / "plan.json.gz")
    return {**whole, "cells": [whole["cells"][0], *traced_cells(whole["cells"])[:1]]}


def refused(reader, path, content):
    """Return what a reader says of a content (None: the file as it is); None where it takes it."""
    if content is not None:
        path.write_text(content)
    try:
        reader(path)
    except ValueError as error:
        assert type(error) is ValueError and str(error).startswith(f"{path}: "), error
        return str(error)
    return None


def test_a_plan_lacks_nothing_that_the_report_needs_or_is_refused_by_key(tmp_path, plan):
    """Every key of config and cell, dropped or of another type; what is taken makes a report."""
    manifest, records, taken = read_manifest(NANO / "manifest.json.gz"), load_published(NANO), []
    for path, change, content in damaged(plan):
        said = refused(read_plan, tmp_path / "plan.json", json.dumps(content))
        if said is None:
            taken.append((path, change))
            # a page is slow: of a cell only the parts that read one
            if path[0] == "cells":
                assert configurations(content, METHODS) and origin(content, manifest), (path, change)
                trees_of(traced_cells(content["cells"]), content["config"]["weights"], read=packed(records))
            else:
                assert page(NANO, content, manifest, []), (path, change)
        else:
            # a list's entry is described by its list
            key = named(path) if path[0] == "cells" else named([key for key in path if not isinstance(key, int)])
            assert f"plan.json: {key}" in said and "; make it with `snakemake --cores all " in said, (
                path,
                change,
                said,
            )
            assert "missing key" in said if change == "drop" else "3.5" in said, (path, change, said)
    assert len(taken) < 120  # what nothing reads


def test_a_manifest_lacks_nothing_that_the_report_needs_or_is_refused_by_key(tmp_path, plan):
    whole, taken = read_packed(NANO / "manifest.json.gz"), []
    whole["cells"] = dict(list(whole["cells"].items())[:1])
    whole["prompts"] = dict(list(whole["prompts"].items())[:1])
    for path, change, content in damaged({key: value for key, value in whole.items() if key != "config"}):
        said = refused(read_manifest, tmp_path / "manifest.json", json.dumps(content))
        if said is None:
            taken.append((path, change))
            assert origin(plan, content) and provenance(content) and not_run(plan["config"], content), (path, change)
            details(NANO, {"tables": []}, content)
        else:
            assert f"manifest.json: {named(path)}" in said and "make it with write_manifest.py" in said, said
    known = {path for path, _ in taken}
    assert ("devices", 0, "name") not in known and ("environments", 0, "git", "commit") not in known


@pytest.mark.parametrize(
    ("reader", "source"),
    [(read_summary, NANO / "summary.json"), (read_expected, EXPECTED)],
    ids=["summary", "expected"],
)
def test_a_summary_or_expectation_of_another_type_is_refused_by_key(tmp_path, reader, source):
    whole, dump = yaml.safe_load(source.read_text()), yaml.safe_dump if source == EXPECTED else json.dumps
    if source == EXPECTED:
        items = whole["items"][:2]
        whole |= {"items": items, "rows": {item["row"]: "a row" for item in items}, "not_comparable": {"nano": "small"}}
        whole |= {"runs": {"ci": {"any": dict(list(whole["runs"]["ci"]["any"].items())[:1])}}, "kernel_table": {}}
    else:
        whole = dict(list(whole.items())[:3])
    said = [refused(reader, tmp_path / source.name, dump(content)) for _, _, content in damaged(whole)]
    assert sum(text is not None for text in said) > len(said) / 3
    for text in filter(None, said):
        assert "is not allowed (allowed: " in text or "missing key" in text or "which rows lacks" in text, text
    assert refused(reader, source, None) is None


def test_cells_are_read_from_a_plan_a_list_or_lines(tmp_path, plan):
    cells, path = plan["cells"], tmp_path / "cells.json"
    for text in (json.dumps(plan), json.dumps(cells), "".join(json.dumps(cell) + "\n" for cell in cells)):
        path.write_text(text)
        assert read_cells(path) == cells
    path.write_text(json.dumps(cells[0]))
    assert read_cells(path) == cells[:1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "holds no cell; give a suite's plan.json", id="empty"),
        pytest.param('{"cells": 3}', "cells: 3 is not allowed (allowed: a list)", id="no-list"),
        pytest.param('{"path": "a"}\n{"path"', "is damaged (", id="cut"),
        pytest.param('{"a": 1}\n[]', "cells[0].suite: missing key", id="no-cell"),
    ],
)
def test_a_list_that_is_none_of_cells_is_refused(tmp_path, text, said):
    (tmp_path / "cells.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_cells(tmp_path / "cells.json")
    assert f"cells.json: {said}" in str(caught.value), caught.value


def test_a_method_that_does_not_exist_is_refused_with_those_that_do(tmp_path, plan):
    content = copy.deepcopy(plan)
    content["cells"][1]["decode"]["method"] = "tfn"
    said = refused(read_plan, tmp_path / "plan.json", json.dumps(content))
    assert "plan.json: cells[1].decode.method: 'tfn' is not allowed (allowed: ar, dflash, " in said


SUITES = sorted(path.stem for path in (ROOT / "workflows/config").glob("*.yaml") if "suite:" in path.read_text())
OTHER = {
    "vllm": ("engines", {"engine": "vllm", "methods": ["ar", "dflash"]}),
    "a_whole_set": ("nano", {"prompts": None}),
    "other_settings": ("nano", {"temperatures": [0.6, 0], "residuals": [False], "stages": True}),
}


@pytest.mark.parametrize(("name", "more"), [*((name, {}) for name in SUITES), *OTHER.values()], ids=[*SUITES, *OTHER])
def test_the_plan_of_every_suite_is_one_that_can_be_read(tmp_path, monkeypatch, name, more):
    monkeypatch.chdir(ROOT)
    given = yaml.safe_load((ROOT / f"workflows/config/{name}.yaml").read_text())
    config = suite.resolve({**given, **more})
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"config": config, "cells": suite.expand(config), "draft_rows": None}))
    assert read_plan(file)["cells"] == read_cells(file) != []
