"""Products of few rows with a large weight in CUDA C++: x [M, in] times weight [out, in] transposed, float32 sums.

The weight's rows are the tall side of the tensor-core instruction, tokens its columns in tiles of 8: 65 rows cost 72
columns. The kernel is csrc/product.cuh, NOTES.md has its traffic. A library holds one number of tiles; plain nvcc
builds it once (sources, flags, architecture) and ctypes calls it. The result depends on shapes, block, warps and the
number of programs, never on the order in which anything ran. Nothing falls back: errors say what is not taken.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tfm_kernels import launches
from tfm_kernels.gdn import fused_cuda

SOURCES = Path(__file__).parent / "csrc"
SHARED = fused_cuda.SOURCES  # launch.h, tensor_core.cuh
MAX_ROWS = 144
BLOCKS, WARPS, STAGES = (64, 128, 256), (4, 8), range(2, 9)
STEP = 64  # of the inner dimension
MOST_SUMS = 40  # tiles of 16 x 8 of a warp: 160 of a thread's 255 registers
BLOCK_SHARED = 227 * 1024  # bytes a block may take of an H200's multiprocessor, which has 1 KiB more for each block
# share of the multiprocessors' programs that must run where each does whole blocks, or an equal piece of one: otherwise
# all run and blocks are cut unevenly. Whole blocks save the second launch, so more may idle: NOTES.md
WHOLE_ENOUGH, PIECES_ENOUGH = 0.84, 0.95


@dataclass(frozen=True)
class Plan:
    """How one product is launched: block of the weight's rows, warps, stages of the ring, programs."""

    block_out: int
    warps: int
    stages: int
    programs: int

    def shared_bytes(self, tiles: int) -> int:
        """Return the shared memory of a program for `tiles` tiles of 8 tokens."""
        return shared_bytes(tiles, self.block_out, self.warps, self.stages)

    def part_shape(self, tiles: int) -> tuple[int, int, int]:
        """Return the shape of the float32 sums of blocks that programs share."""
        return 2 * self.programs, self.block_out, 8 * tiles


