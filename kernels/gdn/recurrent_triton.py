"""Gated-DeltaNet tree verification node by node, as the public engines do it: the baseline of the fused form.

One program owns one value tile of one value head of one request and walks the nodes in order. For every node it loads
its parent's whole state from global memory (the committed state for a root), decays it, applies the delta rule, writes
the node's output, and stores the node's whole state for its children and for the commit:

    S_n = exp(g_n) S_p + k_n u_n^T,   u_n = beta_n (v_n - exp(g_n) S_p^T k_n),   o_n = S_n^T q_n        (paper Eq. 7)

The time is serial in the nodes, and T nodes cost T states of traffic each way. Everything is computed in float32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels.gdn import launch
from tfm_kernels.gdn.naive import MIN_LOG_DECAY

NAME = "recurrent_triton"
DIMS = (16, 32, 64, 128)
_FLOOR = tl.constexpr(MIN_LOG_DECAY)


@dataclass(frozen=True)
class Tiling:
    """How a launch is cut: values a program owns, and its warps."""

    values: int
    warps: int


@triton.jit
def _recurrent_kernel(
    q_p, k_p, v_p, log_decay_p, beta_p, parents_p, state_p, states_p, out_p, u_p, path_p,
    q_r, q_n, q_h, k_r, k_n, k_h, v_r, v_n, v_h, g_r, g_n, g_h, b_r, b_n, b_h, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_k = i_h // (HV // H)
    keys, values = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    tile, first = values[:, None] * K + keys[None, :], keys[None, :] * V + values[:, None]
    q_p += i_r * q_r + i_k * q_h
    k_p += i_r * k_r + i_k * k_h
    v_p += i_r * v_r + i_h * v_h
    log_decay_p += i_r * g_r + i_h * g_h
    beta_p += i_r * b_r + i_h * b_h
    parents_p += i_r * N
    state_p += (i_r * HV + i_h) * K * V
    states_p += (i_r * N * HV + i_h) * K * V
    out_p += (i_r * N * HV + i_h) * V
    u_p += (i_r * N * HV + i_h) * V
    path_p += i_r * N * HV + i_h
    own_p, own_path_p = states_p, path_p
    q, k = tl.load(q_p + keys), tl.load(k_p + keys)
    v, log_decay, beta = tl.load(v_p + values), tl.load(log_decay_p), tl.load(beta_p)
    parent = tl.load(parents_p)
    for node in range(N):
        if parent < 0:  # noqa: SIM108, as Triton code
            state = tl.load(state_p + first)
        else:
            state = tl.load(states_p + parent * (HV * K * V) + tile)
        row_q, row_k, row_v, row_beta = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32), beta.to(tl.float32)
        row_decay, row_parent = tl.maximum(log_decay.to(tl.float32), _FLOOR), parent
        if node + 1 < N:
            # the next row's inputs arrive while this one waits for its parent's state
            q_p += q_n
            k_p += k_n
            v_p += v_n
            log_decay_p += g_n
            beta_p += b_n
            parents_p += 1
            q, k = tl.load(q_p + keys), tl.load(k_p + keys)
            v, log_decay, beta = tl.load(v_p + values), tl.load(log_decay_p), tl.load(beta_p)
            parent = tl.load(parents_p)
        state *= tl.exp(row_decay)
        # both products of the old state at once: q.(S + k u) = q.S + (q.k) u
        from_k = tl.sum(state * row_k[None, :], axis=1)
        from_q = tl.sum(state * row_q[None, :], axis=1)
        u = row_beta * (row_v - from_k)
        tl.store(own_p + tile, state + u[:, None] * row_k[None, :])
        tl.store(out_p + values, from_q + tl.sum(row_q * row_k, axis=0) * u)
        tl.store(u_p + values, u)
        if i_v == 0:
            total = row_decay.to(tl.float64)
            if row_parent >= 0:
                total += tl.load(path_p + row_parent * HV)
            tl.store(own_path_p, total)
        # a child reads what this node stored
        tl.debug_barrier()
        own_p += HV * K * V
        own_path_p += HV
        out_p += HV * V
        u_p += HV * V


def choose_tiling(value_dim: int) -> Tiling:
    """Return the measured best cut (NOTES.md has the table)."""
    return Tiling(values=min(8, value_dim), warps=1)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError unless the kernel runs on `device` with a state of `dtype`."""
    launch.check_device(NAME, device, dtype, interpreted=launch.is_interpreted(_recurrent_kernel))


def check_shape(nodes: int, key_dim: int, value_dim: int, rows: torch.dtype) -> None:
    """Raise ValueError for sizes that the kernel does not take; it has no limit of rows but the memory of T states."""
    if nodes < 1:
        raise ValueError(f"gdn_backend: {NAME} takes 1 row or more, not {nodes}; give each tree its root")
    launch.check_dims(NAME, key_dim, value_dim, DIMS)


def prepare_tree(parents: Tensor, ancestors: Tensor) -> Tensor:
    """Return the parents [R, N] int64."""
    return parents.contiguous()


def verify_states(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor,
    *, tiling: Tiling | None = None, states: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (out, u, path_log_decay, states [R, N, HV, V, K]); shapes as in `tfm_kernels.gdn.ops.tree_verify`.

    `states` is filled when given: it is the large buffer (3.15 MB a node and layer at 48 heads of 128 x 128).
    """
    requests, nodes, heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    tiling = tiling or choose_tiling(value_dim)
    out, u = state.new_empty(v.shape), state.new_empty(v.shape)
    path = state.new_empty(v.shape[:3], dtype=torch.float64)
    if states is None:
        states = state.new_empty(requests, nodes, *state.shape[1:])
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *log_decay.stride(), *beta.stride())
    _recurrent_kernel[(value_dim // tiling.values, value_heads, requests)](
        q, k, v, log_decay, beta, parents, state, states, out, u, path, *strides, nodes,
        H=heads, HV=value_heads, K=key_dim, V=value_dim, BV=tiling.values, num_warps=tiling.warps,
    )  # fmt: skip
    return out, u, path, states


def tree_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, tree: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes as in `tfm_kernels.gdn.ops.tree_verify`, with `tree` from `prepare_tree`; the state in float32."""
    q, k, v = launch.same_rows(q, k, v)
    return verify_states(q, k, v, log_decay, beta, tree, state.contiguous())[:3]
