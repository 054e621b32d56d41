"""Make every table and figure of every published run again from its committed records, and compare the csv files."""

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import sys
import time
from pathlib import Path

import engine_tables
import kernel_figure
from compare_paper import compare, devices_of, write_comparison
from input_errors import told
from input_files import read_expected, read_manifest, read_plan, read_summary
from inventory import write_inventory
from kernel_runs import is_kernel_run, kernel_table, load_kernel_run
from make_figures import draw, save, set_style
from make_paper import write_paper
from make_report import page
from make_tables import write_tables
from packing import GRADED, PLAN, published_folders
from probe_records import load_probes
from publish import load_published
from summarise_engines import is_engines_run, load_run
from summarise_engines import write_tables as write_engines
from tree_steps import packed, traced_cells, trees_of

from baselines import suite
from tfm.manifest import write_atomic, write_json

DESCRIPTION = """
Reads the folders of --published: plan.json.gz with the records, checked by their SHA-256, a kernel run's samples.json,
an engine run's tables.json, which names its timed steps, or engines.json beside what ran inside SGLang. Writes to --out
a folder for each with its tables (csv, md, tex), figures (pdf, svg, png), compare.csv, summary.json and report.html,
and the inventory over all of them, then compares every csv file byte by byte with the published one. Needs no GPU and
no weights. Last line of stdout: one JSON object. Exit 1 when a published csv file is not what its records give, naming
it and where it differs; 2 on bad input.
"""

ENGINE_RUN = "tables.json"
STEPS = "steps"  # folder of an engine run in a suite's


def rebuild_suite(folder: Path, expected: dict, out: Path, *, figures: bool = True) -> None:
    """Write one suite's tables, comparison, paper-shaped tables and figures again."""
    plan = read_plan(folder / PLAN)
    records = load_published(folder)
    write_tables(plan, records, out, probes=load_probes(folder))
    summary = read_summary(out / "summary.json")
    known = {"devices": devices_of(out / "tables/headline.csv"), "dtype": plan["config"]["dtype"]}
    rows = compare(expected, summary, plan["config"]["suite"], **known)
    write_comparison(rows, out / "compare.csv")
    write_paper(out / "tables", plan["config"], out / "paper")
    if (folder / STEPS / ENGINE_RUN).is_file():
        variants = {variant.name(plan["config"]) for variant in suite.headline(plan["config"])}
        summary |= rebuild_engine(folder / STEPS, out / STEPS, {"records": records, "variants": variants})
        write_json(out / "summary.json", summary)
    if figures:
        draw(out / "tables", out / "figures", plan["config"]["figures"])
        manifest = read_manifest(folder / "manifest.json.gz")
        trees = trees_of(traced_cells(plan["cells"]), plan["config"]["weights"], read=packed(records))
        write_atomic(out / "report.html", page(out, plan, manifest, trees).encode())


def rebuild_kernels(folder: Path, out: Path, *, figures: bool = True) -> None:
    """Write the table and the figure of one kernel run again."""
    out.mkdir(parents=True, exist_ok=True)
    table, bandwidth = kernel_table(load_kernel_run(folder)), kernel_figure.bandwidth_of(folder)
    if figures:
        set_style()
        words = {"card": table["card"].iloc[0], "n": table["n"].iloc[0], "bandwidth": bandwidth}
        save(kernel_figure.draw(table, bandwidth), out, "kernels", kernel_figure.CAPTION.format(**words))
    write_atomic(out / "kernels.csv", table.to_csv(index=False, lineterminator="\n").encode())


def rebuild_engine(folder: Path, out: Path, cells: dict | None = None) -> dict:
    """Write the tables of one run of the static engine's steps again, as its tables.json says they were made.

    `cells`: what engine_tables.from_cells reads of the suite that the run belongs to. Returns the summary.
    """
    asked = json.loads((folder / ENGINE_RUN).read_text(encoding="utf-8"))
    report = engine_tables.read(folder / asked["steps"])
    settings = {name: asked[name] for name in ("variant", "context", "taus")}
    settings["cells"] = cells
    timed = report[asked["key"]] if asked["key"] else report
    return engine_tables.write_tables(timed, out / "tables", **settings) | engine_tables.from_checks(report)


