"""Feed every parser damaged and invented input: it reads it, or refuses it with an error of ours, and never crashes."""

import argparse
import functools
import gzip
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "workflows/scripts")]

from campaign_log import Trials  # noqa: E402
from decode_cell import read_cell_argument  # noqa: E402
from fuzz_inputs import VALUES, as_json, damaged, replaced  # noqa: E402
from import_requests import read_log, to_rows  # noqa: E402
from input_files import read_plan  # noqa: E402
from packing import read_packed  # noqa: E402
from workflow_runs import NANO, write_tiny_family  # noqa: E402

from baselines import suite  # noqa: E402
from baselines.commands.cells import KINDS, parse_value  # noqa: E402
from baselines.where import Condition  # noqa: E402
from tfm import checkpoints  # noqa: E402
from tfm.cells import read_cell  # noqa: E402
from tfm.heads import HeadConfig, build_head  # noqa: E402
from tfm.pins import load_pins  # noqa: E402
from tfm.prompt_sources import parse_rows  # noqa: E402
from tfm.prompts import read_prepared  # noqa: E402
from tfm.side_file import SideFile, count_records  # noqa: E402
from tfm.tokenizer import end_tokens, load_tokenizer  # noqa: E402
from tfm.tree import DraftTree  # noqa: E402

DESCRIPTION = """
Draws inputs for each parser with hypothesis: files with bytes changed, cut, repeated and moved, JSON with values
replaced, invented names and trees. A parser may read an input or raise a plain ValueError (or BlockingIOError) of ours;
anything else, also a subclass that a library raised, is a crash. Adds counts to --trials as each parser is done. Last
line of stdout: one JSON object. Exit 1 when an input crashed a parser; --crashes holds them.
"""
ALL = list(HealthCheck)


class Place:
    """A folder with one file that each input replaces."""

    def __init__(self, folder: Path, name: str):
        self.folder, self.path = folder, folder / name
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> Path:
        self.path.write_bytes(data)
        return self.path


def file_parsers(work: Path) -> dict[str, tuple]:
    """Return name -> (strategy of bytes, function of a path) of everything that is read from a file of ours."""
    place = {name: Place(work / name, file) for name, file in FILES.items()}
    pins = (ROOT / "workflows/config/datasets.yaml").read_bytes()
    prompt = {"id": "a", "index": 0, "dataset": "d", "domain": "math", "category": "", "template": "t", "sha256": "0"}
    prompts = "".join(json.dumps({**prompt, "id": f"p{i}", "tokens": [1, 2, i]}) + "\n" for i in range(3)).encode()
    row = {"id": "x", "dataset": "d", "domain": "math", "turns": ["what?", None], "meta": {"kind": "k"}}
    rows = (json.dumps(row) + "\n" + json.dumps({**row, "id": "y"}) + "\n").encode()
    plan, cell = published()
    entry = {"file": "f", "domain": "math", "category": ["kind"]}
    return {
        "done.jsonl": (damaged(side_file(place["done.jsonl"].path)), place["done.jsonl"], read_side_file),
        "prompts": (damaged(prompts) | as_json(replaced(prompt)), place["prompts"], read_prepared),
        "prompt rows": (
            damaged(rows) | as_json(replaced(row)),
            place["prompt rows"],
            lambda path: parse_rows(path.read_bytes(), "d", entry),
        ),
        "pins": (damaged(pins), place["pins"], load_pins),
        "cell.json": (
            damaged(json.dumps(cell).encode()) | as_json(replaced(cell)),
            place["cell.json"],
            lambda path: read_cell(path.parent),
        ),
        "plan.json": (damaged(json.dumps(plan).encode()) | as_json(replaced(plan)), place["plan.json"], read_plan),
        "plan.json.gz": (
            damaged(gzip.compress(json.dumps(plan).encode())) | as_json(replaced(plan)).map(gzip.compress),
            place["plan.json.gz"],
            read_plan,
        ),
        "request log": (
            damaged(LOG) | damaged(json.dumps(REQUEST).encode()) | as_json(replaced(REQUEST)),
            place["request log"],
            lambda path: to_rows(read_log("tfm", path), "they", "a card"),
        ),
        "cell argument": (
            damaged(json.dumps({"decode": {}}).encode()) | as_json(VALUES),
            place["cell argument"],
            lambda path: read_cell_argument(f"@{path}"),
        ),
    }


def published() -> tuple[dict, dict]:
    """Return a plan of two cells, and the cell.json of one."""
    plan = read_packed(ROOT / "results/published/nano/plan.json.gz")
    cell = read_packed(ROOT / "results/published/nano/cells.json.gz")["cells"][0]
    return {**plan, "cells": plan["cells"][:2]}, {key: value for key, value in cell.items() if key != "path"}


