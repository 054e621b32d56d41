"""The deferred commit: an accepted path becomes permanent inside the next verify, which reads the state anyway.

A step that ends with a commit reads and writes every state once more. Here it ends with a `Pending`: the path and what
its verify wrote of the tree. The next verify starts from the state after that path and puts it back:

    S <- exp(G_n) S + sum over j on the path of exp(G_n - G_j) k_j u_j^T,   then the tree from S

The definition is here, two stages after each other; the form in one launch is `deferred_cuda`. The engine commits the
plain way (kernels/NOTES.md has both times).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tfm_kernels.gdn import naive, ops
from tfm_kernels.gdn.backends import KERNELS, TORCH_BACKENDS

MAX_PENDING = 32  # nodes of a path


@dataclass(frozen=True)
class Pending:
    """What a step leaves to commit. Its verify may have had other rows T' than the one that commits it.

    The next verify reads these while it writes its own k, u and decays, so a layer needs two sets of them, in turn.
    """

    path: Tensor  # [R, P] int64 nodes from the root down, padded with -1; an all -1 row has nothing pending
    k: Tensor  # [R, T', H, K]
    u: Tensor  # [R, T', HV, V]
    path_log_decay: Tensor  # [R, T', HV] float64
    inputs: Tensor | None = None  # [R, T', C] before the convolution: only the mixer reads them

    @classmethod
    def nothing(cls, k: Tensor, u: Tensor, path_log_decay: Tensor, inputs: Tensor | None = None) -> "Pending":
        """Return a Pending of buffers not yet written, with no path: what the first step is given."""
        return cls(torch.full((len(k), 1), -1, device=k.device), k, u, path_log_decay, inputs)


def naive_commit(state: Tensor, k: Tensor, u: Tensor, path_log_decay: Tensor, path: Tensor) -> Tensor:
    """Return the state after each request's path, one node after another; shapes as in `ops.commit`."""
    group = u.shape[2] // k.shape[2]
    after = state.clone()
    for request, row in enumerate(path.tolist()):
        above = torch.zeros_like(path_log_decay[request, 0])
        for node in (node for node in row if node >= 0):
            decay = (path_log_decay[request, node] - above).exp().to(state.dtype)
            key = k[request, node].to(state.dtype).repeat_interleave(group, dim=0)
            write = u[request, node].to(state.dtype)
            after[request] = decay[:, None, None] * after[request] + key[:, :, None] * write[:, None]
            above = path_log_decay[request, node]
    return after


def naive_window(window: Tensor, inputs: Tensor, path: Tensor) -> Tensor:
    """Return the newest rows [R, width - 1, C] of each request's window followed by its path's `inputs` [R, T', C]."""
    moved = []
    for old, rows, nodes in zip(window, inputs, path, strict=True):
        moved.append(torch.cat([old, rows[nodes[nodes >= 0]]])[-window.shape[1] :])
    return torch.stack(moved)


def naive_deferred_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor, pending: Pending
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (out, u, path_log_decay, state after the pending path) by the definition; nothing is written."""
    state = naive_commit(state, pending.k, pending.u, pending.path_log_decay, pending.path)
    return (*naive.naive_tree_verify(q, k, v, log_decay, beta, parents, state), state)


def deferred_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor, pending: Pending,
    *, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Commit `pending` into `state`, in place, then verify; shapes and result as in `ops.tree_verify`.

    Raises ValueError for a path that is none of its tree and for a backend without this form.
    """
    ops.check_path(pending.path, pending.k.shape[1], len(pending.k))
    if pending.path.shape[1] > MAX_PENDING:
        raise ValueError(
            f"path: {pending.path.shape[1]} nodes are not allowed (allowed: 1 to {MAX_PENDING}); lower the depth, or "
            "commit and verify apart"
        )
    if backend == "fused_cuda":
        from tfm_kernels.gdn import deferred_cuda  # lazy: needs a compiler

        ops.resolve_backend(backend, state.device, state.dtype)
        return deferred_cuda.deferred_verify(q, k, v, log_decay, beta, parents, state, pending)
    if backend in KERNELS:
        raise ValueError(
            f"gdn_backend: {backend} has no deferred commit (allowed: {', '.join((*TORCH_BACKENDS, 'fused_cuda'))}); "
            "commit and verify apart"
        )
    commit = naive_commit if backend == "naive" else ops.commit
    state.copy_(commit(state, pending.k, pending.u, pending.path_log_decay, pending.path))
    return ops.tree_verify(q, k, v, log_decay, beta, parents, state, backend=backend)
