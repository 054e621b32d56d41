"""Gated-DeltaNet tree verification in CUDA C++, one launch; the equations are in csrc/tree_verify.cuh.

The sources take raw pointers and a stream, so plain nvcc builds them into a shared object, once for each (sources,
flags, architecture), and ctypes calls it. Nothing falls back: without a compiler, on an architecture nobody compiled
for, or with a shape the kernel does not have, the error says so before anything is launched.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from tfm_kernels import launches

NAME = "fused_cuda"
SOURCES = Path(__file__).parent / "csrc"
ARCHITECTURES = {(8, 0): "80", (9, 0): "90a", (10, 0): "100", (12, 0): "120"}
PRECISIONS = {"bf16": 1, "bf16x2": 2, "bf16x3": 3}  # terms an fp32 operand is split into
DEFAULT_PRECISION = "bf16x2"
DIM = 128
MAX_ROWS = 144
GROUPS = (1, 2, 3, 4)  # value heads of a key head


def build(
    arch: str, *, group: int = 3, precision: str = DEFAULT_PRECISION, overlap: bool = True, deferred: bool = False,
    cache: Path | None = None,
) -> Path:  # fmt: skip
    """Return the shared object for `arch` ("80", "90a", "100", "120"), compiled unless the cache holds it.

    `overlap` lets a launch come up while the previous grid ends (sm_90 and later), `deferred` adds the commit of a
    pending path to verify and mixer (deferred_cuda.py). The cache (default ~/.cache/tfm-kernels) is keyed by sources,
    flags and architecture. Raises ValueError without nvcc, RuntimeError with its output where it fails.
    """
    flags = ["-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-shared", "-Xcompiler", "-fPIC"]
    flags += [
        f"-DTFM_GROUP={group}",
        f"-DTFM_TERMS={PRECISIONS[precision]}",
        f"-DTFM_OVERLAP={int(overlap and arch != '80')}",
        f"-DTFM_DEFERRED={int(deferred)}",
    ]
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    cache = cache or Path.home() / ".cache" / "tfm-kernels"
    target = cache / f"tree_verify-sm{arch}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _compile(flags, target)
    return target


def _compile(flags: list[str], target: Path) -> None:
    nvcc = compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    units = [str(path) for path in sorted(SOURCES.glob("*.cu"))]
    done = subprocess.run([nvcc, *flags, *units, "-o", partial], capture_output=True, text=True)
    if done.returncode:
        os.unlink(partial)
        raise RuntimeError(f"gdn_backend: {NAME} did not compile ({nvcc} {' '.join(flags)}):\n{done.stderr.strip()}")
    # whole or not at all: another process may be loading the same name
    os.replace(partial, target)


def compiler() -> str:
    """Return the path of nvcc; raise ValueError where there is none."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise ValueError(
            f"gdn_backend: {NAME} builds its kernel once with nvcc (CUDA 12.8 or later), which is neither on PATH nor "
            "in /usr/local/cuda/bin; install the CUDA toolkit, or use fused_triton"
        )
    return nvcc


