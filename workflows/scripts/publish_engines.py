"""Publish what ran inside SGLang as it came back from a GPU machine: steps, texts, cells, and what is missing."""

import argparse
import contextlib
import json
import re
import shutil
import statistics
import sys
import tarfile
import tempfile
from pathlib import Path

from engine_tables import read
from engine_taus import engine_of
from engines_readme import folder_text
from input_errors import told
from input_files import read_expected
from inventory import write_inventory
from packing import read_packed, write_packed
from publish import pack, settle
from summarise_engines import ARMS, CELLS, MARK, STEPS, devices_in, load_run, tables_of, write_tables

from baselines.plans import read_cells
from tfm.manifest import environment, sealed, sha256_file, write_json

DESCRIPTION = """
Reads --run, the folder into which everything was put that came back, under any names: files of bench_serving.py,
check_serving.py and bench_engine.py, archives of serving.sh, and results/<suite>/ of served cells and of ours beside
them. Without a file of bench_engine.py the steps of our engine are those of --ours. Writes --out anew, at most --limit
bytes: raw steps and texts, records packed in one parquet a kind, tables, manifest, summary.json and README.md, and the
inventory beside --out. What is not there is named with its reason: what a record says, or --stopped. NOTES.md in --out
stays. A call whose plugin had --plugin settings is an arm of its own, named by them. --commit says whose code ran, for
all files or, as CALL=COMMIT, for those of one call's folder. Last line of stdout: one JSON object. Exit 2 on bad input.
"""
LIMIT = 250_000
OURS = Path("results/published/graft-h200/steps/bench.json.gz")
PARTS = ("steps", "ours", "first", "cells", "cells-ours")
SUITES = ("results/engines", "results/engines-ours")
KIND = {"served": {"arms", "options", "shape", "failed"}, "texts": {"arms", "wanted", "failed"}}
KIND["ours"] = {"arms", "records", "weights_gib"}
ALIKE = ("budget", "candidates", "accept", "new_tokens", "flag")
OWN_KEYS = ("arm", "variant", "context", "round", "ms")
VARIANTS = {"variant": "all:fused_cuda", "recurrent_variant": "all:recurrent_triton"}
WORDS = 400  # of a failure, which may end with a server's log
MACHINE_PATH = re.compile(r"(?<![\w./])/(?:[\w.+@=-]+/)+")


def unpack(run: Path, out: Path) -> None:
    """Put the archives' cells and those below `run` itself into `out`; logs stay behind."""
    for archive in files_of(run, ".tar.gz", ".tgz"):
        with tarfile.open(archive) as packed:
            for one in packed.getmembers():
                place = Path(one.name.removeprefix("./"))
                # an archive's words are no paths to follow
                if one.isfile() and place.parts[:1] == ("results",) and ".." not in place.parts:
                    target = out / place
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(packed.extractfile(one).read())
    for suite in SUITES:
        if (run / suite).is_dir():
            shutil.copytree(run / suite, out / suite, dirs_exist_ok=True)


def files_of(run: Path, *endings: str) -> list[Path]:
    """Return the files of a folder and of a call's folder in it, sorted; nothing of results/."""
    found = sorted(path for path in [*run.glob("*"), *run.glob("*/*")] if path.name.endswith(endings))
    return [path for path in found if path.is_file() and path.parent.name != "results"]


def sort_files(run: Path) -> tuple[dict[str, list[tuple[str, dict]]], dict[str, str]]:
    """Return kind -> (name, content) of the JSON files in a folder, and name -> reason of those that are left out."""
    found, left_out = {kind: [] for kind in KIND}, {}
    for path in files_of(run, ".json", ".json.gz"):
        content, name = read(path), path.relative_to(run).as_posix()
        kind = next((kind for kind, keys in KIND.items() if isinstance(content, dict) and keys <= set(content)), None)
        if kind is None:
            left_out[name] = "no file of a bench or a check"
        elif kind == "served" and content["options"].get("layers"):
            left_out[name] = f"a smoke run with {content['options']['layers']} layers: no time"
        else:
            found[kind].append((name, content))
    return found, left_out


def named_by_settings(record: dict) -> dict:
    """Return a file of bench_serving.py whose arms are named by the plugin's settings too, where it had any."""
    words = record["options"].get("plugin") or []
    rename = {"arms": {}, "failed": {}}
    for part, found in rename.items():
        found.update({" ".join([arm, *words]): facts for arm, facts in record[part].items()})
    return {**record, **rename}


def whose_code(words: list[str]) -> dict[str | None, str]:
    """Return call -> commit as the publisher said, None for all others; raises ValueError for words that say none."""
    found = {}
    for word in words:
        call, is_one, commit = word.rpartition("=")
        if not commit or (is_one and not call) or (call or None) in found:
            raise ValueError(f"--commit: {word!r} is not allowed (allowed: COMMIT once, CALL=COMMIT once a call)")
        found[call or None] = commit
    return found


