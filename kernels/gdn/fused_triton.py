"""Gated-DeltaNet tree verification as one masked solve kept on chip, in Triton.

Two launches: `prefix` sums the log-decays of every path, `solve` does the rest. One program of `solve` owns one value
tile of one value head of one request and walks the rows in blocks of at most 64, in topological order, so a block
needs only the blocks before it:

    gram     X_bc = [proper ancestor] exp(G_i - G_j) beta_i k_i.k_j,   Y_bc = [ancestor] exp(G_i - G_j) q_i.k_j
    solve    U_b = (I + X_bb)^-1 (diag(beta) (V_b - diag(exp G) K_b S) - sum over c < b of X_bc U_c)
    out      O_b = diag(exp G) Q_b S + sum over c <= b of Y_bc U_c

The inverse doubles the span of depths that is solved: with T_n the inverse of X restricted to pairs of one group of n
consecutive depths, T_2n = T_n - T_n X' T_n, where X' holds the pairs that share a group of 2n and no group of n. A
tree of depth below 2^m costs m steps whatever its size. Every T_n is a product of contractions, so no entry grows;
the powers of X, whose product gives the same inverse, do grow when keys repeat.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tfm_kernels.gdn import launch
from tfm_kernels.gdn.naive import MIN_LOG_DECAY

NAME = "fused_triton"
BLOCK = 64  # rows of a full block; the last one is 16, 32 or 64
# what fits the shared memory of one multiprocessor of an H200
MAX_NODES = {"bf16": 3 * BLOCK, "mixed": 3 * BLOCK, "tf32": BLOCK + 32, "tf32x3": BLOCK + 32}
# on a GPU, rows of shared memory must be 128 bytes: Triton 3.6 reads past narrower ones (NOTES.md)
DIMS, _TESTED_DIMS = (64, 128), (16, 32, 64, 128)
PREFIX_ROWS = 32  # rows of a program of `prefix`
PRECISIONS = tuple(MAX_NODES)
_FLOOR = tl.constexpr(MIN_LOG_DECAY)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _probe():
    pass


# the interpreter multiplies the bits of bf16 operands as integers, so there they are widened first
_INTERPRETED = tl.constexpr(launch.is_interpreted(_probe))


@dataclass(frozen=True)
class Tiling:
    """How a launch of `solve` is cut: values a program owns, and its warps."""

    values: int
    warps: int


def block_sizes(nodes: int) -> tuple[int, int, int]:
    """Return the rows of the three blocks for `nodes` rows (0: no such block): 65 is (64, 16, 0), not 128."""
    full, rest = divmod(nodes, BLOCK)
    sizes = [BLOCK] * full + [next(size for size in (16, 32, BLOCK) if size >= rest)] * (rest > 0)
    return tuple((sizes + [0, 0, 0])[:3])


@triton.jit
def _dot(a, b, acc):
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc)
    else:
        return tl.dot(a, b, acc=acc)


@triton.jit
def _halves(x):
    # x is the first plus the second, both in bf16, to 16 bits; cutting bits is cheaper than rounding to bf16 and back
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _product(a, b, acc, PRECISION: tl.constexpr):
    # acc + a b of float32 operands
    if PRECISION == "bf16":
        return _dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    elif PRECISION == "mixed":
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        acc = _dot(a_high, b_high, acc)
        acc = _dot(a_low, b_high, acc)
        return _dot(a_high, b_low, acc)
    else:
        return tl.dot(a, b, acc=acc, input_precision=PRECISION)


@triton.jit
def _bounded(a, b, acc, PRECISION: tl.constexpr):
    # acc + a b of operands whose entries are at most about 1, where float16 keeps as many bits as TF32
    if PRECISION == "mixed":
        return _dot(a.to(tl.float16), b.to(tl.float16), acc)
    else:
        return _product(a, b, acc, PRECISION)


@triton.jit
def _gram(a, b, PRECISION: tl.constexpr):
    # a b^T of rows as they are stored; bf16 operands multiply exactly
    zero = tl.zeros((a.shape[0], b.shape[0]), tl.float32)
    if a.dtype == tl.bfloat16:
        return _dot(a, tl.trans(b), zero)
    else:
        return _product(a.to(tl.float32), tl.trans(b.to(tl.float32)), zero, PRECISION)


@triton.jit
def _project(rows, state, PRECISION: tl.constexpr):
    # rows S [rows, values]; with bf16 rows the state is a sum of bf16 terms and every product is exact
    out = tl.zeros((rows.shape[0], state.shape[1]), tl.float32)
    if rows.dtype == tl.bfloat16 and PRECISION != "tf32x3":
        if PRECISION == "bf16":
            return _dot(rows, state.to(tl.bfloat16), out)
        else:
            high, low = _halves(state)
            out = _dot(rows, high, out)
            return _dot(rows, low, out)
    else:
        return _product(rows.to(tl.float32), state, out, PRECISION)


@triton.jit
def _rows(base, stride, first, N, SIZE: tl.constexpr, columns):
    # rows [first, first + SIZE) of a [N, ...] operand, zero beyond N
    rows = first + tl.arange(0, SIZE)
    return tl.load(base + (rows[:, None] * stride + columns[None, :]), mask=rows[:, None] < N, other=0.0)


@triton.jit
def _column(base, first, N, SIZE: tl.constexpr):
    rows = first + tl.arange(0, SIZE)
    return tl.load(base + rows, mask=rows < N, other=0)


@triton.jit
def _scalars(base, first, N, SIZE: tl.constexpr):
    # high and low part of log2 of the path's decay, the decay, beta
    rows = first + tl.arange(0, SIZE)
    inside = rows < N
    high = tl.load(base + rows, mask=inside, other=0.0)
    low = tl.load(base + N + rows, mask=inside, other=0.0)
    beta = tl.load(base + 2 * N + rows, mask=inside, other=0.0)
    return high, low, beta


@triton.jit
def _decay(words, high, low, other_high, other_low, OTHER: tl.constexpr):
    # [i, j]: decay from row j of the other block to row i where j is i or its ancestor, else 0
    # ancestors only, so the exponent is <= 0: masked before exp, or sibling branches overflow
    mask = ((words[:, None] >> tl.arange(0, OTHER).to(tl.int64)[None, :]) & 1) != 0
    difference = (high[:, None] - other_high[None, :]) + (low[:, None] - other_low[None, :])
    return tl.exp2(tl.where(mask, difference, float("-inf")))


@triton.jit
def _inverse(x, depth, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    # (I + x)^-1 of a block, doubling the span of depths that is solved
    place = tl.arange(0, SIZE)
    inverse = tl.where((depth[:, None] ^ depth[None, :]) == 1, -x, 0.0)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, inverse)
    deepest = tl.max(depth, axis=0)
    levels = (deepest >= 2).to(tl.int32) + (deepest >= 4).to(tl.int32) + (deepest >= 8).to(tl.int32)
    levels += (deepest >= 16).to(tl.int32) + (deepest >= 32).to(tl.int32)
    zero = tl.zeros((SIZE, SIZE), tl.float32)
    for level in range(1, levels + 1):
        differ = (depth[:, None] ^ depth[None, :]) >> level
        between = tl.where(differ == 1, -x, 0.0)
        inverse = _bounded(_bounded(inverse, between, zero, PRECISION), inverse, inverse, PRECISION)
    return inverse


@triton.jit
def _store(base, stride, first, N, SIZE: tl.constexpr, columns, value):
    rows = first + tl.arange(0, SIZE)
    tl.store(base + (rows[:, None] * stride + columns[None, :]), value, mask=rows[:, None] < N)


@triton.jit
def _prefix_kernel(
    log_decay_p, beta_p, tree_p, path_p, scalars_p, g_r, g_n, g_h, b_r, b_n, b_h, N,
    HV: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i_h, i_r = tl.program_id(0), tl.program_id(2).to(tl.int64)
    log_decay_p += i_r * g_r + i_h * g_h
    rows, bits = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, 64)
    inside = rows < N
    # float64: only differences of path sums matter, and float32 sums of strong decays would lose them
    total = tl.zeros((ROWS,), tl.float64)
    for word in tl.static_range(WORDS):
        words = tl.load(tree_p + (i_r * (WORDS + 1) + word) * N + rows, mask=inside, other=0)
        mask = ((words[:, None] >> bits.to(tl.int64)[None, :]) & 1) != 0
        others = word * 64 + bits
        log_decay = tl.load(log_decay_p + others * g_n, mask=others < N, other=0.0).to(tl.float64)
        total += tl.sum(tl.where(mask, tl.maximum(log_decay, _FLOOR)[None, :], 0.0), axis=1)
    tl.store(path_p + i_r * N * HV + i_h + rows * HV, total, mask=inside)
    scaled = total * _LOG2_E
    high = scaled.to(tl.float32)
    scalars_p += (i_r * HV + i_h) * 3 * N
    tl.store(scalars_p + rows, high, mask=inside)
    # float32 pair: the difference of two path sums is then exact to float32 rounding where it is small
    tl.store(scalars_p + N + rows, (scaled - high.to(tl.float64)).to(tl.float32), mask=inside)
    beta = tl.load(beta_p + i_r * b_r + i_h * b_h + rows * b_n, mask=inside, other=0.0).to(tl.float32)
    tl.store(scalars_p + 2 * N + rows, beta, mask=inside)


@triton.jit
def _solve_kernel(
    q_p, k_p, v_p, scalars_p, tree_p, state_p, out_p, u_p, q_r, q_n, q_h, k_r, k_n, k_h, v_r, v_n, v_h, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WORDS: tl.constexpr,
    BV: tl.constexpr, SIZE0: tl.constexpr, SIZE1: tl.constexpr, SIZE2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_k = i_h // (HV // H)
    keys, values = tl.arange(0, K), i_v * BV + tl.arange(0, BV)
    q_p += i_r * q_r + i_k * q_h
    k_p += i_r * k_r + i_k * k_h
    v_p += i_r * v_r + i_h * v_h
    scalars_p += (i_r * HV + i_h) * 3 * N
    tree_p += i_r * N * (WORDS + 1)
    state_p += (i_r * HV + i_h) * K * V
    out_p += i_r * N * HV * V + i_h * V
    u_p += i_r * N * HV * V + i_h * V
    depth_p = tree_p + WORDS * N

    # block 0: only its own rows
    k0 = _rows(k_p, k_n, 0, N, SIZE0, keys)
    state = tl.load(state_p + (keys[:, None] * V + values[None, :]))
    high0, low0, beta0 = _scalars(scalars_p, 0, N, SIZE0)
    words00 = _column(tree_p, 0, N, SIZE0)
    depth0 = _column(depth_p, 0, N, SIZE0).to(tl.int32)
    v0 = _rows(v_p, v_n, 0, N, SIZE0, values)
    q0 = _rows(q_p, q_n, 0, N, SIZE0, keys)
    decay00 = _decay(words00, high0, low0, high0, low0, SIZE0)
    gain0 = tl.exp2(high0)
    x00 = _gram(k0, k0, PRECISION) * decay00 * beta0[:, None]
    inverse0 = _inverse(x00, depth0, SIZE0, PRECISION)
    r0 = beta0[:, None] * (v0.to(tl.float32) - gain0[:, None] * _project(k0, state, PRECISION))
    u0 = _product(inverse0, r0, tl.zeros((SIZE0, BV), tl.float32), PRECISION)
    _store(u_p, HV * V, 0, N, SIZE0, values, u0)
    y00 = _gram(q0, k0, PRECISION) * decay00
    o0 = _product(y00, u0, gain0[:, None] * _project(q0, state, PRECISION), PRECISION)
    _store(out_p, HV * V, 0, N, SIZE0, values, o0)

    if SIZE1 > 0:
        k1 = _rows(k_p, k_n, SIZE0, N, SIZE1, keys)
        high1, low1, beta1 = _scalars(scalars_p, SIZE0, N, SIZE1)
        words10 = _column(tree_p, SIZE0, N, SIZE1)
        words11 = _column(tree_p + N, SIZE0, N, SIZE1)
        depth1 = _column(depth_p, SIZE0, N, SIZE1).to(tl.int32)
        v1 = _rows(v_p, v_n, SIZE0, N, SIZE1, values)
        q1 = _rows(q_p, q_n, SIZE0, N, SIZE1, keys)
        decay10 = _decay(words10, high1, low1, high0, low0, SIZE0)
        decay11 = _decay(words11, high1, low1, high1, low1, SIZE1)
        gain1 = tl.exp2(high1)
        x10 = _gram(k1, k0, PRECISION) * decay10 * -beta1[:, None]
        x11 = _gram(k1, k1, PRECISION) * decay11 * beta1[:, None]
        inverse1 = _inverse(x11, depth1, SIZE1, PRECISION)
        r1 = beta1[:, None] * (v1.to(tl.float32) - gain1[:, None] * _project(k1, state, PRECISION))
        r1 = _product(x10, u0, r1, PRECISION)
        u1 = _product(inverse1, r1, tl.zeros((SIZE1, BV), tl.float32), PRECISION)
        _store(u_p, HV * V, SIZE0, N, SIZE1, values, u1)
        y10 = _gram(q1, k0, PRECISION) * decay10
        y11 = _gram(q1, k1, PRECISION) * decay11
        o1 = _product(y10, u0, gain1[:, None] * _project(q1, state, PRECISION), PRECISION)
        o1 = _product(y11, u1, o1, PRECISION)
        _store(out_p, HV * V, SIZE0, N, SIZE1, values, o1)

        if SIZE2 > 0:
            start2: tl.constexpr = SIZE0 + SIZE1
            k2 = _rows(k_p, k_n, start2, N, SIZE2, keys)
            high2, low2, beta2 = _scalars(scalars_p, start2, N, SIZE2)
            words20 = _column(tree_p, start2, N, SIZE2)
            words21 = _column(tree_p + N, start2, N, SIZE2)
            words22 = _column(tree_p + 2 * N, start2, N, SIZE2)
            depth2 = _column(depth_p, start2, N, SIZE2).to(tl.int32)
            v2 = _rows(v_p, v_n, start2, N, SIZE2, values)
            q2 = _rows(q_p, q_n, start2, N, SIZE2, keys)
            decay20 = _decay(words20, high2, low2, high0, low0, SIZE0)
            decay21 = _decay(words21, high2, low2, high1, low1, SIZE1)
            decay22 = _decay(words22, high2, low2, high2, low2, SIZE2)
            gain2 = tl.exp2(high2)
            x20 = _gram(k2, k0, PRECISION) * decay20 * -beta2[:, None]
            x21 = _gram(k2, k1, PRECISION) * decay21 * -beta2[:, None]
            x22 = _gram(k2, k2, PRECISION) * decay22 * beta2[:, None]
            inverse2 = _inverse(x22, depth2, SIZE2, PRECISION)
            r2 = beta2[:, None] * (v2.to(tl.float32) - gain2[:, None] * _project(k2, state, PRECISION))
            r2 = _product(x21, u1, _product(x20, u0, r2, PRECISION), PRECISION)
            u2 = _product(inverse2, r2, tl.zeros((SIZE2, BV), tl.float32), PRECISION)
            _store(u_p, HV * V, start2, N, SIZE2, values, u2)
            y20 = _gram(q2, k0, PRECISION) * decay20
            y21 = _gram(q2, k1, PRECISION) * decay21
            y22 = _gram(q2, k2, PRECISION) * decay22
            o2 = _product(y20, u0, gain2[:, None] * _project(q2, state, PRECISION), PRECISION)
            o2 = _product(y22, u2, _product(y21, u1, o2, PRECISION), PRECISION)
            _store(out_p, HV * V, start2, N, SIZE2, values, o2)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError unless the kernels run on `device` with a state of `dtype`."""
    launch.check_device(NAME, device, dtype, interpreted=_INTERPRETED.value)