def architecture(device: torch.device | str) -> str:
    """Return the compile target of `device`; raise ValueError for one the kernel is not built for."""
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHITECTURES:
        allowed = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise ValueError(
            f"gdn_backend: {NAME} is not built for compute capability {capability[0]}.{capability[1]} "
            f"(allowed: {allowed}); use fused_triton or solve"
        )
    return ARCHITECTURES[capability]


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError unless the kernel runs on `device` with a state of `dtype`."""
    if dtype != torch.float32:
        raise ValueError(f"gdn_backend: {NAME} keeps its state in float32, not {dtype}; use solve for {dtype}")
    if device.type != "cuda":
        raise ValueError(f"gdn_backend: {NAME} needs a CUDA device, not {device}; use solve there")
    architecture(device)
    compiler()


def check_shape(nodes: int, key_dim: int, value_dim: int, rows: torch.dtype) -> None:
    """Raise ValueError for sizes and types that the kernel does not take."""
    if not 1 <= nodes <= MAX_ROWS:
        raise ValueError(f"gdn_backend: {NAME} takes 1 to {MAX_ROWS} rows, not {nodes}; lower the budget or use solve")
    if (key_dim, value_dim) != (DIM, DIM):
        raise ValueError(f"gdn_backend: {NAME} takes heads of {DIM}, not {key_dim} and {value_dim}; use solve")
    if rows != torch.bfloat16:
        raise ValueError(f"gdn_backend: {NAME} takes q, k, v in bfloat16, not {rows}; use fused_triton or solve")


def prepare_tree(parents: Tensor, ancestors: Tensor) -> Tensor:
    """Return the parents [R, N] int64: the kernel forms the ancestors itself."""
    return parents.contiguous()


@functools.cache
def library(arch: str, group: int, precision: str, overlap: bool, deferred: bool = False) -> ctypes.CDLL:
    """Return the loaded shared object with its signatures declared; built on first use."""
    return declare(ctypes.CDLL(str(build(arch, group=group, precision=precision, overlap=overlap, deferred=deferred))))


def declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library with the signatures of its functions declared."""
    pointer, number = ctypes.c_void_p, ctypes.c_int
    loaded.tfm_tree_verify.argtypes = [pointer] * 10 + [number] * 4 + [pointer] * 4 + [number] * 2 + [pointer]
    loaded.tfm_commit.argtypes = [pointer, number, pointer] + [number] * 7 + [pointer]
    stride = ctypes.c_int64
    pending_window = [pointer] * 2 + [number] * 2 + [stride]
    loaded.tfm_prepare.argtypes = [pointer] * 13 + [number] * 4 + [stride] * 3 + [*pending_window, pointer]
    norm = [pointer] * 4 + [ctypes.c_float, ctypes.c_int64, number, stride] + [pointer, number, number]
    loaded.tfm_gated_norm.argtypes = [*norm, *pending_window, pointer]
    loaded.tfm_error_string.restype = ctypes.c_char_p
    return loaded


def library_of(
    device: torch.device, group: int, precision: str, overlap: bool | None = None, deferred: bool = False
) -> ctypes.CDLL:
    """Return the shared object for `device`; raise ValueError for a precision that does not exist.

    `overlap` None is what `launches` says of this process.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not allowed (allowed: {', '.join(PRECISIONS)})")
    overlap = launches.chosen() != "plain" if overlap is None else overlap
    return library(architecture(device), group, precision, overlap, deferred)


def raise_for(lib: ctypes.CDLL, code: int, op: str) -> None:
    """Raise RuntimeError if a launch returned an error."""
    if code:
        raise RuntimeError(f"{op}: launch failed: {lib.tfm_error_string(code).decode()}")


def tree_verify_into(
    q: Tensor,  # [R, T, H, 128] bf16, normalised and scaled
    k: Tensor,  # [R, T, H, 128] bf16, normalised
    v: Tensor,  # [R, T, HV, 128] bf16
    log_decay: Tensor,  # [R, T, HV] float32
    beta: Tensor,  # [R, T, HV] float32
    parents: Tensor,  # [R, T] int64; -1 starts from the state, -2 is padding: its inputs are not used, its outputs 0
    state: Tensor,  # [R, HV, 128, 128] float32
    out: Tensor,  # [R, T, HV, 128] float32 or bf16, written
    u: Tensor,  # [R, T, HV, 128] float32, written
    path_log_decay: Tensor,  # [R, T, HV] float64, written
    *,
    precision: str = DEFAULT_PRECISION,
    overlap: bool | None = None,
) -> None:
    """Launch on the current stream; allocates nothing, so it can be captured in a CUDA graph.

    The tree is device data: `parents` may change between replays. Raises ValueError for inputs the kernel does not
    take; parents[i] < i is the caller's promise (a parent that is not counts as -1).
    """
    tensors = (q, k, v, log_decay, beta, parents, state, out, u, path_log_decay)
    check_verify(*tensors)
    launch_verify(library_of(state.device, v.shape[2] // k.shape[2], precision, overlap), tensors)


# nothing is pending: no path, keys, writes and decays, no length and rows
NO_PENDING = (None, None, None, None, 0, 0)


def launch_verify(lib: ctypes.CDLL, tensors: tuple[Tensor, ...], pending: tuple = NO_PENDING) -> None:
    """Launch on the current stream; `tensors` are `tree_verify_into`'s, checked by `check_verify`."""
    (requests, rows, heads, _), state, out = tensors[1].shape, tensors[6], tensors[7]
    _check_rows(rows, lib.tfm_verify_shared_bytes(rows), state.device)
    with torch.cuda.device(state.device):
        stream = torch.cuda.current_stream(state.device).cuda_stream
        pointers = [x.data_ptr() for x in tensors]
        sizes = (requests, rows, heads, int(out.dtype == torch.bfloat16))
        code = lib.tfm_tree_verify(*pointers, *sizes, *pending, stream)
    raise_for(lib, code, "tree_verify")


