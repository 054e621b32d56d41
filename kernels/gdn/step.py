"""One more token for R sequences: the gated delta rule with a state that is updated in place.

    S <- exp(g) S + k u^T,   u = beta (v - exp(g) S^T k),   o = S^T q                                    (paper Eq. 7)

This is what sampling without a draft needs: no tree, no scratch, one pass over the states. `step` takes Triton's form
where the state lies on a CUDA device, the plain one elsewhere.
"""

import torch
from torch import Tensor

from tfm_kernels.gdn.naive import MIN_LOG_DECAY


def step(
    q: Tensor,  # [R, H, K], normalised and scaled by K^-0.5
    k: Tensor,  # [R, H, K], normalised
    v: Tensor,  # [R, HV, V], HV a multiple of H
    log_decay: Tensor,  # [R, HV], <= 0; -inf forgets everything
    beta: Tensor,  # [R, HV]
    state: Tensor,  # [R, HV, K, V], contiguous; written
) -> Tensor:
    """Return the new token's output [R, HV, V] in the state's dtype and put its state into `state`."""
    if state.is_cuda:
        from tfm_kernels.gdn import step_triton

        return step_triton.step(q, k, v, log_decay, beta, state)
    return plain_step(q, k, v, log_decay, beta, state)


def plain_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """`step` in PyTorch, in the state's dtype."""
    group = v.shape[1] // k.shape[1]
    q, k = (x.to(state.dtype).repeat_interleave(group, dim=1) for x in (q, k))
    v, log_decay, beta = (x.to(state.dtype) for x in (v, log_decay, beta))
    state.mul_(log_decay.clamp(min=MIN_LOG_DECAY).exp()[..., None, None])
    write = beta[..., None] * (v - torch.einsum("rhk,rhkv->rhv", k, state))
    state.add_(k[..., None] * write[..., None, :])
    return torch.einsum("rhk,rhkv->rhv", q, state)
