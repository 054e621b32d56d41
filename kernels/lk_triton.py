"""LK terms of logits rows over a large vocabulary in four reads of each number: alpha, KL and the draft's gradient.

What eager PyTorch needs a dozen float32 copies of [rows, vocab] for: with 49,152 tokens and 10,000 rows each is 2 GB.
Definition: tfm/train/losses.py (kl_divergence, and the sum of min(p, q) in lk_loss). All sums are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _row_lse(logits_p, vocab, BLOCK: tl.constexpr):
    # log sum exp of one row, its maximum carried along
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        i_v = start + tl.arange(0, BLOCK)
        x = tl.load(logits_p + i_v, mask=i_v < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    return top + tl.log(total)


@triton.jit
def _lk_forward_kernel(target_p, draft_p, terms_p, vocab, BLOCK: tl.constexpr):
    # terms [rows, 5]: alpha, kl, both log sums, the mass that q has below p
    i_row = tl.program_id(0).to(tl.int64)
    target_p += i_row * vocab
    draft_p += i_row * vocab
    lse_p = _row_lse(target_p, vocab, BLOCK)
    lse_q = _row_lse(draft_p, vocab, BLOCK)
    alpha = tl.full([], 0.0, tl.float32)
    kl = tl.full([], 0.0, tl.float32)
    below = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        i_v = start + tl.arange(0, BLOCK)
        is_real = i_v < vocab
        log_p = tl.load(target_p + i_v, mask=is_real, other=0.0).to(tl.float32) - lse_p
        log_q = tl.load(draft_p + i_v, mask=is_real, other=0.0).to(tl.float32) - lse_q
        p = tl.where(is_real, tl.exp(log_p), 0.0)
        q = tl.where(is_real, tl.exp(log_q), 0.0)
        alpha += tl.sum(tl.minimum(p, q), 0)
        kl += tl.sum(tl.where(p > 0, p * (log_p - log_q), 0.0), 0)
        # torch.minimum halves the gradient where both are equal
        below += tl.sum(tl.where(q < p, q, tl.where(q == p, 0.5 * q, 0.0)), 0)
    terms_p += i_row * 5
    tl.store(terms_p, alpha)
    tl.store(terms_p + 1, kl)
    tl.store(terms_p + 2, lse_p)
    tl.store(terms_p + 3, lse_q)
    tl.store(terms_p + 4, below)


@triton.jit
def _lk_backward_kernel(target_p, draft_p, terms_p, alpha_grad_p, kl_grad_p, grad_p, vocab, BLOCK: tl.constexpr):
    # d alpha / d z = q ([q < p] - below), d kl / d z = q - p
    i_row = tl.program_id(0).to(tl.int64)
    i_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = i_v < vocab
    place = i_row * vocab + i_v
    lse_p = tl.load(terms_p + i_row * 5 + 2)
    lse_q = tl.load(terms_p + i_row * 5 + 3)
    below = tl.load(terms_p + i_row * 5 + 4)
    p = tl.exp(tl.load(target_p + place, mask=is_real, other=0.0).to(tl.float32) - lse_p)
    q = tl.exp(tl.load(draft_p + place, mask=is_real, other=0.0).to(tl.float32) - lse_q)
    is_below = tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0))
    grad = tl.load(alpha_grad_p + i_row) * q * (is_below - below) + tl.load(kl_grad_p + i_row) * (q - p)
    tl.store(grad_p + place, grad.to(grad_p.dtype.element_ty), mask=is_real)


@triton.jit
def _lse_kernel(logits_p, lse_p, vocab, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    tl.store(lse_p + i_row, _row_lse(logits_p + i_row * vocab, vocab, BLOCK))


class _LkRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, vocab = draft_logits.shape
        terms = torch.empty(rows, 5, dtype=torch.float32, device=draft_logits.device)
        _lk_forward_kernel[(rows,)](target_logits, draft_logits, terms, vocab, BLOCK=BLOCK, num_warps=8)
        ctx.save_for_backward(target_logits, draft_logits, terms)
        return terms[:, 0].clone(), terms[:, 1].clone()

    @staticmethod
    def backward(ctx, alpha_grad: Tensor, kl_grad: Tensor) -> tuple[None, Tensor]:
        target_logits, draft_logits, terms = ctx.saved_tensors
        rows, vocab = draft_logits.shape
        grad = torch.empty_like(draft_logits)
        grid = (rows, triton.cdiv(vocab, BLOCK))
        given = (alpha_grad.float().contiguous(), kl_grad.float().contiguous())
        _lk_backward_kernel[grid](target_logits, draft_logits, terms, *given, grad, vocab, BLOCK=BLOCK, num_warps=8)
        return None, grad


def lk_rows(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (alpha, KL(p || q)) [...] float32 of logits [..., vocab]; the gradient reaches the draft's alone."""
    shape, vocab = draft_logits.shape[:-1], draft_logits.shape[-1]
    flat = (logits.reshape(-1, vocab).contiguous() for logits in (target_logits.detach(), draft_logits))
    alpha, kl = _LkRows.apply(*flat)
    return alpha.view(shape), kl.view(shape)


def row_lse(logits: Tensor) -> Tensor:
    """Return log sum exp [...] float32 of logits [..., vocab], without a gradient."""
    flat = logits.detach().reshape(-1, logits.shape[-1]).contiguous()
    lse = torch.empty(len(flat), dtype=torch.float32, device=logits.device)
    _lse_kernel[(len(flat),)](flat, lse, flat.shape[1], BLOCK=BLOCK, num_warps=8)
    return lse.view(logits.shape[:-1])
