"""Check a GPU as the GPU workflow does, where there is no Snakemake; then plant a slower kernel and see it named."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from baselines import probes  # noqa: E402

BENCH = "results/published/kernels-h200/bench.py"
PLAN = "results/ci/plan.json"
KERNEL_TESTS = (
    "tests/test_triton.py",
    "tests/test_triton_target.py",
    "tests/test_fused_cuda.py",
    "tests/test_mixer_cuda.py",
)
LAUNCH = "  return tfm::launch(kernel, grid"  # of csrc/tree_verify.cu, which the plant does twice
SLOWED = ("kernel_us_fused_cuda_random_T64", "kernel_us_fused_cuda_random_T128")  # items that have to fail then

DESCRIPTION = f"""
Runs, each step timed and logged below --out: the kernels' GPU tests, suite ci (its kernel errors, its cells in one
process, its tables), bench.py's CUDA-graph times, and check.py, which has to pass. Then copies the code, makes the copy
launch the CUDA kernel of tree verification twice, compiles and times it, and calls check.py again, which has to fail by
that kernel's name and by nothing else. Needs {PLAN} and the prompts beside it (`snakemake {PLAN}
results/ci/prompts/nano/sample-{{chat,math,code}}.jsonl --cores 1 --configfile workflows/config/ci.yaml`), nvcc, and the
packages of run_paired.py with pytest, pytest-xdist, jsonschema and seaborn. Writes summary.json to --out. Last line of
stdout: one JSON object. Exit 1 when a step does not end as it has to.
"""


@dataclass
class Steps:
    """Steps that were run: their seconds, how they ended, and their logs."""

    out: Path
    environment: dict
    done: dict

    def run(self, name: str, call: list, *, cwd: Path = ROOT, expect: int = 0, environment: dict | None = None) -> bool:
        """Run a command with its output in NAME.log; return whether it ended with status `expect`."""
        start = time.monotonic()
        with open(self.out / f"{name}.log", "wb") as log:
            place = {"cwd": cwd, "env": {**self.environment, **(environment or {})}}
            status = subprocess.run(list(map(str, call)), **place, stdout=log, stderr=subprocess.STDOUT).returncode
        self.done[name] = {"seconds": round(time.monotonic() - start, 1), "exit": status, "expected": expect}
        print(f"{name}: exit {status} (expected {expect}) after {self.done[name]['seconds']} s", file=sys.stderr)
        return status == expect


def environment_of(root: Path, place: Path) -> dict:
    """Return the environment in which `root`'s packages are imported, tfm_kernels by a link in `place`."""
    place.mkdir(parents=True)
    (place / "tfm_kernels").symlink_to(root / "kernels")
    paths = [str(place), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def check_call(bench: Path, out: Path) -> list:
    """Return the call of check.py with a bench run."""
    call = [
        sys.executable,
        "workflows/scripts/check.py",
        "--plan",
        PLAN,
        "--expected",
        "workflows/config/expected.yaml",
    ]
    return [*call, "--published", "results/published", "--bench", bench, "--out", out]


def check_card(steps: Steps, options: argparse.Namespace) -> bool:
    """Run what the workflow runs; return whether the unchanged tree passes."""
    python, scripts = sys.executable, "workflows/scripts"
    config = json.loads((ROOT / PLAN).read_text())["config"]
    settings = {name: json.dumps(probes.SETTINGS[name](config)) for name in ("kernels", "definitions")}
    tests = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        options.processes,
        "-m",
        "gpu",
        *KERNEL_TESTS,
    ]
    errors = [python, f"{scripts}/bench_kernel.py", "--settings", settings["kernels"], "--out", "results/ci/kernels"]
    sizes = [python, f"{scripts}/check_definitions.py", "--settings", settings["definitions"]]
    cells = [python, f"{scripts}/run_paired.py", "--list", PLAN, "--out", ".", "--commit", options.commit]
    bench = [python, BENCH, "--out", steps.out / "bench", "--commit", options.commit, "--shapes-at"]
    passed = all(
        [
            steps.run("kernel_tests", tests),
            steps.run("kernel_errors", errors),
            steps.run("definitions", [*sizes, "--out", "results/ci/definitions"]),
            steps.run("cells", cells),
            steps.run("tables", [python, f"{scripts}/make_tables.py", "--plan", PLAN, "--out", "results/ci"]),
            steps.run("bench", bench),
            steps.run("check", check_call(steps.out / "bench", steps.out / "check")),
        ]
    )
    if (ROOT / "results/ci/tables").is_dir():
        shutil.copytree(ROOT / "results/ci/tables", steps.out / "tables", dirs_exist_ok=True)
    return passed


def plant(work: Path) -> Path:
    """Return a copy of the code whose CUDA kernel of tree verification is launched twice."""
    for name in ("kernels", "tfm", "results/published/kernels-h200"):
        shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    source = work / "kernels/gdn/csrc/tree_verify.cu"
    text = source.read_text()
    if text.count(LAUNCH) != 1:
        raise SystemExit(f"{source.name}: {LAUNCH.strip()!r} stands there {text.count(LAUNCH)} times, not once")
    twice = LAUNCH.replace("return ", "").strip()
    line = next(line for line in text.splitlines() if line.startswith(LAUNCH)).replace(LAUNCH, f"  {twice}")
    source.write_text(text.replace(LAUNCH, f"{line}\n{LAUNCH}"))
    bench = work / BENCH
    sizes = "SIZES = (16, 17, 32, 33, 64, 65, 128, 129)"
    if sizes not in bench.read_text():
        raise SystemExit(f"{bench.name}: no line {sizes!r}")
    bench.write_text(bench.read_text().replace(sizes, "SIZES = (64, 65, 128)"))
    return work


BUILD = """
from concurrent.futures import ThreadPoolExecutor
from tfm_kernels.gdn import fused_cuda
with ThreadPoolExecutor() as pool:
    jobs = [pool.submit(fused_cuda.build, "90a", precision=p, overlap=o)
            for p, o in (("bf16x2", True), ("bf16x2", False), ("bf16", True), ("bf16x3", True))]
    print(*(job.result() for job in jobs), sep="\\n")
"""


def check_planted(steps: Steps, work: Path, options: argparse.Namespace) -> bool:
    """Return whether check.py fails for a slower kernel, by its name and by no other's."""
    copy = plant(work / "planted")
    place = environment_of(copy, work / "planted-site")
    bench = [sys.executable, BENCH, "--out", steps.out / "planted/bench", "--commit", options.commit, "--shapes-at"]
    built = steps.run("planted_build", [sys.executable, "-c", BUILD], cwd=copy, environment=place)
    timed = built and steps.run("planted_bench", bench, cwd=copy, environment=place)
    if not timed or not steps.run(
        "planted_check", check_call(steps.out / "planted/bench", steps.out / "planted"), expect=1
    ):
        return False
    text = (steps.out / "planted_check.log").read_text()
    failed = {line.split(": ")[1] for line in text.splitlines() if line.startswith("check: kernel_us_")}
    others = {name for name in failed if not name.startswith("kernel_us_fused_cuda")}
    other_items = [line for line in text.splitlines() if line.startswith("check: ") and ": expected " in line]
    only = len(other_items) == len(failed) and not others
    steps.done["planted_check"] |= {"failed": sorted(failed), "only_that_kernel": only}
    return set(SLOWED) <= failed and only


def main() -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, reports and summary.json")
    parser.add_argument("--commit", required=True, help="commit of the code, recorded in every cell")
    parser.add_argument("--processes", type=int, default=12, help="of the kernel tests (default: 12)")
    parser.add_argument("--only-planted", action="store_true", help="the slower kernel alone, after a run without it")
    options = parser.parse_args()
    if not (ROOT / PLAN).is_file():
        parser.error(f"{PLAN} is missing: make it where Snakemake is, as --help says")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        steps = Steps(options.out, environment_of(ROOT, work / "site"), {})
        start = time.monotonic()
        passed = options.only_planted or check_card(steps, options)
        seconds = round(time.monotonic() - start, 1)
        named = check_planted(steps, work, options)
    result = {"commit": options.commit, "check_seconds": seconds, "unchanged_passes": passed, "slower_is_named": named}
    (options.out / "summary.json").write_text(json.dumps(result | {"steps": steps.done}, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if passed and named else 1


if __name__ == "__main__":
    sys.exit(main())
