"""The faults of the campaign: each a name and a function that breaks a run of the bench and recovers it."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from campaign_bench import AR, TFM, Bench, Outcome, partial_cells, recover
from campaign_kill import Run, differences
from workflow_runs import environment_of

from tfm.side_file import NAME, count_records

Trial = Callable[[Bench], Outcome | None]
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


def finish(run: Run, *, log: str = "printed.log", expect_failure: bool = True, **start) -> tuple[str, list[str]]:
    """Run Snakemake to its end; return the last lines that it printed and what is wrong with how it ended."""
    with run.start(log=log, **start) as driver:
        driver.wait()
    text = (run.folder / log).read_text()
    problems = partial_cells(run)
    if expect_failure and driver.returncode == 0:
        problems.append("snakemake exits 0 in spite of the fault")
    return text, problems


# disks


def disk_full() -> Iterator[tuple[str, Trial]]:
    for size in (4, 24, 40, 64, 96):
        yield f"file system of {size} KiB", partial(small_disk, size)
    for size in (1500, 4000, 9000, 14000):
        yield f"files of at most {size} bytes", partial(small_files, size)


def small_disk(size: int, bench: Bench) -> Outcome | None:
    """results/ on a file system that is too small; what fitted is kept and there is room again afterwards."""
    run = bench.clean()
    place, kept = run.folder / "results", run.folder / "kept"
    place.mkdir()
    mount = f"mount -t tmpfs -o size={size}k tmpfs {place}"
    if subprocess.run([*NAMESPACE, mount], capture_output=True).returncode:
        return None
    keep = f'{mount} && {{ "$@"; status=$?; cp -a {place} {kept}; exit $status; }}'
    text, problems = finish(run, wrapper=(*NAMESPACE, keep, "sh"))
    place.rmdir()
    kept.rename(place)
    problems += partial_cells(run)
    return recover(Outcome(run, f"{named_as_full(text)}; {run.progress()}", problems))


def small_files(size: int, bench: Bench) -> Outcome:
    """No file may grow past a size, as under a quota."""
    run = bench.clean()
    text, problems = finish(run, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))
    return recover(Outcome(run, f"{named_as_full(text)}; {run.progress()}", problems))


def named_as_full(text: str) -> str:
    words = ("disk full", "No space left on device", "File too large")
    return next((f"said {word!r}" for word in words if word in text), "did not say why")


def read_only() -> Iterator[tuple[str, Trial]]:
    for name in ("results/", "folder of one cell"):
        for state in ("before the first job", "in mid-cell", "before the tables"):
            if name == "results/" or state == "in mid-cell":
                yield f"{name}, {state}", partial(remount, name, state)


def remount(name: str, state: str, bench: Bench) -> Outcome | None:
    """A part of results/ cannot be written to."""
    starts = {"before the first job": bench.clean, "in mid-cell": bench.half, "before the tables": bench.finished}
    run = starts[state]()
    place = run.folder / ("results" if name == "results/" else AR)
    place.mkdir(parents=True, exist_ok=True)
    mount = f"mount --bind {place} {place} && mount -o remount,bind,ro {place}"
    if subprocess.run([*NAMESPACE, mount], capture_output=True).returncode:
        return None
    if state == "in mid-cell":
        run_unlock(run)
    text, problems = finish(run, wrapper=(*NAMESPACE, f'{mount} && exec "$@"', "sh"))
    said = "Read-only file system" in text
    return recover(Outcome(run, f"said 'Read-only file system': {said}; {run.progress()}", problems))


def run_unlock(run: Run) -> None:
    """Unlock a folder whose Snakemake is gone, so that the fault meets the cell and not the lock."""
    call = [sys.executable, "-m", "snakemake", *run.arguments, "--unlock"]
    subprocess.run(call, cwd=run.folder, env=environment_of(run.folder), capture_output=True)


# damage

RECORDS = [f"{cell}/{kind}.parquet" for cell in (AR, TFM) for kind in ("requests", "steps", "trees")]
MANIFESTS = [f"{TFM}/cell.json", "results/nano/prompts/nano/sample-math.manifest.json", "results/nano/plan.json"]
PROMPTS = ["results/nano/prompts/nano/sample-math.jsonl"]
WEIGHTS = ["target/model.safetensors", "drafter/model.safetensors", "weaver/model.safetensors", "target/config.json"]
WEIGHTS += ["drafter/config.json", "weaver/config.json", "target/tokenizer.json", "facts.json"]
CONFIGS = ["workflows/config/nano.yaml", "workflows/config/datasets.yaml", "workflows/schemas/config.schema.yaml"]


def damage(path: Path, how: str) -> None:
    """Cut a file to half, to nothing, or flip one bit of it; the new time is that of the damage."""
    data = bytearray(path.read_bytes())
    if how == "half":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = bytearray()
    else:
        rng = random.Random(f"{path.name} {how}")
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def damages(files: list[str], function: Callable, *, flips: int = 2) -> Iterator[tuple[str, Trial]]:
    """Yield a trial for each file cut to half, empty, and with one bit flipped `flips` times."""
    for file in files:
        for how in ("half", "empty", *(f"bit {number}" for number in range(1, flips + 1))):
            yield f"{file}, {how}", partial(function, file, how)


def damaged_result(file: str, how: str, bench: Bench) -> Outcome:
    """A file of a finished run is damaged and its tables are to be made: refused by name, and made again as told."""
    run = bench.finished()
    damage(run.folder / file, how)
    return recover(Outcome(run, "finished run", repeats=8), names=(Path(file).name,))


def damaged_prompts(file: str, how: str, bench: Bench) -> Outcome:
    """Prompts are damaged between two prompts of a cell: no cell reads them."""
    run = bench.half()
    damage(run.folder / file, how)
    return recover(Outcome(run, "half a cell", repeats=8), names=(Path(file).name,))


def damaged_weights(file: str, how: str, bench: Bench) -> Outcome:
    """Weights are damaged between two prompts of a cell: refused by name before anything runs, until put back."""
    run = bench.half()
    place = bench.own_weights(run)
    whole = (place / file).read_bytes()
    damage(place / file, how)
    names = (Path(file).name, f"{place.name}/{Path(file).parent}")
    return recover(
        Outcome(run, "half a cell", repeats=2), names=names, restore=lambda: (place / file).write_bytes(whole)
    )


def damaged_config(file: str, how: str, bench: Bench) -> Outcome:
    """A config is damaged between two prompts of a cell. A flipped bit may be another valid value, or a comment."""
    run = bench.half()
    path = run.folder / file
    whole = path.read_bytes()
    damage(path, how)
    names = (path.name, path.stem, "missing key", "unknown key", "is not allowed")
    # another value is another cell: once it is put back, the first two prompts are decoded again
    return recover(Outcome(run, "half a cell", repeats=4), names=names, restore=lambda: path.write_bytes(whole))


def damaged_side_file() -> Iterator[tuple[str, Trial]]:
    yield from damages([f"{AR}/{NAME}"], damaged_side, flips=4)


def damaged_side(file: str, how: str, bench: Bench) -> Outcome:
    """done.jsonl is damaged: its damaged lines are decoded again and no other."""
    run = bench.half()
    damage(run.folder / file, how)
    left = count_records(run.folder / file)
    return recover(Outcome(run, f"half a cell, {left} of 2 prompts left", repeats=2 - left))


# clocks


def clock_jumps() -> Iterator[tuple[str, Trial]]:
    for state in ("mid-cell", "finished"):
        for name in ("two days ahead", "1990", "random"):
            yield f"files of {name}, {state}", partial(other_times, name, state)
    for hours in (-30, 30):
        yield f"clock of a cell jumps by {hours} hours", partial(jump, hours)


def other_times(name: str, state: str, bench: Bench) -> Outcome:
    """All files of results/ have times of another clock."""
    run = bench.half() if state == "mid-cell" else bench.finished()
    rng, now = random.Random(name), time.time()
    for path in sorted(run.folder.glob("results/**/*")):
        choices = {"two days ahead": now + 172800, "1990": 631152000.0, "random": now + rng.uniform(-1e6, 1e6)}
        os.utime(path, (choices[name], choices[name]))
    return recover(Outcome(run, state))


def jump(hours: float, bench: Bench) -> Outcome:
    """The wall clock of a cell jumps after its first prompt."""
    then = f"import time; now = time.time; time.time = lambda: now() + {hours * 3600}"
    run = bench.clean(then=f"\n            {then}")
    _, problems = finish(run, expect_failure=False)
    return recover(Outcome(run, run.progress(), problems))


# two calls


def two_calls() -> Iterator[tuple[str, Trial]]:
    for seconds in (0.0, 0.5, 4.0):
        yield f"in one folder, {seconds} s apart", partial(one_folder, seconds)
    yield "in two folders", two_folders


def one_folder(seconds: float, bench: Bench) -> Outcome:
    """A second call while the first runs: one of them stops and the other is not hurt."""
    run = bench.clean()
    with run.start() as first:
        time.sleep(seconds)
        with run.start(log="second.log") as second:
            second.wait()
        first.wait()
    said = "cannot be locked" in (run.folder / "second.log").read_text() + (run.folder / "printed.log").read_text()
    problems = [] if said or 0 in (first.returncode, second.returncode) else ["no call named the lock"]
    return recover(Outcome(run, f"exits {first.returncode} and {second.returncode}", problems + partial_cells(run)))


def two_folders(bench: Bench) -> Outcome:
    """Two calls in two folders share one card; both finish."""
    run, other = bench.clean(), bench.clean("other")
    with run.start() as first, other.start() as second:
        statuses = first.wait(), second.wait()
    problems = differences(bench.reference.folder, other.folder) + partial_cells(run)
    problems += [] if statuses == (0, 0) else [f"exits {statuses}"]
    shutil.rmtree(other.folder)
    return recover(Outcome(run, f"exits {statuses[0]} and {statuses[1]}", problems))


# cards

ERRORS = {
    "a card that vanishes": 'RuntimeError("CUDA error: unspecified launch failure")',
    "out of memory": 'torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")',
    "a card that hangs up the process": "SystemExit(134)",
}
BREAK = """
            import torch
            broken = LEDGER + ".broken"
            if len(open(LEDGER).readlines()) == RECORDS and not os.path.exists(broken):
                open(broken, "w").close()
                target, calls = sys.modules["tfm.target"].Target, [0]
                def verify(self, *arguments, inner=target.verify, **named):
                    calls[0] += 1
                    if calls[0] == CALL:
                        raise ERROR
                    return inner(self, *arguments, **named)
                target.verify = verify"""


def lost_cards() -> Iterator[tuple[str, Trial]]:
    for name in ERRORS:
        for records, call in ((1, 1), (2, 5), (5, 3)):
            yield f"{name} after {records} prompts and {call} steps", partial(lose_card, name, records, call)


def lose_card(name: str, records: int, call: int, bench: Bench) -> Outcome:
    """The target's pass fails in mid-prompt as it does when the card is gone (simulated, on a CPU)."""
    then = BREAK.replace("RECORDS", str(records)).replace("CALL", str(call)).replace("ERROR", ERRORS[name])
    run = bench.clean(then=then)
    text, problems = finish(run)
    said = "said why" if "CUDA" in text else "said no more than its exit"
    return recover(Outcome(run, f"{said}; {run.progress()}", problems))


