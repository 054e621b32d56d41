"""What goes wrong around a run: kills, full disks, damage, two runs at once, no network, a call from elsewhere."""

import base64
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import campaign_kill
import pytest
import yaml
from workflow_runs import GUARD, NANO, ROOT, SLICE, checkout, environment_of, snakemake

from baselines import suite
from baselines.commands import resume
from tfm.cells import is_whole, load_cells, read_cell
from tfm.side_file import count_records

sys.path.insert(0, str(ROOT / "workflows/scripts"))
CELL = "results/nano/cells/torch/nano/sample-math"
AR = f"{CELL}/ar/t1/seed0"


def change(path: Path, old: str, new: str) -> None:
    """Replace the one place that reads `old`; {} in `new` stands for it."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} holds {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new.replace("{}", old)))


def wait_for(condition, *, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not happen"
        time.sleep(0.02)


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """The finished checkout, to break."""
    shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


# kills


@pytest.mark.parametrize("what", ["snakemake", "cell", "worker"])
def test_after_kill_minus_9_resume_gives_the_records_of_an_undisturbed_run(finished, tmp_path, tiny_weights, what):
    """snakemake#1318, snakemake#1497. One kill of each kind; tests/campaign_kill.py kills at many random moments."""
    arguments = ("--cores", "1", f"{AR}/requests.parquet", "--config", *SLICE)
    folder = checkout(tmp_path / "killed", tiny_weights)
    # the first record of all is followed by a long rest, in which the kill falls
    run = campaign_kill.Run(folder, arguments, "len(open(LEDGER).readlines()) == 1 and time.sleep(300)")
    with run.start() as driver:
        wait_for(lambda: count_records(folder / AR / "done.jsonl") == 1 or driver.poll() is not None)
        [cell] = run.jobs()
        # a worker is the shell in which Snakemake runs the cell
        os.kill({"snakemake": driver.pid, "cell": cell.pid, "worker": cell.parent}[what], signal.SIGKILL)
        assert driver.wait(timeout=240) != 0
    assert not (folder / AR / "cell.json").exists()
    assert [process.pid for process in run.jobs()] == ([] if what == "cell" else [cell.pid])
    resumed = run.resume()
    assert not campaign_kill.problems_after(run, resumed, finished)
    assert read_cell(folder / AR)["resumed_requests"] == 1
    assert "ending process" in resumed.stderr or what == "cell"


