"""Noise addressed by (seed, request, position, token): its law, its independence of order and batch, its extremes."""

import math

import pytest
import torch

from tfm import sampling
from tfm.sampling import gumbel, gumbel_from_bits, next_tokens, uniform

WORD = 2**64 - 1


def splitmix(state: int) -> int:
    """The published splitmix64 output function of a 64-bit state."""
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def draw(logits, *, positions, indices, seed=0, temperature=1.0, span=None):
    return next_tokens(
        logits, torch.tensor(positions), torch.tensor(indices), seed=seed, temperature=temperature, span=span
    )


def chi_square_tail(counts, expected):
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0, dtype=torch.float64), statistic / 2))


# --- the hash


def test_the_stream_of_a_key_is_splitmix64():
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    words = sampling._stream(torch.tensor(keys), 3)
    expected = [[splitmix((key + step * 0x9E3779B97F4A7C15) & WORD) for step in range(3)] for key in keys]
    assert [[int(word) & WORD for word in row] for row in words] == expected


def test_keys_differ_for_every_seed_request_and_position():
    indices, positions = torch.arange(200)[:, None], torch.arange(500)[None]
    keys = torch.cat([sampling._position_key(seed, indices, positions).flatten() for seed in (0, 1, 2, 2**40)])
    assert len(keys.unique()) == len(keys)


def test_noise_is_finite_at_every_edge_of_the_hash():
    """Every power of two, its neighbours, all of the top 2**16 and the bottom 2**16 values."""
    powers = [2**k + d for k in range(32) for d in (-1, 0, 1)]
    edges = torch.tensor([*range(2**16), *range(2**32 - 2**16, 2**32), *powers])
    noise = gumbel_from_bits(edges)
    assert noise.isfinite().all()
    assert float(noise.max()) == pytest.approx(-math.log(2**-33), rel=1e-6)
    assert float(noise.min()) == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


def test_noise_falls_as_the_bits_rise():
    noise = gumbel_from_bits(torch.arange(0, 2**32, 2**20))
    assert (noise.diff() < 0).all()


def test_noise_of_a_position_does_not_depend_on_the_batch():
    """Alone, among others, and in reverse order: the same bits."""
    indices, positions = torch.tensor([3, 0, 9]), torch.tensor([[5, 6], [7, 6], [5, 100]])
    together = gumbel(11, indices, positions, 512)
    assert torch.equal(gumbel(11, indices.flip(0), positions.flip(0), 512).flip(0), together)
    for request in range(3):
        alone = gumbel(11, indices[request : request + 1], positions[request : request + 1, 1:], 512)
        assert torch.equal(alone[0], together[request, 1:])


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size():
    wide, narrow = (gumbel(0, torch.tensor([1]), torch.tensor([[2]]), vocab) for vocab in (2048, 100))
    torch.testing.assert_close(wide[..., :100], narrow, rtol=1e-6, atol=1e-6)


def test_noise_has_the_moments_of_a_gumbel():
    noise = gumbel(5, torch.arange(20), torch.arange(50).expand(20, 50), 200).double()
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


@pytest.mark.parametrize("axis", ["index", "position", "token", "seed"])
def test_neighbouring_addresses_are_uncorrelated(axis):
    first = gumbel(7, torch.arange(64), torch.arange(64).expand(64, 64), 64)
    second = {
        "index": lambda: gumbel(7, torch.arange(64) + 1, torch.arange(64).expand(64, 64), 64),
        "position": lambda: gumbel(7, torch.arange(64), torch.arange(64).expand(64, 64) + 1, 64),
        "token": lambda: first.roll(1, -1),
        "seed": lambda: gumbel(8, torch.arange(64), torch.arange(64).expand(64, 64), 64),
    }[axis]()
    pair = torch.stack([first.flatten(), second.flatten()]).double()
    # 2**18 pairs: the standard deviation of a null correlation is 0.002
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.01


# --- uniforms


def test_uniforms_are_uniform_and_open():
    values = uniform(3, torch.arange(100), torch.arange(100), 1, 1000).flatten()
    assert values.dtype == torch.float64
    assert float(values.min()) > 0 and float(values.max()) < 1
    counts = torch.histc(values, 50, 0, 1)
    assert chi_square_tail(counts, torch.full((50,), 2000.0, dtype=torch.float64)) > 1e-4


def test_streams_do_not_meet_each_other_or_the_noise():
    indices, positions = torch.arange(50), torch.arange(50)
    streams = [uniform(0, indices, positions, stream, 40).flatten() for stream in (1, 2)]
    noise = (-(-gumbel(0, indices, positions[:, None], 40)).exp()).exp().double().flatten()
    correlations = torch.corrcoef(torch.stack([*streams, noise])) - torch.eye(3, dtype=torch.float64)
    assert float(correlations.abs().max()) < 0.08


