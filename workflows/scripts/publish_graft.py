"""Publish suite graft-real as it came back from a GPU machine: records, steps, tables, figures, README table."""

import argparse
import contextlib
import json
import re
import shutil
import sys
from pathlib import Path

import pandas as pd
import yaml
from input_files import read_plan, told
from make_figures import draw
from packing import PLAN, write_packed
from publish import pack, settle
from rebuild_published import ENGINE_RUN, STEPS, rebuild_suite
from write_manifest import manifest

from baselines import suite
from tfm.manifest import write_json

DESCRIPTION = """
Reads --run, the folder that workflows/offline/graft_cells.sh and graft_bench.sh worked in: results/graft-real (plan,
prompts, cells) and graft-bench/*.json. Writes --out anew, at most --limit bytes: records packed in one parquet a kind,
plan, manifest, tables, figures, compare, steps/ (what bench_engine.py timed and the checks found, with tables) and
summary.json with the suite's and the engine's names. Planned cells that are not there are left out and counted. Notes
(*.md) in --out stay. With --readme, the table between <!-- table: graft --> and <!-- end of table: graft --> is
replaced. Last line of stdout: one JSON object. Exit 2 on bad input.
"""
SUITE = "results/graft-real"
LIMIT = 700_000
# of the bench's files and checks: what a table, a choice or the summary is made of
KEPT = ("tuned", "early", "products", "check_graft", "rehearse_paper")
PLACES = ("graft-bench", "out", ".")  # of RUN
SETTINGS = {"steps": "bench.json.gz", "key": "tuned", "variant": "all:fused_cuda", "context": 512}
# tokens a step that the numbers printed in the paper imply; the modelled speeds stand at them
TAUS = {"tfm": 6.7, "dflash": 3.8, "ddtree": 5.1}
LABELS = {"ar": "AR", "dflash": "DFlash", "ddtree": "DDTree", "dartree": "DARTree", "tfm": "DFlash-TfM"}
LABELS |= {"adaptive": "DFlash-TfM, adaptive budget"}
FIGURES, LEFT_OUT = ("throughput", "tau", "latency", "sweeps"), ("*.md", "*.tex", "engine_summary.json")
MEASURED = ("tau", "step_over_ar", "speedup", "decode_speedup")
MARKS = ("<!-- table: graft -->", "<!-- end of table: graft -->")


def whole_cells(run: Path, plan: dict) -> tuple[dict, list[str]]:
    """Return the plan with the cells that are there and local names for what lay elsewhere, and the missing paths."""
    cells = [cell for cell in plan["cells"] if (run / cell["path"] / "cell.json").is_file()]
    missing = [cell["path"] for cell in plan["cells"] if cell not in cells]
    config = plan["config"] | ({"data": "local"} if plan["config"].get("data") else {})
    settings = {cell["setting"] for cell in cells if cell["part"] == "headline"}
    temperatures = [one for one in config["temperatures"] if suite.setting_name(one, reasoning=False) in settings]
    return {**plan, "config": config | {"temperatures": temperatures}, "cells": cells}, missing


def copy_steps(run: Path, out: Path) -> None:
    """Pack the files of bench and checks and write how their tables are made."""
    files = {name: [run / place / f"{name}.json" for place in PLACES] for name in KEPT}
    first = {name: next((path for path in paths if path.is_file()), None) for name, paths in files.items()}
    found = {name: json.loads(path.read_text()) for name, path in first.items() if path is not None}
    if SETTINGS["key"] not in found:
        raise ValueError(f"--run: {run}/graft-bench/{SETTINGS['key']}.json is missing; run graft_bench.sh")
    for row in found.get("products", {}).get("products", ()):
        row["tried"] = len(row["tried"])  # times of tiles that lost
    out.mkdir(parents=True)
    write_packed(out / SETTINGS["steps"], found)
    write_json(out / ENGINE_RUN, {**SETTINGS, "taus": TAUS})