def check_shape(nodes: int, key_dim: int, value_dim: int, rows: torch.dtype) -> None:
    """Raise ValueError for sizes that the kernels do not take."""
    _check_nodes(nodes, default_precision(rows), rows)
    launch.check_dims(NAME, key_dim, value_dim, _TESTED_DIMS if _INTERPRETED.value else DIMS)


def _check_nodes(nodes: int, precision: str, rows: torch.dtype) -> None:
    most = MAX_NODES[precision]
    if not 1 <= nodes <= most:
        raise ValueError(f"gdn_backend: {NAME} takes 1 to {most} rows of {rows}, not {nodes}; use solve")


def prepare_tree(parents: Tensor, ancestors: Tensor) -> Tensor:
    """Return [R, words + 1, N] int64: each row's ancestors as bits, 64 rows a word, then its depth inside its block."""
    nodes = ancestors.shape[1]
    groups = torch.nn.functional.pad(ancestors, (0, -nodes % BLOCK)).unflatten(2, (-1, BLOCK))
    words = (groups.long() << torch.arange(BLOCK, device=ancestors.device)).sum(-1)
    own = torch.arange(nodes, device=ancestors.device) // BLOCK
    depth = groups.sum(-1).gather(2, own[None, :, None].expand(len(parents), -1, 1)) - 1
    return torch.cat([words, depth], dim=2).transpose(1, 2).contiguous()