def test_stream_zero_is_refused():
    with pytest.raises(ValueError, match=r"stream: 0 is not allowed \(allowed: an integer >= 1\)"):
        uniform(0, torch.tensor([0]), torch.tensor([0]), 0, 3)


# --- drawing


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, 0.3, -2.0, 0.9])
    tokens = draw(
        logits.expand(100, 2000, 8),
        positions=[list(range(2000))] * 100,
        indices=list(range(100)),
        temperature=temperature,
    )
    expected = 200_000 * (logits.double() / temperature).softmax(-1)
    assert chi_square_tail(tokens.flatten().bincount(minlength=8).double(), expected) > 1e-4


def test_close_logits_far_from_zero_keep_their_law():
    """C057: logits near 20 in steps of 0.03; bfloat16 logits are drawn as what they are."""
    exact = 20 + 0.03 * torch.arange(8)
    for logits in (exact, exact.bfloat16()):
        tokens = draw(logits.expand(100, 2000, 8), positions=[list(range(2000))] * 100, indices=list(range(100)))
        expected = 200_000 * logits.double().softmax(-1)
        assert chi_square_tail(tokens.flatten().bincount(minlength=8).double(), expected) > 1e-4


@pytest.mark.parametrize("temperature", [0.0, 9.9e-6])
def test_ties_go_to_the_lowest_id_when_greedy(temperature):
    """C039: logits [1, 3, 3, 0] give id 1, in any row of a batch."""
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0]).expand(3, 70, 4)
    tokens = draw(logits, positions=[[0] * 70] * 3, indices=[0, 1, 2], temperature=temperature)
    assert tokens.unique().tolist() == [1]


@pytest.mark.parametrize("vocab", [2, 65, 2048, 2049])
def test_greedy_is_torch_argmax_on_rows_full_of_ties(vocab):
    logits = torch.randint(0, 3, (4, 33, vocab)).float()
    tokens = draw(logits, positions=[[0] * 33] * 4, indices=[0] * 4, temperature=0.0)
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_huge_and_impossible_logits_are_safe(dtype, temperature):
    """C064: [6e4, 0, -inf, ...] gives id 0, never NaN's index and never an id of probability 0."""
    logits = torch.tensor([0.0, 6e4, -math.inf, 5.0, -math.inf]).roll(-1).to(dtype)
    tokens = draw(
        logits.expand(5, 200, 5), positions=[list(range(200))] * 5, indices=list(range(5)), temperature=temperature
    )
    assert tokens.unique().tolist() == [0]


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    tokens = draw(logits.expand(1, 4000, 4), positions=[list(range(4000))], indices=[0])
    assert tokens.unique().tolist() == [1, 3]


def test_three_seeds_give_different_text():
    """C060 spirit."""
    rows = torch.zeros(1, 30, 64)
    texts = {tuple(draw(rows, positions=[list(range(30))], indices=[4], seed=seed)[0].tolist()) for seed in range(3)}
    assert len(texts) == 3


def test_a_request_draws_the_same_tokens_alone_in_a_list_and_in_reverse():
    """C063 spirit: same prompt index and seed."""
    logits = torch.randn(5, 40, 300)
    positions = [list(range(9, 49))] * 5
    together = draw(logits, positions=positions, indices=[8, 1, 5, 2, 0])
    reverse = draw(logits.flip(0), positions=positions, indices=[0, 2, 5, 1, 8])
    assert torch.equal(reverse.flip(0), together)
    for request, index in enumerate([8, 1, 5, 2, 0]):
        alone = draw(logits[request : request + 1], positions=positions[:1], indices=[index])
        assert torch.equal(alone[0], together[request])


@pytest.mark.parametrize("span", [None, 4, 9], ids=["found_out", "exact", "larger_than_needed"])
def test_rows_of_one_position_share_their_noise(span):
    """A tree's rows draw what single rows at the same positions draw."""
    logits, positions = torch.randn(2, 12, 50), torch.randint(0, 4, (2, 12)) + torch.tensor([[3], [90]])
    together = draw(logits, positions=positions.tolist(), indices=[6, 2], span=span)
    for request, index in enumerate([6, 2]):
        for node in range(12):
            alone = draw(
                logits[request, node][None, None], positions=[[int(positions[request, node])]], indices=[index]
            )
            assert int(alone) == int(together[request, node])


@pytest.mark.gpu
def test_the_device_does_not_change_the_noise():
    indices, positions = torch.arange(4), torch.arange(64).view(4, 16)
    here, there = (gumbel(3, indices.to(d), positions.to(d), 4096).cpu() for d in ("cpu", "cuda"))
    torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-6)
    bits = [
        sampling._stream(sampling._position_key(3, indices.to(d), positions[:, 0].to(d)), 4096).cpu()
        for d in ("cpu", "cuda")
    ]
    assert torch.equal(*bits)
