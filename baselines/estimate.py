"""How long a suite takes and what it writes, worked out from counts and the paper's speeds: an estimate, not a time.

hours of a cell = prompts x tokens a prompt / tokens a second + bytes of its weights / bytes a second read
tokens a second = the paper's macro throughput of the method (workflows/config/expected.yaml; SGLang, T = 1, reasoning
on). The torch engine here is another one and was not timed on that card: scale the hours by what `tok_s` of the first
finished cells says. Tokens a prompt is an assumption; the cap of the suite bounds it from above.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import yaml

from baselines import suite
from baselines.inputs import WORKFLOWS

DESCRIPTION = """
Reads a suite's config, the pins of its prompt sets and the paper's speeds. Prints hours by method, then disk. Last line
of stdout: one JSON object.
"""
EXPECTED = WORKFLOWS / "config/expected.yaml"
# 10 to 30 % below DFlash-TfM, says the paper; no number of its own is printed. The others are in no table of it
BELOW_TFM = {"ddtree": 1.2} | dict.fromkeys(
    ("dartree", "dartfixed", "headddtree", "headchain", "heap", "overgrown", "adaptive"), 1.0
)
# parameters x bytes: Qwen3.6-27B with vision tower and MTP layer, z-lab's drafter, Weaver in float32
WEIGHT_BYTES = {"target": 27.78e9 * 2, "drafter": 1.73e9 * 2, "weaver": 56.7e6 * 4}
READ_BYTES_A_SECOND = 2e9  # one NVMe drive, sequential; the page cache makes later cells faster
STEP_BYTES = 10  # of a step in steps.parquet, 9.3 in the published records
NODE_BYTES = 7  # of a node in trees.parquet, 6.8 there


def prompt_counts(config: dict) -> dict[str, int]:
    """Return the prompts of each set: the config's number, or the protocol's, or all rows."""
    entries = suite.pins()[config["source"]]
    return {name: config["prompts"] or entries[name].get("cap") or entries[name]["rows"] for name in config["datasets"]}


def speeds(expected: dict) -> dict[str, float]:
    """Return tokens a second of each method on the paper's card, from its headline table and text."""
    paper = {item["item"]: item["paper"] for item in expected["items"]}
    known = {method: paper[f"tok_s_{method}"] for method in ("ar", "dflash", "tfm")}
    return known | {method: known["tfm"] / factor for method, factor in BELOW_TFM.items()}


@dataclass(frozen=True)
class CellEstimate:
    """What one cell costs: hours of decoding and of loading, bytes of records."""

    cell: dict  # the resolved cell
    decode: float
    load: float
    written: float

    @property
    def hours(self) -> float:
        return self.decode + self.load


def estimate_cells(
    config: dict, tok_s: dict, *, tokens: int, weight_bytes: dict[str, float] = WEIGHT_BYTES
) -> list[CellEstimate]:
    """Return what each cell of a suite costs when every answer has `tokens` tokens.

    `tok_s` holds tokens a second by method. Raises ValueError when an answer cannot have that many.
    """
    if not 1 <= tokens <= config["max_new_tokens"]:
        raise ValueError(f"tokens: {tokens} is not allowed (allowed: 1 to {config['max_new_tokens']}, the suite's cap)")
    counts, found = prompt_counts(config), []
    for cell in suite.expand(config):
        method = cell["decode"]["method"]
        total = counts[cell["dataset"]] * tokens
        steps = total * tok_s["ar"] / tok_s[method]  # a step of a tree costs at least one of ar's
        nodes = (cell["decode"]["budget"] or (15 if method == "dflash" else 0)) + 1
        written = steps * (STEP_BYTES + (NODE_BYTES * nodes if cell["traced"] else 0))
        load = sum(weight_bytes[part] for part in cell["weights"]) / READ_BYTES_A_SECOND / 3600
        found.append(CellEstimate(cell, total / tok_s[method] / 3600, load, written))
    return found


def estimate(config: dict, expected: dict, *, tokens: int) -> dict:
    """Return hours by method with their parts, and gigabytes by kind, when every answer has `tokens` tokens.

    Raises ValueError when an answer cannot have that many.
    """
    hours: dict[str, dict] = defaultdict(lambda: {"cells": 0, "decode": 0.0, "load": 0.0})
    cells = estimate_cells(config, speeds(expected), tokens=tokens)
    for one in cells:
        row = hours[one.cell["decode"]["method"]]
        row["cells"] += 1
        row["decode"] += one.decode
        row["load"] += one.load
    written = sum(one.written for one in cells)
    disk = {part: size / 1e9 for part, size in WEIGHT_BYTES.items()} | {"records": written / 1e9}
    prompts = sum(prompt_counts(config).values())
    return {"prompts": prompts, "tokens": tokens, "hours": dict(hours), "gigabytes": disk}


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=WORKFLOWS / "config/paper.yaml", help="a suite's config file")
    parser.add_argument("--tokens", type=int, help="tokens of an answer, assumed (default: the suite's cap)")
    options = parser.parse_args()
    config = suite.resolve(yaml.safe_load(options.config.read_text(encoding="utf-8")))
    expected = yaml.safe_load(EXPECTED.read_text(encoding="utf-8"))
    try:
        result = estimate(config, expected, tokens=options.tokens or config["max_new_tokens"])
    except ValueError as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 2
    print(f"{result['prompts']} prompts a setting, {result['tokens']} tokens an answer, at the paper's speeds")
    for method, row in result["hours"].items():
        print(f"{method:8} {row['cells']:4} cells  {row['decode']:7.1f} h decoding  {row['load']:5.1f} h loading")
    whole = sum(row["decode"] + row["load"] for row in result["hours"].values())
    print(f"{'all':8} {sum(row['cells'] for row in result['hours'].values()):4} cells  {whole:7.1f} h")
    print(", ".join(f"{name} {size:.1f} GB" for name, size in result["gigabytes"].items()))
    print(json.dumps({"hours": math.ceil(whole), "gigabytes": math.ceil(sum(result["gigabytes"].values()))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
