"""Cells decoded side by side: the records are those of decode_cell, the order of the methods alternates."""

import argparse
import json
import sys
from dataclasses import asdict

import pyarrow.parquet as pq
import pytest
from workflow_runs import NANO, ROOT

from baselines import suite
from tfm.cells import is_whole, load_cells
from tfm.prompts import PreparedPrompt

sys.path.insert(0, str(ROOT / "workflows/scripts"))
FIELDS = {name: "x" for name in ("dataset", "domain", "category", "template", "sha256")}
SMALL = {
    "datasets": ["sample-math"],
    "max_new_tokens": 6,
    "requests": 1,
    "seeds": [0, 1],
    "methods": ["ar", "tfm"],
    "audit": [],
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan of two methods at two seeds on three prompts."""
    out = tmp_path_factory.mktemp("paired")
    config = suite.resolve({**NANO, **SMALL, "engine": "torch-static", "forms": "torch"})
    cells = [cell for cell in suite.expand(config) if cell["part"] == "headline" and cell["setting"] == "t1"]
    rows = [PreparedPrompt(id=f"q{i}", index=i, tokens=list(range(20, 30 + i)), **FIELDS) for i in range(3)]
    prompts = out / "results/nano/prompts" / cells[0]["target"] / "sample-math.jsonl"
    prompts.parent.mkdir(parents=True)
    prompts.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    (out / "plan.json").write_text(json.dumps({"cells": cells}))
    return out, cells, prompts


def options(out, **more):
    given = {"list": out / "plan.json", "out": out, "commit": "test", "part": None, "seconds": None, "again": False}
    return argparse.Namespace(**{**given, **more})


def test_records_are_those_of_single_cells_and_prompts_alternate(plan, tmp_path, monkeypatch):
    import run_paired
    from decode_cell import run_cell

    out, cells, prompts = plan
    order, decode = [], run_paired.Runner.decode

    def noted(self, prompt, *more):
        order.append((self.cell["seed"], prompt.id, self.cell["decode"]["method"]))
        return decode(self, prompt, *more)

    monkeypatch.setattr(run_paired.Runner, "decode", noted)
    assert run_paired.run(options(out)) == {"groups": 3, "prompts": 12, "left": 0, "failed": {}}
    timed = [(prompt, method) for seed, prompt, method in order if seed == 0]
    assert timed == [("q0", "ar"), ("q0", "tfm"), ("q1", "tfm"), ("q1", "ar"), ("q2", "ar"), ("q2", "tfm")]
    for number, cell in enumerate(cells):
        run_cell(cell, prompts=prompts, out=tmp_path / str(number), commit="test")
        folders = [out / cell["path"], tmp_path / str(number)]
        assert is_whole(folders[0])
        one, other = (pq.read_table(folder / "requests.parquet").to_pylist() for folder in folders)
        assert [row["output_tokens"] for row in one] == [row["output_tokens"] for row in other]
        one, other = (pq.read_table(folder / "steps.parquet").to_pylist() for folder in folders)
        assert one == other
        manifests = [load_cells([folder]).cells[0] for folder in folders]
        assert len({manifest["cell_digest"] for manifest in manifests}) == 1
        # the order in which the arms were timed stands in their records
        places = [0, 0, 0] if cell["seed"] == 1 else [0, 1, 0] if cell["decode"]["method"] == "ar" else [1, 0, 1]
        assert manifests[0]["turns"] == {"of": 1 if cell["seed"] == 1 else 2, "places": places}
        assert (pq.read_table(folders[0] / "requests.parquet")["wall_us"][0].as_py() is None) == (cell["seed"] == 1)


def test_what_is_done_is_not_decoded_again_and_parts_share_the_groups(plan):
    import run_paired

    out, cells, _ = plan
    assert run_paired.run(options(out))["prompts"] == 0
    groups = run_paired.groups_of(cells)
    # timed cells of a seed together, the others alone
    assert [len(group) for group in groups] == [2, 1, 1]
    for cell in cells:
        (out / cell["path"] / "cell.json").unlink()
    counts = [run_paired.run(options(out, part=f"{part}/2")) for part in (1, 2)]
    assert [found["groups"] for found in counts] == [2, 1]
    assert sum(found["prompts"] for found in counts) == 12
    assert all(is_whole(out / cell["path"]) for cell in cells)


def renewed(plan):
    """The plan's options, with no cell done and nothing noted."""
    out, cells, _ = plan
    for file in [*out.glob("results/nano/claims/*.failed.json"), *(out / cell["path"] / "cell.json" for cell in cells)]:
        file.unlink(missing_ok=True)
    return options(out)


def test_a_process_that_comes_later_takes_what_is_left(plan):
    import run_paired

    given, (out, cells, _) = renewed(plan), plan
    first, *others = run_paired.groups_of(cells)
    claims = run_paired.Claims(out / "results/nano/claims")
    with claims.take(first) as is_mine:
        assert is_mine
        with claims.take(first) as is_mine_too:
            assert not is_mine_too
        found = run_paired.run(given)
        assert (found["prompts"], found["left"]) == (sum(map(len, others)) * 3, len(first))
    assert run_paired.run(given) == {"groups": 3, "prompts": 3 * len(first), "left": 0, "failed": {}}


def test_a_cell_that_fails_stops_no_other_and_is_not_tried_again(plan, monkeypatch):
    import run_paired

    given, decode = renewed(plan), run_paired.Runner.decode

    def breaks(self, prompt, *more):
        if (self.cell["decode"]["method"], self.cell["seed"], prompt.id) == ("tfm", 0, "q1"):
            raise RuntimeError("broken")
        return decode(self, prompt, *more)

    monkeypatch.setattr(run_paired.Runner, "decode", breaks)
    found = run_paired.run(given)
    ((path, reason),) = found["failed"].items()
    assert "/tfm" in path and reason == "RuntimeError: broken" and found["left"] == 1
    monkeypatch.setattr(run_paired.Runner, "decode", decode)
    assert run_paired.run(given)["left"] == 1
    given.again = True
    assert run_paired.run(given)["left"] == 0


def test_a_cell_whose_files_cannot_be_written_stops_no_other(plan, monkeypatch):
    """It ended the process, with the records of the cells beside it unwritten and none of them noted."""
    import run_paired

    given, finish = renewed(plan), run_paired.Runner.finish

    def breaks(self, *more):
        if (self.cell["decode"]["method"], self.cell["seed"]) == ("ar", 0):
            raise OSError(27, "File too large")
        return finish(self, *more)

    monkeypatch.setattr(run_paired.Runner, "finish", breaks)
    found = run_paired.run(given)
    ((path, reason),) = found["failed"].items()
    assert "/ar/" in path and reason == "OSError: [Errno 27] File too large" and found["left"] == 1
    monkeypatch.setattr(run_paired.Runner, "finish", finish)
    given.again = True
    found = run_paired.run(given)
    assert (found["prompts"], found["left"]) == (0, 0), "its prompts were safe"


def test_an_error_of_the_device_ends_the_process_and_the_next_one_goes_on(plan, monkeypatch):
    import run_paired

    given, open_cell = renewed(plan), run_paired._open

    def breaks(cell, *arguments):
        if cell["decode"]["method"] == "tfm" and cell["seed"] == 0:
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        return open_cell(cell, *arguments)

    monkeypatch.setattr(run_paired, "_open", breaks)
    with pytest.raises(run_paired.DeviceFailed, match="illegal memory access"):
        run_paired.run(given)
    assert run_paired.run(given)["left"] == 1


def test_what_matters_most_comes_first():
    import run_paired

    def cell(part, setting, seed, budget=64):
        where = {name: "x" for name in ("suite", "target", "dataset", "variant", "path")}
        settings = {"part": part, "setting": setting, "seed": seed, "decode": {"method": "tfm", "budget": budget}}
        return {**where, **settings, "clock": "wall", "traced": False}

    wanted = [cell("headline", "t1", 0), cell("headline", "t1", 1), cell("headline", "t0", 0), cell("stages", "t1", 0)]
    wanted += [cell("budgets", "t1", 0, 8), cell("budgets", "t1", 0, 16), cell("widths", "t1", 0)]
    assert run_paired.groups_of(wanted[::-1]) == [[one] for one in wanted]


def test_a_null_control_stands_beside_the_method_that_it_repeats():
    import run_paired

    config = suite.resolve({**NANO, **SMALL, "methods": ["ar", "dflash", "tfm"], "null_control": True})
    groups = run_paired.groups_of([cell for cell in suite.expand(config) if cell["clock"] == "wall"])
    variants = [[cell["variant"] for cell in group] for group in groups if any(c["part"] == "null" for c in group)]
    assert variants == [["ar", "ar-null", "dflash", "tfm-b64-w4"]]
