"""The acceptance ceiling: every estimate against exact enumeration of a toy target whose oracle marginal is known."""

import itertools

import pytest
import torch
from helpers import ToyLaw
from torch import Tensor

from tfm import ceiling
from tfm.ceiling import Acceptance, Continuations

VOCAB, LENGTH = 3, 3
NO_EOS: tuple[int, ...] = ()


def sequences(vocab: int = VOCAB, length: int = LENGTH) -> list[tuple[int, ...]]:
    return list(itertools.product(range(vocab), repeat=length))


def path_rows(law: ToyLaw, tokens) -> Tensor:
    """The law's rows [D, vocab] along one path."""
    return torch.stack([law.levels[t][tuple(tokens[:t])].softmax(-1) for t in range(len(tokens))])


def continuations(law: ToyLaw, paths, eos: tuple[int, ...] = NO_EOS) -> Continuations:
    tokens = torch.tensor(paths)
    return Continuations(tokens, torch.stack([path_rows(law, path) for path in paths]), ceiling.is_alive(tokens, eos))


def expectation(law: ToyLaw, count: int, estimate) -> dict[str, Tensor]:
    """The exact mean of an estimate over every tuple of `count` continuations drawn from the law."""
    joint, totals = law.joint(), {}
    vocab, length = joint.shape[0], joint.dim()
    for paths in itertools.product(sequences(vocab, length), repeat=count):
        weight = torch.stack([joint[path] for path in paths]).prod()
        found: Acceptance = estimate(continuations(law, paths))
        for name in ("reached", "accepted", "alive", "overlap"):
            totals[name] = totals.get(name, 0) + weight * getattr(found, name)
    return totals


def true_marginals(law: ToyLaw) -> Tensor:
    """The oracle marginal [D, vocab]: the mean over paths of the law's rows."""
    joint = law.joint()
    return sum(joint[path] * path_rows(law, path) for path in sequences(joint.shape[0], joint.dim()))


def speculative_chain(law: ToyLaw, draft) -> Tensor:
    """Exact probability [D] that drafts 1 to t are all accepted, by playing speculative sampling in full.

    `draft(prefix)` is the law that the next draft is sampled from; each draft is accepted with min(1, p / q).
    """
    survival = torch.zeros(LENGTH, dtype=torch.float64)
    for path in sequences():
        mass = torch.ones((), dtype=torch.float64)
        for t, token in enumerate(path):
            q, p = draft(path[:t])[token], law.levels[t][path[:t]].softmax(-1)[token]
            mass = mass * q * (p / q).clamp(max=1)
            # all later tokens are free: each survivor of length t + 1 is met once a completion
            survival[t] += mass / VOCAB ** (LENGTH - t - 1)
    return survival


