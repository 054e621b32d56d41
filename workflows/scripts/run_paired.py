"""Decode a suite's cells in one process with the models loaded once, timed methods prompt by prompt in A B .. B A."""

import argparse
import contextlib
import gc
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from run_cells import is_done, part_of, prompts_file, read_cells, register_kernels

register_kernels()

import torch  # noqa: E402
from decode_cell import (  # noqa: E402
    WARM_UP_TOKENS,
    check_weights,
    decode_config,
    digest_of,
    run_facts,
    source_of,
    without_place,
)

from baselines import engines  # noqa: E402
from baselines.loading import load_models  # noqa: E402
from tfm import checkpoints, device, manifest  # noqa: E402
from tfm.cells import CellWriter, rerun_command  # noqa: E402
from tfm.config import HEADS  # noqa: E402
from tfm.decode import Models, Prompt  # noqa: E402
from tfm.gpu_meter import CardSpan  # noqa: E402
from tfm.prompts import read_prepared  # noqa: E402
from tfm.tokenizer import load_tokenizer  # noqa: E402

DESCRIPTION = """
Reads resolved cells (a plan.json, or JSON lines) and the prompt files under --out, and writes each cell's folder
under --out at the path the cell names: the files that decode_cell.py writes, skipping cells that are there, whole and
of this code. Cells of one set, setting, seed and clock stand side by side: every prompt is decoded by each of them in
turn, the order reversed at every second prompt, so that a drift of the machine reaches all alike. The models are loaded
once for all cells that share them. On a machine with two cards, start one process a card with --part 1/2 and 2/2.
Last line of stdout: one JSON object. Exit 1 if a cell failed.
"""
PARTS = ("drafter", "weaver")
logger = logging.getLogger("run_paired")


@dataclass
class Runner:
    """A cell under way: its records so far and the loop that decodes its prompts."""

    cell: dict
    writer: CellWriter
    config: object
    prompts: list[Prompt]
    run: object
    facts: dict
    start: float
    span: CardSpan
    joules: list[float] = field(default_factory=list)

    def decode(self, prompt: Prompt, detokenise) -> None:
        """Decode one prompt and record it, unless a killed run did."""
        if prompt.id in self.writer.done:
            return
        self.span.start()
        self.run([prompt], on_finish=self.writer.add, detokenise=detokenise, traced=self.cell["traced"])
        card = self.span.end()
        if card and "before" in card:
            self.joules.append((card["after"]["energy_mj"] - card["before"]["energy_mj"]) / 1e3)

    def finish(self, commit: str, clocks: dict | None, where: torch.device) -> dict:
        """Write the cell's files."""
        facts = {**self.facts, "device": device.facts(where) | {"clocks": clocks}, "cpu_share": None}
        # of the prompts that this run decoded, prefill included
        facts["energy"] = {"joule": sum(self.joules), "prompts": len(self.joules)} if self.joules else None
        facts |= run_facts(self.cell, self.config, start=self.start, commit=commit)
        return self.writer.finish([prompt.id for prompt in self.prompts], facts)


class Shared:
    """What cells share: models of one set of weights, shape and type, and the loops of one setting and seed."""

    def __init__(self, cells: list[dict], longest: int, where: torch.device):
        """`longest` is the number of tokens of the longest prompt of all cells."""
        self._cells, self._longest, self._where = cells, longest, where
        self._key, self._models, self._loops, self._round, self._heads = None, None, {}, None, {}

    def loop(self, cell: dict, config):
        """Return the loop of a cell; cells of other sets with the same settings share it."""
        now = (_family(cell), cell["setting"], cell["seed"])
        if now != self._round:
            # graphs hold their memory until they go
            self._loops, self._round = {}, now
            gc.collect()
            if self._where.type == "cuda":
                torch.cuda.empty_cache()
        key = json.dumps([cell["decode"], cell["engine"], cell.get("forms"), cell["clock"], config.eos_tokens])
        if key not in self._loops:
            models = self._models_of(cell)
            self._loops[key] = engines.make_loop(cell, models, config, self._where, longest=self._longest)
        return self._loops[key]

    def _models_of(self, cell: dict) -> Models:
        # all the parts that any cell needs of the same family
        key, where = _family(cell), self._where
        if key != self._key:
            self._models = None
            of_family = [other for other in self._cells if _family(other) == key]
            widest = max(of_family, key=lambda other: len(other["weights"]))
            options = {name: widest.get(name) for name in ("swa_causal", "graft")}
            weights = {part: folder for other in of_family for part, folder in other["weights"].items()}
            weights = {part: folder for part, folder in weights.items() if part in ("target", *PARTS)}
            self._models = load_models(weights, device=where, dtype=getattr(torch, widest["dtype"]), **options)
            self._key, self._heads = key, {}
        parts = (getattr(self._models, part) if part in cell["weights"] else None for part in PARTS)
        return Models(self._models.target, *parts, head=self._head_of(cell))

    def _head_of(self, cell: dict):
        kind = next((head for head in HEADS if head in cell["weights"] and head not in PARTS), None)
        if kind and kind not in self._heads:
            folder, dtype = cell["weights"][kind], getattr(torch, cell["dtype"])
            self._heads[kind] = checkpoints.load_head(folder, device=self._where, dtype=dtype)
        return self._heads.get(kind)