@torch.library.custom_op("tfm::gdn_tree_verify_cuda", mutates_args=())
def tree_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, tree: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes as in `tfm_kernels.gdn.ops.tree_verify`, types as in `tree_verify_into`; `tree` is the parents."""
    out, u, path_log_decay = _empty_outputs(v)
    tree_verify_into(q, k, v, log_decay, beta, tree, state, out, u, path_log_decay)
    return out, u, path_log_decay


@tree_verify.register_fake
def _(q, k, v, log_decay, beta, tree, state):
    return _empty_outputs(v)


def _empty_outputs(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(v, dtype=torch.float32)
    return out, torch.empty_like(out), torch.empty(v.shape[:3], dtype=torch.float64, device=v.device)


def check_verify(q, k, v, log_decay, beta, parents, state, out, u, path_log_decay) -> None:
    """Raise ValueError for tensors that `tree_verify_into` does not take."""
    requests, rows, heads, _ = k.shape
    value_heads = v.shape[2]
    if value_heads % heads or value_heads // heads not in GROUPS:
        raise ValueError(
            f"v: {value_heads} value heads for {heads} key heads are not allowed (allowed: 1, 2, 3 or 4 a key head); "
            "choose fused_triton or solve"
        )
    keys, values, scalars = (
        (requests, rows, heads, DIM),
        (requests, rows, value_heads, DIM),
        (requests, rows, value_heads),
    )
    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    expected = {
        "q": (q, keys, bf16),
        "k": (k, keys, bf16),
        "v": (v, values, bf16),
        "log_decay": (log_decay, scalars, fp32),
        "beta": (beta, scalars, fp32),
        "parents": (parents, (requests, rows), (torch.int64,)),
        "state": (state, (requests, value_heads, DIM, DIM), fp32),
        "out": (out, values, (torch.float32, torch.bfloat16)),
        "u": (u, values, fp32),
        "path_log_decay": (path_log_decay, scalars, (torch.float64,)),
    }
    check_tensors(expected, state.device)


def check_tensors(
    expected: dict[str, tuple[Tensor, tuple, tuple]], device: torch.device, *, strided: tuple[str, ...] = ()
) -> None:
    """Raise ValueError unless every tensor has its shape and one of its dtypes, contiguous on the CUDA `device`.

    Those named in `strided` may have their rows [R, T] further apart than they are long, all by one distance.
    """
    for name, (tensor, shape, dtypes) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} {tensor.dtype} is not allowed (allowed: {shape}, "
                f"{' or '.join(map(str, dtypes))}); convert it, or choose backend solve"
            )
        # what a kernel reads in vectors; a slice of scalars may start anywhere
        vectors = tensor.dim() == 4 or shape[-1] % 8 == 0 and tensor.dtype == torch.bfloat16
        is_laid_out = _has_even_rows(tensor, vectors) if name in strided else tensor.is_contiguous()
        if not is_laid_out or vectors and tensor.data_ptr() % 16:
            raise ValueError(
                f"{name}: strides {tensor.stride()} are not allowed (allowed: contiguous, 16-byte aligned)"
            )
        if tensor.device != device or not tensor.is_cuda:
            raise ValueError(f"{name}: on {tensor.device} (allowed: the CUDA device of the state); move it there")


def row_distance(tensor: Tensor) -> int:
    """Return how many elements apart the rows of [R, T, ..] lie; a dimension of one row says nothing about it."""
    if tensor.shape[1] > 1:
        return tensor.stride(1)
    return tensor.stride(0) if len(tensor) > 1 else tensor[0, 0].numel()


def _has_even_rows(tensor: Tensor, vectors: bool) -> bool:
    # [R, T, ..]: every row contiguous, all rows one distance apart, which keeps vectors aligned
    distance = row_distance(tensor)
    is_even = len(tensor) == 1 or tensor.stride(0) == tensor.shape[1] * distance
    return tensor[0, 0].is_contiguous() and is_even and not (vectors and distance * tensor.element_size() % 16)


def _check_rows(rows: int, shared_bytes: int, device: torch.device) -> None:
    check_shape(rows, DIM, DIM, torch.bfloat16)
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if shared_bytes > limit:
        raise ValueError(
            f"gdn_backend: {NAME} needs {shared_bytes} bytes of shared memory for {rows} rows, "
            f"{torch.cuda.get_device_name(device)} gives {limit}; lower the budget or use fused_triton"
        )
