"""Write the inventory of the paper over all published runs: every row with the paper's value, ours, and its status."""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd
from compare_paper import compare, devices_of, is_of_type, shown
from engine_taus import inventory_summary
from input_errors import told
from input_files import read_expected, read_plan, read_summary
from kernel_runs import is_kernel_run, kernel_summary, load_kernel_run
from packing import PLAN, published_folders, read_packed
from summarise_engines import CELLS, devices_in, is_engines_run, load_run

from tfm.manifest import sha256_file, write_atomic, write_json

DESCRIPTION = """
Reads expected.yaml and, of every folder under --published, summary.json (a suite's), samples.json (a kernel run's) or
the records (a run of engines).
Writes inventory.json (one entry a row of the inventory: paper, ours, low, high, n, status, reason, and its items with
what every published run says of them), inventory.csv (one row an item) and inventory.md to --out. An item's value is
that of the first run, in the order that expected.yaml gives, which measured it in the item's type, where it has one.
Last line of stdout: one JSON object.
"""
STATUSES = ("fail", "open", "not comparable", "pass")  # a row is no better than its worst item
FIELDS = ("paper", "ours", "low", "high", "n", "unit", "tolerance", "status", "reason", "source")
COLUMNS = ("row", "what", "item", "unit", "paper", "run", "ours", "low", "high", "n", "tolerance", "status", "reason")
COLUMNS += ("source",)


def inventory(expected: dict, published: Path) -> list[dict]:
    """Return one entry a row of the inventory, in its order; nothing of it is absent."""
    folders = run_folders(published, expected)
    runs = {folder.name: _rows_of(folder, expected) for folder in folders}
    types = {folder.name: _type_of(folder) for folder in folders}
    entries: dict[int, dict] = {}
    for place, item in enumerate(expected["items"]):
        found = {name: rows[place] for name, rows in runs.items()}
        names = sorted(found, key=lambda name: not is_of_type(item, types[name]))
        measured = {name: found[name] for name in names if found[name]["ours"] is not None}
        run, row = next(iter(measured.items()), (None, None))
        row = row or next(iter(found.values()), None) or compare(expected, {}, "none")[place]
        mine = {"item": item["item"], "run": run, **{name: row[name] for name in FIELDS}}
        others = [
            {"run": name, **{key: other[key] for key in ("ours", "low", "high", "n", "status", "reason")}}
            for name, other in measured.items()
            if name != run
        ]
        entry = entries.setdefault(
            item["row"], {"row": item["row"], "what": expected["rows"][item["row"]], "items": []}
        )
        entry["items"].append({**mine, "also": others})
    return [_summed_up(entry) for entry in entries.values()]


def run_folders(published: Path, expected: dict) -> list[Path]:
    """Return the published folders with numbers, the preferred one first, as expected.yaml orders them."""
    order = expected["inventory_order"]
    folders = [path for path in published_folders(published) if (path / PLAN).is_file() or _is_other(path)]
    return sorted(folders, key=lambda path: order.index(path.name) if path.name in order else -1)


def _rows_of(folder: Path, expected: dict) -> list[dict]:
    """Return what one published run says of every item, in the order of expected.yaml."""
    if is_kernel_run(folder):
        run = load_kernel_run(folder)
        return compare(expected, kernel_summary(run), folder.name, devices={run.card})
    if is_engines_run(folder):
        run = load_run(folder, expected)
        known = {"devices": devices_in(run), "dtype": _type_of(folder)}
        return compare(expected, inventory_summary(run.records), folder.name, **known)
    suite, summary = read_plan(folder / PLAN)["config"]["suite"], read_summary(folder / "summary.json")
    known = {"devices": devices_of(folder / "tables/headline.csv"), "dtype": _type_of(folder)}
    return compare(expected, summary, suite, **known)


def _is_other(folder: Path) -> bool:
    return is_kernel_run(folder) or is_engines_run(folder)


def _type_of(folder: Path) -> str | None:
    """Return the type in which a published suite decoded; None for a kernel run, which has several."""
    if is_engines_run(folder):
        cells = read_packed(folder / CELLS)["cells"] if (folder / CELLS).is_file() else []
        return next((cell["cell"]["dtype"] for cell in cells), None)
    return None if is_kernel_run(folder) else read_plan(folder / PLAN)["config"]["dtype"]


def _summed_up(entry: dict) -> dict:
    """Return a row with the numbers of its first item, the status of its worst one, and the reason for that."""
    items = entry["items"]
    status = next(name for name in STATUSES if name in {item["status"] for item in items})
    worst = [item for item in items if item["status"] == status]
    # one reason that all items share is said once
    reasons = list(dict.fromkeys(item["reason"] for item in worst if item["reason"]))
    if len(reasons) > 1 or len(worst) < len(items):
        reasons = [f"{item['item']}: {item['reason']}" for item in worst if item["reason"]]
    first = {name: items[0][name] for name in ("item", "run", "paper", "ours", "low", "high", "n", "unit", "source")}
    return {"row": entry["row"], "what": entry["what"], **first, "status": status, "reason": "; ".join(reasons)} | {
        "items": items
    }


def to_frame(entries: list[dict]) -> pd.DataFrame:
    """Return one row an item."""
    rows = [{"row": entry["row"], "what": entry["what"], **item} for entry in entries for item in entry["items"]]
    return pd.DataFrame(rows)[list(COLUMNS)]


def to_markdown(entries: list[dict]) -> str:
    """Return the rows as a Markdown table, the items that decide a row's status under it."""
    lines = ["| row | what | paper | ours | n | run | status | reason |", "|" + " --- |" * 8]
    for entry in entries:
        ours = shown(entry["ours"])
        if entry["low"] is not None and entry["high"] is not None:
            ours += f" [{shown(entry['low'])}, {shown(entry['high'])}]"
        what = f"{entry['what']} (`{entry['item']}`)"
        cells = [entry["row"], what, shown(entry["paper"]), ours, shown(entry["n"]), entry["run"] or ""]
        cells += [entry["status"], entry["reason"]]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def write_inventory(expected: dict, published: Path, out: Path) -> list[dict]:
    """Write inventory.json, inventory.csv and inventory.md; return the entries."""
    entries = inventory(expected, published)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "inventory.json", entries)
    write_atomic(out / "inventory.csv", to_frame(entries).to_csv(index=False, lineterminator="\n").encode())
    sources = [f"{path.name}/{name}" for path in run_folders(published, expected) for name in _sources(path)]
    made = ", ".join(f"`{name}` {sha256_file(published / name)[:12]}" for name in sources)
    head = f"# Every item of the paper, over all published runs\n\nMade from {made}.\n\n"
    write_atomic(out / "inventory.md", (head + to_markdown(entries)).encode())
    return entries


def _sources(folder: Path) -> tuple[str, ...]:
    return ("samples.json",) if is_kernel_run(folder) else ("summary.json",)


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expected", required=True, type=Path, help="workflows/config/expected.yaml")
    parser.add_argument("--published", required=True, type=Path, help="results/published")
    parser.add_argument("--out", required=True, type=Path, help="folder of inventory.{json,csv,md}")
    options = parser.parse_args()
    expected = read_expected(options.expected)
    entries = write_inventory(expected, options.published, options.out)
    statuses = [entry["status"] for entry in entries]
    print(json.dumps({status: statuses.count(status) for status in STATUSES} | {"rows": len(entries)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