def commit_of(name: str, record: dict, commits: dict[str | None, str]) -> dict:
    """Return the commit whose code made a file, and what the file said; raises ValueError where nobody names it.

    A copy of a checkout may name an older commit and call itself changed: then the publisher's word counts.
    """
    commit = commits.get(name.partition("/")[0], commits.get(None))
    git = record.get("git") or {}
    known = commit or git.get("commit")
    if not known or (git.get("dirty") and not commit):
        says = "names no commit" if not known else "is of code that its machine calls uncommitted"
        raise ValueError(f"--commit: a file of bench_serving.py {says} ({name}); say which commit's code ran")
    return {"commit": known, "said": git}


def slim_served(record: dict, git: dict) -> dict:
    """Return a file of bench_serving.py without its machine's paths."""
    arms = {
        arm: {key: value for key, value in facts.items() if key != "cell"}
        | {"cell": {key: value for key, value in facts["cell"].items() if key != "weights"}}
        for arm, facts in record["arms"].items()
    }
    failed = {arm: plain(text) for arm, text in record["failed"].items()}
    return without_paths({**record, "arms": arms, "failed": failed, "git": git})


def slim_ours(report: dict, contexts: set[int]) -> dict:
    """Return of a file of bench_engine.py the whole steps of the arms that both engines have."""
    wanted = set(VARIANTS.values())
    records = [
        {key: row[key] for key in OWN_KEYS if key in row}
        for row in report["records"]
        if "ms" in row and row["variant"] in wanted and row["arm"] in ARMS and row["context"] in contexts
    ]
    keys = {f"{row['arm']} {row['variant']}" for row in records}
    kept = {key: report.get(key) for key in ("device", "weights_gib")}
    kept["git"] = (report.get("environment") or {}).get("git")
    return {**kept, "arms": {key: report["arms"][key] for key in sorted(keys)}, "records": records}


def plain(text: str) -> str:
    """Return a failure in one line, without a machine's folders."""
    return MACHINE_PATH.sub("", " ".join(str(text).split()))[:WORDS]


def without_paths(value):
    """Return a JSON value without the texts that are absolute paths; what an engine says of itself holds some."""
    if isinstance(value, dict):
        return {key: without_paths(one) for key, one in value.items() if not _is_path(one)}
    return value


def _is_path(value) -> bool:
    return isinstance(value, str) and value.startswith("/")


def check_alike(served: list[tuple[str, dict]]) -> None:
    """Raise ValueError when files to be laid beside each other differ in card, shape or work a step."""
    for name, record in served[1:]:
        first, other = served[0][1], record
        pairs = {"card": [one["device"]["name"] for one in (first, other)], "shape": [first["shape"], other["shape"]]}
        pairs |= {key: [one["options"].get(key) for one in (first, other)] for key in ALIKE}
        for key, (one, two) in pairs.items():
            if one != two:
                raise ValueError(f"--run: {served[0][0]} and {name} differ in {key}; publish them apart")


def repeated(served: list[tuple[str, dict]]) -> dict[str, str]:
    """Return the arms of earlier files that a later one timed again, and which therefore stand in no table."""
    found, last = {}, {}
    for name, record in served:
        for arm, facts in record["arms"].items():
            if arm in last:
                ms = statistics.median(row["step_ms"] for row in last[arm][1]["rows"])
                found[f"{arm} of {last[arm][0]}"] = (
                    f"timed again in {name}; its median was {ms:.2f} ms over all contexts"
                )
            last[arm] = name, facts
    return found


def planned_cells(root: Path, stopped: dict[str, str]) -> tuple[list[Path], list[dict]]:
    """Return the cells that are whole, as paths in `root`, and those that a plan names beside them."""
    here, missing = [], []
    for suite in SUITES:
        there = sorted(path.parent.relative_to(root) for path in root.glob(f"{suite}/cells/*/*/*/*/*/*/cell.json"))
        here += there
        plan = root / suite / "plan.json"
        for cell in read_cells(plan) if plan.is_file() else ():
            if Path(cell["path"]) in there:
                continue
            side = engine_of(cell["engine"])
            started = (root / cell["path"] / "done.jsonl").exists()
            reason = stopped.get("cells" if side == "sglang" else "cells-ours", "not run")
            row = {"path": cell["path"], "engine": side, "method": cell["decode"]["method"]}
            row |= {"setting": cell["setting"], "reason": "begun and not finished" if started else reason}
            missing.append(row)
    return here, missing


def pack_cells(root: Path, cells: list[Path], out: Path) -> None:
    """Pack the records of cells, whose manifests lose the paths that their servers named and are sealed anew."""
    with contextlib.chdir(root):  # cells are named by their paths in the suite
        pack(cells, out)
    packed = read_packed(out / CELLS)
    packed["cells"] = [sealed(without_paths(cell)) for cell in packed["cells"]]
    write_packed(out / CELLS, packed)


