"""Gated-DeltaNet tree verification: the public ops and the one place that chooses a backend."""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from tfm_kernels.gdn import naive, solve
from tfm_kernels.gdn.backends import BACKENDS, KERNELS, TORCH_BACKENDS


def resolve_backend(name: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """Return `name` if that backend runs on `device` with a state of `dtype`, else raise ValueError with the reason."""
    if name not in BACKENDS:
        raise ValueError(f"gdn_backend: {name!r} is not allowed (allowed: {', '.join(BACKENDS)}); choose one of them")
    if name in KERNELS:
        kernel_module(name).check_device(torch.device(device), dtype)
    elif dtype not in (torch.float32, torch.float64):
        raise ValueError(f"gdn_backend: {name} keeps its state in float32 or float64, not {dtype}; convert the state")
    return name


def kernel_module(name: str) -> ModuleType:
    """Return the module of a GPU backend, or raise ValueError when what it needs is not installed.

    Such a module offers `check_device(device, dtype)`, `check_shape(nodes, key_dim, value_dim, dtype)`, both raising
    ValueError, `prepare_tree(parents, ancestors)` and `tree_verify(q, k, v, log_decay, beta, tree, state)`.
    """
    try:
        return importlib.import_module(KERNELS[name])
    except ModuleNotFoundError as error:
        raise ValueError(
            f"gdn_backend: {name} needs the package {error.name} (allowed without it: {', '.join(TORCH_BACKENDS)}); "
            "pip install -e '.[kernels]', or use solve"
        ) from error


def prepare_tree(parents: Tensor, ancestors: Tensor, *, backend: str) -> Tensor:
    """Return what `backend` reads of the trees, for `tree_verify`: once a verify, since all layers share it.

    `parents` [R, N], `ancestors` [R, N, N] bool, both on the device that verifies.
    """
    return ancestors if backend in TORCH_BACKENDS else kernel_module(backend).prepare_tree(parents, ancestors)


def tree_verify(
    q: Tensor,  # [R, N, H, K], normalised and scaled by K^-0.5
    k: Tensor,  # [R, N, H, K], normalised
    v: Tensor,  # [R, N, HV, V], HV a multiple of H
    log_decay: Tensor,  # [R, N, HV], <= 0; -inf forgets everything
    beta: Tensor,  # [R, N, HV]
    parents: Tensor,  # [R, N] int64, parents[i] < i; -1 (the root and padding) starts from the committed state
    state: Tensor,  # [R, HV, K, V] float32 or float64; read, never written
    *,
    backend: str,
    tree: Tensor | None = None,  # of prepare_tree, computed from parents when absent
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify every node of R trees against its ancestors.

    Returns (out [R, N, HV, V], u [R, N, HV, V], path_log_decay [R, N, HV] float64): out and u in the state's dtype.
    u and path_log_decay are all that `commit` needs of the tree. Rows with parent -1 are independent of the others.
    """
    _check(q, k, v, log_decay, beta, parents, state)
    if tree is None:
        _check_parents(parents)
    resolve_backend(backend, state.device, state.dtype)
    if backend == "naive":
        return naive.naive_tree_verify(q, k, v, log_decay, beta, parents, state)
    if backend in KERNELS:
        kernel_module(backend).check_shape(k.shape[1], k.shape[3], v.shape[3], k.dtype)
    if tree is None:
        tree = prepare_tree(parents, ancestor_mask(parents), backend=backend)
    verify = solve.tree_verify if backend == "solve" else kernel_module(backend).tree_verify
    return verify(q, k, v, log_decay, beta, tree, state)


def commit(
    state: Tensor,  # [R, HV, K, V]
    k: Tensor,  # [R, N, H, K]
    u: Tensor,  # [R, N, HV, V], from tree_verify
    path_log_decay: Tensor,  # [R, N, HV], from tree_verify
    path: Tensor,  # [R, P] int64 nodes from the root down, padded with -1; an all -1 row keeps its state
) -> Tensor:
    """Return the state after each request's path [R, HV, K, V]; the given state is not written.

    S_n = exp(G_n) S_0 + sum over j on the path of exp(G_n - G_j) k_j u_j^T. Raises ValueError for nodes outside the
    tree, another count of requests, and a state in low precision.
    """
    resolve_backend("solve", state.device, state.dtype)
    expected = (*k.shape[:2], state.shape[1])
    if u.shape[:3] != expected or path_log_decay.shape != expected or len(state) != len(k):
        shapes = [tuple(x.shape) for x in (state, k, u, path_log_decay)]
        raise ValueError(f"state, k, u, path_log_decay: shapes {shapes} disagree; pass those of one tree_verify")
    check_path(path, k.shape[1], len(k))
    return solve.commit(state, k, u, path_log_decay, path)


def check_path(path: Tensor, nodes: int, requests: int) -> None:
    """Raise ValueError unless `path` [R, P] holds `requests` rows of ascending nodes below `nodes`, then -1."""
    is_path = path.dim() == 2 and path.numel() > 0 and len(path) == requests
    is_path = is_path and not path.is_floating_point() and path.dtype != torch.bool
    if is_path:
        climbs = (path[:, 1:] >= 0) & (path[:, 1:] <= path[:, :-1])
        gap = (path[:, :-1] < 0) & (path[:, 1:] >= 0)
        is_path = int(path.min()) >= -1 and int(path.max()) < nodes and not bool((climbs | gap).any())
    if not is_path:
        raise ValueError(
            f"path: {path.tolist()} is not allowed (allowed: [{requests} requests, length] of integers, ascending "
            f"nodes 0 to {nodes - 1}, then -1 as padding); pass the path of the tree that was verified"
        )


def ancestor_mask(parents: Tensor) -> Tensor:
    """Return mask [R, N, N] bool: mask[r, i, j] says that j is i or an ancestor of i.

    `parents` [R, N] int64 with parents[i] < i or -1. Reachability by repeated squaring: log2(N) small products
    instead of N dependent steps.
    """
    width = parents.shape[1]
    reach = torch.zeros(*parents.shape, width + 1, device=parents.device)
    reach.scatter_(2, (parents % (width + 1))[..., None], 1.0)  # -1 falls into the spare last column
    reach = reach[..., :width] + torch.eye(width, device=parents.device)
    span = 1
    while span < width - 1:
        reach = (reach @ reach).clamp(max=1.0)
        span *= 2
    return reach > 0


def _check_parents(parents: Tensor) -> None:
    rows = torch.arange(parents.shape[1], device=parents.device)
    if parents.is_floating_point() or bool(((parents >= rows) | (parents < -1)).any()):
        raise ValueError(
            f"parents: {parents.tolist()} is not allowed (allowed: integers, parents[i] < i, -1 for roots, padding); "
            "put parents before their children"
        )


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, parents: Tensor, state: Tensor) -> None:
    requests, nodes, heads, key_dim = k.shape
    expected = (requests, v.shape[2], key_dim, v.shape[3])
    if v.shape[2] % heads:
        raise ValueError(f"v: {v.shape[2]} value heads are no multiple of {heads} key heads")
    if q.shape != k.shape or v.shape[:2] != (requests, nodes) or parents.shape != (requests, nodes):
        shapes = [tuple(x.shape) for x in (q, k, v, parents)]
        raise ValueError(f"q, k, v, parents: shapes {shapes} disagree; all carry [requests, nodes] first")
    if log_decay.shape != v.shape[:3] or beta.shape != v.shape[:3]:
        shapes = [tuple(log_decay.shape), tuple(beta.shape)]
        raise ValueError(f"log_decay, beta: shapes {shapes}, expected {tuple(v.shape[:3])} = [requests, nodes, HV]")
    if state.shape != expected:
        raise ValueError(f"state: shape {tuple(state.shape)}, expected {expected} = [requests, value heads, K, V]")
