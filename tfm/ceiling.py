"""How many drafts a drafter can get accepted: estimates from continuations of an anchor (paper 3.5, figures 4 and 6).

Under speculative sampling a draft from q is accepted with probability sum_v min(q(v), p(v)), p the target's law on the
path so far. A drafter of marginals knows only the anchor: its best law for offset t is the oracle marginal

    pbar_t = E over continuations x of p_t(. | x_<t),

and what pbar_t loses to p_t is a ceiling that no training of marginals lifts. Everything here is a function of
tensors; running the models is the business of workflows/scripts/estimate_ceiling.py.

"Given that all earlier drafts were accepted" is a change of measure: along a continuation x of the target the drafts
x_<t are accepted with density prod_{s<t} min(1, q_s(x_s) / p_s(x_s)) relative to the target's law, so that weight
turns means over continuations into means over accepted paths. A drafter that proposes one token (Dirac) follows one
path: it is forced, not sampled. After an end of text nothing is drafted: such positions carry no weight.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TIE = 1e-4  # relative; the bound from above is off by less


@dataclass(frozen=True)
class Continuations:
    """M continuations of one anchor, drawn from the target; D offsets, offset 0 is the token after the root."""

    tokens: Tensor  # [M, D] int64
    probs: Tensor  # [M, D, vocab], the target's law of each token given those before it, temperature applied
    alive: Tensor  # [M, D] bool, no end of text among the tokens before

    @staticmethod
    def of(tokens: Tensor, logits: Tensor, *, temperature: float, eos_tokens: tuple[int, ...]) -> "Continuations":
        """Return continuations from the logits [M, D, vocab] that they were drawn from."""
        return Continuations(tokens, (logits.float() / temperature).softmax(-1), is_alive(tokens, eos_tokens))


@dataclass(frozen=True)
class Acceptance:
    """What one anchor says of one drafter; each a tensor [D] of means over continuations (or of one forced path).

    accepted / reached is the acceptance given that all earlier drafts were accepted, accepted alone the probability
    that drafts up to this offset are accepted, overlap / alive the acceptance along the target's own text.
    """

    reached: Tensor  # weight of the paths on which all earlier drafts were accepted
    accepted: Tensor  # the same times the acceptance of this offset's draft
    alive: Tensor  # share of continuations that have not ended
    overlap: Tensor  # the same times the acceptance, whatever happened to earlier drafts


def is_alive(tokens: Tensor, eos_tokens: tuple[int, ...]) -> Tensor:
    """Return [..., D] bool for tokens [..., D]: no end of text among the tokens before each."""
    ends = torch.isin(tokens, torch.tensor(eos_tokens, dtype=tokens.dtype, device=tokens.device))
    return ends.cumsum(-1) - ends.long() == 0


def sampled(draft: Tensor, own: Continuations) -> Acceptance:
    """Return the acceptance of a drafter that samples from `draft` [D, vocab], or [M, D, vocab] given each path."""
    overlap = torch.minimum(draft, own.probs).sum(-1) * own.alive
    reached = path_weights(draft, own)
    return Acceptance(*(x.double().mean(0) for x in (reached, reached * overlap, own.alive, overlap)))


def path_weights(draft: Tensor, own: Continuations) -> Tensor:
    """Return [M, D]: the weight of each continuation up to offset t given that its tokens were drafted and accepted."""
    at = own.tokens[..., None]
    ratio = draft.expand_as(own.probs).gather(-1, at) / own.probs.gather(-1, at).clamp(min=torch.finfo().tiny)
    accepted = ratio[..., 0].clamp(max=1.0).cumprod(-1)
    before = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=1)
    return before * own.alive


def leave_one_out(own: Continuations) -> Tensor:
    """Return the oracle marginal [M, D, vocab] as each continuation may see it: the mean of the others' rows.

    A continuation's own row would be counted as its own prediction. Where all others have ended, the row is zero.
    Because min is concave, the acceptance of this noisy marginal is at most the oracle's in expectation.
    """
    rows = own.probs * own.alive[..., None]
    others = (own.alive.sum(0) - own.alive.long()).clamp(min=1)
    return (rows.sum(0) - rows).clamp(min=0) / others[..., None]


def oracle(own: Continuations) -> Acceptance:
    """Return the acceptance of the oracle marginal, from below (see leave_one_out)."""
    return sampled(leave_one_out(own), own)


def oracle_above(own: Continuations) -> Acceptance:
    """Return the acceptance of the oracle marginal from above: at least the truth in expectation, offset by offset.

    min(., p) lies below its tangent: min(pbar, p) <= min(c, p) + [c < p] (pbar - c) for any c. One half of the
    continuations gives c; the other half gives p and, the continuation itself left out, an unbiased pbar. At c = p
    every slope from 0 to 1 is a tangent's; one half is taken up to TIE, or rounding would choose where texts agree. The
    weights of `reached` are those of `oracle`, so that beyond the second offset only the overlap is strictly above.
    """
    count = len(own.tokens)
    if count < 4:
        raise ValueError(f"continuations: {count} is not allowed (allowed: 4 or more, two a half); draw more")
    overlap = torch.empty(own.tokens.shape, dtype=own.probs.dtype, device=own.probs.device)
    halves = torch.arange(count, device=own.tokens.device).chunk(2)
    for here, there in (halves, halves[::-1]):
        one, other = (replace(own, tokens=own.tokens[i], probs=own.probs[i], alive=own.alive[i]) for i in (here, there))
        point = mean_law(other)
        slope = torch.where((point - one.probs).abs() <= TIE * one.probs, 0.5, (point < one.probs).to(point.dtype))
        rise = slope.mul_(leave_one_out(one).sub_(point))
        overlap[here] = (torch.minimum(point, one.probs) + rise).sum(-1) * one.alive
    reached = path_weights(leave_one_out(own), own)
    return Acceptance(*(x.double().mean(0) for x in (reached, reached * overlap, own.alive, overlap)))


def mean_law(own: Continuations) -> Tensor:
    """Return the oracle marginal [D, vocab] of all continuations that have not ended; zero where all have."""
    return (own.probs * own.alive[..., None]).sum(0) / own.alive.sum(0).clamp(min=1)[:, None]


def forced(
    tokens: Tensor, probs: Tensor, eos_tokens: tuple[int, ...], own: Continuations, guesses: Tensor
) -> Acceptance:
    """Return the acceptance of a drafter that proposes one token an offset.

    tokens [D] is its path and probs [D, vocab] the target's law along it: what is reached is exactly this path. On the
    target's own text (overlap) it guesses `guesses` [D], or [M, D] where each continuation is left out of its own.
    """
    alive = is_alive(tokens, eos_tokens)
    accepted = (probs.double().gather(-1, tokens[:, None])[:, 0] * alive).cumprod(-1)
    reached = torch.cat([torch.ones_like(accepted[:1]), accepted[:-1]]) * alive
    at = guesses.expand_as(own.tokens)[..., None]
    overlap = own.probs.gather(-1, at)[..., 0] * own.alive
    return Acceptance(reached, accepted, own.alive.double().mean(0), overlap.double().mean(0))


def crossover(one: Tensor, other: Tensor) -> Tensor:
    """Return [...] where curve `other` [..., D] first passes `one`, as a draft length between 1 and D + 1.

    Lengths count from 1; between two lengths the curves are straight lines. 1 says that `other` starts above, D + 1
    that it never passes. Touching is not passing.
    """
    gap = other - one
    length = gap.shape[-1]
    above = gap > 0
    first = torch.where(above.any(-1), above.long().argmax(-1), length)  # counted from 0
    inside = (first > 0) & (first < length)
    before = gap.gather(-1, (first - 1).clamp(min=0)[..., None])[..., 0]
    after = gap.gather(-1, first.clamp(max=length - 1)[..., None])[..., 0]
    # the length before is `first`, counted from 1; there the gap is not above 0
    within = first - before / (after - before).where(inside, torch.ones_like(before))
    return torch.where(inside, within, first + 1.0)
