"""The forms in which training computes the LK terms of whole rows of logits: eager PyTorch, or one kernel on a GPU."""

import importlib

import torch
from torch import Tensor

from tfm.train.losses import kl_divergence

FORMS = ("torch", "triton")


def lk_rows(target_logits: Tensor, draft_logits: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Return (alpha, KL(p || q)) [...] float32 of logits [..., vocab]; the target's carry no gradient."""
    if form == "triton":
        return _kernels().lk_rows(target_logits, draft_logits)
    target, draft = target_logits.float().log_softmax(-1), draft_logits.float().log_softmax(-1)
    return torch.minimum(target.exp(), draft.exp()).sum(-1), kl_divergence(target, draft)


def candidate_log_probs(logits: Tensor, candidates: Tensor, form: str) -> Tensor:
    """Return the log-probabilities [..., K] float32, normalised over the vocabulary, of candidates [..., K]."""
    total = _kernels().row_lse(logits) if form == "triton" else logits.float().logsumexp(-1)
    return logits.gather(-1, candidates).float() - total[..., None]


def check_form(form: str, vocab: int, device: str, dtype: torch.dtype) -> None:
    """Compare a form's terms and gradient with eager PyTorch's on this device; raises ValueError where they differ."""
    if form == "torch":
        return
    generator = torch.Generator().manual_seed(0)
    given = [(3 * torch.randn(64, vocab, generator=generator)).to(device, dtype) for _ in range(2)]
    found = []
    for each in ("torch", form):
        draft = given[1].clone().requires_grad_()
        terms = lk_rows(given[0], draft, each)
        (terms[1] - terms[0]).sum().backward()
        found.append((*(term.detach() for term in terms), draft.grad.float()))
    for name, one, other in zip(("alpha", "kl", "gradient"), *found, strict=True):
        gap, size = float((one - other).abs().max()), float(one.abs().max())
        if not gap <= 0.01 * size:
            raise ValueError(
                f"loss.form: {form} gives another {name} here (off by {gap:.2e} of {size:.2e}); use --loss-form torch"
            )


def _kernels():
    # lazy: needs triton
    return importlib.import_module("tfm_kernels.lk_triton")
