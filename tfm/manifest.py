"""What produced a result: digests of code and data, and the facts of the machine that are fit to publish."""

import ast
import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import zlib
from pathlib import Path

from tfm_kernels.gdn.backends import backend_modules

SCHEMA_VERSION = 2
REPOSITORY = Path(__file__).resolve().parent.parent
# import name -> folder; imports that leave these are the environment's business
PACKAGES = {"tfm_kernels": "kernels", "tfm": "tfm", "baselines": "baselines"}
SCRIPTS = "workflows/scripts"
SEAL = "manifest_sha256"  # in a cell.json: the digest of its other fields
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".json")
PACKED = ".safetensors.gz"  # as int8 families ship; only the content counts, and its name is that without .gz
LARGE = 1 << 26  # bytes; a larger file is hashed once, not at every call of Snakemake and in every cell
HASHED = ".sha256"  # what large files of a folder hashed to, beside them


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value) -> str:
    """Return the hex SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_weights(folder: Path) -> str | None:
    """Return one digest over the tensors and JSON files of a checkpoint folder (cards left out); None when absent."""
    files = weight_files(folder)
    names = [path.relative_to(folder).as_posix() for path in files]
    names = [name.removesuffix(".gz") if name.endswith(PACKED) else name for name in names]
    return sha256_json(dict(zip(names, map(sha256_once, files), strict=True))) if files else None


def sha256_once(path: Path) -> str:
    """Return a file's SHA-256, a large one's from the note beside it while size, inode and times are those noted.

    A PACKED file's is that of what it holds, a damaged one's that of its own bytes.
    """
    if path.name.endswith(PACKED):
        with contextlib.suppress(ValueError):
            return hashlib.sha256(unpacked(path)).hexdigest()
    facts = path.stat()
    if facts.st_size < LARGE:
        return sha256_file(path)
    state = [facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns]
    note = path.parent / HASHED
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        noted = {}
    if noted.get(path.name, {}).get("state") != state:
        noted[path.name] = {"state": state, "sha256": sha256_file(path)}
        with contextlib.suppress(OSError):  # a folder that cannot be written to is hashed each time
            write_atomic(note, json.dumps(noted).encode())
    return noted[path.name]["sha256"]


def unpacked(path: Path) -> bytes:
    """Return what a gzip file holds; raises ValueError naming it when it is damaged."""
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged gzip file ({error}); restore it (git checkout -- {path})") from error


def weight_files(folder: Path) -> list[Path]:
    """Return the tensors and JSON files under a checkpoint folder, sorted; empty when the folder is missing."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return sorted(path for path in files if path.suffix in WEIGHT_SUFFIXES or path.name.endswith(PACKED))


def source_digest(method_module: str, root: Path = REPOSITORY, *, gdn_backend: str = "solve") -> str:
    """Return the digest of the code that decides a method's tokens.

    Covers tfm.decode, the method's module ("module" or "module:factory") and everything that they import inside
    kernels, tfm and baselines. Comments, docstrings and layout do not count. A GPU backend's own modules count for the
    cells that use it, those named *_cuda with the bytes of the csrc folder beside them.
    """
    return modules_digest(["tfm.decode", method_module.partition(":")[0], *backend_modules(gdn_backend)], root)


def modules_digest(modules: list[str], root: Path = REPOSITORY, *, without: tuple[str, ...] = ()) -> str:
    """Return the digest of some modules and everything that they import inside this project, as in source_digest.

    Modules of `without` are left out, though what they import is not.
    """
    digests = {}
    for module in (name for name in import_closure(modules, root) if name not in without):
        path = module_path(module, root)
        digests[path.relative_to(root).as_posix()] = _source_sha256(path)
        for source in sorted((path.parent / "csrc").glob("*")) if path.stem.endswith("_cuda") else ():
            digests[source.relative_to(root).as_posix()] = sha256_file(source)
    return sha256_json(digests)


def script_digest(name: str, root: Path = REPOSITORY) -> str:
    """Return the digest of a script of workflows/scripts, the scripts beside it and the modules that they import."""
    pending, scripts, modules = [name], {}, set()
    while pending:
        path = root / SCRIPTS / f"{pending.pop()}.py"
        if path.name in scripts:
            continue
        scripts[path.name] = _source_sha256(path)
        for imported in _imported_names(path.read_text(encoding="utf-8"), package=""):
            if (path.parent / f"{imported}.py").is_file():
                pending.append(imported)
            elif module_path(imported, root) is not None:
                modules.add(imported)
    return sha256_json([scripts, modules_digest(sorted(modules), root)])


