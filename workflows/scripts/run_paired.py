"""Decode a suite's cells in one process with the models loaded once, timed methods prompt by prompt in A B .. B A."""

import argparse
import contextlib
import fcntl
import gc
import hashlib
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from input_errors import told
from run_cells import is_done, part_of, prompts_file, register_kernels

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
from baselines.plans import read_cells  # noqa: E402
from tfm import checkpoints, device, manifest  # noqa: E402
from tfm.cells import CellWriter, rerun_command  # noqa: E402
from tfm.config import HEADS  # noqa: E402
from tfm.decode import Models, Prompt  # noqa: E402
from tfm.gpu_meter import CardSpan  # noqa: E402
from tfm.prompts import read_prepared  # noqa: E402
from tfm.span import Span  # noqa: E402
from tfm.tokenizer import load_tokenizer  # noqa: E402

DESCRIPTION = """
Reads resolved cells (a plan.json, or JSON lines) and the prompt files under --out, and writes each cell's folder under
--out at the path the cell names: the files that decode_cell.py writes, skipping cells that are there, whole and of
this code. Cells of one set, setting, seed and clock stand side by side: every prompt is decoded by each of them in
turn, the order reversed at every second prompt, so that a drift of the machine reaches all alike; a null control
stands next to the method that it repeats. The models are loaded once for all cells that share them. What matters most
comes first: the headline's first seed at T = 1, its other seeds, T = 0, stages, sweeps. Processes beside each other
(one a card, started whenever a card is free) share the list: each takes the next group that nobody holds. A cell that
failed is noted and left out of later calls, unless --again. Last line of stdout: one JSON object. Exit 1 if a cell
failed, 3 if the device failed with it: call again to go on.
"""
PARTS = ("drafter", "weaver")
ORDER = ("headline", "stages")  # other parts follow
NULL = "null"  # part of the null control
DEVICE_FAILED = 3
logger = logging.getLogger("run_paired")


@dataclass
class Runner:
    """A cell under way: its records so far and the loop that decodes its prompts."""

    cell: dict
    path: str  # of the cell in its suite
    writer: CellWriter
    config: object
    prompts: list[Prompt]
    run: object
    facts: dict
    taken: Span
    span: CardSpan
    joules: list[float] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)  # prompt -> how many cells decoded it before this one

    def decode(self, prompt: Prompt, detokenise, turn: int) -> bool:
        """Decode one prompt and record it, unless an earlier run did; return whether it was decoded now."""
        if prompt.id in self.writer.done:
            return False
        self.turns[prompt.id] = turn
        self.span.start()
        self.run([prompt], on_finish=self.writer.add, detokenise=detokenise, traced=self.cell["traced"])
        card = self.span.end()
        if card and "before" in card:
            self.joules.append((card["after"]["energy_mj"] - card["before"]["energy_mj"]) / 1e3)
        return True

    def finish(self, commit: str, clocks: dict | None, where: torch.device, group: int) -> dict:
        """Write the cell's files; `group` is the number of cells that took turns."""
        facts = {**self.facts, "device": device.facts(where) | {"clocks": clocks}, "cpu_share": None}
        # of the prompts that this run decoded, prefill included
        facts["energy"] = {"joule": sum(self.joules), "prompts": len(self.joules)} if self.joules else None
        # null for a prompt that an earlier, killed run decoded
        facts["turns"] = {"of": group, "places": [self.turns.get(prompt.id) for prompt in self.prompts]}
        facts |= run_facts(self.cell, self.config, span=self.taken, commit=commit)
        return self.writer.finish([prompt.id for prompt in self.prompts], facts)


class Shared:
    """What cells share: models of one set of weights, shape and type, and the loops of one setting and seed."""

    def __init__(self, cells: list[dict], longest: int, where: torch.device):
        """`longest` is the number of tokens of the longest prompt of all cells."""
        self._cells, self._longest, self._where = cells, longest, where
        self._key, self._models, self._loops, self._round, self._heads = None, None, {}, None, {}

    def loop(self, cell: dict, config):
        """Return the loop of a cell; cells of other sets with the same settings share it."""
        now = (_family(cell), *round_of(cell))
        if now != self._round:
            # graphs hold their memory until they go
            self._loops, self._round = {}, now
            self._give_back()
        key = json.dumps([cell["decode"], cell["engine"], cell.get("forms"), cell["clock"], config.eos_tokens])
        if key not in self._loops:
            models, named = self._models_of(cell), {"longest": self._longest}
            try:
                self._loops[key] = engines.make_loop(cell, models, config, self._where, **named)
            except torch.OutOfMemoryError:
                logger.warning("%s: out of memory, once more after giving back what nothing holds", cell["variant"])
                self._give_back()
                self._loops[key] = engines.make_loop(cell, models, config, self._where, **named)
        return self._loops[key]

    def _give_back(self) -> None:
        gc.collect()
        if self._where.type == "cuda":
            torch.cuda.empty_cache()

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


