"""What publishing a run that came back from a GPU machine has in common: whole cells, folders, tables, the README."""

import argparse
import contextlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from input_files import read_expected, read_plan, read_summary
from make_figures import draw
from packing import PLAN, write_packed
from publish import pack, settle
from rebuild_published import rebuild_suite
from write_manifest import manifest

from baselines import suite

FIGURES = ("throughput", "tau", "latency", "sweeps")


@dataclass(frozen=True)
class Folder:
    """A run on its way to results/published: `packed` takes its place, `made` takes the other forms of tables."""

    run: Path
    suite: str  # results/<suite>, below `run`
    plan: dict  # with the cells that are there
    planned: dict
    missing: list[str]  # paths of planned cells that are not there
    expected: dict
    packed: Path
    made: Path

    def pack_cells(self) -> dict:
        """Pack plan and records of all cells; return the facts of their manifest."""
        with contextlib.chdir(self.run):  # cells are named by their paths in the suite
            pack([Path(cell["path"]) for cell in self.plan["cells"]], self.packed)
            facts = manifest(self.plan, Path(self.suite))
        write_packed(self.packed / PLAN, self.plan)
        return facts

    def make(self, *tables: str, left_out: tuple[str, ...]) -> None:
        """Write tables, comparison and figures; of the folders `tables` all but `left_out` is published.

        Rule rebuild_published makes the other forms again.
        """
        rebuild_suite(self.packed, self.expected, self.made, figures=False)
        draw(self.made / "tables", self.made / "figures", self.plan["config"]["figures"])
        for name in ("summary.json", "compare.csv"):
            shutil.copyfile(self.made / name, self.packed / name)
        for name in tables:
            shutil.copytree(self.made / name, self.packed / name, ignore=shutil.ignore_patterns(*left_out))
        (self.packed / "figures").mkdir()
        for path in (path for name in FIGURES for path in (self.made / "figures").glob(f"{name}.svg")):
            shutil.copyfile(path, self.packed / "figures" / path.name)

    def summary(self) -> dict:
        return read_summary(self.packed / "summary.json")


def publish(
    options: argparse.Namespace, write: Callable[[Folder], str], *, where: str, script: str, marks: tuple[str, str],
    change: Callable[[Folder], Folder] = lambda folder: folder,
) -> dict:  # fmt: skip
    """Let `write` fill a folder and put it into --out; return sizes and what is missing.

    `where` is results/<suite> below --run. `write` returns what the README shows between `marks`; `change` may alter
    the plan before it. Raises ValueError for a run without a cell (`script` makes them), too many bytes, damaged
    records.
    """
    run, out = options.run.resolve(), options.out.resolve()
    planned = read_plan(run / where / "plan.json")
    plan, missing = whole_cells(run, planned)
    if not plan["cells"]:
        raise ValueError(f"--run: no cell of {where} is there; run {script}")
    made, packed = out.with_name(f".{out.name}.made"), out.with_name(f".{out.name}.partial")
    for folder in (made, packed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    expected = read_expected(options.expected)
    table = write(change(Folder(run, where, plan, planned, missing, expected, packed, made)))
    settled = settle(packed, out, limit=options.limit)
    shutil.rmtree(made)
    if options.readme:
        put_into(options.readme, table, marks)
    found = {"published": str(options.out), "bytes": settled["bytes"], "cells": len(plan["cells"])}
    return found | {"missing": len(missing), "first_missing": missing[:1]}


def whole_cells(run: Path, plan: dict) -> tuple[dict, list[str]]:
    """Return the plan with the cells that are there and local names for what lay elsewhere, and the missing paths."""
    cells = [cell for cell in plan["cells"] if (run / cell["path"] / "cell.json").is_file()]
    missing = [cell["path"] for cell in plan["cells"] if cell not in cells]
    config = plan["config"] | ({"data": "local"} if plan["config"].get("data") else {})
    settings = {cell["setting"] for cell in cells if cell["part"] == "headline"}
    temperatures = [one for one in config["temperatures"] if suite.setting_name(one, reasoning=False) in settings]
    return {**plan, "config": config | {"temperatures": temperatures}, "cells": cells}, missing


def put_into(readme: Path, table: str, marks: tuple[str, str]) -> None:
    """Replace what stands between the marks; raises ValueError for a file without them."""
    text = readme.read_text(encoding="utf-8")
    pattern = re.compile("(" + re.escape(marks[0]) + r")\n.*?(" + re.escape(marks[1]) + ")", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"--readme: {readme} has no {marks[0]} .. {marks[1]}; put the two lines where the table goes")
    readme.write_text(pattern.sub(lambda found: f"{found[1]}\n{table}\n{found[2]}", text), encoding="utf-8")


def parser_of(description: str, *, run: str, out: str, limit: int) -> argparse.ArgumentParser:
    """Return a parser of the options that every such script takes; `run` says what --run is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, help=run)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--expected", type=Path, default=Path("workflows/config/expected.yaml"))
    parser.add_argument("--readme", type=Path, help="file whose table is replaced")
    parser.add_argument("--limit", type=int, default=limit, help=f"bytes at most (default: {limit})")
    return parser