def test_a_cell_that_outlived_snakemake_is_kept(finished, tmp_path):
    """Killed between the cell's last write and its own note of it, Snakemake would have all decoded anew."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, symlinks=True)
    before = {path.name: path.read_bytes() for path in (folder / AR).glob("*.*") if path.suffix != ".log"}
    marks = folder / ".snakemake/incomplete"
    for name in ("requests.parquet", "steps.parquet", "trees.parquet", "cell.json"):
        # as Snakemake notes what it is making
        marks.joinpath(base64.urlsafe_b64encode(f"{AR}/{name}".encode()).decode()).write_text("{}")
    assert sorted(resume.incomplete_files(folder))[0] == f"{AR}/cell.json"
    run = campaign_kill.Run(folder, ("--cores", "1", f"{AR}/requests.parquet", "--config", *SLICE))
    resumed = run.resume()
    assert f"keeping {AR}" in resumed.stderr and not campaign_kill.problems_after(run, resumed, finished)
    assert not run.decoded()
    assert {path.name: path.read_bytes() for path in (folder / AR).glob("*.*") if path.name in before} == before


def test_a_stray_file_among_the_notes_of_a_kill_is_none(tmp_path):
    """A network disk leaves .nfs files, a desktop .DS_Store."""
    notes = tmp_path / ".snakemake/incomplete"
    notes.mkdir(parents=True)
    for name in (base64.urlsafe_b64encode(f"{AR}/cell.json".encode()).decode(), ".nfs00012", ".DS_Store", "x", "a b=="):
        (notes / name).touch()
    assert resume.incomplete_files(tmp_path) == [f"{AR}/cell.json"]


def test_resume_ends_only_what_a_dead_snakemake_left(tmp_path):
    """A script that somebody started by hand in the same folder goes on."""
    (tmp_path / "workflows/scripts").mkdir(parents=True)
    (tmp_path / "Snakefile").write_text("rule all:\n    shell: 'true'\n")
    script = tmp_path / "workflows/scripts/decode_cell.py"
    script.write_text("import time\ntime.sleep(60)\n")
    call = [sys.executable, "workflows/scripts/decode_cell.py"]
    by_hand = subprocess.Popen(call, cwd=tmp_path)
    orphan = subprocess.Popen(call, cwd=tmp_path, env={**os.environ, "TFM_PROGRESS": "{}"})
    try:
        wait_for(lambda: len([p for p in resume.processes_in(tmp_path) if p.runs("decode_cell.py")]) == 2)
        assert resume.resume(["--cores", "1", "-q"], folder=tmp_path) == 0
        assert orphan.wait(timeout=10) == -signal.SIGTERM and by_hand.poll() is None
    finally:
        by_hand.kill()
        orphan.kill()
        by_hand.wait()


def test_two_resumes_do_not_unlock_each_other(tmp_path):
    (tmp_path / "Snakefile").write_text("rule all:\n    shell: 'sleep 30'\n")
    with resume.alone(tmp_path), pytest.raises(ValueError, match="another tfm resume is running here"):
        resume.resume([], folder=tmp_path)


# two runs at once


def test_a_second_snakemake_stops_and_the_first_is_not_hurt(finished, tmp_path, tiny_weights):
    """Two calls in one folder; the same cell by hand; and a call in another folder, which neither waits nor fails."""
    target = f"{AR}/requests.parquet"
    folder, other = (checkout(tmp_path / name, tiny_weights) for name in ("one", "two"))
    arguments = ("--cores", "1", target, "--config", *SLICE)
    go = tmp_path / "go"
    first = campaign_kill.Run(
        folder, arguments, f"\n            while not os.path.exists({str(go)!r}): time.sleep(0.05)"
    )
    elsewhere = campaign_kill.Run(other, arguments).start()
    with first.start() as driver:
        try:
            wait_for(lambda: count_records(folder / AR / "done.jsonl") == 1 or driver.poll() is not None)
            text = snakemake(folder, target, config=SLICE, expect=1)
            assert "Directory cannot be locked" in text and "no other Snakemake process" in text
            with pytest.raises(ValueError, match=f"snakemake is running here .process {driver.pid}"):
                resume.resume([], folder=folder)
            done = by_hand(folder, "ar", "t1", out=AR)
            assert done.returncode == 1 and "done.jsonl: another process is running this cell" in done.stderr
        finally:
            go.touch()
        assert driver.wait(timeout=240) == 0
    assert elsewhere.wait(timeout=240) == 0
    assert not campaign_kill.differences(finished, folder) and not campaign_kill.differences(finished, other)


def by_hand(folder: Path, variant: str, setting: str, *, out: str | Path, wrapper=(), **options):
    """Run a cell's script as its printed command does."""
    changes = {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in SLICE)}
    config = suite.resolve({**NANO, **changes})
    fields = {"dataset": "sample-math", "variant": variant, "setting": setting, "seed": 0}
    digests = suite.weight_digests({"weights": folder / "tfm/weights/nano"})
    cell = suite.resolve_cell(config, **fields, digests=digests)
    prompts = "results/nano/prompts/nano/sample-math.jsonl"
    call = [
        *wrapper,
        sys.executable,
        "workflows/scripts/decode_cell.py",
        "--cell",
        json.dumps(cell),
        "--prompts",
        prompts,
    ]
    call += ["--out", str(out), "--log", f"{out}/decode.log"]
    return subprocess.run(
        call, cwd=folder, env=environment_of(folder), capture_output=True, text=True, timeout=600, **options
    )


