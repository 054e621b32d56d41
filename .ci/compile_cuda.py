"""Compile the CUDA kernels for every architecture that they support, with plain nvcc; nothing is run."""

import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tfm_kernels import product_cuda
from tfm_kernels.gdn import fused_cuda

if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").is_file():
    print("CUDA kernels not compiled: no nvcc on PATH or in /usr/local/cuda/bin")
    sys.exit()
started = time.monotonic()
with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
    kinds = [(arch, deferred) for arch in fused_cuda.ARCHITECTURES.values() for deferred in (False, True)]
    built = list(pool.map(lambda kind: fused_cuda.build(kind[0], deferred=kind[1], cache=Path(folder)), kinds))
    # few and most tokens for one card, a tree of 65 for each
    tiles = [("90a", 1), ("90a", 18), *((arch, 9) for arch in fused_cuda.ARCHITECTURES.values())]
    built += pool.map(lambda kind: product_cuda.build(*kind, cache=Path(folder)), tiles)
names = ", ".join(f"sm_{arch}" for arch in fused_cuda.ARCHITECTURES.values())
print(f"CUDA kernels compiled for {names}: {len(built)} objects in {time.monotonic() - started:.0f} s")