def _family(cell: dict) -> str:
    graft = cell.get("graft") and {name: cell["graft"][name] for name in ("seed", "target")}
    return json.dumps([cell["weights"]["target"], cell["weights_sha256"]["target"], cell["dtype"], graft])


def groups_of(cells: list[dict]) -> list[list[dict]]:
    """Return cells that are decoded side by side, all groups of a setting and seed in a row, which share their loops.

    Traced and untimed cells stand alone.
    """
    groups: dict[tuple, list[dict]] = {}
    for cell in cells:
        key = tuple(cell[name] for name in ("suite", "target", "dataset", "setting", "seed", "clock", "traced"))
        alone = () if cell["clock"] == "wall" else (cell["variant"],)
        groups.setdefault(key + alone, []).append(cell)
    return sorted(groups.values(), key=lambda group: (group[0]["setting"], group[0]["seed"]))


def run_group(group: list[dict], shared: Shared, options, where: torch.device) -> int:
    """Decode the cells of one group side by side; returns how many prompts were decoded."""
    with contextlib.ExitStack() as stack:
        runners = [_open(cell, shared, options, where, stack) for cell in group]
        detokenise = load_tokenizer(group[0]["weights"]["target"]).decode
        span = CardSpan(where)
        span.start()
        for number, prompt in enumerate(runners[0].prompts):
            for runner in runners[:: -1 if number % 2 else 1]:
                runner.decode(prompt, detokenise)
        clocks = span.end()
        for runner in runners:
            runner.finish(options.commit, clocks, where)
    return len(runners[0].prompts) * len(runners)


def _open(cell: dict, shared: Shared, options, where: torch.device, stack) -> Runner:
    start, file, folder = time.time(), prompts_file(cell, options.out), options.out / cell["path"]
    # where Snakemake looks for it: `folder` may lie below another one
    place, cell = Path(cell["path"]), without_place(cell)
    check_weights(cell)
    rows = read_prepared(file)
    prompts = [Prompt(row.id, row.index, row.tokens) for row in rows]
    writer = stack.enter_context(CellWriter(folder, digest=digest_of(cell, file)))
    config = decode_config(cell, load_tokenizer(cell["weights"]["target"]))
    run = shared.loop(cell, config)
    if cell["clock"] != "off":
        # no measured prompt: the first one's tokens in reverse
        warm_up = Prompt("warm-up", 0, prompts[0].tokens[::-1])
        run([warm_up], max_new_tokens=WARM_UP_TOKENS, on_finish=lambda _: None)
    facts = {
        "source_digest": source_of(cell),
        "prompts_sha256": manifest.sha256_file(file),
        "prompts": len(rows),
        "resumed_requests": len(writer.done),
        "rerun": rerun_command(place),
    }
    return Runner(cell, writer, config, prompts, run, facts, start, CardSpan(where))


def run(options: argparse.Namespace) -> dict:
    """Run the groups in the order of the list; a failed one is reported and the next one starts."""
    cells = read_cells(options.list)
    groups = part_of(groups_of(cells), options.part)
    device.make_deterministic(threads=cells[0]["threads"])
    deadline = time.time() + options.seconds if options.seconds else float("inf")
    files = {prompts_file(cell, options.out) for cell in cells}
    longest = max(len(row.tokens) for file in files for row in read_prepared(file))
    failed, decoded = {}, 0
    with device.claim(device.check_device(cells[0]["device"])) as where:
        shared = Shared(cells, longest, where)
        for group in groups:
            group = [cell for cell in group if not is_done(cell, options.out)]
            if not group or time.time() > deadline:
                continue
            name, start = "/".join(group[0]["path"].split("/")[-4:]), time.time()
            try:
                decoded += run_group(group, shared, options, where)
            except Exception as error:  # the other groups are still worth the machine's time; the exit status tells
                logging.exception("%s failed", name)
                failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {len(group)} cells, {time.time() - start:.1f} s", file=sys.stderr, flush=True)
    left = sum(not is_done(cell, options.out) for group in groups for cell in group)
    return {"groups": len(groups), "prompts": decoded, "left": left, "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", required=True, type=Path, help="plan.json or JSON lines of resolved cells")
    parser.add_argument("--out", required=True, type=Path, help="folder that stands for the repository's root")
    parser.add_argument("--commit", required=True, help="commit of the code, recorded in every cell")
    parser.add_argument("--part", help="I/N: only the I-th of N parts of the groups, for N calls side by side")
    parser.add_argument("--seconds", type=float, help="start no further group after this long")
    parser.add_argument("--log", type=Path, help="file for the log (default: stderr)")
    options = parser.parse_args()
    logging.basicConfig(filename=options.log, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    result = run(options)
    print(json.dumps(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