def collect(options: argparse.Namespace, root: Path, out: Path) -> dict:
    """Write all that tables are made of to `out`; return what was missing and how many of what were found."""
    stopped = stops(options.stopped)
    unpack(options.run, root)
    files, left_out = sort_files(options.run)
    commits = whose_code(options.commit)
    check_alike(files["served"])
    timed = [(name, named_by_settings(record)) for name, record in files["served"]]
    left_out |= repeated(timed)
    served = [slim_served(record, commit_of(name, record, commits)) for name, record in timed]
    contexts = {row["prompt_tokens"] for one in served for arm in one["arms"].values() for row in arm["rows"]}
    ours, source = own_steps(files["ours"], options, commits)
    texts = []
    for _, one in files["texts"]:
        failed = {method: plain(why) for method, why in one["failed"].items()}
        texts.append({**without_paths(one), "failed": failed})
    slim = slim_ours(ours, contexts | {options.context}) if ours else None
    write_packed(out / STEPS, {"served": served, "ours": slim, "texts": texts})
    cells, missing = planned_cells(root, stopped)
    if cells:
        pack_cells(root, cells, out)
    asked = {"context": options.context, "attention": options.attention, **VARIANTS, "stopped": stopped}
    asked |= {"missing_cells": missing, "left_out": left_out, **source, "tests": last_line(options.run)}
    write_json(out / MARK, asked)
    if not (served or texts or cells or stopped):
        raise ValueError(f"--run: {options.run} holds no file of a bench or check and no cell; say --stopped PART=WHY")
    return {"served": len(served), "texts": len(texts), "cells": len(cells), "missing_cells": len(missing)}


def own_steps(
    here: list[tuple[str, dict]], options: argparse.Namespace, commits: dict[str | None, str]
) -> tuple[dict | None, dict]:
    """Return the file of bench_engine.py to lay beside, the run's own before --ours, and where it is from."""
    if here:
        name, report = here[-1]
        said = (report.get("environment") or {}).get("git") or {}
        commit = commits.get(name.partition("/")[0], commits.get(None))
        git = {"commit": commit, "dirty": False, "said": said} if commit else said
        return {**report, "environment": {"git": git}}, {"ours_from": "the same run", "ours_sha256": None}
    if not options.ours.is_file():
        return None, {"ours_from": None, "ours_sha256": None}
    found = read(options.ours)
    source = {"ours_from": f"another run, {options.ours.as_posix()}", "ours_sha256": sha256_file(options.ours)}
    return found.get(options.ours_key, found), source


def stops(words: list[str]) -> dict[str, str]:
    """Return part -> where it stopped; raises ValueError for a part that does not exist."""
    found = dict(word.partition("=")[::2] for word in words)
    wrong = [part for part, why in found.items() if part not in PARTS or not why]
    if wrong:
        raise ValueError(f"--stopped: {wrong[0]!r} is not allowed (allowed: PART=WHY, PART of {', '.join(PARTS)})")
    return {part: plain(why) for part, why in found.items()}


def last_line(run: Path) -> str | None:
    """Return the last line of the plugin's GPU tests, where their log came back."""
    logs = [path for path in files_of(run, "plugin-tests.log", "test_sglang_plugin.log")]
    lines = [line for log in logs for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    return plain(lines[-1]) if lines else None


def publish(options: argparse.Namespace) -> dict:
    """Write everything; return sizes and what is missing. Raises ValueError for too many bytes or damaged records."""
    expected, out = read_expected(options.expected), options.out.resolve()
    made = out.with_name(f".{out.name}.partial")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        counts = collect(options, Path(scratch), made)
    run = load_run(made, expected)
    summary = write_tables(run, made)
    write_json(made / "summary.json", summary)
    (made / "README.md").write_text(folder_text(run, tables_of(run), summary), encoding="utf-8")
    files = sorted(path for path in made.rglob("*") if path.is_file() and path.name != "README.md")
    outputs = {path.relative_to(made).as_posix(): sha256_file(path) for path in files}
    facts = {"outputs": outputs, "cards": sorted(devices_in(run)), "published_by": environment()}
    write_packed(made / "manifest.json.gz", facts)
    settled = settle(made, out, limit=options.limit)
    if (out.parent / "inventory.json").is_file():
        write_inventory(expected, out.parent, out.parent)
    lacking = sorted(name for name, entry in summary.items() if entry["value"] is None)
    return {"published": options.out.as_posix(), **settled, **counts, "without_value": lacking}


@told
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", required=True, type=Path, help="folder of all that came back")
    add("--out", type=Path, default=Path("results/published/engines-h200"))
    add(
        "--ours",
        type=Path,
        default=Path("results/published/graft-h200/steps/bench.json.gz"),
        help="steps of our engine",
    )
    add("--ours-key", default="tuned", help="entry of --ours, where it holds several (default: tuned)")
    add("--commit", nargs="+", default=[], metavar="[CALL=]COMMIT", help="whose code ran, where files do not say it")
    add("--stopped", nargs="+", default=[], metavar="PART=WHY", help=f"where a part stopped: {', '.join(PARTS)}")
    add("--context", type=int, default=512, help="prompt length of the summary (default 512)")
    add("--attention", default="triton", help="SGLang's attention backend of the summary (default triton)")
    add("--expected", type=Path, default=Path("workflows/config/expected.yaml"))
    add("--limit", type=int, default=LIMIT, help=f"bytes at most (default: {LIMIT})")
    print(json.dumps(publish(parser.parse_args(arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
