"""Running the workflow in tests: a copy of the code, a tiny random family, and Snakemake as a user calls it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from tfm import checkpoints
from tfm.drafter import Drafter, DrafterConfig, init_drafter
from tfm.target import Target, TargetConfig
from tfm.weaver import Weaver, WeaverConfig, init_weaver

ROOT = Path(__file__).resolve().parent.parent
NANO = yaml.safe_load((ROOT / "workflows/config/nano.yaml").read_text())
TOKENIZER = ROOT / "tfm/weights/nano/target/tokenizer.json"
# a slice of suite nano that runs in a minute
SMALL = ["datasets=sample-math", "prompts=2", "max_new_tokens=6", "temperatures=0,1", "seeds=0", "requests=2"]
EVERY_METHOD = "methods=ar,dflash,ddtree,dartree,tfm"
NO_SWEEPS = [f"{key}=[]" for key in ("widths", "candidate_counts", "children_counts", "depths", "dartree_widths")]
SLICE = [*SMALL, *NO_SWEEPS, EVERY_METHOD, "budget=8", "width=2", "dartree_width=3", "residuals=false"]
SLICE += ["ceiling={prompts: 2, anchors: 1, continuations: 4}"]
SLICE += ["kernels={rows: [5, 9], shapes: [chain, mixed], key_heads: 1, value_heads: 2, head_dim: 8, rounds: 2}"]
SLICE += ["budgets=4", "audit=legacy_traversal,sampled-traversal"]


def checkout(folder: Path, weights: Path) -> Path:
    """A copy of the code to run in, so that a test never touches the results of the person who runs it."""
    for name in ("workflows", "tfm", "baselines"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "weights"))
    shutil.copy(ROOT / "Snakefile", folder)
    (folder / "kernels").symlink_to(ROOT / "kernels")
    # the copy's own, whatever checkout is installed
    (folder / "tfm_kernels").symlink_to(ROOT / "kernels")
    (folder / "tfm/weights").mkdir()
    (folder / "tfm/weights/nano").symlink_to(weights)
    return folder


def environment_of(*folders: Path) -> dict[str, str]:
    """This process's environment with the packages of `folders` first, and one thread."""
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def snakemake(
    folder: Path, *arguments: str, config=(), expect: int | None = 0, cwd: Path | None = None, wrapper=(), paths=()
) -> str:
    """Run Snakemake in a checkout, or from `cwd`; return everything it printed.

    `wrapper` are words before the command, `paths` more folders to import from.
    """
    call = [*wrapper, sys.executable, "-m", "snakemake", "--cores", "1", *arguments]
    call += ["--config", *config] if config else []
    place = {"cwd": cwd or folder, "env": environment_of(folder, *paths)}
    done = subprocess.run(call, **place, capture_output=True, text=True, timeout=600)
    text = done.stdout + done.stderr
    assert expect is None or done.returncode == expect, text[-4000:]
    return text


# imported by every Python of a run: notes each use of an internet socket or name service, successful or not, and each
# client of the network that a script of ours imports
GUARD = """
import socket, sys
CLIENTS = {"huggingface_hub", "transformers", "datasets", "requests", "urllib3", "httpx", "aiohttp", "sentry_sdk"}
def note(text):
    with open(NOTES, "a") as file:
        file.write(f"{sys.orig_argv[1:4]}: {text}\\n")
def noted(name, real):
    def call(*arguments, **named):
        if getattr(arguments[0], "family", None) != socket.AF_UNIX:
            note(f"{name} {arguments[1:] or arguments}")
        return real(*arguments, **named)
    return call
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, noted(name, getattr(socket.socket, name)))
for name in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "create_connection"):
    setattr(socket, name, noted(name, getattr(socket, name)))
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in CLIENTS:
            note(f"import {name}")
if any(word.startswith("workflows/scripts/") for word in sys.orig_argv):
    sys.meta_path.insert(0, Finder())
"""


def run_offline(folder: Path, hook: Path, config) -> None:
    """Run Snakemake with the network off, where a namespace can be made, and every use of it noted in offline.json."""
    hook.mkdir()
    notes = hook / "notes"
    (hook / "sitecustomize.py").write_text(GUARD.replace("NOTES", repr(str(notes))))
    wrapper = ["unshare", "--user", "--map-root-user", "--net"]
    try:
        is_off = subprocess.run([*wrapper, "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        is_off = False
    snakemake(folder, config=config, wrapper=wrapper if is_off else (), paths=[hook])
    uses = notes.read_text().splitlines() if notes.exists() else []
    (folder / "offline.json").write_text(json.dumps({"network_off": is_off, "uses": uses}))


def jobs(text: str) -> dict[str, int]:
    """The job counts of a dry run."""
    table = text.partition("Job stats:")[2].partition("total")[0]
    return {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, flags=re.MULTILINE)}


def write_tiny_family(folder: Path) -> Path:
    """Write a random family of the nano architecture in the public formats: the DAG does not care what was learned."""
    gdn, size = "linear_attention", 32
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    layers = (gdn, "full_attention")
    target = Target(
        TargetConfig(
            2048, size, 2 * size, layers, **sizes, **linear, linear_value_head_dim=16, tie_word_embeddings=True
        )
    )
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    checkpoints.save_target(target, folder / "target")
    shutil.copy(TOKENIZER, folder / "target")
    drafter = Drafter(DrafterConfig(size, 2 * size, 2, 1, 16, ("full_attention",), (0, 1), 5, block_size=16))
    init_drafter(drafter, 0)
    checkpoints.save_drafter(drafter, folder / "drafter")
    weaver = Weaver(
        WeaverConfig(d_model=size, d_embed=size, d_rank=16, num_heads=2, mlp_dim=32, candidate_pool_size=64)
    )
    init_weaver(weaver, 0)
    checkpoints.save_weaver(weaver, folder / "weaver")
    return folder
