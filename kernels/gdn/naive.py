"""The definition of gated-DeltaNet tree verification: one node at a time, every state kept. Tests compare with this.

A node's state follows from its parent's, not from the node before it:

    S_n = exp(g_n) S_p + k_n (beta_n (v_n - k_n^T exp(g_n) S_p))^T,   o_n = q_n^T S_n        (paper Eq. 7)
"""

import torch
from torch import Tensor

# exp of this is 0 in float64 too; with a log-decay of -inf, differences of path sums would not exist
MIN_LOG_DECAY = -1e4


def naive_states(
    q: Tensor,  # [R, N, H, K], normalised and scaled
    k: Tensor,  # [R, N, H, K], normalised
    v: Tensor,  # [R, N, HV, V], HV a multiple of H: value head h reads key head h // (HV / H)
    log_decay: Tensor,  # [R, N, HV], <= 0
    beta: Tensor,  # [R, N, HV]
    parents: Tensor,  # [R, N] int64, parents[i] < i; -1 starts from the committed state
    state: Tensor,  # [R, HV, K, V]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out [R, N, HV, V], states [R, N, HV, K, V], writes [R, N, HV, V]), all in the state's dtype."""
    group = v.shape[2] // k.shape[2]
    q, k = (x.to(state.dtype).repeat_interleave(group, dim=2) for x in (q, k))
    v, log_decay, beta = (x.to(state.dtype) for x in (v, log_decay, beta))
    out, writes = torch.empty_like(v), torch.empty_like(v)
    states = state.new_empty(*v.shape[:2], *state.shape[1:])
    for request, row in enumerate(parents.tolist()):
        for node, parent in enumerate(row):
            before = state[request] if parent < 0 else states[request, parent]
            decayed = before * log_decay[request, node].exp()[:, None, None]
            seen = torch.einsum("hk,hkv->hv", k[request, node], decayed)
            write = beta[request, node][:, None] * (v[request, node] - seen)
            states[request, node] = decayed + torch.einsum("hk,hv->hkv", k[request, node], write)
            out[request, node] = torch.einsum("hk,hkv->hv", q[request, node], states[request, node])
            writes[request, node] = write
    return out, states, writes


def naive_tree_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`tree_verify` by the definition; shapes as in `tfm_kernels.gdn.tree_verify`."""
    out, _, writes = naive_states(q, k, v, log_decay, beta, parents, state)
    path_log_decay = log_decay.double().clamp(min=MIN_LOG_DECAY)
    for request, row in enumerate(parents.tolist()):
        for node, parent in enumerate(row):
            if parent >= 0:
                path_log_decay[request, node] += path_log_decay[request, parent]
    return out, writes, path_log_decay