def tiles_of(rows: int) -> int:
    """Return the tiles of 8 tokens that `rows` take; raise ValueError for more than the kernel has."""
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"rows: {rows} is not allowed (allowed: 1 to {MAX_ROWS}); use torch's product")
    return -(-rows // 8)


def shared_bytes(tiles: int, block_out: int, warps: int, stages: int) -> int:
    """Return the shared memory of a program: stages of weight and tokens, and where two groups of warps meet."""
    return stages * 2 * STEP * (block_out + 8 * tiles) + (2048 * tiles if warps == 8 else 0)


def plan(
    rows: int, out_rows: int, *, block_out: int, warps: int, stages: int, slots: int, each: int = 1,
    limit: int = BLOCK_SHARED,
) -> Plan:  # fmt: skip
    """Return how a product of `rows` with `out_rows` is launched on `slots` multiprocessors with `each` programs.

    As many programs run as can at once, or slightly fewer where each then does whole blocks, or an equal share of one,
    and nothing has to be added up. `stages` may shrink: more tokens than were measured take larger ones. `limit` are
    the bytes of shared memory that the card gives one program. Raises ValueError for what the kernel does not have.
    """
    tiles = tiles_of(rows)
    for name, value, allowed in (("block_out", block_out, BLOCKS), ("warps", warps, WARPS), ("stages", stages, STAGES)):
        if value not in allowed:
            raise ValueError(f"{name}: {value} is not allowed (allowed: {', '.join(map(str, allowed))}); choose one")
    if block_out // 64 * tiles > MOST_SUMS:
        raise ValueError(
            f"block_out: {block_out} is not allowed for {rows} rows (allowed: {64 * (MOST_SUMS // tiles)} or less, "
            "whose sums fit into registers); choose a smaller one"
        )
    room = (limit + 1024) // each - 1024
    while stages > 2 and shared_bytes(tiles, block_out, warps, stages) > room:
        stages -= 1
    if shared_bytes(tiles, block_out, warps, stages) > room:
        raise ValueError(f"block_out: {block_out} does not fit {each} times beside {rows} rows; choose a smaller one")
    blocks, most = -(-out_rows // block_out), slots * each
    even = blocks * (most // blocks) if blocks <= most else -(-blocks // -(-blocks // most))
    is_even = blocks % even == 0 or even % blocks == 0
    enough = WHOLE_ENOUGH if blocks % even == 0 else PIECES_ENOUGH
    return Plan(block_out, warps, stages, even if is_even and even >= enough * most else most)


def build(arch: str, tiles: int, *, overlap: bool = True, cache: Path | None = None) -> Path:
    """Return the shared object for `arch` and `tiles` tiles of tokens, compiled unless the cache holds it.

    Cache, architectures and `overlap` are those of `fused_cuda.build`. Raises ValueError without nvcc, RuntimeError
    with its output where it fails.
    """
    flags = ["-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-shared", "-Xcompiler", "-fPIC"]
    flags += [f"-DTFM_TILES={tiles}", f"-DTFM_OVERLAP={int(overlap and arch != '80')}"]
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in (*sorted(SOURCES.iterdir()), SHARED / "launch.h", SHARED / "tensor_core.cuh"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    cache = cache or Path.home() / ".cache" / "tfm-kernels"
    target = cache / f"product{tiles}-sm{arch}-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    command = [fused_cuda.compiler(), *flags, f"-I{SHARED}", str(SOURCES / "product.cu"), "-o", partial]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        os.unlink(partial)
        raise RuntimeError(f"linear: form cuda did not compile ({' '.join(command)}):\n{done.stderr.strip()}")
    # whole or not at all: another process may be loading the same name
    os.replace(partial, target)
    return target


@functools.cache
def library(arch: str, tiles: int, overlap: bool) -> ctypes.CDLL:
    """Return the loaded shared object; built on first use."""
    return declare(ctypes.CDLL(str(build(arch, tiles, overlap=overlap))))


def library_of(device: torch.device, rows: int) -> ctypes.CDLL:
    """Return the shared object for `rows` on `device`, with launches as `launches` says of this process."""
    return library(fused_cuda.architecture(device), tiles_of(rows), launches.chosen() != "plain")


def declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library with the signatures of its functions declared."""
    pointer, number = ctypes.c_void_p, ctypes.c_int
    loaded.tfm_product.argtypes = [pointer] * 4 + [number] * 3 + [ctypes.c_int64] + [number] * 4 + [pointer]
    loaded.tfm_error_string.restype = ctypes.c_char_p
    return loaded


def check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Raise ValueError for tensors that the kernel does not take."""
    (rows, inner), out_rows = x.shape, weight.shape[0]
    shapes = {"x": (rows, inner), "weight": (out_rows, inner), "out": (rows, out_rows)}
    for (name, shape), tensor in zip(shapes.items(), (x, weight, out), strict=True):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16 or tensor.device != x.device:
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} is not allowed (allowed: {shape}, "
                f"torch.bfloat16, on {x.device}); use torch's product"
            )
        is_laid_out = (
            tensor.stride(1) == 1 and _row_distance(tensor) % 8 == 0 if name == "x" else tensor.is_contiguous()
        )
        if not is_laid_out or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name}: strides {tensor.stride()} are not allowed (allowed: contiguous, rows of x any multiple of 8 "
                "apart, 16-byte aligned); make it contiguous"
            )
    if inner % 8:
        raise ValueError(f"x: an inner size of {inner} is not allowed (allowed: multiples of 8); use torch's product")


def _row_distance(x: Tensor) -> int:
    # a single row's stride says nothing
    return x.stride(0) if len(x) > 1 else x.shape[1]


def launch(lib: ctypes.CDLL, x: Tensor, weight: Tensor, out: Tensor, how: Plan, stream: int) -> None:
    """Launch `how` on `stream`; tensors are `check`ed, `lib` holds their number of tiles."""
    (rows, inner), out_rows = x.shape, weight.shape[0]
    blocks = -(-out_rows // how.block_out)
    shape = how.part_shape(tiles_of(rows)) if blocks % how.programs else (0,)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    pointers = [tensor.data_ptr() for tensor in (x, weight, out, parts)]
    sizes = (rows, out_rows, inner, _row_distance(x), how.block_out, how.warps, how.stages, how.programs)
    code = lib.tfm_product(*pointers, *sizes, stream)
    fused_cuda.raise_for(lib, code, "product")


def multiply(x: Tensor, weight: Tensor, out: Tensor, *, block_out: int, warps: int, stages: int, each: int) -> Tensor:
    """Fill `out` [M, out] with x [M, in] times weight [out, in] transposed on the current stream and return it.

    All bf16 on one CUDA device; `each` programs run on a multiprocessor. Raises ValueError for what the kernel does not
    take, RuntimeError for a launch that failed.
    """
    check(x, weight, out)
    if x.device.type != "cuda":
        raise ValueError(f"x: form cuda needs a CUDA device, not {x.device}; use torch's product there")
    card = torch.cuda.get_device_properties(x.device)
    slots, limit = card.multi_processor_count, card.shared_memory_per_block_optin
    tile = dict(block_out=block_out, warps=warps, stages=stages, each=each)
    how = plan(len(x), len(weight), **tile, slots=slots, limit=limit)
    lib = library_of(x.device, len(x))
    with torch.cuda.device(x.device):
        launch(lib, x, weight, out, how, torch.cuda.current_stream(x.device).cuda_stream)
    return out
