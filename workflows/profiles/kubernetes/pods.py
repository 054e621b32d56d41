"""Run Snakemake's jobs as Kubernetes jobs over one shared volume, by kubectl: submit, status, cancel."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

DESCRIPTION = """
submit reads the job script that Snakemake wrote, starts a Kubernetes job that runs it in the present folder, with the
claim mounted where it is mounted here, and prints the job's name. status prints running, success or failed. cancel ends
jobs and their pods. Calls kubectl, with its own configuration. Exit 2 on bad input, 1 when kubectl fails.
"""
KEPT_SECONDS = 86400  # of a job that ended, for its log


def manifest_of(script: Path, options: argparse.Namespace, folder: Path) -> dict:
    """Return the Kubernetes job; raises ValueError for a folder that pods cannot see."""
    if not folder.is_relative_to(options.mount):
        raise ValueError(
            f"--mount: {folder} is not below {options.mount}, so that no pod could see it; call snakemake from a "
            "folder of the volume, or name the place where it is mounted"
        )
    asked = {"cpu": str(options.threads), "memory": f"{options.mem_mb}Mi"}
    # a GPU is a limit, which is its request too
    limits = {"memory": asked["memory"]} | ({"nvidia.com/gpu": str(options.gpu)} if options.gpu else {})
    container = {
        "name": "job",
        "image": options.image,
        "command": ["/bin/sh", str(script.resolve())],
        "workingDir": str(folder),
        "resources": {"requests": asked, "limits": limits},
        "volumeMounts": [{"name": "work", "mountPath": str(options.mount)}],
    }
    volume = {"name": "work", "persistentVolumeClaim": {"claimName": options.claim}}
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": [volume]}
    # Snakemake starts a failed job again, not Kubernetes: two pods would write one cell
    spec = {"backoffLimit": 0, "ttlSecondsAfterFinished": KEPT_SECONDS, "template": {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"generateName": "tfm-"}, "spec": spec}


def submit(options: argparse.Namespace) -> str:
    """Start the job of a script and return its name."""
    job = manifest_of(options.script, options, Path.cwd())
    return kubectl("create", "-f", "-", "-o", "name", text=json.dumps(job)).strip().rpartition("/")[2]


def status(options: argparse.Namespace) -> str:
    """Return running, success or failed; a job that is gone has failed."""
    found = kubectl("get", "job", options.job, "-o", "json", "--ignore-not-found")
    if not found.strip():
        return "failed"
    counts = json.loads(found).get("status", {})
    return "success" if counts.get("succeeded") else "failed" if counts.get("failed") else "running"


def cancel(options: argparse.Namespace) -> str:
    """End jobs with their pods; return what kubectl says."""
    return kubectl("delete", "job", *options.jobs, "--ignore-not-found", "--wait=false").strip()


def kubectl(*words: str, text: str | None = None) -> str:
    """Return what kubectl prints; raises RuntimeError with its message when it fails."""
    try:
        done = subprocess.run(["kubectl", *words], input=text, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("kubectl is not found; install it where snakemake is called") from None
    if done.returncode:
        raise RuntimeError(f"kubectl {words[0]}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    calls = parser.add_subparsers(required=True)
    new = calls.add_parser("submit", help="start a job and print its name")
    new.add_argument("--image", required=True, help="image with Python and this project's packages")
    new.add_argument("--claim", required=True, help="claim of the volume that holds the repository")
    new.add_argument("--mount", required=True, type=Path, help="where the volume is mounted, here and in pods")
    new.add_argument("--threads", required=True, type=int)
    new.add_argument("--mem-mb", required=True, type=int)
    new.add_argument("--gpu", required=True, type=int, help="GPUs of the job, 0 for none")
    new.add_argument("script", type=Path)
    new.set_defaults(call=submit)
    old = calls.add_parser("status", help="print running, success or failed")
    old.add_argument("job")
    old.set_defaults(call=status)
    end = calls.add_parser("cancel", help="end jobs")
    end.add_argument("jobs", nargs="+")
    end.set_defaults(call=cancel)
    options = parser.parse_args()
    try:
        print(options.call(options))
    except (ValueError, RuntimeError) as error:
        print(f"pods: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