def default_precision(rows: torch.dtype) -> str:
    """Return the precision for q and k of dtype `rows`: float32 rows mean a float32 model, which TF32 would spoil."""
    return "tf32x3" if rows == torch.float32 else "mixed"


def choose_tiling(nodes: int, value_dim: int, precision: str) -> Tiling:
    """Return the measured best cut for `nodes` rows (NOTES.md has the table)."""
    return Tiling(values=min(32 if precision in ("tf32", "tf32x3") else 64, value_dim), warps=4)


def prefix(log_decay: Tensor, beta: Tensor, tree: Tensor) -> tuple[Tensor, Tensor]:
    """Return (path_log_decay [R, N, HV] float64, scalars [R, HV, 3, N]).

    The scalars are log2 of the path's decay as a float32 pair, and beta: what `solve` reads, one head after another.
    """
    requests, nodes, value_heads = log_decay.shape
    path = log_decay.new_empty(requests, nodes, value_heads, dtype=torch.float64)
    scalars = log_decay.new_empty(requests, value_heads, 3, nodes, dtype=torch.float32)
    _prefix_kernel[(value_heads, triton.cdiv(nodes, PREFIX_ROWS), requests)](
        log_decay, beta, tree, path, scalars, *log_decay.stride(), *beta.stride(), nodes,
        HV=value_heads, WORDS=tree.shape[1] - 1, ROWS=PREFIX_ROWS, num_warps=4,
    )  # fmt: skip
    return path, scalars


