"""The deferred commit in CUDA C++: csrc/pending.cuh inside tree verify, csrc/mixer.cu for the convolution's window.

A library of its own (TFM_DEFERRED=1), so that the plain verify stays as it is. Paths are device data: a captured graph
commits whatever path its buffer holds at the replay.
"""

import torch
from torch import Tensor

from tfm_kernels.gdn import fused_cuda, mixer_cuda
from tfm_kernels.gdn.deferred import MAX_PENDING, Pending
from tfm_kernels.gdn.fused_cuda import DEFAULT_PRECISION, DIM, check_tensors, library_of, row_distance


def deferred_verify_into(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor,
    out: Tensor, u: Tensor, path_log_decay: Tensor, pending: Pending,
    *, precision: str = DEFAULT_PRECISION, overlap: bool | None = None,
) -> None:  # fmt: skip
    """`fused_cuda.tree_verify_into` from the state after the pending path, which `state` holds afterwards.

    Allocates nothing and reads no path on the host, so it can be captured; that the path's nodes exist and go down is
    the caller's promise (`ops.check_path`). Raises ValueError for tensors that it does not take.
    """
    tensors = (q, k, v, log_decay, beta, parents, state, out, u, path_log_decay)
    fused_cuda.check_verify(*tensors)
    arguments = _pending_arguments(pending, k, u)
    lib = library_of(state.device, v.shape[2] // k.shape[2], precision, overlap, deferred=True)
    fused_cuda.launch_verify(lib, tensors, arguments)


def deferred_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor, pending: Pending
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, u, path_log_decay), float32 and float64, of new memory; `state` is written."""
    out = torch.empty_like(v, dtype=torch.float32)
    path_log_decay = torch.empty(v.shape[:3], dtype=torch.float64, device=v.device)
    outputs = (out, torch.empty_like(out), path_log_decay)
    deferred_verify_into(q, k, v, log_decay, beta, parents.contiguous(), state, *outputs, pending)
    return outputs


def deferred_mixer_into(
    inputs: mixer_cuda.MixerInputs,
    weights: mixer_cuda.MixerWeights,
    buffers: mixer_cuda.MixerBuffers,
    pending: Pending,
    *,
    precision: str = DEFAULT_PRECISION,
) -> None:
    """`mixer_cuda.mixer_into` after the pending path: state and window of `inputs` hold what it leaves, afterwards.

    `buffers` and `inputs.mixed` must be other memory than what `pending` reads.
    """
    arguments = _pending_arguments(pending, buffers.k, buffers.u)
    channels, rows = inputs.mixed.shape[2], pending.k.shape[1]
    if pending.inputs is None:
        raise ValueError(
            "inputs: the mixer moves the window along the pending path and needs that step's inputs, not None"
        )
    expected = {"inputs": (pending.inputs, (len(pending.k), rows, channels), (torch.bfloat16,))}
    check_tensors(expected, inputs.state.device, strided=("inputs",))
    _refuse_shared("inputs", pending.inputs, inputs.mixed)
    window = (pending.path.data_ptr(), pending.inputs.data_ptr(), pending.path.shape[1], rows)
    lib = library_of(inputs.state.device, buffers.v.shape[2] // buffers.k.shape[2], precision, deferred=True)
    mixer_cuda.launch_mixer(lib, inputs, weights, buffers, arguments, (*window, row_distance(pending.inputs)))


def _pending_arguments(pending: Pending, k: Tensor, u: Tensor) -> tuple:
    # what tfm_tree_verify takes of a pending path, checked; k and u are those of the verify that commits it
    requests, rows, length = len(k), pending.k.shape[1], pending.path.shape[-1]
    if not 1 <= length <= MAX_PENDING:
        raise ValueError(f"path: {length} nodes are not allowed (allowed: 1 to {MAX_PENDING}); commit and verify apart")
    expected = {
        "path": (pending.path, (requests, length), (torch.int64,)),
        "pending k": (pending.k, (requests, rows, k.shape[2], DIM), (torch.bfloat16,)),
        "pending u": (pending.u, (requests, rows, u.shape[2], DIM), (torch.float32,)),
        "pending path_log_decay": (pending.path_log_decay, (requests, rows, u.shape[2]), (torch.float64,)),
    }
    check_tensors(expected, k.device)
    _refuse_shared("k", pending.k, k)
    _refuse_shared("u", pending.u, u)
    pointers = (x.data_ptr() for x in (pending.path, pending.k, pending.u, pending.path_log_decay))
    return (*pointers, length, rows)


def _refuse_shared(name: str, pending: Tensor, own: Tensor) -> None:
    if pending.data_ptr() == own.data_ptr():
        raise ValueError(
            f"{name}: the pending rows lie where this verify puts its own (allowed: two sets, used in turn); "
            "pass the other set"
        )
