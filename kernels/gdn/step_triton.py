"""`step.plain_step` in one Triton launch: a program owns a tile of values of one head, reads it once, writes it once.

Bytes bound it: a state of 48 heads of 128 x 128 is 3.15 MB each way and sequence.
"""

import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels.gdn import launch
from tfm_kernels.gdn.naive import MIN_LOG_DECAY

NAME = "step_triton"
DIMS = (16, 32, 64, 128)
VALUES, WARPS = 32, 4  # of a tile; a row of a tile is then a whole 128-byte line
_FLOOR = tl.constexpr(MIN_LOG_DECAY)


@triton.jit
def _step_kernel(
    q_p, k_p, v_p, log_decay_p, beta_p, state_p, out_p,
    q_r, q_h, k_r, k_h, v_r, v_h, g_r, g_h, b_r, b_h,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    i_r, i_h, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i_k = i_h // (HV // H)
    keys, values = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    tile = state_p + (i_r * HV + i_h) * K * V + keys[:, None] * V + values[None, :]
    q = tl.load(q_p + i_r * q_r + i_k * q_h + keys).to(tl.float32)
    k = tl.load(k_p + i_r * k_r + i_k * k_h + keys).to(tl.float32)
    v = tl.load(v_p + i_r * v_r + i_h * v_h + values).to(tl.float32)
    log_decay = tl.load(log_decay_p + i_r * g_r + i_h * g_h).to(tl.float32)
    beta = tl.load(beta_p + i_r * b_r + i_h * b_h).to(tl.float32)
    state = tl.load(tile) * tl.exp(tl.maximum(log_decay, _FLOOR))
    write = beta * (v - tl.sum(state * k[:, None], axis=0))
    state += k[:, None] * write[None, :]
    tl.store(tile, state)
    tl.store(out_p + (i_r * HV + i_h) * V + values, tl.sum(state * q[:, None], axis=0))


def step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Shapes as in `step.step`; the state in float32. Raises ValueError for what the kernel does not take."""
    launch.check_device(NAME, state.device, state.dtype, interpreted=launch.is_interpreted(_step_kernel))
    (requests, value_heads, key_dim, value_dim), heads = state.shape, k.shape[1]
    launch.check_dims(NAME, key_dim, value_dim, DIMS)
    if not state.is_contiguous():
        raise ValueError("state: is not contiguous, and it is updated in place; allocate it as [R, HV, K, V]")
    q, k, v = (launch.rows_last(x) for x in (q, k, v))
    out, values = state.new_empty(v.shape), min(VALUES, value_dim)
    strides = (x.stride()[:2] for x in (q, k, v, log_decay, beta))
    _step_kernel[(requests, value_heads, value_dim // values)](
        q, k, v, log_decay, beta, state, out, *(stride for pair in strides for stride in pair),
        H=heads, HV=value_heads, K=key_dim, V=value_dim, BV=values, num_warps=WARPS,
    )  # fmt: skip
    return out
