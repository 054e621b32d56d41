"""Publish suite graft-real as it came back from a GPU machine: records, steps, tables, figures, README table."""

import json
import sys
from pathlib import Path

import pandas as pd
from input_errors import told
from packing import write_packed
from publish_run import Folder, parser_of, publish
from rebuild_published import ENGINE_RUN, STEPS

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
LEFT_OUT = ("*.md", "*.tex", "engine_summary.json")
MEASURED = ("tau", "step_over_ar", "speedup", "decode_speedup")
MARKS = ("<!-- table: graft -->", "<!-- end of table: graft -->")


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
    counted = (
        f"The headline at T = 1 of a suite of {summary['cells']['value']:.0f} cells; step over AR: steps timed apart, "
        f"at a context of {SETTINGS['context']}. Grafted: function of mini, cost of 27B; {card}."
    )
    return "\n".join([*body, "", f"*{counted} Intervals are 95 %; what is modelled was never measured.*"])


def _with_interval(row: dict, name: str) -> str:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return _number(row.get(name)) + ("" if low is None or pd.isna(low) else f" [{low:.2f}, {high:.2f}]")


def _number(value) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.2f}"


def write_folder(folder: Folder) -> str:
    """Write everything; return the README's table."""
    packed = folder.packed
    facts = folder.pack_cells()
    copy_steps(folder.run, packed / STEPS)
    folder.make("tables", f"{STEPS}/tables", left_out=LEFT_OUT)
    write_packed(packed / "manifest.json.gz", facts)
    card = pd.read_csv(packed / "tables/headline.csv")["device"].iloc[0]
    table = side_by_side(pd.read_csv(packed / STEPS / "tables/headline.csv"), folder.summary(), card)
    (packed / "tables/side_by_side.md").write_text(table + "\n", encoding="utf-8")
    return table


@told
def main() -> int:
    of_run = "folder RUN of the offline scripts"
    parser = parser_of(DESCRIPTION, run=of_run, out="results/published/graft-h200", limit=LIMIT)
    names = {"where": SUITE, "script": "graft_cells.sh", "marks": MARKS}
    print(json.dumps(publish(parser.parse_args(), write_folder, **names)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