LOCK = """
import sys, time
from pathlib import Path
from tfm.device import lock_first_free
with lock_first_free([Path(name) for name in sys.argv[3:]], every=0.01, shared=sys.argv[2] == "shared") as index:
    print("held", index, flush=True)
    time.sleep(float(sys.argv[1]))
"""


def hold(paths: list[Path], folder: Path, *, seconds: float = 60, kind: str = "alone") -> subprocess.Popen:
    call = [sys.executable, "-c", LOCK, str(seconds), kind, *map(str, paths)]
    environment = environment_of(ROOT)
    return subprocess.Popen(
        call, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_card_is_held_by_one_process_wherever_it_runs_and_free_after_kill_minus_9(tmp_path):
    """snakemake#281, snakemake#3711: a lock on the card itself, since Snakemake counts its resources a call."""
    cards = [tmp_path / f"card{number}.lock" for number in range(2)]
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    holders = [hold(cards, folder) for folder in folders[:2]]
    try:
        assert sorted(holder.stdout.readline() for holder in holders) == ["held 0\n", "held 1\n"]
        third = hold(cards, folders[2], seconds=0)
        holders.append(third)
        assert third.stderr.readline() == "all cards are held by other runs; waiting for one\n"
        holders[1].kill()
        assert third.stdout.readline().startswith("held") and third.wait(timeout=20) == 0
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_untimed_cells_share_a_card_with_each_other_but_not_with_a_timed_one(tmp_path):
    cards = [tmp_path / f"card{number}.lock" for number in range(2)]
    holders = [hold(cards, tmp_path, kind="shared") for _ in range(2)]
    try:
        # a card each as long as there is one
        assert sorted(holder.stdout.readline() for holder in holders) == ["held 0\n", "held 1\n"]
        holders.append(hold(cards, tmp_path, kind="shared"))
        assert holders[2].stdout.readline() in ("held 0\n", "held 1\n")
        timed = hold(cards, tmp_path, seconds=0)
        holders.append(timed)
        assert timed.stderr.readline() == "all cards are held by other runs; waiting for one\n"
        for holder in holders[:3]:
            holder.kill()
        assert timed.stdout.readline().startswith("held") and timed.wait(timeout=20) == 0
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_lock_that_another_user_made_can_be_held(tmp_path):
    """A file that cannot be written, as another user's in /tmp, still serves as the lock."""
    from tfm.device import lock_first_free

    path = tmp_path / "card.lock"
    path.touch(mode=0o444)
    with lock_first_free([path]) as index, pytest.raises(BlockingIOError, match="not ours"):
        assert index == 0
        raise BlockingIOError("not ours")  # what is raised inside passes through


def test_a_lock_can_be_opened_by_other_users_whatever_the_umask_of_its_maker(tmp_path):
    from tfm.device import lock_first_free

    before = os.umask(0o077)
    try:
        with lock_first_free([tmp_path / "card.lock"]):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "card.lock").stat().st_mode & 0o777 == 0o644


# failing cells and full disks


def test_a_cell_that_exits_3_fails_the_run_and_its_finished_prompts_are_kept(finished, tmp_path, tiny_weights):
    """snakemake#2234: Snakemake removes the outputs of a failed job; the finished prompts are not among them."""
    folder = checkout(tmp_path / "copy", tiny_weights)
    target = f"{AR}/requests.parquet"
    failing = campaign_kill.Run(folder, ("--cores", "1", target, "--config", *SLICE), "os._exit(3)")
    with failing.start() as driver:
        assert driver.wait(timeout=240) == 1
    assert "exit status 3" in (folder / "printed.log").read_text()
    assert count_records(folder / AR / "done.jsonl") == 1 and not (folder / AR / "requests.parquet").exists()
    with pytest.raises(ValueError, match="cell.json is missing; make it again: snakemake"):
        load_cells([folder / AR])
    snakemake(folder, target, config=SLICE)
    assert read_cell(folder / AR)["resumed_requests"] == 1 and not campaign_kill.differences(finished, folder)