@functools.cache
def loader_digest(root: Path = REPOSITORY) -> str:
    """Return the digest of the code that makes the loop's arguments from a cell: script, checkpoint reader, tokenizer.

    It counts for staleness only. This module is left out: it writes down what was run and decides no token.
    """
    modules = modules_digest(["baselines.loading", "tfm.tokenizer"], root, without=("tfm.manifest",))
    return sha256_json([modules, _source_sha256(root / SCRIPTS / "decode_cell.py")])


def cell_digest(cell: dict, *, source: str, prompts_sha256: str) -> str:
    """Return the digest that decides whether a finished cell is stale: code, resolved cell, weights and prompts."""
    return sha256_json({"source": source, "loader": loader_digest(), "cell": cell, "prompts": prompts_sha256})


def sealed(manifest: dict) -> dict:
    """Return a cell.json with the digest of all its other fields, so that a changed number in it shows."""
    return {**manifest, SEAL: _seal(manifest)}


def is_sealed(manifest: dict) -> bool:
    """Return whether a cell.json says what it said when it was written; its `path` is no part of that."""
    return manifest.get(SEAL) == _seal(manifest)


def _seal(manifest: dict) -> str:
    return sha256_json({key: value for key, value in manifest.items() if key not in (SEAL, "path")})


def import_closure(modules: list[str], root: Path = REPOSITORY) -> list[str]:
    """Return, sorted, all modules of this project reached by import statements from `modules`, themselves included.

    Raises FileNotFoundError for a starting module that has no file. Strings are not followed: a table of
    "module:factory" names reaches none of them.
    """
    pending, seen = list(modules), set()
    for module in modules:
        if module_path(module, root) is None:
            raise FileNotFoundError(f"{module}: no such module under {', '.join(PACKAGES.values())}")
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        parts = module.split(".")
        parents = [".".join(parts[:size]) for size in range(1, len(parts))]
        for name in [*parents, *imported_names(module, root)]:
            if name not in seen and module_path(name, root) is not None:
                pending.append(name)
    return sorted(seen)


def imported_names(module: str, root: Path = REPOSITORY) -> list[str]:
    """Return the dotted names a module imports, `from a import b` giving both a and a.b."""
    path = module_path(module, root)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return list(_imported_names(path.read_text(encoding="utf-8"), package=package))


# kept by content: a call of Snakemake asks for the digests of 14 scripts and all methods, which share most modules
@functools.cache
def _imported_names(source: str, *, package: str) -> tuple[str, ...]:
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(names)


def module_path(module: str, root: Path = REPOSITORY) -> Path | None:
    """Return the file of a module of this project, or None for anything else (folders without __init__ too)."""
    top, *rest = module.split(".")
    if top not in PACKAGES:
        return None
    base = root.joinpath(PACKAGES[top], *rest)
    for path in (base / "__init__.py", base.with_suffix(".py") if rest else None):
        if path is not None and path.is_file():
            return path
    return None


def environment() -> dict:
    """Return versions, platform and commit. Names no host, user or absolute path."""
    packages = ("torch", "numpy", "pyarrow", "safetensors", "tokenizers", "triton")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version for name in packages if (version := _version(name))},
        "git": git_state(),
    }


def git_state(root: Path = REPOSITORY) -> dict:
    """Return {commit, dirty}; both None outside a repository. Dirty means tracked files of the code differ."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": None, "dirty": None}
    changed = _git(
        root, "status", "--porcelain", "--untracked-files=no", "--", "kernels", "tfm", "baselines", "workflows"
    )
    return {"commit": commit.strip(), "dirty": bool(changed and changed.strip())}


def cpu_name() -> str:
    """Return the processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write_atomic(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a reader sees the old file or the whole new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(Path(path), (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_sha256(path: Path) -> str:
    return _canonical_sha256(path.read_text(encoding="utf-8"))


@functools.cache
def _canonical_sha256(source: str) -> str:
    return hashlib.sha256(_canonical(ast.parse(source)).encode()).hexdigest()


def _canonical(node) -> str:
    """Return text for a syntax tree that is the same on every Python: no positions, docstrings or empty fields."""
    if isinstance(node, list):
        return "[" + ",".join(_canonical(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            value = value[1:] if value and _is_docstring(value[0]) else value
        if value is not None and value != [] and name not in ("kind", "type_comment", "type_ignores", "ctx"):
            fields.append(f"{name}={_canonical(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