def rebuild_folder(folder: Path, expected: dict, out: Path, *, figures: bool = True) -> float | None:
    """Make one published folder again in `out`; return the seconds it took, None for one that holds no run."""
    started = time.monotonic()
    if (folder / PLAN).is_file():
        rebuild_suite(folder, expected, out / folder.name, figures=figures)
    elif is_kernel_run(folder):
        rebuild_kernels(folder, out / folder.name, figures=figures)
    elif is_engines_run(folder):
        write_json(out / folder.name / "summary.json", write_engines(load_run(folder, expected), out / folder.name))
    elif (folder / ENGINE_RUN).is_file():
        rebuild_engine(folder, out / folder.name)
    else:
        return None
    return round(time.monotonic() - started, 1)


def rebuild(
    published: Path, expected: dict, out: Path, *, figures: bool = True, processes: int = 1
) -> dict[str, float]:
    """Make everything again, several folders at a time; return the seconds that each published folder took."""
    folders = published_folders(published)
    again = functools.partial(rebuild_folder, expected=expected, out=out, figures=figures)
    if processes == 1:
        seconds = list(map(again, folders))
    else:
        # spawned: a fork of a process with threads may hang
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
            seconds = list(pool.map(again, folders))
    write_inventory(expected, published, out)
    return {folder.name: one for folder, one in zip(folders, seconds, strict=True) if one is not None}


def made_again(published: Path) -> list[Path]:
    """Return the published csv files that records give: all but accuracies, which need the reference answers too."""
    places = [*published.glob("*.csv"), *(path for one in published_folders(published) for path in one.rglob("*.csv"))]
    return sorted(path for path in places if path.name != GRADED)


def differences(published: Path, out: Path) -> dict[str, str]:
    """Return published csv file -> where the one made again differs; a file that is not made again differs too."""
    found = {}
    for path in made_again(published):
        name = path.relative_to(published).as_posix()
        again = out / name
        if not again.is_file():
            found[name] = "no table of today's code has this name"
        elif path.read_bytes() != again.read_bytes():
            found[name] = first_difference(
                path.read_text(encoding="utf-8").splitlines(), again.read_text(encoding="utf-8").splitlines()
            )
    return found


def first_difference(old: list[str], new: list[str]) -> str:
    """Return line and content of the first line that differs."""
    for number, (one, other) in enumerate(zip(old, new, strict=False), start=1):
        if one != other:
            return f"line {number}: published {one[:160]!r}, made again {other[:160]!r}"
    return f"published {len(old)} lines, made again {len(new)}"


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", required=True, type=Path, help="results/published")
    parser.add_argument("--expected", required=True, type=Path, help="workflows/config/expected.yaml")
    parser.add_argument("--out", required=True, type=Path, help="folder for what is made again")
    parser.add_argument("--report", type=Path, help="JSON file for what differs (default: rebuilt.json in --out)")
    parser.add_argument("--processes", type=int, default=1, help="folders made at a time (default: 1)")
    options = parser.parse_args()
    expected = read_expected(options.expected)
    seconds = rebuild(options.published, expected, options.out, processes=options.processes)
    wrong = differences(options.published, options.out)
    compared = len(made_again(options.published))
    report = {"seconds": seconds, "compared": compared, "different": wrong}
    for name, where in wrong.items():
        print(f"rebuild_published: {options.published / name} is not what its records give: {where}", file=sys.stderr)
    write_json(options.report or options.out / "rebuilt.json", report)
    print(json.dumps({"seconds": seconds, "compared": compared, "different": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