def side_by_side(frame: pd.DataFrame, summary: dict, card: str) -> str:
    """Return the Markdown table of paper, graft measured and modelled, a row a method."""
    head = ["method", "paper: speed over AR", "measured: tau", "step over AR", "speed over AR", "decode alone"]
    lines = [[*head, "modelled speed at the paper's tau"]]
    for row in frame.to_dict("records"):
        modelled = row.get("modelled_speedup")
        at = "" if pd.isna(modelled) else f"{modelled:.2f} (tau {row['tau_given']:g})"
        cells = [LABELS[row["method"]], _number(row["paper_speedup"])]
        cells += [_with_interval(row, f"measured_{name}") for name in MEASURED]
        if any([*cells[1:], at]):
            lines.append([*cells, at])
    body = ["| " + " | ".join(line) + " |" for line in lines]
    body.insert(1, "|---|" + "---:|" * len(head))
    counted = f"Cells: {summary['cells']['value']:.0f}, T = 1. Grafted: function of mini, cost of 27B; {card}."
    return "\n".join([*body, "", f"*{counted} Intervals are 95 %; what is modelled was never measured.*"])


def _with_interval(row: dict, name: str) -> str:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return _number(row.get(name)) + ("" if low is None or pd.isna(low) else f" [{low:.2f}, {high:.2f}]")


def _number(value) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.2f}"


def put_into(readme: Path, table: str, marks: tuple[str, str] = MARKS) -> None:
    """Replace what stands between the marks; raises ValueError for a file without them."""
    text = readme.read_text(encoding="utf-8")
    pattern = re.compile("(" + re.escape(marks[0]) + r")\n.*?(" + re.escape(marks[1]) + ")", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"--readme: {readme} has no {marks[0]} .. {marks[1]}; put the two lines where the table goes")
    readme.write_text(pattern.sub(lambda found: f"{found[1]}\n{table}\n{found[2]}", text), encoding="utf-8")


def publish(options) -> dict:
    """Write everything; return sizes and what is missing. Raises ValueError for too many bytes or damaged records."""
    run, out = options.run.resolve(), options.out.resolve()
    expected = yaml.safe_load(options.expected.read_text(encoding="utf-8"))
    plan, missing = whole_cells(run, read_plan(run / SUITE / "plan.json"))
    if not plan["cells"]:
        raise ValueError(f"--run: no cell of {SUITE} is there; run graft_cells.sh")
    made, packed = out.with_name(f".{out.name}.made"), out.with_name(f".{out.name}.partial")
    for folder in (made, packed):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    with contextlib.chdir(run):  # cells are named by their paths in the suite
        pack([Path(cell["path"]) for cell in plan["cells"]], packed)
    write_packed(packed / PLAN, plan)
    copy_steps(run, packed / STEPS)
    rebuild_suite(packed, expected, made, figures=False)
    draw(made / "tables", made / "figures", plan["config"]["figures"])
    with contextlib.chdir(run):
        facts = manifest(plan, Path(SUITE))
    write_packed(packed / "manifest.json.gz", facts)
    for name in ("summary.json", "compare.csv"):
        shutil.copyfile(made / name, packed / name)
    # rule rebuild_published makes the other forms again
    for name in ("tables", f"{STEPS}/tables"):
        shutil.copytree(made / name, packed / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (packed / "figures").mkdir()
    for path in (path for name in FIGURES for path in (made / "figures").glob(f"{name}.svg")):
        shutil.copyfile(path, packed / "figures" / path.name)
    summary = json.loads((packed / "summary.json").read_text())
    card = pd.read_csv(packed / "tables/headline.csv")["device"].iloc[0]
    table = side_by_side(pd.read_csv(packed / STEPS / "tables/headline.csv"), summary, card)
    (packed / "tables/side_by_side.md").write_text(table + "\n", encoding="utf-8")
    settled = settle(packed, out, limit=options.limit)
    shutil.rmtree(made)
    if options.readme:
        put_into(options.readme, table)
    found = {"published": str(options.out), "bytes": settled["bytes"], "cells": len(plan["cells"])}
    return found | {"missing": len(missing), "first_missing": missing[:1]}


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, type=Path, help="folder RUN of the offline scripts")
    parser.add_argument("--out", type=Path, default=Path("results/published/graft-h200"))
    parser.add_argument("--expected", type=Path, default=Path("workflows/config/expected.yaml"))
    parser.add_argument("--readme", type=Path, help="file whose table is replaced")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"bytes at most (default: {LIMIT})")
    options = parser.parse_args()
    print(json.dumps(publish(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
