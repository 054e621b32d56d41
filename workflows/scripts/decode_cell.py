"""Decode one cell: load what its method needs, decode every prompt, write its records and manifest."""

import argparse
import dataclasses
import errno
import functools
import importlib.util
import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path

import torch
from input_errors import told
from progress import Progress, suite_from

from baselines import engine_names, engines
from baselines.loading import load_models
from baselines.methods import METHODS, check
from baselines.refusals import one_of
from tfm import device, manifest
from tfm.cells import CellWriter, rerun_command
from tfm.config import DecodeConfig
from tfm.decode import Prompt
from tfm.gpu_meter import CardSpan
from tfm.prompts import read_prepared
from tfm.span import Span
from tfm.tokenizer import check_folder_tokenizers, end_tokens, load_tokenizer

DESCRIPTION = """
Reads the resolved cell (JSON), its prompt file and the weights that the cell names. Writes requests.parquet,
steps.parquet, trees.parquet and cell.json to --out, each in one move; finished requests are kept in done.jsonl while
the cell runs, so that a killed cell goes on where it stopped. Last line of stdout: one JSON object. Exit 2 on bad
input, 1 on any other failure.
"""
WARM_UP_TOKENS = 8
CELL_KEYS = ("engine", "dataset", "variant", "setting", "seed", "clock", "traced", "threads", "device", "dtype")
CELL_KEYS += ("weights", "weights_sha256")
OWN_KEYS = ("method", "gdn_backend", "stop", "eos_tokens")  # of decode
logger = logging.getLogger("decode_cell")


def run_cell(cell: dict, *, prompts: Path, out: Path, commit: str | None = None, suite=None) -> dict:
    """Decode the prompts that have no record yet, then write the cell's files; return its cell.json.

    Raises ValueError when the weights or prompts are not those of the cell, before any model is built.
    """
    span = Span()
    # where Snakemake looks for it: `out` may lie below another folder
    place, cell = Path(cell.get("path", out)), without_place(cell)
    check_cell(cell)
    check_kernels()
    check_weights(cell)
    rows = read_prepared(prompts)
    source, prompts_sha256 = source_of(cell), manifest.sha256_file(prompts)
    digest = digest_of(cell, prompts)
    device.make_deterministic(threads=cell["threads"])
    where, shared = device.check_device(cell["device"]), cell["clock"] == "off"
    with CellWriter(out, digest=digest) as writer, device.claim(where, shared=shared) as where:
        writer.on_device(device.facts(where)["name"], [row.id for row in rows])
        pending, resumed = _pending(rows, writer), len(writer.done)
        if not pending and writer.facts:
            return writer.finish([row.id for row in rows], writer.facts)
        tokenizer = load_tokenizer(cell["weights"]["target"])
        config, share, clocks = decode_config(cell, tokenizer), None, None
        if pending:
            name = "/".join([cell["dataset"], cell["variant"], cell["setting"], f"seed{cell['seed']}"])
            progress = Progress(name, prompts=len(rows), done=resumed, suite=suite)
            with_progress = {"writer": writer, "progress": progress, "tokenizer": tokenizer}
            share, clocks = decode_prompts(pending, cell, config, where, **with_progress)
        facts = {"source_digest": source, "prompts_sha256": prompts_sha256, "prompts": len(rows)}
        facts |= {"resumed_requests": resumed, "rerun": rerun_command(place)}
        facts["device"] = device.facts(where) | {"clocks": clocks}
        # of the CPU only: with a GPU the process may sleep while kernels run
        facts["cpu_share"] = share if cell["device"] == "cpu" else None
        facts |= run_facts(cell, config, span=span, commit=commit)
        return writer.finish([row.id for row in rows], facts)


def digest_of(cell: dict, prompts: Path) -> str:
    """Return the cell_digest that a run of the cell with these prompts has now."""
    source, prompts_sha256 = source_of(cell), manifest.sha256_file(prompts)
    return manifest.cell_digest(without_place(cell), source=source, prompts_sha256=prompts_sha256)


def source_of(cell: dict) -> str:
    """Return the source digest of the cell's engine, method and backend."""
    decode = cell["decode"]
    return _source_digest(cell["engine"], cell.get("forms"), decode["method"], decode["gdn_backend"])


@functools.cache
def _source_digest(engine: str, forms: str | None, method: str, gdn_backend: str) -> str:
    return engine_names.source_of(
        {"engine": engine, "forms": forms, "decode": {"method": method, "gdn_backend": gdn_backend}}
    )


