"""The rest of a GDN layer's tree mode in CUDA C++: what stands before and after tree verify, and the commit.

`mixer_into` is three launches, from the in-projections' outputs to the out-projection's input. `Commit` makes the
accepted path permanent in all layers with one. Kernels and formulas: csrc/mixer.cu, csrc/commit.cu.
"""

import ctypes
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tfm_kernels.gdn import fused_cuda
from tfm_kernels.gdn.fused_cuda import (
    DEFAULT_PRECISION,
    DIM,
    MAX_ROWS,
    check_tensors,
    library_of,
    raise_for,
    row_distance,
)

WIDTH = 4  # of the convolution


@dataclass(frozen=True)
class MixerWeights:
    conv: Tensor  # [C, 4] bf16, C = (2 H + HV) * 128: channels of q, k, v
    a_log: Tensor  # [HV] float32
    dt_bias: Tensor  # [HV] float32
    norm: Tensor  # [128] bf16
    eps: float


@dataclass(frozen=True)
class MixerInputs:
    # the first four may be columns of one product: their rows may be further apart than they are long
    mixed: Tensor  # [R, T, C] bf16, before the convolution
    gate: Tensor  # [R, T, HV, 128] bf16
    decay: Tensor  # [R, T, HV] bf16
    write: Tensor  # [R, T, HV] bf16, before the sigmoid
    parents: Tensor  # [R, T] int64; -1 starts from the committed inputs and state, -2 is padding
    window: Tensor  # [R, 3, C] bf16 committed inputs, oldest first
    state: Tensor  # [R, HV, 128, 128] float32


@dataclass(frozen=True)
class MixerBuffers:
    """What a verify writes; k, u and path_log_decay are what `Commit` reads."""

    q: Tensor  # [R, T, H, 128] bf16
    k: Tensor  # [R, T, H, 128] bf16
    v: Tensor  # [R, T, HV, 128] bf16
    log_decay: Tensor  # [R, T, HV] float32
    beta: Tensor  # [R, T, HV] float32
    out: Tensor  # [R, T, HV, 128] bf16, before the norm
    u: Tensor  # [R, T, HV, 128] float32
    path_log_decay: Tensor  # [R, T, HV] float64
    normed: Tensor  # [R, T, HV, 128] bf16, the out-projection's input

    @classmethod
    def empty(cls, requests: int, rows: int, heads: int, value_heads: int, device: torch.device) -> "MixerBuffers":
        dtypes = {
            "log_decay": torch.float32,
            "beta": torch.float32,
            "u": torch.float32,
            "path_log_decay": torch.float64,
        }
        shapes = {"q": (heads, DIM), "k": (heads, DIM)}
        shapes |= {name: (value_heads,) for name in ("log_decay", "beta", "path_log_decay")}
        return cls(
            **{
                field.name: torch.empty(
                    requests,
                    rows,
                    *shapes.get(field.name, (value_heads, DIM)),
                    dtype=dtypes.get(field.name, torch.bfloat16),
                    device=device,
                )
                for field in fields(cls)
            }
        )