FILES = {
    "done.jsonl": "done.jsonl",
    "prompts": "set.jsonl",
    "prompt rows": "rows.jsonl",
    "pins": "datasets.yaml",
    "cell.json": "cell.json",
    "plan.json": "plan.json",
    "plan.json.gz": "plan.json.gz",
    "request log": "tfm.log",
    "cell argument": "cell.json",
}


# another harness's log, as it is printed and as JSON lines
LOG = b"""[gsm8k 1/1] qid=10 tokens=100 steps=20 accept_length=5.00 latency=1.5s finish=stop
base_url=http://127.0.0.1:30000 model=m temperature=1.0 reasoning=on max_new_tokens=4096 concurrency=1 seed=0
gsm8k                1      0         100       3.0       33.3          5.00        -
"""
REQUEST = {"dataset": "gsm8k", "id": 3, "temperature": 1, "reasoning": "on", "dataset_wall": 4.0, "concurrency": 1}
REQUEST |= {"meta_info": {"completion_tokens": 40, "spec_verify_ct": 8, "e2e_latency": 1.5, "finish_reason": None}}


def side_file(path: Path) -> bytes:
    """Return a whole side file of three records."""
    path.unlink(missing_ok=True)
    file = SideFile(path, digest="c")
    for number in range(3):
        file.append({"id": f"p{number}", "steps": [1, 2], "text": "é\n"})
    file.close()
    return path.read_bytes()


def read_side_file(path: Path) -> None:
    """Read a side file: damage is passed over, and what is kept is what was written."""
    file = SideFile(path, digest="c")
    try:
        assert all(record in RECORDS for record in file.records), file.records
        assert count_records(path) >= len(file.records)
    finally:
        file.close()


RECORDS = [{"id": f"p{number}", "steps": [1, 2], "text": "é\n"} for number in range(3)]


def checkpoint_parsers(work: Path) -> dict[str, tuple]:
    """Return parsers of checkpoints: configs, headers of safetensors files, the pickled Weaver, tokenizers."""
    family = write_tiny_family(work / "family")
    checkpoints.save_weaver_pth(checkpoints.load_weaver(family / "weaver"), family / "weaver.pth")
    (family / "target/generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    checkpoints.save_head(build_head(HeadConfig("recurrent", d_model=8, d_embed=8, rank=4, state=4)), family / "head")
    tokenizer = load_tokenizer(family / "target")
    parsers, loaders = {}, {"target": checkpoints.load_target, "drafter": checkpoints.load_drafter}
    for part, load in (loaders | {"weaver": checkpoints.load_weaver, "head": checkpoints.load_head}).items():
        for name in ("config.json", "model.safetensors"):
            folder = work / f"{part} {name}"
            shutil.copytree(family / part, folder)
            whole = (folder / name).read_bytes()
            is_config = name == "config.json"
            inputs = damaged(whole) | as_json(replaced(json.loads(whole))) if is_config else damaged(whole, span=3000)
            parsers[f"{part} {name}"] = inputs, Place(folder, name), lambda path, load=load: load(path.parent)
    pth = (family / "weaver.pth").read_bytes()
    parsers["weaver.pth"] = damaged(pth), Place(work / "pth", "weaver.pth"), checkpoints.load_weaver
    short = (family / "target/generation_config.json").read_bytes()
    parsers["generation_config.json"] = (
        damaged(short) | as_json(replaced({"eos_token_id": [1, 2]})),
        Place(work / "generation", "generation_config.json"),
        lambda path: end_tokens(path.parent, tokenizer),
    )
    text = (family / "target/tokenizer.json").read_bytes()
    parsers["tokenizer.json"] = (
        damaged(text, span=4000),
        Place(work / "tokenizer", "tokenizer.json"),
        lambda path: load_tokenizer(path.parent),
    )
    return parsers


@functools.cache
def nano() -> dict:
    return suite.resolve(NANO)


@st.composite
def trees(draw) -> tuple:
    nodes = draw(st.integers(0, 6))
    parents = [draw(st.integers(-3, nodes + 1)) if draw(st.booleans()) else i - 1 for i in range(nodes)]
    tokens = draw(st.lists(st.integers(-2, 5), min_size=nodes, max_size=nodes + draw(st.integers(0, 1))))
    counts = draw(st.none() | st.lists(st.integers(-1, nodes + 1), min_size=0, max_size=2))
    return parents, tokens, counts


def build_tree(value) -> None:
    parents, tokens, counts = value
    tree = DraftTree.build(
        torch.tensor([tokens], dtype=torch.long),
        torch.tensor([parents], dtype=torch.long),
        num_nodes=None if counts is None else torch.tensor(counts, dtype=torch.long),
    )
    tree.validate()
    assert bool((tree.depths[tree.is_real] >= 0).all())


WORDS = st.sampled_from(
    ["==", ">=", " and ", " or ", "not ", "(", ")", "tfm", "method", "budget", "64", "'", " in ", "["]
)
NAME = st.from_regex(
    r"(tfm|dflash|ar|ddtree|dartree)(-[a-z]\d{0,4}|-sampled|-traversal|-stages|-){0,6}", fullmatch=True
)


def value_parsers() -> dict[str, tuple]:
    """Return name -> (strategy, None, function) of what comes from the command line or as a value."""
    # what a config names is looked up, so that invented folders are refused and large numbers are not run
    return {
        "config": (replaced(NANO), None, suite.resolve),
        "config text": (damaged(yaml.safe_dump(NANO).encode()), None, resolve_text),
        "variant": (NAME | st.text(max_size=30), None, lambda name: suite.parse_variant(name, nano())),
        "setting": (
            st.from_regex(r"t\d{0,25}(\.\d{0,25})?(-think)?", fullmatch=True) | st.text(max_size=12),
            None,
            suite.parse_setting,
        ),
        "KEY=VALUE": (st.text(max_size=20) | st.text(max_size=8).map(lambda text: f"k=[{text}"), None, parse_value),
        "where": (
            st.lists(WORDS | st.text(max_size=6), max_size=9).map("".join),
            None,
            lambda text: Condition(text, KINDS),
        ),
        "tree": (trees(), None, build_tree),
    }


def resolve_text(data: bytes) -> dict:
    """Read a config as Snakemake does; what is no YAML mapping is Snakemake's to refuse."""
    try:
        raw = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError):
        raise ValueError("no YAML") from None
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise ValueError("no mapping")
    return suite.resolve(raw)


