"""Build the CUDA sources for a CPU: tests/cuda_emulator in place of launches and PTX, g++ in place of nvcc.

Covered is what sm_80 compiles: products of a warp group (sm_90a) are not. Only small shapes, so that a build takes
seconds.
"""

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tfm_kernels import product_cuda
from tfm_kernels.gdn import fused_cuda

EMULATOR = Path(__file__).parent / "cuda_emulator"
MAX_ROWS = 48
EVERYWHERE = [
    ("extern __shared__ __align__(16) unsigned char memory[];", "unsigned char* memory = emulator::shared_memory;"),
    ("  __shared__ ", "  static "),
    ("constexpr int MAX_BLOCKS = 9;", f"constexpr int MAX_BLOCKS = {MAX_ROWS // 16};"),
]


def cuda_headers() -> Path | None:
    """Return the folder with cuda_bf16.h of the toolkit that nvcc belongs to, or None."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    folders = [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    folders.append(Path("/usr/local/cuda/include"))
    return next((folder for folder in folders if (folder / "cuda_bf16.h").is_file()), None)


def write_sources(folder: Path, edits: dict[str, list[tuple[str, str]]], sources: Path = fused_cuda.SOURCES) -> None:
    """Write the sources for the emulator into `folder`, with the headers that `fused_cuda` shares."""
    shutil.copytree(sources, folder)
    real = (fused_cuda.SOURCES / "tensor_core.cuh").read_text()
    for path in folder.iterdir():
        text = path.read_text()
        for old, new in EVERYWHERE:
            text = text.replace(old, new)
        for old, new in edits.get(path.name, []):
            assert text.count(old) == 1, (path.name, old, text.count(old))
            text = text.replace(old, new)
        path.write_text(text)
    for path in EMULATOR.iterdir():
        shutil.copy(path, folder / path.name)
    # plain C++ from here on: exponents, sums
    plain = real[real.index("// 2^whole, 0 below the normal range") :]
    (folder / "tensor_core.cuh").write_text((EMULATOR / "tensor_core.cuh").read_text() + plain)


def build(
    folder: Path, *, deferred: bool = False, edits: dict[str, list[tuple[str, str]]] | None = None
) -> ctypes.CDLL:
    """Return the library of the sources with `edits` (file -> lines to replace); skips where g++ or headers lack."""
    write_sources(folder, edits or {})
    return fused_cuda.declare(_compile(folder, [f"-DTFM_DEFERRED={int(deferred)}"]))


def build_product(folder: Path, tiles: int, edits: dict[str, list[tuple[str, str]]] | None = None) -> ctypes.CDLL:
    """Return the library of `product_cuda` for `tiles` tiles of tokens; as `build` otherwise."""
    write_sources(folder, edits or {}, product_cuda.SOURCES)
    return product_cuda.declare(_compile(folder, [f"-DTFM_TILES={tiles}"]))


def _compile(folder: Path, defines: list[str]) -> ctypes.CDLL:
    headers, compiler = cuda_headers(), shutil.which("g++")
    if headers is None or compiler is None:
        pytest.skip("needs g++ and the headers of a CUDA toolkit")
    flags = ["-std=c++20", "-O1", "-w", "-fPIC", f"-I{headers}", *defines, "-DTFM_OVERLAP=1"]

    def compile_unit(path: Path) -> str:
        target = str(path.with_suffix(".o"))
        done = subprocess.run([compiler, *flags, "-x", "c++", "-c", path, "-o", target], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_unit, sorted(folder.glob("*.cu"))))
    library = folder / "emulated.so"
    subprocess.run([compiler, "-shared", *objects, "-o", library], check=True)
    return ctypes.CDLL(str(library))