def mixer_into(
    inputs: MixerInputs, weights: MixerWeights, buffers: MixerBuffers, *, precision: str = DEFAULT_PRECISION
) -> None:
    """Convolve over ancestors, split, normalise, verify and norm, on the current stream; allocates nothing."""
    lib = library_of(inputs.state.device, buffers.v.shape[2] // buffers.k.shape[2], precision)
    launch_mixer(lib, inputs, weights, buffers)


# nothing is pending: no path and inputs, no length, rows and distance of rows
NO_PENDING_WINDOW = (None, None, 0, 0, 0)


def launch_mixer(
    lib: ctypes.CDLL,
    inputs: MixerInputs,
    weights: MixerWeights,
    buffers: MixerBuffers,
    pending: tuple = fused_cuda.NO_PENDING,
    pending_window: tuple = NO_PENDING_WINDOW,
) -> None:
    """Check the tensors and launch the three kernels of `mixer_into` from `lib`."""
    b = buffers
    verify = (b.q, b.k, b.v, b.log_decay, b.beta, inputs.parents, inputs.state, b.out, b.u, b.path_log_decay)
    _check_mixer(inputs, weights, buffers)
    fused_cuda.check_verify(*verify)
    with torch.cuda.device(inputs.state.device):
        launch_prepare(lib, inputs, weights, buffers, pending_window)
        fused_cuda.launch_verify(lib, verify, pending)
        launch_norm(lib, inputs, weights, buffers, pending_window)


def launch_prepare(
    lib: ctypes.CDLL, inputs: MixerInputs, weights: MixerWeights, b: MixerBuffers, pending: tuple = NO_PENDING_WINDOW
) -> None:
    """Launch what stands before tree verify, on checked tensors of the current device."""
    before = (inputs.mixed, inputs.window, weights.conv, inputs.decay, inputs.write, weights.a_log, weights.dt_bias)
    pointers = [x.data_ptr() for x in (*before, inputs.parents, b.q, b.k, b.v, b.log_decay, b.beta)]
    sizes = (*b.k.shape[:3], b.v.shape[2])
    strides = [row_distance(x) for x in (inputs.mixed, inputs.decay, inputs.write)]
    stream = torch.cuda.current_stream().cuda_stream
    raise_for(lib, lib.tfm_prepare(*pointers, *sizes, *strides, *pending, stream), "prepare")


def launch_norm(
    lib: ctypes.CDLL, inputs: MixerInputs, weights: MixerWeights, b: MixerBuffers, pending: tuple = NO_PENDING_WINDOW
) -> None:
    """Launch what stands after tree verify, on checked tensors of the current device."""
    pointers = [x.data_ptr() for x in (b.out, inputs.gate, weights.norm, b.normed)]
    sizes = (b.v.shape[:3].numel(), b.v.shape[2], row_distance(inputs.gate))
    window = (inputs.window.data_ptr(), len(inputs.window), inputs.window.shape[2])
    stream = torch.cuda.current_stream().cuda_stream
    raise_for(lib, lib.tfm_gated_norm(*pointers, weights.eps, *sizes, *window, *pending, stream), "gated_norm")


def _check_mixer(inputs: MixerInputs, weights: MixerWeights, buffers: MixerBuffers) -> None:
    requests, rows, heads, _ = buffers.k.shape
    value_heads = buffers.v.shape[2]
    channels = (2 * heads + value_heads) * DIM
    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    values, scalars = (requests, rows, value_heads, DIM), (requests, rows, value_heads)
    expected = {
        "mixed": (inputs.mixed, (requests, rows, channels), bf16),
        "gate": (inputs.gate, values, bf16),
        "decay": (inputs.decay, scalars, bf16),
        "write": (inputs.write, scalars, bf16),
        "window": (inputs.window, (requests, WIDTH - 1, channels), bf16),
        "conv": (weights.conv, (channels, WIDTH), bf16),
        "a_log": (weights.a_log, (value_heads,), fp32),
        "dt_bias": (weights.dt_bias, (value_heads,), fp32),
        "norm": (weights.norm, (DIM,), bf16),
        "out": (buffers.out, values, bf16),
        "normed": (buffers.normed, values, bf16),
    }
    check_tensors(expected, inputs.state.device, strided=("mixed", "gate", "decay", "write"))


@dataclass(frozen=True)
class CommitLayer:
    """One layer's tensors: `state` and `window` are written, the others come from the verify."""

    state: Tensor  # [R, HV, 128, 128] float32
    k: Tensor  # [R, T, H, 128] bf16
    u: Tensor  # [R, T, HV, 128] float32
    path_log_decay: Tensor  # [R, T, HV] float64
    window: Tensor  # [R, 3, C], the convolution's committed inputs, oldest first
    inputs: Tensor  # [R, T, C] of window's dtype: the nodes' inputs; rows equally far apart in all layers


class Commit:
    """The accepted path of every layer in one launch, in place.

    The table of addresses is built once; calling launches on the current stream with the path as device data, so a
    CUDA graph may replay it.
    """

    def __init__(self, layers: list[CommitLayer]):
        first = layers[0]
        requests, self.rows, self.heads, _ = first.k.shape
        self.requests, self.value_heads = requests, first.u.shape[2]
        channels, kind = first.window.shape[2], first.window.dtype
        self.window_bytes = channels * kind.itemsize
        if self.window_bytes % 16:
            raise ValueError(f"window: {self.window_bytes} bytes a row are not allowed (allowed: multiples of 16)")
        values = (requests, self.rows, self.value_heads, DIM)
        for layer in layers:
            expected = {
                "state": (layer.state, (requests, self.value_heads, DIM, DIM), (torch.float32,)),
                "k": (layer.k, (requests, self.rows, self.heads, DIM), (torch.bfloat16,)),
                "u": (layer.u, values, (torch.float32,)),
                "path_log_decay": (layer.path_log_decay, values[:3], (torch.float64,)),
                "window": (layer.window, (requests, WIDTH - 1, channels), (kind,)),
                "inputs": (layer.inputs, (requests, self.rows, channels), (kind,)),
            }
            check_tensors(expected, first.state.device, strided=("inputs",))
            apart, allowed = row_distance(layer.inputs), row_distance(first.inputs)
            if apart != allowed:
                raise ValueError(
                    f"inputs: rows {apart} apart are not allowed (allowed: {allowed}, "
                    "as in the first layer); give all layers' inputs one distance"
                )
        self.input_bytes = row_distance(first.inputs) * kind.itemsize
        self.layers = list(layers)  # keeps the addresses alive
        addresses = [[getattr(layer, field.name).data_ptr() for field in fields(CommitLayer)] for layer in layers]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=first.state.device)
        self.library = library_of(first.state.device, 3, DEFAULT_PRECISION)

    def __call__(self, path: Tensor) -> None:
        """Commit `path` [R, P] int64: nodes from the root down, then -1; a row of -1 changes nothing.

        Raises ValueError for a shape or type; that the nodes exist and go down is the caller's promise
        (`tfm_kernels.gdn.ops.check_path`), because reading them would stop the stream.
        """
        shape = (self.requests, path.shape[-1])
        check_tensors({"path": (path, shape, (torch.int64,))}, self.table.device)
        if shape[1] > MAX_ROWS:
            raise ValueError(f"path: {shape[1]} nodes are not allowed (allowed: 1 to {MAX_ROWS}); lower the depth")
        with torch.cuda.device(self.table.device):
            code = self.library.tfm_commit(
                self.table.data_ptr(), len(self.layers), path.data_ptr(), *shape, self.rows, self.heads,
                self.value_heads, self.window_bytes, self.input_bytes, torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip
        raise_for(self.library, code, "commit")