def parsers(work: Path) -> dict[str, tuple]:
    """Return all parsers: name -> (strategy, place of the file or None, function)."""
    return value_parsers() | file_parsers(work) | checkpoint_parsers(work)


def is_ours(error: BaseException) -> bool:
    """Whether an error is one that we raise: a subclass of ValueError is a library's, and says not what to do."""
    return type(error) in (ValueError, BlockingIOError) and bool(str(error))


def fuzz(parser: tuple, *, inputs: int, seed: int) -> tuple[Counter, list[str]]:
    """Feed `inputs` inputs to a parser; return how many were read and refused, and the crashes."""
    strategy, place, function = parser
    counts, crashes = Counter(), []

    @seeded(seed)
    @settings(max_examples=inputs, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=ALL)
    @given(strategy)
    def feed(value) -> None:
        counts["inputs"] += 1
        try:
            function(value if place is None else place.put(value))
            counts["read"] += 1
        except Exception as error:
            counts["refused" if is_ours(error) else "crashed"] += 1
            if not is_ours(error) and len(crashes) < 20:
                where = traceback.extract_tb(error.__traceback__)[-1]
                crashes.append(f"{type(error).__name__}: {error} at {where.filename}:{where.lineno} for {value!r:.400}")

    feed()
    return counts, crashes


def fuzz_all(chosen: dict[str, tuple], *, inputs: int, seed: int, trials: Trials) -> tuple[Counter, list[str]]:
    """Feed each parser until it has had about `inputs` inputs; hypothesis stops a run when it repeats itself.

    Counts are noted as each parser is done.
    """
    total, all_crashes = Counter(), []
    for name, parser in chosen.items():
        counts, crashes, start = Counter(), [], time.monotonic()
        for number in range(1000):
            some = min(20_000, inputs - counts["inputs"])
            if some <= 0 or len(crashes) > 20:
                break
            more, found = fuzz(parser, inputs=some, seed=random.Random(f"{seed} {name} {number}").getrandbits(32))
            counts += more
            crashes += found
        print(f"{name}: {dict(counts)}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        values = {"fuzz_inputs": counts["inputs"], "fuzz_crashes": counts["crashed"]}
        trials.count("fuzz", f"{name}, seed {seed}: {counts['read']} read", **values)
        total += counts
        all_crashes += [f"{name}: {crash}" for crash in crashes]
    return total, all_crashes


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=6000, help="for each parser (default: 6000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of parsers (default: all)")
    parser.add_argument("--crashes", type=Path, help="file for the inputs that crashed a parser")
    parser.add_argument("--trials", type=Path, help="file of trials to add the counts to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: one for name, one in parsers(Path(folder)).items() if not options.only or name in options.only}
        trials = Trials(options.trials or Path(folder, "trials.jsonl"))
        total, crashes = fuzz_all(chosen, inputs=options.inputs, seed=options.seed, trials=trials)
    if options.crashes:
        options.crashes.write_text("\n".join(crashes) + "\n")
    print(json.dumps({"inputs": total["inputs"], "crashes": total["crashed"]}))
    return int(total["crashed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