def without_place(cell: dict) -> dict:
    """Return a cell without the keys that say where it stands in its suite."""
    return {key: value for key, value in cell.items() if key not in ("path", "part")}


def _pending(rows, writer: CellWriter) -> list[Prompt]:
    """Return the prompts without a record, and log what the side file held."""
    pending = [Prompt(row.id, row.index, row.tokens) for row in rows if row.id not in writer.done]
    logger.info("%s: %d prompts, %d done before", writer.folder, len(rows), len(writer.done))
    if writer.side.dropped:
        logger.warning("%s: of another config, code, weights, prompts or device; starting over", writer.side.path)
    if writer.side.damaged:
        logger.warning("%s: %d damaged lines, decoded again", writer.side.path, writer.side.damaged)
    return pending


def run_facts(cell: dict, config: DecodeConfig, *, span: Span, commit: str | None) -> dict:
    """Return what cell.json says of the run itself: resolved cell, code, warm-up and times."""
    environment = manifest.environment()
    if commit is not None:
        environment["git"] = {"commit": commit, "dirty": None}
    return {
        "schema": manifest.SCHEMA_VERSION,
        "loader_digest": manifest.loader_digest(),
        "cell": {**cell, "decode": dataclasses.asdict(config)},
        "environment": environment,
        "warm_up": {"prompts": int(cell["clock"] != "off"), "new_tokens": WARM_UP_TOKENS},
        **span.facts(),
    }


def decode_prompts(
    prompts, cell: dict, config: DecodeConfig, where, *, writer, progress: Progress, tokenizer
) -> tuple[float, dict | None]:
    """Load the models, warm up when the cell is timed, and decode; each finished request goes to the writer.

    Returns the share of the wall that the process spent on a core, below 1 when other work took the core away, and the
    card's clocks before the first prompt and after the last one (None on a CPU).
    """
    # absent where the drafter's config decides, and where the models are those of the folders
    options = {key: cell.get(key) for key in ("swa_causal", "graft")}
    models = load_models(cell["weights"], device=where, dtype=getattr(torch, cell["dtype"]), **options)
    longest = max(len(prompt.tokens) for prompt in prompts)
    run = engines.make_loop(cell, models, config, where, longest=longest)
    if cell["clock"] != "off":
        # no measured prompt: the first one's tokens in reverse
        warm_up = Prompt("warm-up", 0, prompts[0].tokens[::-1])
        run([warm_up], max_new_tokens=WARM_UP_TOKENS, on_finish=lambda _: None, detokenise=tokenizer.decode)

    def on_finish(trace) -> None:
        writer.add(trace)
        progress.finished()
        tokens, steps = len(trace.output_tokens), len(trace.steps)
        logger.info("%s: %d tokens in %d steps, %s", trace.id, tokens, steps, trace.finish_reason)

    span = CardSpan(where)
    span.start()
    wall, cpu = time.perf_counter(), time.process_time()
    run(
        prompts,
        on_finish=on_finish,
        on_token=progress.token,
        detokenise=tokenizer.decode,
        traced=cell["traced"],
    )
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    clocks = span.end()
    progress.close()
    return round(share, 4), clocks


def decode_config(cell: dict, tokenizer) -> DecodeConfig:
    """Return the cell's settings with the tokenizer's and the model's ends of turn as EOS, when the cell names none."""
    for key in ("stop", "eos_tokens"):
        if not isinstance(cell["decode"][key], list | tuple):  # a word would become its letters
            raise ValueError(f"{key}: {cell['decode'][key]!r} is not allowed (allowed: a list); write [] for none")
    fields = {**cell["decode"], "stop": tuple(cell["decode"]["stop"])}
    fields["eos_tokens"] = tuple(cell["decode"]["eos_tokens"]) or end_tokens(cell["weights"]["target"], tokenizer)
    return check(DecodeConfig(**fields))


def check_kernels() -> None:
    """Raise ValueError when tfm_kernels is another checkout's, whose code the source digest does not cover."""
    spec = importlib.util.find_spec("tfm_kernels")
    places = [Path(place).resolve() for place in spec.submodule_search_locations] if spec else []
    if (manifest.REPOSITORY / "kernels").resolve() not in places:
        found = ", ".join(map(str, places)) or "not installed"
        raise ValueError(f"tfm_kernels: {found}, not this checkout's kernels folder; run pip install -e . here")