# notice to leave


def notice() -> Iterator[tuple[str, Trial]]:
    for number in range(1, 7):
        grace = (0.2, 2.0, 30.0)[number % 3]
        yield f"SIGTERM {number}, {grace} s of grace", partial(leave, number, grace)


def leave(number: int, grace: float, bench: Bench) -> Outcome:
    """Every process gets SIGTERM at a random moment, as on a machine that is taken back, then SIGKILL."""
    run = bench.clean()
    after = random.Random(f"leave {number}").uniform(2, bench.seconds)
    with run.start() as driver:
        time.sleep(after)
        everyone = [process.pid for process in run.jobs()] + [driver.pid]
        for kind, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 5)):
            for pid in everyone:
                try:
                    os.kill(pid, kind)
                except ProcessLookupError:
                    continue
            end = time.monotonic() + wait
            while time.monotonic() < end and (driver.poll() is None or run.jobs()):
                time.sleep(0.05)
        driver.wait(timeout=60)
    return recover(Outcome(run, f"after {after:.1f} s; {run.progress()}", partial_cells(run)))


KINDS: dict[str, Callable[[], Iterator[tuple[str, Trial]]]] = {
    "disk_full": disk_full,
    "read_only": read_only,
    "damaged_records": partial(damages, RECORDS, damaged_result),
    "damaged_manifests": partial(damages, MANIFESTS, damaged_result),
    "damaged_prompts": partial(damages, PROMPTS, damaged_prompts, flips=4),
    "damaged_weights": partial(damages, WEIGHTS, damaged_weights, flips=1),
    "damaged_configs": partial(damages, CONFIGS, damaged_config),
    "damaged_side_files": damaged_side_file,
    "clock_jumps": clock_jumps,
    "two_calls": two_calls,
    "lost_cards": lost_cards,
    "sigterm": notice,
}