def round_of(cell: dict) -> tuple:
    """Return what cells share whose loops are kept: those of a sweep's other points have memory of their own."""
    part = cell.get("part", ORDER[0])
    # a control apart from what it controls would measure the machine's drift
    part = ORDER[0] if part == NULL else part
    point = cell["decode"]["budget"] if part == "budgets" else None
    return part, cell["setting"], cell["seed"], point


def rank(cell: dict) -> tuple:
    """Return where a cell stands: part, T = 1 first, seed; of T = 1 all seeds come before T = 0."""
    part, setting, seed, point = round_of(cell)
    order = ORDER.index(part) if part in ORDER else len(ORDER)
    return order, setting != "t1", setting, seed, part, point or 0


def groups_of(cells: list[dict]) -> list[list[dict]]:
    """Return cells that are decoded side by side, what matters most first; groups that share loops stand in a row.

    Traced and untimed cells stand alone. Within a group cells of one method stand in a row, a null control beside ar.
    """
    groups: dict[tuple, list[dict]] = {}
    for cell in cells:
        key = tuple(cell[name] for name in ("suite", "target", "dataset", "clock", "traced")) + round_of(cell)
        alone = () if cell["clock"] == "wall" else (cell["variant"],)
        groups.setdefault(key + alone, []).append(cell)
    for group in groups.values():
        methods = [cell["decode"]["method"] for cell in group]
        group.sort(key=lambda cell, methods=methods: methods.index(cell["decode"]["method"]))
    return sorted(groups.values(), key=lambda group: rank(group[0]))