def solve(
    q: Tensor, k: Tensor, v: Tensor, scalars: Tensor, tree: Tensor, state: Tensor,
    *, precision: str | None = None, tiling: Tiling | None = None, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out, u), both [R, N, HV, V] float32, from what `prefix` and `prepare_tree` returned; `out` is filled."""
    requests, nodes, heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    precision = precision or default_precision(k.dtype)
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not allowed (allowed: {', '.join(PRECISIONS)})")
    _check_nodes(nodes, precision, k.dtype)
    tiling = tiling or choose_tiling(nodes, value_dim, precision)
    out, u = out or (state.new_empty(v.shape), state.new_empty(v.shape))
    size0, size1, size2 = block_sizes(nodes)
    _solve_kernel[(value_dim // tiling.values, value_heads, requests)](
        q, k, v, scalars, tree, state, out, u, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], nodes,
        H=heads, HV=value_heads, K=key_dim, V=value_dim, WORDS=tree.shape[1] - 1, BV=tiling.values,
        SIZE0=size0, SIZE1=size1, SIZE2=size2, PRECISION=precision, num_warps=tiling.warps,
    )  # fmt: skip
    return out, u


def tree_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, tree: Tensor, state: Tensor,
    *, precision: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Shapes as in `tfm_kernels.gdn.ops.tree_verify`, with `tree` from `prepare_tree`; the state in float32.

    `precision` names how float32 products are formed: "bf16" rounds the operands; "mixed" sums three products of bf16
    halves, float16 inside the inverse; "tf32" and "tf32x3" are the hardware's. Products of bf16 rows are exact in all.
    """
    q, k, v = launch.same_rows(q, k, v)
    path, scalars = prefix(log_decay, beta, tree)
    out, u = solve(q, k, v, scalars, tree, state.contiguous(), precision=precision)
    return out, u, path
