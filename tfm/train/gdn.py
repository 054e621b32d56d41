"""Training forms of the gated delta rule over whole sequences, and the gradient check that a form must pass.

`solve` is the plain form of kernels/gdn/solve.py. `blocked` is the same arithmetic with the triangular systems inverted
by products of small blocks, which suits a GPU's matrix units, and one Gram matrix for all value heads of a key head.
`fla` is the chunked kernel of the fla-core package (bfloat16, CUDA only). Wrong gradients of fused forms on Hopper have
been reported (fla#640, fla#913), so `use_form` runs the check on the very device before a form trains anything.
"""

import importlib.util
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor

from tfm.target import Target
from tfm_kernels.gdn import solve
from tfm_kernels.gdn.naive import MIN_LOG_DECAY

CHUNK = 64
BLOCK = 8  # inverted by doubling; larger blocks lose digits to cancellation when keys repeat
CHECKED = ("q", "k", "v", "log_decay", "beta")
# largest relative error of a gradient: TF32 products keep 10 bits, bfloat16 ones 7
TOLERANCE = {"solve": 5e-3, "blocked": 5e-3, "fla": 3e-2}


def blocked_chain(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Shapes and result as `solve.chain_forward`: out [R, T, HV, V] and the state after the last token, float32."""
    length, heads, group = v.shape[1], k.shape[2], v.shape[2] // k.shape[2]
    pad, dtype = -length % CHUNK, state.dtype

    def chunks(x: Tensor, split: tuple[int, ...]) -> Tensor:
        # [R, T, heads, ...] -> [R, H, (G), chunks, CHUNK, ...]
        padded = torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, pad)).unflatten(1, (-1, CHUNK))
        return padded.unflatten(3, split).movedim(3, 1).movedim(4, 2) if len(split) == 2 else padded.movedim(3, 1)

    q, k = (chunks(x.to(dtype), (heads,)) for x in (q, k))  # [R, H, C, 64, K]
    v, beta = (chunks(x.to(dtype), (heads, group)) for x in (v, beta))  # [R, H, G, C, 64, V], [R, H, G, C, 64]
    total = chunks(log_decay.double().clamp(min=MIN_LOG_DECAY), (heads, group)).cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).to(dtype).tril().exp().tril()
    keys, gain = k[:, :, None], total.exp().to(dtype)[..., None]
    system = (k @ k.mT)[:, :, None] * decay * beta[..., None]
    right = beta[..., None] * torch.cat([v, (gain * keys)], dim=-1)
    from_values, from_state = UnitLowerSolve.apply(system, right).split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.mT)[:, :, None] * decay
    asked, last = gain * q[:, :, None], total[..., -1:]
    carry = (last - total).exp().to(dtype)[..., None] * keys
    kept = last.exp().to(dtype)[..., None]
    state, out = state.unflatten(1, (heads, group)), []
    for c in range(v.shape[3]):
        writes = from_values[:, :, :, c] - from_state[:, :, :, c] @ state
        out.append(asked[:, :, :, c] @ state + within[:, :, :, c] @ writes)
        state = kept[:, :, :, c] * state + carry[:, :, :, c].mT @ writes
    rows = torch.cat(out, dim=3)[:, :, :, :length].flatten(1, 2)  # [R, HV, T, V]
    return rows.transpose(1, 2), state.flatten(1, 2)


class UnitLowerSolve(torch.autograd.Function):
    """X of (I + L) X = B [..., n, m], L the strict lower triangle of `system` [..., n, n], by the explicit inverse."""

    @staticmethod
    def forward(ctx, system: Tensor, right: Tensor) -> Tensor:
        inverse = unit_lower_inverse(system)
        solution = inverse @ right
        ctx.save_for_backward(inverse, solution)
        return solution

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        inverse, solution = ctx.saved_tensors
        grad_right = inverse.mT @ grad
        return -(grad_right @ solution.mT).tril(-1), grad_right


def unit_lower_inverse(system: Tensor) -> Tensor:
    """Return (I + L)^-1 [..., n, n] for the strict lower triangle L of `system`, n = 8 times a power of two.

    Blocks of 8 are inverted as (I + N)(I + N^2)(I + N^4), N = -L, since N^8 = 0; two neighbours [[A, 0], [B, C]] then
    join to [[A', 0], [-C' B A', C']] with A', C' their inverses, until one is left. All products in full float32.
    """
    count = system.shape[-1]
    with full_precision():
        power = -_diagonal_blocks(system.tril(-1), BLOCK)
        inverse = power + torch.eye(BLOCK, dtype=system.dtype, device=system.device)
        for _ in range(2):
            power = power @ power
            inverse = inverse + inverse @ power
        size = BLOCK
        while size < count:
            first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
            below = _diagonal_blocks(system, 2 * size)[..., size:, :size]
            top = torch.cat([first, torch.zeros_like(first)], dim=-1)
            inverse = torch.cat([top, torch.cat([-(second @ below @ first), second], dim=-1)], dim=-2)
            size *= 2
    return inverse[..., 0, :, :]


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    # [..., n, n] -> [..., n / size, size, size]
    blocks = matrix.unflatten(-2, (-1, size)).unflatten(-1, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


@contextmanager
def full_precision():
    """No TF32 in matrix products inside; the setting outside comes back."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def fla_chain(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`solve.chain_forward` through fla's chunk_gated_delta_rule; products in bfloat16, out bfloat16."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = (x.bfloat16().contiguous() for x in (q, k, v))
    decay = log_decay.float().clamp(min=MIN_LOG_DECAY)
    return chunk_gated_delta_rule(
        q, k, v, decay, beta.float(), scale=1.0, initial_state=state.float(), output_final_state=True
    )


FORMS: dict[str, Callable] = {"solve": solve.chain_forward, "blocked": blocked_chain, "fla": fla_chain}


def use_form(target: Target, name: str, device: str) -> Target:
    """Let `target` run whole sequences through a form that has passed the gradient check here; return it.

    Raises ValueError naming the form when its package is missing, the device is wrong or the check fails.
    """
    if name == "fla" and (importlib.util.find_spec("fla") is None or device != "cuda"):
        raise ValueError(f"gdn: 'fla' needs the package fla-core and --device cuda, not {device}; use gdn: blocked")
    if name != "solve":
        check_gradients(name, device)
    for layer in target.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.chain_forward = FORMS[name]
    return target


def check_gradients(name: str, device: str, *, head_dim: int = 128, length: int = 150) -> dict[str, float]:
    """Compare a form's output and gradients on `device` with the recurrence in float64 on the CPU.

    Two requests, one key head with three value heads; the second request repeats one key throughout. Returns the
    relative error of each tensor; raises ValueError with all of them when one exceeds TOLERANCE.
    """
    inputs = _check_inputs(head_dim, length)
    weights = torch.randn(2, length, 3, head_dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = _gradients(recurrence, inputs, weights)
    found = _gradients(FORMS[name], [x.float().to(device) for x in inputs], weights.float().to(device))
    errors = {
        key: float((mine.cpu().double() - exact).norm() / exact.norm())
        for key, mine, exact in zip(("out", *CHECKED), found, wanted, strict=True)
    }
    if not max(errors.values()) <= TOLERANCE[name]:  # NaN fails too
        shown = ", ".join(f"{key} {value:.2e}" for key, value in errors.items())
        raise ValueError(f"gdn: {name!r} fails its gradient check on {device} (allowed {TOLERANCE[name]}): {shown}")
    return errors


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other (paper Eq. 7); differentiable, in the dtype of its inputs."""
    group, out = v.shape[2] // k.shape[2], []
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    for t in range(v.shape[1]):
        state = state * log_decay[:, t].exp()[..., None, None]
        write = beta[:, t, :, None] * (v[:, t] - torch.einsum("rhk,rhkv->rhv", k[:, t], state))
        state = state + torch.einsum("rhk,rhv->rhkv", k[:, t], write)
        out.append(torch.einsum("rhk,rhkv->rhv", q[:, t], state))
    return torch.stack(out, dim=1), state


def _check_inputs(head_dim: int, length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(2, length, 1, head_dim), normal(2, length, 1, head_dim), normal(2, length, 3, head_dim)
    k[1] = k[1, :1]
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    log_decay = -normal(2, length, 3).exp() * 0.1
    # bfloat16 first: a form that computes in it then starts from the same numbers
    q, k, v = (x.bfloat16().double() for x in (q, k, v))
    return [q, k, v, log_decay, normal(2, length, 3).sigmoid(), torch.zeros(2, 3, head_dim, head_dim).double()]


def _gradients(form: Callable, inputs: list[Tensor], weights: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs[:5]]
    out, state = form(*leaves, inputs[5])
    ((out.to(weights.dtype) * weights).sum() + state.sum()).backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]