@pytest.mark.parametrize("seed", range(3))
def test_weights_turn_the_targets_paths_into_accepted_paths_for_marginals(seed):
    law, other = ToyLaw.random(VOCAB, LENGTH, seed), torch.randn(LENGTH, VOCAB, dtype=torch.float64).softmax(-1)
    found = expectation(law, 1, lambda own: ceiling.sampled(other, own))
    torch.testing.assert_close(found["accepted"], speculative_chain(law, lambda prefix: other[len(prefix)]))
    # what is reached at t is what was accepted at t - 1: their ratio is the acceptance given all before
    torch.testing.assert_close(found["reached"][1:], found["accepted"][:-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_weights_turn_the_targets_paths_into_accepted_paths_for_conditional_drafts(seed):
    law, drafter = ToyLaw.random(VOCAB, LENGTH, seed), ToyLaw.random(VOCAB, LENGTH, seed + 10)
    found = expectation(
        law, 1, lambda own: ceiling.sampled(torch.stack([path_rows(drafter, p) for p in own.tokens.tolist()]), own)
    )
    exact = speculative_chain(law, lambda prefix: drafter.levels[len(prefix)][tuple(prefix)].softmax(-1))
    torch.testing.assert_close(found["accepted"], exact, rtol=0, atol=1e-12)


def test_a_drafter_that_knows_the_law_is_always_accepted():
    law = ToyLaw.random(VOCAB, LENGTH, 0)
    own = continuations(law, sequences())
    found = ceiling.sampled(own.probs, own)
    for values in (found.reached, found.accepted, found.overlap):
        torch.testing.assert_close(values, torch.ones(LENGTH, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(3))
def test_one_token_drafts_follow_one_path(seed):
    """The forced path's product of probabilities is what speculative sampling of a Dirac gives on sampled paths."""
    law = ToyLaw.random(VOCAB, LENGTH, seed)
    path = true_marginals(law).argmax(-1)
    own = continuations(law, sequences())
    found = ceiling.forced(path, path_rows(law, path.tolist()), NO_EOS, own, path)
    one_hot = torch.nn.functional.one_hot(path, VOCAB).double()
    exact = expectation(law, 1, lambda one: ceiling.sampled(one_hot, one))
    torch.testing.assert_close(found.accepted, exact["accepted"], rtol=0, atol=1e-12)
    torch.testing.assert_close(found.reached, exact["reached"], rtol=0, atol=1e-12)
    # on the target's own text the guess is accepted with its marginal probability
    torch.testing.assert_close(exact["overlap"], true_marginals(law).gather(1, path[:, None])[:, 0])


def exact_overlap(law: ToyLaw) -> Tensor:
    marginals, joint = true_marginals(law), law.joint()
    shape = joint.shape[0], joint.dim()
    return sum(joint[path] * torch.minimum(marginals, path_rows(law, path)).sum(-1) for path in sequences(*shape))


@pytest.mark.parametrize("seed", range(3))
def test_leaving_one_out_bounds_the_oracle_from_below_and_counting_oneself_flatters_it(seed):
    """Exact means over all pairs: the bias of both estimators has the sign that is claimed, and offset 1 has none."""
    law = ToyLaw.random(3, 3, seed, scale=3.0)
    exact = exact_overlap(law)
    below = expectation(law, 2, ceiling.oracle)["overlap"]
    flattered = expectation(law, 2, lambda own: ceiling.sampled(ceiling.mean_law(own), own))["overlap"]
    assert below[0] == pytest.approx(1) and exact[0] == pytest.approx(1)
    assert (below <= exact + 1e-12).all() and below.sum() < exact.sum() - 1e-4
    assert (flattered[1:] > exact[1:] + 1e-3).all()


@pytest.mark.parametrize("seed", range(2))
def test_the_tangent_bounds_the_oracle_from_above(seed):
    """Exact means over all tuples of four: the estimate from above is never below the truth."""
    law = ToyLaw.random(2, 2, seed, scale=2.0)
    exact, above = exact_overlap(law), expectation(law, 4, ceiling.oracle_above)["overlap"]
    assert above[0] == pytest.approx(1) and above[1] > exact[1]
    assert above[1] - exact[1] < 0.2


def draw(law: ToyLaw, count: int, seed: int = 1) -> list[tuple[int, ...]]:
    joint = law.joint()
    generator = torch.Generator().manual_seed(seed)
    picks = torch.multinomial(joint.flatten(), count, replacement=True, generator=generator)
    return [sequences(joint.shape[0], joint.dim())[i] for i in picks.tolist()]


def test_both_bounds_close_in_on_the_exact_ceiling():
    law = ToyLaw.random(VOCAB, LENGTH, 5)
    marginals = true_marginals(law)
    exact = speculative_chain(law, lambda prefix: marginals[len(prefix)])
    own = continuations(law, draw(law, 4000))
    below, above = ceiling.oracle(own), ceiling.oracle_above(own)
    for found in (below, above):
        torch.testing.assert_close(found.accepted, exact, rtol=0, atol=0.02)
        torch.testing.assert_close(found.overlap, exact_overlap(law), rtol=0, atol=0.02)
    gaps = [mean_gap(law, count) for count in (4, 16, 64)]
    assert gaps[0] > gaps[1] > gaps[2] > 0


def mean_gap(law: ToyLaw, count: int) -> float:
    owns = [continuations(law, draw(law, count, seed)) for seed in range(30)]
    return sum(float((ceiling.oracle_above(own).overlap - ceiling.oracle(own).overlap).sum()) for own in owns) / 30


def test_matching_marginals_is_not_the_best_drafter_where_conditionals_are_scattered():
    """One-hot conditionals with weights m: the marginal accepts sum m^2, one token max m (the paper's point)."""
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    first, second = weights.log(), torch.full((3, 3), -1e9, dtype=torch.float64)
    second.fill_diagonal_(0.0)
    law = ToyLaw([first, second])
    marginals, paths = true_marginals(law), [(i, i) for i in range(3)]
    own = continuations(law, paths)
    both = torch.minimum(marginals[1], own.probs[:, 1]).sum(-1)
    assert float((weights * both).sum()) == pytest.approx(float(weights.square().sum()))
    assert float((weights * own.probs[:, 1, 0]).sum()) == pytest.approx(float(weights.max()))


def test_nothing_is_drafted_after_an_end_of_text():
    law = ToyLaw.random(VOCAB, LENGTH, 2)
    own = continuations(law, [(0, 1, 2), (1, 2, 0), (2, 2, 2), (0, 0, 0)], eos=(1,))
    assert own.alive.tolist() == [[True, True, False], [True, False, False], [True, True, True], [True, True, True]]
    found = ceiling.sampled(true_marginals(law), own)
    assert found.alive.tolist() == [1, 0.75, 0.5] and found.reached[2] <= 0.5 and found.overlap[2] <= 0.5
    path = torch.tensor([1, 0, 0])
    ended = ceiling.forced(path, path_rows(law, path.tolist()), (1,), own, path)
    assert ended.reached.tolist() == [1, 0, 0] and ended.accepted[1:].tolist() == [0, 0]
    # the rows of ended continuations say nothing about the marginal
    torch.testing.assert_close(ceiling.mean_law(own)[2], own.probs[2:, 2].mean(0))
    torch.testing.assert_close(ceiling.leave_one_out(own)[2, 2], own.probs[3, 2])


@pytest.mark.parametrize(
    ("other", "length"),
    [
        ([0.5, 0.5, 1.5, 2.0], 2.5),
        ([0.5, 0.5, 0.5, 0.5], 5.0),
        ([2.0, 2.0, 2.0, 2.0], 1.0),
        ([1.0, 1.0, 1.0, 1.0], 5.0),
        ([0.0, 2.0, 0.0, 2.0], 1.5),
        ([0.0, 0.0, 0.0, 1.1], 3 + 1 / 1.1),
        ([1.0, 1.0, 2.0, 2.0], 2.0),
    ],
)
def test_the_crossover_is_where_the_second_curve_first_passes(other, length):
    curves = torch.tensor([other, [0.0] * 4], dtype=torch.float64)
    assert ceiling.crossover(torch.ones_like(curves), curves).tolist() == [pytest.approx(length), 5.0]


def test_too_few_continuations_are_refused():
    with pytest.raises(ValueError, match="continuations: 3 is not allowed .*4 or more"):
        ceiling.oracle_above(continuations(ToyLaw.random(2, 2, 0), [(0, 0), (1, 0), (1, 1)]))
