"""Run two cells through a Slurm of one node, started here for that, and compare with a run without Slurm."""

import argparse
import contextlib
import getpass
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from campaign_bench import SLICE  # noqa: E402
from campaign_kill import TARGET, Run, differences, run_undisturbed  # noqa: E402
from campaign_log import Trials  # noqa: E402
from workflow_runs import checkout  # noqa: E402

DESCRIPTION = """
Starts munged, slurmctld and slurmd (packages slurmctld, slurmd, slurm-client and munge of Debian) as this user in a
temporary folder, runs a slice of suite nano with --workflow-profile workflows/profiles/slurm, and checks that the jobs
went through Slurm and that all columns but times equal a run without it. Writes --log without host, user or absolute
path. Last line of stdout: one JSON object.
"""
HOME = Path("/etc/slurm/slurm.conf")  # where Slurm looks without SLURM_CONF, which the plugin hides from jobs
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue")
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={next_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
MinJobAge=600
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def why_not() -> str:
    """Return what a run needs and is not here; nothing when all is."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install slurmctld slurmd slurm-client munge"
    if HOME.exists() or not os.access(HOME.parent, os.W_OK):
        return f"{HOME} must not be there yet and its folder must be writable: jobs forget SLURM_CONF; use a container"
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        return "pip install 'snakemake-executor-plugin-slurm>=2.8,<3'"
    return ""


def search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@contextlib.contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Slurm of this machine alone; yield the environment that its commands need."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    port = free_port()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 * 9 // 10
    values = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser(), "folder": folder}
    values |= {"port": port, "next_port": port + 1, "cpus": os.cpu_count(), "memory": memory}
    (folder / "slurm.conf").write_text(CONF.format(**values))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    HOME.symlink_to(folder / "slurm.conf")
    environment = {**os.environ, "PATH": search_path()}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    munge += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    daemons = []
    try:
        for call in (munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            with open(folder / f"{call[0]}.out", "wb") as file:
                daemons.append(subprocess.Popen(call, env=environment, stdout=file, stderr=file, cwd=folder))
            time.sleep(1)
        wait_until_idle(environment, folder)
        yield environment
    finally:
        HOME.unlink()
        for daemon in reversed(daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()


def wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    """Wait until the node takes jobs; raises RuntimeError with what the daemons said when it does not."""
    for _ in range(60):
        found = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        if found.stdout.strip() in ("idle", "mixed", "allocated"):
            return
        time.sleep(0.5)
    said = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.[lo][ou][gt]")))
    raise RuntimeError(f"the node does not become idle ({found.stdout} {found.stderr})\n{said}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def run_in_slurm(work: Path) -> tuple[Run, str, int, int]:
    """Run the slice; return the run, what Snakemake printed, its exit status and how many jobs Slurm ran."""
    arguments = (TARGET, "--workflow-profile", "workflows/profiles/slurm", "--jobs", "2")
    arguments += ("--default-resources", "slurm_account=none", "slurm_partition=main", "runtime=30", "mem_mb=2000")
    # without a database of finished jobs, sacct knows none
    arguments += ("--slurm-status-command", "squeue", "--slurm-init-seconds-before-status-checks", "5")
    arguments += ("--config", *SLICE)
    run = Run(checkout(work / "slurm", ROOT / "tfm/weights/nano"), arguments)
    place = work / "node"
    place.mkdir()
    with one_node(place) as environment:
        with run.start(environment=environment) as driver:
            driver.wait()
        text = (run.folder / "printed.log").read_text()
        done = subprocess.run(
            ["squeue", "-h", "-t", "all", "-o", "%i %T"], env=environment, capture_output=True, text=True
        ).stdout
    jobs = len(re.findall(r"COMPLETED", done))
    return run, text, driver.returncode, jobs


def scrub(text: str, work: Path) -> str:
    """Return a log without host, user, absolute paths and colour."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(str(work / "slurm"), ".").replace(str(work), "")
    text = re.sub(r"(?m)^( *(?:Platform|User)): .*$", r"\1: -", text)
    host = socket.gethostname()
    for word in {host, host.partition(".")[0]}:
        text = re.sub(rf"\b{re.escape(word)}\b", "NODE", text)
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)*([\w.+-]+)", r"\1", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="file for what Snakemake printed")
    parser.add_argument("--trials", type=Path, help="file of trials to add the result to")
    options = parser.parse_args()
    if why_not():
        raise SystemExit(f"no Slurm can be run here: {why_not()}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        trials = Trials(options.trials or work / "trials.jsonl")
        run, text, status, jobs = run_in_slurm(work)
        if options.log:
            options.log.write_text(scrub(text, work))
        problems = [] if status == 0 else [f"snakemake exits {status}: {scrub(text, work)[-1500:]}"]
        if not problems:
            plain = Run(
                checkout(work / "plain", ROOT / "tfm/weights/nano"), ("--cores", "2", TARGET, "--config", *SLICE)
            )
            run_undisturbed(plain)
            problems = differences(plain.folder, run.folder) + (
                [] if jobs >= 3 else [f"{jobs} jobs went through Slurm"]
            )
        trials.add("slurm", f"{trials.facts['date']}", problems=problems, lost_cells=0, outcome=f"{jobs} jobs")
        trials.count("slurm_jobs", trials.facts["date"], slurm_jobs_run=jobs)
    print(json.dumps({"slurm_jobs_run": jobs, "problems": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
