"""The Kubernetes profile: what is asked of the cluster, a dry run, and a cell through a kubectl that runs it here."""

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
import yaml
from workflow_runs import ROOT, SLICE, checkout, jobs, snakemake

PROFILE = ROOT / "workflows/profiles/kubernetes"
PLUGIN = "snakemake_executor_plugin_cluster_generic"
with_plugin = pytest.mark.skipif(
    importlib.util.find_spec(PLUGIN) is None, reason="pip install 'snakemake-executor-plugin-cluster-generic>=1.0.9,<2'"
)
# runs a job's command in its folder, in the background, as a node would
KUBECTL = """#!{python}
import json, os, signal, subprocess, sys
from pathlib import Path
home, words = Path({home!r}), sys.argv[1:]
with open(home / "calls", "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[0] == "create":
    job = json.load(sys.stdin)
    name = job["metadata"]["generateName"] + str(len(list(home.glob("*.json"))))
    (home / f"{{name}}.json").write_text(json.dumps(job))
    box = job["spec"]["template"]["spec"]["containers"][0]
    wrap = f"{{' '.join(box['command'])}} > {{home}}/{{name}}.log 2>&1; echo $? > {{home}}/{{name}}.exit"
    null = {{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}}
    process = subprocess.Popen(["/bin/sh", "-c", wrap], cwd=box["workingDir"], start_new_session=True, **null)
    (home / f"{{name}}.pid").write_text(str(process.pid))
    print(f"job.batch/{{name}}")
elif words[0] == "get" and (home / f"{{words[2]}}.json").exists():
    end = home / f"{{words[2]}}.exit"
    state = "active" if not end.exists() else "succeeded" if end.read_text() == "0\\n" else "failed"
    print(json.dumps({{"status": {{state: 1}}}}))
elif words[0] == "delete":
    for name in (word for word in words[2:] if word[0] != "-"):
        os.killpg(int((home / f"{{name}}.pid").read_text()), signal.SIGKILL)
elif words[0] == "fail":
    sys.exit("the cluster is away")
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """A folder whose kubectl is first on the path; it holds the jobs that were created."""
    home = tmp_path / "cluster"
    home.mkdir()
    (home / "kubectl").write_text(KUBECTL.format(python=sys.executable, home=str(home)))
    (home / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return home


@pytest.fixture(scope="module")
def pods():
    spec = importlib.util.spec_from_file_location("pods", PROFILE / "pods.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked(mount: Path, **more) -> argparse.Namespace:
    given = {"image": "an/image:1", "claim": "work", "mount": mount, "threads": 2, "mem_mb": 8000, "gpu": 1}
    return argparse.Namespace(**{**given, **more})


def test_a_job_asks_for_its_share_of_a_node_and_sees_the_volume(pods, tmp_path):
    job = pods.manifest_of(tmp_path / "script.sh", asked(tmp_path), tmp_path / "here")
    spec = job["spec"]["template"]["spec"]
    (box,) = spec["containers"]
    assert box["command"] == ["/bin/sh", str(tmp_path / "script.sh")] and box["workingDir"] == str(tmp_path / "here")
    assert box["resources"]["limits"] == {"memory": "8000Mi", "nvidia.com/gpu": "1"}
    assert box["volumeMounts"] == [{"name": "work", "mountPath": str(tmp_path)}]
    assert spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "work"}
    # a job that fails is Snakemake's to start again: two pods on one cell would fight for its lock
    assert job["spec"]["backoffLimit"] == 0 and spec["restartPolicy"] == "Never"
    without = pods.manifest_of(tmp_path / "script.sh", asked(tmp_path, gpu=0), tmp_path)
    limits = without["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "8000Mi"}


def test_a_folder_that_no_pod_sees_is_refused(pods, tmp_path):
    with pytest.raises(ValueError, match="--mount: .*no pod could see it"):
        pods.manifest_of(tmp_path / "script.sh", asked(tmp_path / "elsewhere"), tmp_path)


def test_a_jobs_end_is_told_by_its_status_and_a_job_that_is_gone_has_failed(pods, cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = {}
    for name, line in (("good", "exit 0"), ("bad", "exit 3"), ("long", "sleep 300")):
        (tmp_path / name).write_text(f"{line}\n")
        ended[name] = pods.submit(asked(tmp_path, script=tmp_path / name))
    until = time.monotonic() + 60
    while "running" in [state(pods, ended[name]) for name in ("good", "bad")] and time.monotonic() < until:
        time.sleep(0.05)
    assert {name: state(pods, job) for name, job in ended.items()} == {
        "good": "success",
        "bad": "failed",
        "long": "running",
    }
    pods.cancel(argparse.Namespace(jobs=[ended["long"]]))
    assert state(pods, "tfm-none") == "failed"
    with pytest.raises(RuntimeError, match="kubectl fail: the cluster is away"):
        pods.kubectl("fail")


def state(pods, job: str) -> str:
    return pods.status(argparse.Namespace(job=job))


def test_the_profile_names_its_programs():
    profile = yaml.safe_load((PROFILE / "config.yaml").read_text())
    for word in ("submit", "status", "cancel"):
        program = next(part for part in profile[f"cluster-generic-{word}-cmd"].split() if "/" in part)
        assert (ROOT / program).is_file(), program
    # called as one program, without a shell
    assert os.access(ROOT / profile["cluster-generic-cancel-cmd"], os.X_OK)


@with_plugin
def test_a_dry_run_lists_every_job(tmp_path, tiny_weights):
    folder = checkout(tmp_path / "volume", tiny_weights)
    counts = jobs(snakemake(folder, "-n", "--workflow-profile", "workflows/profiles/kubernetes", config=SLICE))
    assert counts == jobs(snakemake(folder, "-n", config=SLICE))


@with_plugin
def test_a_cell_runs_as_a_job_of_the_cluster(cluster, tmp_path, tiny_weights):
    folder = checkout(tmp_path / "volume", tiny_weights)
    profile = folder / "workflows/profiles/kubernetes/config.yaml"
    profile.write_text(profile.read_text().replace("--mount /mnt/tfm", f"--mount {folder.parent}"))
    cell = "results/nano/cells/torch/nano/sample-math/ar/t1/seed0"
    arguments = ["--workflow-profile", "workflows/profiles/kubernetes", "--latency-wait", "5"]
    snakemake(folder, f"{cell}/requests.parquet", *arguments, config=SLICE)
    assert (folder / cell / "cell.json").exists()
    created = [json.loads(path.read_text()) for path in cluster.glob("tfm-*.json")]
    boxes = [job["spec"]["template"]["spec"]["containers"][0] for job in created]
    assert len(boxes) == 2 and {box["workingDir"] for box in boxes} == {str(folder)}  # prompts and the cell
    assert {box["resources"]["requests"]["memory"] for box in boxes} == {"8000Mi"}
