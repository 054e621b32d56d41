"""Grade the answers of finished cells: GSM8K by a rule, HumanEval and MBPP by running them in the sandbox, if asked."""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from input_errors import told
from input_files import read_plan
from publish import load_published

from baselines.inputs import PINS_FILE
from tfm import grading, metrics
from tfm.cells import load_cells
from tfm.manifest import write_atomic
from tfm.pins import load_pins
from tfm.prompt_sources import load_prompt_set
from tfm.prompts import PromptRow
from tfm.sandbox import run_python
from tfm.tokenizer import load_tokenizer

DESCRIPTION = """
Reads --plan, the cells that it lists (or --records, a published folder), the target's tokenizer, and the solutions or
tests of the sets from --data (the folder of `--config data=DIR`; without it from the hub at the pinned revision).
Writes --out, a CSV: one row a set, method and setting with the share of right answers, its 95 % interval over prompts,
and its difference to ar on the same prompts. HumanEval and MBPP run what a model wrote: only with --run-model-code,
only in the sandbox of tfm/sandbox.py (no network, limits on time and memory). Last line of stdout: one JSON object.
Exit 2 on bad input.
"""
RULES = ("gsm8k",)
FEW = 50  # prompts above which no answer right, or all of them, is more likely a mistake than a result
PROGRAMS = ("humaneval", "mbpp")


def grader(row: PromptRow) -> Callable[[str], bool]:
    """Return the judge of answers to a prompt. Raises ValueError when its set holds no solution or no tests."""
    meta, name = row.meta, row.dataset
    needed = {"gsm8k": ("solution", "reference"), "humaneval": ("test",), "mbpp": ("test_list",)}[name]
    found = next((meta[key] for key in needed if meta.get(key)), None)
    if found is None:
        raise ValueError(f"{row.id}: has no {' or '.join(needed)}, so that {name} cannot be graded; give --data DIR")
    if name == "gsm8k":
        return lambda text: grading.gsm8k_is_right(text, found)
    if name == "mbpp":
        return lambda text: (
            run_python(grading.mbpp_program(text, tests=list(found), imports=meta.get("test_imports"))).passed
        )
    prompt, entry_point = row.turns[0], meta["entry_point"]
    return lambda text: (
        run_python(grading.humaneval_program(text, prompt=prompt, entry_point=entry_point, test=found)).passed
    )


def grade(requests: pd.DataFrame, rows: dict[str, PromptRow], decode: Callable[[list[int]], str]) -> pd.Series:
    """Return whether each request's answer is right; an answer that several methods gave is graded once.

    Raises ValueError for a request whose prompt the set does not hold.
    """
    strange = sorted(set(requests["id"]) - set(rows))
    if strange:
        raise ValueError(
            f"prompts: {strange[0]!r} and {len(strange) - 1} more are not in the set; give the data that was decoded"
        )

    @functools.cache
    def is_right(prompt: str, tokens: tuple[int, ...]) -> bool:
        return grader(rows[prompt])(decode(list(tokens)))

    return pd.Series(
        [is_right(name, tuple(tokens)) for name, tokens in zip(requests["id"], requests["output_tokens"], strict=True)],
        index=requests.index,
    )


def accuracy(requests: pd.DataFrame) -> pd.DataFrame:
    """Return one row a set, variant and setting: share of right answers and its difference to ar, with intervals."""
    found = []
    for (dataset, setting, variant), arm in requests.groupby(["dataset", "setting", "variant"]):
        one = _sums(arm)
        row = {"dataset": dataset, "variant": variant, "setting": setting}
        row |= _fields("right", metrics.estimate([one], lambda a: a))
        base = requests[(requests["dataset"] == dataset) & (requests["setting"] == setting)]
        base = _sums(base[base["variant"] == "ar"])
        shared = one.index.intersection(base.index)
        if len(shared):
            estimate = metrics.estimate([one.loc[shared], base.loc[shared]], lambda a, b: a - b)
            row |= _fields("over_ar", estimate)
            row["flag"] = "differs from ar" if estimate.low > 0 or estimate.high < 0 else ""
        if row["right"] in (0, 1) and row["right_n"] > FEW:
            doubt = f"{'all' if row['right'] else 'none'} of {row['right_n']} right: doubt the grader or the prompts"
            row["flag"] = "; ".join(filter(None, [row.get("flag"), doubt]))
        found.append(row)
    return pd.DataFrame(found)


def _sums(arm: pd.DataFrame) -> pd.DataFrame:
    index = pd.MultiIndex.from_frame(arm[[*metrics.KEY, "seed"]])
    return pd.DataFrame({"num": arm["right"].astype(float).to_numpy(), "den": 1.0}, index=index)


def _fields(name: str, estimate: metrics.Estimate) -> dict:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high, f"{name}_n": estimate.n}


def run(options: argparse.Namespace) -> pd.DataFrame:
    """Grade and write; return the table."""
    plan = read_plan(options.plan)
    config = plan["config"]
    wanted = RULES + (PROGRAMS if options.run_model_code else ())
    sets = [name for name in config["datasets"] if name in wanted]
    if not sets:
        code = [name for name in config["datasets"] if name in PROGRAMS]
        hint = f"; {', '.join(code)} need --run-model-code" if code and not options.run_model_code else ""
        raise ValueError(f"datasets: {', '.join(config['datasets'])} hold none that can be graded ({wanted}){hint}")
    records = (
        load_published(options.records)
        if options.records
        else load_cells([cell["path"] for cell in plan["cells"] if cell["dataset"] in sets], allow_missing=True)
    )
    tokenizer, pins = load_tokenizer(options.tokenizer or Path(config["weights"]) / "target"), load_pins(PINS_FILE)
    requests = records.requests[records.requests["dataset"].isin(sets)].copy()
    if requests.empty:
        raise ValueError(f"no cell of {', '.join(sets)} is finished; run snakemake first")
    source = "local" if options.data else "hub"
    rows = {}
    for name in sets:
        rows |= {row.id: row for row in load_prompt_set(pins, source=source, name=name, data=options.data).rows}
    requests["right"] = grade(requests, rows, tokenizer.decode)
    table = accuracy(requests)
    write_atomic(options.out, table.to_csv(index=False).encode())
    return table


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, type=Path, help="plan.json of the suite")
    parser.add_argument("--records", type=Path, help="published folder to read instead of the cells' folders")
    parser.add_argument("--data", type=Path, help="folder of the real sets, with solutions and tests")
    parser.add_argument("--tokenizer", type=Path, help="the target's folder (default: the one that the plan names)")
    parser.add_argument("--run-model-code", action="store_true", help="grade HumanEval and MBPP too, in the sandbox")
    parser.add_argument("--out", required=True, type=Path, help="CSV file")
    options = parser.parse_args()
    table = run(options)
    print(json.dumps({"rows": len(table), "answers": int(table["right_n"].sum()), "out": str(options.out)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
