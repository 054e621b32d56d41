"""What an engine's environment is given of this project, and what it is asked before a server starts in it.

The environment needs the engine alone. This checkout is put on its path, with a note of distribution metadata by which
the engine finds the plugin, so that the code that runs is the code that the source digest covers.
"""

import json
import os
import subprocess
from pathlib import Path

from tfm.manifest import PACKED, REPOSITORY, sha256_weights, write_atomic

PLUGINS = "[sglang.srt.plugins]\ndflash_tfm = baselines.sglang.plugin:register\n"
METADATA = "Metadata-Version: 2.1\nName: dflash-tfm\nVersion: 0.1.0\n"
ASK = """
import importlib.metadata as m, json, sys
try:
    version = m.version(sys.argv[1])
except m.PackageNotFoundError:
    version = None
plugins = [entry.name for entry in m.entry_points(group="sglang.srt.plugins")]
print(json.dumps({"version": version, "plugins": plugins}))
"""


def make_site(folder: Path) -> str:
    """Return a PYTHONPATH that starts with this checkout's packages under their import names, and the plugin's note."""
    site = Path(folder).resolve() / "site"
    info = site / "dflash_tfm-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    for name, target in (("tfm", "tfm"), ("baselines", "baselines"), ("tfm_kernels", "kernels")):
        link = site / name
        if not link.is_symlink() or link.readlink() != REPOSITORY / target:
            link.unlink(missing_ok=True)
            link.symlink_to(REPOSITORY / target)
    write_atomic(info / "METADATA", METADATA.encode())
    write_atomic(info / "entry_points.txt", PLUGINS.encode())
    return os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])


def probe(python: str, package: str, version: str, paths: dict[str, str]) -> None:
    """Raise ValueError unless an environment's Python runs and holds this version of the engine."""
    try:
        done = subprocess.run(
            [python, "-c", ASK, package],
            env={**os.environ, **paths},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ValueError(
            f"server_python: {python!r} does not run ({type(error).__name__}); give the Python of the environment of "
            f"{package}"
        ) from error
    if found["version"] != version:
        here = f"{package} {found['version']}" if found["version"] else f"no {package}"
        raise ValueError(
            f"server_python: {python!r} has {here}, {version} is needed; pip install {package}=={version} in an "
            "environment of its own, and give its Python"
        )


def with_vocabulary(drafter: Path, target: Path, folder: Path) -> Path:
    """Return a drafter's folder whose config.json says its vocabulary, the target's: vLLM guesses where it does not."""
    if "vocab_size" in read_config(drafter):
        return drafter
    return with_fields(drafter, {"vocab_size": text_sizes(target)["vocab_size"]}, folder)


def with_fields(source: Path, fields: dict, folder: Path) -> Path:
    """Return a checkpoint folder whose config.json also has `fields`: links to `source` beside a new config.json."""
    copy = Path(folder).resolve() / "checkpoints" / f"{source.name}-with-{'-'.join(sorted(fields))}"
    copy.mkdir(parents=True, exist_ok=True)
    for path in (path for path in source.iterdir() if path.name != "config.json"):
        link = copy / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    write_atomic(copy / "config.json", json.dumps({**read_config(source), **fields}, indent=1).encode())
    return copy


def read_config(folder: Path) -> dict:
    """Return a checkpoint's config.json."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def text_sizes(folder: Path) -> dict:
    """Return what a target's config.json says of its text model."""
    config = read_config(folder)
    return config.get("text_config") or config


def checkpoint_folder(source: Path, folder: Path) -> Path:
    """Return a checkpoint folder in the public format: `source` itself, or its dequantised copy under `folder`."""
    from safetensors import safe_open

    from tfm.checkpoints import export

    def is_quantised(path: Path) -> bool:
        if path.name.endswith(PACKED):
            return True
        with safe_open(path, "pt") as file:
            return any(name.endswith(".scale") for name in file.keys())  # noqa: SIM118, not a mapping

    files = [*Path(source).glob("*.safetensors"), *Path(source).glob(f"*{PACKED}")]
    if not any(map(is_quantised, files)):
        return Path(source).resolve()
    copy = Path(folder).resolve() / "checkpoints" / f"{source.name}-{sha256_weights(source)[:12]}"
    if not (copy / "config.json").exists():
        export(source, copy)
    return copy
