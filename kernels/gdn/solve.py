"""Gated-DeltaNet tree verification as one masked triangular solve, in plain PyTorch.

With G_i the sum of log-decays on the path to node i and "j < i" for "j is a proper ancestor of i" (paper 3.4):

    X_ij = [j < i]  exp(G_i - G_j) beta_i k_i.k_j        (I + X) U = diag(beta) (V - diag(exp G) K S_0)
    Y_ij = [j <= i] exp(G_i - G_j) q_i.k_j               O = diag(exp G) Q S_0 + Y U

No per-node state exists, so nothing has to be rolled back: the state of any node is
S_n = exp(G_n) S_0 + sum over j <= n of exp(G_n - G_j) k_j u_j^T.

G is accumulated in float64 and only differences between a node and its ancestors are exponentiated; both matter where
a strong decay makes |G| large. Everything else is computed in the state's dtype.
"""

import torch
from torch import Tensor

from tfm_kernels.gdn.naive import MIN_LOG_DECAY

CHUNK = 64


def tree_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, ancestors: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes as in `tfm_kernels.gdn.tree_verify`, with `ancestors` [R, N, N] bool (a node is its own ancestor)."""
    q, k, v, beta = _heads_first(q, k, v, beta, state.dtype)
    clamped = log_decay.double().clamp(min=MIN_LOG_DECAY)
    path_log_decay = torch.matmul(ancestors.double(), clamped)  # [R, N, HV]
    total = path_log_decay.transpose(1, 2)  # [R, HV, N]
    own = ancestors[:, None]
    decay = _ancestor_decay(total, own, state.dtype)
    gain = total.exp().to(state.dtype)[..., None]
    system = (k @ k.mT) * decay * beta[..., None]
    # solve_triangular reads below the diagonal only and takes the diagonal as ones: the proper ancestors
    right = beta[..., None] * (v - gain * (k @ state))
    writes = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = gain * (q @ state) + ((q @ k.mT) * decay) @ writes
    return out.transpose(1, 2), writes.transpose(1, 2), path_log_decay


def commit(state: Tensor, k: Tensor, u: Tensor, path_log_decay: Tensor, path: Tensor) -> Tensor:
    """Shapes as in `tfm_kernels.gdn.commit`."""
    keep = path >= 0  # [R, P]
    nodes = path.clamp(min=0)[..., None]
    total = path_log_decay.gather(1, nodes.expand(-1, -1, path_log_decay.shape[2])).transpose(1, 2)  # [R, HV, P]
    last = (keep.sum(1, keepdim=True) - 1).clamp(min=0)
    leaf = total.gather(2, last[:, None].expand(-1, total.shape[1], 1))
    weight = (leaf - total).exp().masked_fill(~keep[:, None], 0).to(state.dtype)
    group = u.shape[2] // k.shape[2]
    keys = _rows(k, nodes).to(state.dtype).repeat_interleave(group, dim=2).transpose(1, 2)  # [R, HV, P, K]
    writes = _rows(u, nodes).to(state.dtype).transpose(1, 2)
    moved = leaf.exp().to(state.dtype)[..., None] * state + (keys * weight[..., None]).mT @ writes
    return torch.where(keep[:, :1, None, None], moved, state)


def chain_forward(
    q: Tensor,  # [R, T, H, K]
    k: Tensor,  # [R, T, H, K]
    v: Tensor,  # [R, T, HV, V]
    log_decay: Tensor,  # [R, T, HV]
    beta: Tensor,  # [R, T, HV]
    state: Tensor,  # [R, HV, K, V]
) -> tuple[Tensor, Tensor]:
    """Return (out [R, T, HV, V], state after the last token) of a plain sequence; differentiable.

    Chunks of 64 tokens are solved together and only the state goes from chunk to chunk: inside a chunk the chain is
    a tree whose ancestor mask is lower triangular. A token with beta 0 and log-decay 0 leaves the state untouched,
    which is how padding is passed.
    """
    length = v.shape[1]
    chunk = min(CHUNK, length)
    pad = -length % chunk
    q, k, v, beta = _heads_first(q, k, v, beta, state.dtype)
    total = log_decay.double().clamp(min=MIN_LOG_DECAY).transpose(1, 2)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    beta, total = (torch.nn.functional.pad(x, (0, pad)).unflatten(2, (-1, chunk)) for x in (beta, total))
    total = total.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=v.device).tril()
    decay = _ancestor_decay(total, lower, state.dtype)
    gain = total.exp().to(state.dtype)[..., None]
    system = (k @ k.mT) * decay * beta[..., None]
    right = beta[..., None] * torch.cat([v, gain * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_values, from_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.mT) * decay
    last = total[..., -1:]
    carry = (last - total).exp().to(state.dtype)[..., None] * k  # each write's key, decayed to the chunk's end
    kept = last.exp().to(state.dtype)[..., None]
    out = []
    for c in range(v.shape[2]):
        writes = from_values[:, :, c] - from_state[:, :, c] @ state
        out.append((gain[:, :, c] * q[:, :, c]) @ state + within[:, :, c] @ writes)
        state = kept[:, :, c] * state + carry[:, :, c].mT @ writes
    return torch.cat(out, dim=2)[:, :, :length].transpose(1, 2), state


def _heads_first(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    # [R, N, heads, dim] -> [R, HV, N, dim] in the state's dtype, key heads repeated to the value heads
    group = v.shape[2] // k.shape[2]
    q, k = (x.to(dtype).repeat_interleave(group, dim=2).transpose(1, 2) for x in (q, k))
    return q, k, v.to(dtype).transpose(1, 2), beta.to(dtype).transpose(1, 2)


def _ancestor_decay(total: Tensor, own: Tensor, dtype: torch.dtype) -> Tensor:
    # exp(G_i - G_j) where j is i or its ancestor, else 0; masked before exp, or unrelated branches overflow
    difference = (total[..., :, None] - total[..., None, :]).to(dtype)
    return difference.masked_fill(~own, float("-inf")).exp()


def _rows(x: Tensor, nodes: Tensor) -> Tensor:
    # x [R, N, heads, dim] at nodes [R, P, 1] -> [R, P, heads, dim]
    return x.gather(1, nodes[..., None].expand(-1, -1, *x.shape[2:]))