def check_weights(cell: dict) -> None:
    """Raise ValueError unless the checkpoint folders hold what the cell was resolved with."""
    for part, folder in cell["weights"].items():
        found, expected = manifest.sha256_weights(Path(folder)), cell["weights_sha256"][part]
        if found is None:
            raise ValueError(
                f"weights.{part}: {folder} holds no file; put the checkpoint there, or give its folder with "
                "--config weights=DIR"
            )
        if found != expected:
            raise ValueError(
                f"weights.{part}: {folder} has sha256 {found}, the cell was resolved with {expected}; "
                "restore the folder, or resolve the cell again by calling snakemake"
            )
    check_folder_tokenizers(cell["weights"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", required=True, help="the resolved cell, JSON text or @FILE")
    parser.add_argument("--prompts", required=True, type=Path, help="prepared prompts (prepare_prompts.py)")
    parser.add_argument("--out", required=True, type=Path, help="the cell's folder")
    parser.add_argument("--log", required=True, type=Path, help="file for everything but the progress line")
    parser.add_argument("--commit", help="commit of the code where this is no git checkout")
    return parser.parse_args(arguments)


@told
def main() -> int:
    options = parse()
    try:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(filename=options.log, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    except OSError as error:  # no log to write it to
        raise ValueError(f"--log {options.log}: {error.strerror}; give a file in a folder of your own") from error
    logging.captureWarnings(True)
    try:
        cell = read_cell_argument(options.cell)
        suite = suite_from(os.environ.get("TFM_PROGRESS"))
        result = run_cell(cell, prompts=options.prompts, out=options.out, commit=options.commit, suite=suite)
    except Exception as error:
        logger.exception("the cell failed")
        print(f"\ndecode_cell: {options.out}: {explain(error, options.out)} (log: {options.log})", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(json.dumps({"cell": str(options.out), "prompts": result["prompts"], "seconds": result["seconds"]}))
    return 0


def read_cell_argument(text: str) -> dict:
    """Return the cell of --cell: JSON text, or the file behind an @."""
    try:
        cell = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise ValueError(f"--cell: {text!r} cannot be read ({error.strerror}); give @FILE or JSON text") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--cell: {text[:40]!r} is not JSON ({error}); take one of the suite's plan.json") from error
    if not isinstance(cell, dict) or "decode" not in cell:
        raise ValueError(f"--cell: {text[:40]!r} is no resolved cell; take one of the suite's plan.json")
    return cell


def check_cell(cell: dict) -> None:
    """Raise ValueError, naming the key, unless a resolved cell has what its run reads, of values that exist."""
    remedy = "take one of the suite's plan.json"
    decode, known = cell["decode"], {field.name for field in dataclasses.fields(DecodeConfig)}
    if not isinstance(decode, dict):
        raise ValueError(f"--cell: decode: {decode!r} is not allowed (allowed: an object); {remedy}")
    lacking = [key for key in CELL_KEYS if key not in cell] + [f"decode.{key}" for key in OWN_KEYS if key not in decode]
    if lacking or set(decode) - known:
        unknown = f", knows no decode.{', decode.'.join(sorted(set(decode) - known))}" if set(decode) - known else ""
        raise ValueError(f"--cell: lacks {', '.join(lacking) or 'nothing'}{unknown}; {remedy}")
    for key, value, allowed in (
        ("engine", cell["engine"], engine_names.ENGINES),
        ("dtype", cell["dtype"], ("float32", "bfloat16")),
        ("method", decode["method"], tuple(METHODS)),
    ):
        one_of(key, value, allowed)
    if type(cell["threads"]) is not int or not 1 <= cell["threads"] <= 1024:
        raise ValueError(f"threads: {cell['threads']!r} is not allowed (allowed: an integer from 1 to 1024); {remedy}")


def explain(error: Exception, out: Path) -> str:
    """Return what is printed of a failure; a full disk and a lock get their remedy, which the system does not know."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(out).free // 2**20 if out.exists() else 0
        return (
            f"disk full ({error.strerror}; {free} MiB free there): free some space or raise the limit, then call "
            "`tfm resume`; finished prompts are kept"
        )
    return str(error) if isinstance(error, BlockingIOError) else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # at once: the side file is gone, and a kill during the interpreter's slow exit would cost the finals as well
    os._exit(status)
