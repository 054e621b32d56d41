"""Losses and acceptance measures of the drafter and the weaver."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tfm.layers import widen
from tfm.train.peers import ALONE, Peers


@dataclass(frozen=True)
class LkLoss:
    """One LK loss and its parts; scalars except alpha_rows. With several processes, each scalar is this one's share."""

    loss: Tensor
    alpha: Tensor  # weighted mean acceptance
    kl: Tensor
    kl_weight: Tensor
    alpha_rows: Tensor  # [...], sum over v of min(p, q)


def lk_loss(
    target_log_probs: Tensor,
    draft_log_probs: Tensor,
    weights: Tensor,
    *,
    kl_scale: float,
    kl_decay: float,
    peers: Peers = ALONE,
) -> LkLoss:
    """Return w KL + (1 - w)(1 - alpha) with w = kl_scale exp(-kl_decay stopgrad(alpha)), means over `weights` [...].

    target_log_probs [..., V] may be those of a subset of the vocabulary (the candidates): alpha then compares with the
    target's full mass, tokens outside count as never accepted, and KL(p || q) takes p renormalised over the subset.
    draft_log_probs [..., V] are normalised over what they hold. Rows of weight 0 must be finite. Computed in float32.
    Means and alpha are over the rows of all `peers`.
    """
    target, draft = widen(target_log_probs), widen(draft_log_probs)
    alpha_rows = torch.minimum(target.exp(), draft.exp()).sum(-1)
    kl_rows = kl_divergence(target.log_softmax(-1), draft)
    return lk_of_rows(alpha_rows, kl_rows, weights, kl_scale=kl_scale, kl_decay=kl_decay, peers=peers)


def lk_of_rows(
    alpha_rows: Tensor, kl_rows: Tensor, weights: Tensor, *, kl_scale: float, kl_decay: float, peers: Peers = ALONE
) -> LkLoss:
    """Return the LK loss of rows [...] whose acceptance and divergence are known."""
    total = peers.sum(weights.sum()).clamp(min=1e-9)
    share = weights.sum() / total
    alpha = (alpha_rows * weights).sum() / total
    kl = (kl_rows * weights).sum() / total
    kl_weight = kl_scale * torch.exp(-kl_decay * peers.sum(alpha))
    return LkLoss(kl_weight * kl + (1 - kl_weight) * (share - alpha), alpha, kl, kl_weight * share, alpha_rows)


def kl_divergence(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return KL(p || q) over the last axis, both given as normalised log-probabilities."""
    return (target_log_probs.exp() * (target_log_probs - draft_log_probs)).sum(-1)


def next_token_loss(logits: Tensor, tokens: Tensor, lengths: Tensor, peers: Peers = ALONE) -> Tensor:
    """Return the mean cross entropy (nats) of tokens[:, 1:] given logits [R, L, vocab]; rows end at `lengths` [R].

    The mean is over the tokens of all `peers`; the result is this process's share of it.
    """
    wanted = tokens[:, 1:]
    real = torch.arange(1, tokens.shape[1], device=tokens.device) < lengths[:, None]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted.flatten(), reduction="none")
    return (losses * real.flatten()).sum() / peers.sum(real.sum())


def row_weights(valid: Tensor, gamma: float) -> Tensor:
    """Return weights [..., D] exp(-d / gamma) of draft rows d, 0 where `valid` [..., D] is False.

    A row matters only if all rows before it were accepted, so early rows weigh more.
    """
    rows = torch.arange(valid.shape[-1], device=valid.device)
    return torch.exp(-rows / gamma) * valid


def leading_matches(drafted: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    """Return how many drafts [..., D] equal the target's own tokens before the first miss [...].

    Its mean is the accepted length of an argmax chain under target-only verification at the temperature the tokens
    were sampled at: a draft is accepted exactly when the target's sample is that token.
    """
    return ((drafted == tokens) & valid).long().cumprod(-1).sum(-1)
