"""What `tfm doctor` finds out: the machine, the packages, the kernels, the weights, and what each suite still needs."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from baselines import suite
from baselines.cell_states import Inspector, count_states
from baselines.inputs import WORKFLOWS, missing_weights
from baselines.parts import problems
from tfm.manifest import REPOSITORY, cpu_name, git_state, sha256_weights, weight_files
from tfm.pins import unpinned
from tfm.tokenizer import load_tokenizer

DEFAULT_SUITE = "nano"
NEEDED = ("torch", "numpy", "pandas", "pyarrow", "safetensors", "tokenizers", "snakemake", "jsonschema", "pyyaml")
NEEDED += ("matplotlib", "seaborn", "rich")
WANTED = ("transformers", "datasets")  # other targets' formats in tests, prompt sets of the hub
DISK_GIB = 0.1  # the default suite writes about 10 MiB
OPEN_SUITES = {
    "mini": "a larger trained family and one H200",
    "dense": "a pretrained attention-only target with its heads, one H200",
}
# nodes, the root included: the paper's smallest and largest budget; ragged in a block of 16 and in one of 64
TREE_ROWS = (16, 65)
KERNEL_SHAPE = {"heads": 2, "value_heads": 6, "size": 128}
# largest difference from float64, values of size 4: float32 rows in PyTorch, bfloat16 rows in a GPU kernel, whose
# products keep 16 bits and more (kernels/NOTES.md); a wrong row costs 0.1 and more
ALLOWED_ERROR, ALLOWED_KERNEL_ERROR = 2e-5, 5e-3


@dataclass(frozen=True)
class Finding:
    """One line of the report. Of state "bad", `blocks` says that the default suite cannot run because of it."""

    section: str
    name: str
    state: str  # good, note (worth knowing), open (not here, and the default suite does without), bad
    text: str
    facts: dict = field(default_factory=dict)
    blocks: bool = False


def diagnose() -> Iterator[Finding]:
    """Yield every finding, in the order of the report; a part that fails unforeseen is itself a finding."""
    for section, look in SECTIONS.items():
        try:
            yield from look()
        except Exception as error:  # a broken install is what this command is for
            text = f"{type(error).__name__}: {error}"
            yield Finding(section, "not looked at", "bad", text, blocks=section in ("packages", "weights", "suites"))


def machine() -> Iterator[Finding]:
    cores, memory = os.cpu_count(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    text = f"{cpu_name()}, {cores} cores, {memory:.0f} GiB of memory"
    facts = {"name": cpu_name(), "cores": cores, "memory_gib": round(memory, 1)}
    yield Finding("machine", "processor", "good", text, facts)
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    is_linux = platform.system() == "Linux"
    note = "" if is_linux else ", tried on Linux only"
    yield Finding("machine", "system", "good" if is_linux else "note", system + note)
    version = platform.python_version()
    is_old = sys.version_info < (3, 11)
    text = version + (", 3.11 is needed" if is_old else "")
    yield Finding("machine", "python", "bad" if is_old else "good", text, blocks=is_old)
    free = shutil.disk_usage(REPOSITORY).free / 2**30
    text, facts = f"{free:.1f} GiB free here", {"free_gib": round(free, 2)}
    yield Finding("machine", "disk", "good" if free > DISK_GIB else "bad", text, facts, blocks=free <= DISK_GIB)
    yield from _gpus()
    yield _compiler()
    triton = version_of("triton")
    text = triton or "none: no Triton kernels"
    yield Finding("machine", "triton", "good" if triton else "open", text, {"version": triton})


def _gpus() -> Iterator[Finding]:
    import torch  # slow to import

    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        capability = f"{card.major}.{card.minor}"
        text = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, capability {capability}, CUDA {torch.version.cuda}"
        facts = {"name": card.name, "memory_gib": round(card.total_memory / 2**30, 1), "capability": capability}
        yield Finding("machine", f"gpu {index}", "good", text, facts)
    if not torch.cuda.device_count():
        yield Finding("machine", "gpu", "open", "none: suites with device cuda cannot run here", {"count": 0})


def _compiler() -> Finding:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc") or (home and shutil.which("nvcc", path=f"{home}/bin"))
    if not path:
        return Finding("machine", "nvcc", "open", "none: the CUDA kernel cannot be built", {"path": None})
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    release = re.search(r"release (\S+),", said)
    version = release[1] if release else "of unknown version"
    return Finding("machine", "nvcc", "good", f"{version}, {path}", {"path": path, "version": version})


def packages() -> Iterator[Finding]:
    found = {name: version_of(name) for name in (*NEEDED, *WANTED)}
    lacking = [name for name in NEEDED if not found[name]]
    if lacking:
        text = f"{', '.join(lacking)} not installed; pip install -e ."
        yield Finding("packages", "needed", "bad", text, found, blocks=True)
    else:
        yield Finding("packages", "needed", "good", ", ".join(f"{name} {found[name]}" for name in NEEDED), found)
    for name in (name for name in WANTED if not found[name]):
        yield Finding("packages", name, "open", "not installed; the default suite does without")
    spec = importlib.util.find_spec("tfm_kernels")
    places = [Path(place).resolve() for place in spec.submodule_search_locations] if spec else []
    if (REPOSITORY / "kernels").resolve() not in places:
        text = f"tfm_kernels is {places[0] if places else 'not installed'}, not this checkout's; pip install -e . here"
        yield Finding("packages", "code", "bad", text, blocks=True)
        return
    state = git_state()
    text = "no git checkout" if not state["commit"] else state["commit"][:12] + (", changed" if state["dirty"] else "")
    yield Finding("packages", "code", "good", text, state)


def kernels() -> Iterator[Finding]:
    import torch  # slow to import

    from tfm_kernels.gdn.ops import BACKENDS

    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for name in BACKENDS:
            yield _kernel(name, device)


def _kernel(name: str, device: str) -> Finding:
    import torch  # slow to import

    from tfm_kernels.gdn.backends import KERNELS
    from tfm_kernels.gdn.ops import resolve_backend

    where, blocks = f"{name}, {device}", (name, device) == ("solve", "cpu")
    try:
        resolve_backend(name, torch.device(device), torch.float32)
        errors = {rows: kernel_error(name, device, rows) for rows in TREE_ROWS}
    except ValueError as error:
        text = re.sub(r"^gdn_backend: | \(allowed[^)]*\)", "", str(error))
        return Finding("kernels", where, "open", text, {"runs": False})
    except Exception as error:  # a kernel that does not build or launch must not hide the next one
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Finding("kernels", where, "bad", text, {"runs": False}, blocks=blocks)
    allowed = ALLOWED_KERNEL_ERROR if name in KERNELS else ALLOWED_ERROR
    is_right = all(error <= allowed for error in errors.values())  # false for NaN
    text = ", ".join(f"{error:.1e} at T = {rows}" for rows, error in errors.items())
    text += f" from float64 (allowed: {allowed:g})"
    facts = {"runs": True, "allowed": allowed, "error": {str(rows): error for rows, error in errors.items()}}
    return Finding("kernels", where, "good" if is_right else "bad", text, facts, blocks=blocks and not is_right)


def kernel_error(backend: str, device: str, rows: int) -> float:
    """Return the largest error of a GDN backend on one random tree of `rows` nodes, against float64.

    q, k and v hold bfloat16 values, which a GPU kernel gets as bfloat16 and PyTorch as float32; the rest is float32.
    """
    import torch

    from tfm_kernels.gdn import ops
    from tfm_kernels.gdn.backends import KERNELS

    heads, value_heads, size = KERNEL_SHAPE.values()
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int):
        return torch.randn(1, *shape, generator=generator, dtype=torch.float64)

    parents = [-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, rows))]
    q, k = (torch.nn.functional.normalize(draw(rows, heads, size), dim=-1) for _ in range(2))
    vectors = [x.bfloat16() for x in (q * size**-0.5, k, draw(rows, value_heads, size))]
    decay, beta = -0.3 * draw(rows, value_heads).abs(), draw(rows, value_heads).sigmoid()
    scalars, parents = [x.float() for x in (decay, beta)], torch.tensor([parents])
    state = draw(value_heads, size, size).float()
    doubles = [x.double() for x in (*vectors, *scalars)]
    expected = ops.tree_verify(*doubles, parents, state.double(), backend="naive")[:2]
    vectors = vectors if backend in KERNELS else [x.float() for x in vectors]
    given = [x.to(device) for x in (*vectors, *scalars, parents, state)]
    found = ops.tree_verify(*given, backend=backend)[:2]
    return max(float((got.cpu().double() - want).abs().max()) for got, want in zip(found, expected, strict=True))


def weights() -> Iterator[Finding]:
    families = sorted(path.parent.parent for path in (REPOSITORY / "tfm/weights").glob("*/target/config.json"))
    if REPOSITORY / "tfm/weights" / DEFAULT_SUITE not in families:
        yield Finding("weights", DEFAULT_SUITE, "bad", "not here; git checkout -- tfm/weights", blocks=True)
    for folder in families:
        blocks = folder.name == DEFAULT_SUITE
        digests = {part: sha256_weights(folder / part) for part in ("target", "drafter", "weaver")}
        wrong = problems({"weights": str(folder)})
        lacking = [part for part, digest in digests.items() if digest is None]
        size = sum(path.stat().st_size for path in weight_files(folder)) / 2**20
        named = ", ".join(f"{part} {digest[:12]}" for part, digest in digests.items() if digest)
        facts = {"sha256": digests, "problems": wrong}
        if wrong or lacking:
            text = wrong[0] if wrong else f"{', '.join(lacking)} not here; git checkout -- {folder}"
            yield Finding("weights", folder.name, "bad", text, facts, blocks=blocks)
        else:
            path = folder / "facts.json"
            is_recorded = path.exists() and "sha256" in json.loads(path.read_text(encoding="utf-8"))
            text = f"{size:.1f} MiB, {named}" + (", as recorded in facts.json" if is_recorded else "")
            yield Finding("weights", folder.name, "good", text, facts)
        yield _tokenizer(folder, blocks)


def _tokenizer(folder: Path, blocks: bool) -> Finding:
    name = f"{folder.name} tokenizer"
    tokenizer = load_tokenizer(folder / "target")
    fields = json.loads((folder / "target/config.json").read_text(encoding="utf-8"))
    rows = (fields.get("text_config") or fields)["vocab_size"]
    sample = "naïve 日本語 def f(x): return x ** 2"
    if tokenizer.vocab_size > rows or tokenizer.decode(tokenizer.encode(sample)) != sample:
        text = f"{tokenizer.vocab_size} tokens for {rows} rows, or text does not come back; restore tokenizer.json"
        return Finding("weights", name, "bad", text, blocks=blocks)
    digest = tokenizer.vocab_sha256()
    text = f"{tokenizer.vocab_size} tokens, vocabulary {digest[:12]}, <|im_end|> is {tokenizer.eos_id}"
    return Finding("weights", name, "good", text, {"tokens": tokenizer.vocab_size, "vocab_sha256": digest})


def suites() -> Iterator[Finding]:
    import torch  # slow to import

    has_gpu = torch.cuda.is_available()
    for path in sorted((WORKFLOWS / "config").glob("*.yaml"), key=lambda path: (path.stem != DEFAULT_SUITE, path)):
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(raw, dict) and "suite" in raw:
            yield _suite(raw, has_gpu)
    for name, needs in OPEN_SUITES.items():
        if not (WORKFLOWS / f"config/{name}.yaml").exists():
            yield Finding("suites", name, "open", f"not in this version; needs {needs}", {"ready": False})


def _suite(raw: dict, has_gpu: bool) -> Finding:
    name = raw["suite"]
    blocks = name == DEFAULT_SUITE
    try:
        config = suite.resolve(dict(raw))
        cells = suite.expand(config)
    except ValueError as error:
        return Finding("suites", name, "bad", " ".join(str(error).split()), {"ready": False}, blocks=blocks)
    parts = [Path(folder).name for folder in missing_weights(config)]
    needs = [f"{' + '.join(parts)} in {config['weights']}"] if parts else []
    needs += ["a CUDA device"] if config["device"] == "cuda" and not has_gpu else []
    if config["source"] == "hub":
        names = unpinned(suite.pins(), config["datasets"])
        needs += [f"tfm pin for {len(names)} prompt sets"] if names else []
        needs += [] if version_of("datasets") else ["the package datasets"]
    facts = {"ready": not needs, "needs": needs, "cells": len(cells)}
    if needs:
        state = "bad" if blocks else "open"
        return Finding("suites", name, state, f"{len(cells)} cells; needs {', '.join(needs)}", facts, blocks=blocks)
    counts = count_states(map(Inspector(REPOSITORY / "results").inspect, cells))
    text = f"{len(cells)} cells: " + ", ".join(f"{count} {state}" for state, count in counts.items())
    return Finding("suites", name, "good", text, facts | {"states": counts})


def results() -> Iterator[Finding]:
    from baselines.commands.resume import processes_in

    folder = REPOSITORY / "results"
    is_writable = os.access(folder if folder.exists() else REPOSITORY, os.W_OK)
    text = "can be written" if is_writable else f"{folder} cannot be written; change its owner or mode"
    yield Finding("results", "folder", "good" if is_writable else "bad", text, blocks=not is_writable)
    locks = sorted(path.name for path in (REPOSITORY / ".snakemake/locks").glob("*"))
    alive = [process.pid for process in processes_in(REPOSITORY) if process.runs("snakemake")]
    facts = {"locks": locks, "snakemake": alive}
    if alive:
        yield Finding("results", "lock", "note", f"snakemake is running here (process {alive[0]})", facts)
    elif locks:
        text = "left by a run that was killed; tfm resume goes on"
        yield Finding("results", "lock", "bad", text, facts, blocks=True)
    else:
        yield Finding("results", "lock", "good", "none", facts)


def version_of(package: str) -> str | None:
    """Return the installed version of a package, None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


SECTIONS: dict[str, Callable[[], Iterator[Finding]]] = {
    "machine": machine,
    "packages": packages,
    "kernels": kernels,
    "weights": weights,
    "suites": suites,
    "results": results,
}