class Claims:
    """Who decodes which group, and which cells failed, in a folder that the processes of a suite share.

    A claim is a lock, which goes with its process; failures are files named after the cell and its digest.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def take(self, group: list[dict]):
        """Yield whether the group is this process's for the block; it is not while another one holds it."""
        with open(self._folder / f"{self._name(group[0]['path'])}.lock", "w", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def note(self, cell: dict, digest: str, error: str) -> None:
        """Note that a cell of this digest failed."""
        manifest.write_json(self._failure(cell, digest), {"cell": cell["path"], "error": error})

    def has_failed(self, cell: dict, digest: str) -> bool:
        return self._failure(cell, digest).exists()

    def _failure(self, cell: dict, digest: str) -> Path:
        return self._folder / f"{self._name(cell['path'] + digest)}.failed.json"

    @staticmethod
    def _name(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:20]


class DeviceFailed(RuntimeError):
    """The device refuses all further work of this process."""


def run_group(group: list[dict], shared: Shared, options, where: torch.device, failed: dict) -> int:
    """Decode the cells of one group side by side; returns how many prompts were decoded.

    A cell that fails is put into `failed` (path -> reason) and the others go on. Raises DeviceFailed for an error after
    which the device does nothing more.
    """
    decoded = 0
    with contextlib.ExitStack() as stack:
        runners = [_try(cell["path"], failed, _open, cell, shared, options, where, stack) for cell in group]
        runners = [runner for runner in runners if runner is not None]
        detokenise = load_tokenizer(group[0]["weights"]["target"]).decode
        span = CardSpan(where)
        span.start()
        for number, prompt in enumerate(runners[0].prompts if runners else ()):
            for turn, runner in enumerate(runners[:: -1 if number % 2 else 1]):
                if runner.path not in failed:
                    decoded += bool(_try(runner.path, failed, runner.decode, prompt, detokenise, turn))
        clocks = span.end()
        for runner in runners:
            if runner.path not in failed:
                _try(runner.path, failed, runner.finish, options.commit, clocks, where, len(runners))
    return decoded


def _try(path: str, failed: dict, call, *arguments):
    try:
        return call(*arguments)
    except Exception as error:  # the other cells are still worth the machine's time; the exit status tells
        failed[path] = f"{type(error).__name__}: {error}"[:500]
        logging.exception("%s failed", path)
        if "CUDA" in str(error) and not isinstance(error, (ValueError, torch.OutOfMemoryError)):
            raise DeviceFailed(failed[path]) from error
        return None


def _open(cell: dict, shared: Shared, options, where: torch.device, stack) -> Runner:
    taken, file, folder = Span(), prompts_file(cell, options.out), options.out / cell["path"]
    # where Snakemake looks for it: `folder` may lie below another one
    place, cell = Path(cell["path"]), without_place(cell)
    check_weights(cell)
    rows = read_prepared(file)
    prompts = [Prompt(row.id, row.index, row.tokens) for row in rows]
    writer = stack.enter_context(CellWriter(folder, digest=digest_of(cell, file)))
    writer.on_device(device.facts(where)["name"], [row.id for row in rows])
    tokenizer = load_tokenizer(cell["weights"]["target"])
    config = decode_config(cell, tokenizer)
    run = shared.loop(cell, config)
    if cell["clock"] != "off":
        # no measured prompt: the first one's tokens in reverse
        warm_up = Prompt("warm-up", 0, prompts[0].tokens[::-1])
        run([warm_up], max_new_tokens=WARM_UP_TOKENS, on_finish=lambda _: None, detokenise=tokenizer.decode)
    facts = {
        "source_digest": source_of(cell),
        "prompts_sha256": manifest.sha256_file(file),
        "prompts": len(rows),
        "resumed_requests": len(writer.done),
        "rerun": rerun_command(place),
    }
    return Runner(cell, place.as_posix(), writer, config, prompts, run, facts, taken, CardSpan(where))


def run(options: argparse.Namespace) -> dict:
    """Run the groups that nobody holds, in the order of `groups_of`, until nothing is left to take."""
    cells = read_cells(options.list)
    groups = part_of(groups_of(cells), options.part)
    device.make_deterministic(threads=cells[0]["threads"])
    deadline = time.monotonic() + options.seconds if options.seconds else float("inf")
    files = {prompts_file(cell, options.out) for cell in cells}
    longest = max(len(row.tokens) for file in files for row in read_prepared(file))
    claims, failed, decoded = Claims(options.out / f"results/{cells[0]['suite']}/claims"), {}, 0
    with device.claim(device.check_device(cells[0]["device"])) as where:
        shared, took_any = Shared(cells, longest, where), True
        while took_any:  # a group whose process died is free again
            took_any = False
            for group in groups:
                with claims.take(group) as is_mine:
                    left = [cell for cell in group if is_mine and _is_left(cell, claims, failed, options)]
                    if not left or time.monotonic() > deadline:
                        continue
                    took_any, start = True, time.monotonic()
                    try:
                        decoded += run_group(left, shared, options, where, failed)
                    finally:
                        for cell in (cell for cell in left if cell["path"] in failed):
                            claims.note(cell, digest_of(cell, prompts_file(cell, options.out)), failed[cell["path"]])
                        name = "/".join(left[0]["path"].split("/")[-4:])
                        seconds = f"{len(left)} cells, {time.monotonic() - start:.1f} s"
                        print(f"{name}: {seconds}{_reserved(where)}", file=sys.stderr, flush=True)
    left = sum(not is_done(cell, options.out) for group in groups for cell in group)
    return {"groups": len(groups), "prompts": decoded, "left": left, "failed": failed}


def _reserved(where: torch.device) -> str:
    return f", {torch.cuda.max_memory_reserved(where) / 2**30:.1f} GiB reserved" if where.type == "cuda" else ""


def _is_left(cell: dict, claims: Claims, failed: dict, options) -> bool:
    if cell["path"] in failed or is_done(cell, options.out):
        return False
    return options.again or not claims.has_failed(cell, digest_of(cell, prompts_file(cell, options.out)))


@told
def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", required=True, type=Path, help="plan.json or JSON lines of resolved cells")
    parser.add_argument("--out", required=True, type=Path, help="folder that stands for the repository's root")
    parser.add_argument("--commit", required=True, help="commit of the code, recorded in every cell")
    parser.add_argument("--part", help="I/N: only the I-th of N parts of the groups, for N calls side by side")
    parser.add_argument("--again", action="store_true", help="try cells again that failed in an earlier call")
    parser.add_argument("--seconds", type=float, help="start no further group after this long")
    parser.add_argument("--log", type=Path, help="file for the log (default: stderr)")
    options = parser.parse_args()
    logging.basicConfig(filename=options.log, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        result = run(options)
    except DeviceFailed as error:
        print(json.dumps({"device_failed": str(error)[:500]}))
        return DEVICE_FAILED
    print(json.dumps(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