def tmpfs(folder: Path, size: str) -> list[str] | None:
    """A command prefix that runs with a small file system at `folder` and copies it to `folder`.after; None without."""
    mount = f"mount -t tmpfs -o size={size} tmpfs {folder}"
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    try:
        if subprocess.run([*prefix, mount], capture_output=True, timeout=10).returncode:
            return None
    except (OSError, subprocess.TimeoutExpired):
        return None
    keep = f'"$@"; status=$?; cp -a {folder} {folder}.after; exit $status'
    return [*prefix, f"{mount} && {{ {keep}; }}", "sh"]


@pytest.mark.parametrize("limit", ["tmpfs", "file_size"])
def test_a_full_disk_is_named_and_costs_no_finished_prompt(finished, tmp_path, limit):
    """snakemake#364. A file system of 8 KiB, or where none can be mounted a limit of the process's files."""
    out = tmp_path / "cell"
    out.mkdir()
    if limit == "tmpfs":
        wrapper, after, options = tmpfs(out, "8k"), tmp_path / "cell.after", {}
        if wrapper is None:
            pytest.skip("no tmpfs can be mounted without privileges here; the other case limits the size of files")
    else:
        # the header and one record fit
        wrapper, after, options = (
            (),
            out,
            {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000,) * 2)},
        )
    done = by_hand(finished, "tfm-b8-w2-stages", "t1", out=out, wrapper=wrapper or (), **options)
    assert done.returncode == 1 and "disk full" in done.stderr and "tfm resume" in done.stderr, done.stderr
    names = {path.name for path in after.iterdir()}
    assert names <= {"done.jsonl", "decode.log"}, names  # neither a final nor a piece of one
    kept = count_records(after / "done.jsonl")
    shutil.copytree(after, tmp_path / "room")
    again = by_hand(finished, "tfm-b8-w2-stages", "t1", out=tmp_path / "room")
    assert again.returncode == 0, again.stderr
    facts = read_cell(tmp_path / "room")
    assert facts["resumed_requests"] == kept and is_whole(tmp_path / "room")
    same = load_cells([tmp_path / "room"]).requests["output_sha256"]
    assert (
        same.tolist() == load_cells([finished / CELL / "tfm-b8-w2-stages/t1/seed0"]).requests["output_sha256"].tolist()
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_only_a_full_disk_is_called_one(number, tmp_path):
    from decode_cell import explain

    assert "disk full" in explain(OSError(number, os.strerror(number)), tmp_path)
    assert "disk full" not in explain(PermissionError(errno.EACCES, "Permission denied"), tmp_path)


# no network


def test_the_run_from_prompts_to_report_uses_no_network(finished):
    """The fixture ran with the network off, loopback included; beside that no Python of it even tried."""
    facts = json.loads((finished / "offline.json").read_text())
    assert facts["uses"] == []
    if not facts["network_off"]:
        pytest.skip("no network namespace can be made here without privileges; no process tried to use the network")


def test_the_guard_notes_an_attempt_that_fails(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(GUARD.replace("NOTES", repr(str(tmp_path / "notes"))))
    code = (
        "import socket\nwith socket.socket() as s: s.settimeout(0.1); s.connect_ex(('127.0.0.1', 9))\nimport requests"
    )
    (tmp_path / "workflows/scripts").mkdir(parents=True)
    (tmp_path / "workflows/scripts/any.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "workflows/scripts/any.py"], cwd=tmp_path, env=environment, capture_output=True)
    notes = (tmp_path / "notes").read_text()
    assert "connect_ex (('127.0.0.1', 9),)" in notes and "import requests" in notes
