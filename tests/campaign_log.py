"""What campaigns of faults tried and how it ended: a line a trial, so that several runs add up; and their sum."""

import argparse
import datetime
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from tfm.manifest import environment, write_json  # noqa: E402

DESCRIPTION = """
Reads the trials that campaign_kill.py, campaign_faults.py, campaign_fuzz.py, campaign_plan.py and campaign_slurm.py
wrote, one JSON object a line. Writes their sum to --out and prints it on the last line of stdout. Exit 1 when a trial
was not survived or an input crashed a parser.
"""
FOLDER = ROOT / "results/published/faults"


class Trials:
    """The trials of a file, to which more are added; one that is there already is not run again.

    A trial is {"kind", "name", "date", "commit", "problems": [...], "lost_cells", "outcome"}; what is counted or
    measured instead is {"kind", "name", "date", "commit", "values": {name: number}}.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        git = environment()["git"]
        self.facts = {
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "commit": f"{git['commit'][:12] if git['commit'] else None}{' and changes' if git['dirty'] else ''}",
        }

    def has(self, kind: str, name: str) -> bool:
        """Return whether this trial was made before."""
        return any((row["kind"], row["name"]) == (kind, name) for row in self.rows)

    def add(self, kind: str, name: str, *, problems: list[str], lost_cells: int, outcome: str) -> None:
        """Note one trial; `problems` is empty when it was survived."""
        self._write({"kind": kind, "name": name, "problems": problems, "lost_cells": lost_cells, "outcome": outcome})
        print(f"{kind}, {name}: {'; '.join(problems) or 'survived'} ({outcome})", file=sys.stderr, flush=True)

    def count(self, kind: str, name: str, **values: float) -> None:
        """Note numbers that were counted or measured."""
        self._write({"kind": kind, "name": name, "values": values})
        print(f"{kind}, {name}: {values}", file=sys.stderr, flush=True)

    def _write(self, row: dict) -> None:
        row = {"kind": row["kind"], "name": row["name"], **self.facts, **row}
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")


def summary(rows: list[dict]) -> dict:
    """Return the sum of trials: tried and survived a kind, cells lost, and the numbers that were counted.

    Counts of inputs and jobs add up; of what was measured (names with a unit) the last one stands.
    """
    trials = [row for row in rows if "values" not in row]
    tried = Counter(row["kind"] for row in trials)
    survived = Counter(row["kind"] for row in trials if not row["problems"])
    result = {f"tried_{kind}": tried[kind] for kind in sorted(tried)}
    result |= {f"survived_{kind}": survived[kind] for kind in sorted(tried)}
    result["lost_cells"] = sum(row["lost_cells"] for row in trials)
    for row in rows:
        for name, value in row.get("values", {}).items():
            adds_up = name.endswith(("_inputs", "_crashes", "_run"))
            result[name] = value + result.get(name, 0) if adds_up else value
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=Path, default=FOLDER / "trials.jsonl", help="file of the campaigns")
    parser.add_argument("--out", type=Path, default=FOLDER / "summary.json", help="file for the sum")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.trials.read_text().splitlines()]
    result = summary(rows)
    write_json(options.out, result)
    print(json.dumps(result))
    return int(any(row.get("problems") for row in rows) or result.get("fuzz_crashes", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
