"""Random numbers addressed by (seed, request, position, token): no generator, no state, no order of calls.

Every method that reaches the same position of the same request meets the same noise, so autoregressive decoding and
every tree method with the rule target_only emit the same tokens at any temperature and batch size.
"""

import torch
from torch import Tensor

from tfm.config import GREEDY_BELOW

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# odd multipliers that keep (index, position) pairs apart before the first mix
_INDEX = 0xD1342543DE82EF95
_POSITION = 0xAF251AF3B0F025B5
_LARGEST_BELOW_ONE = 1 - 2**-24


def next_tokens(
    logits: Tensor,  # [R, N, vocab]
    positions: Tensor,  # [R, N] int64, absolute position of the token being drawn
    indices: Tensor,  # [R] int64, the request's index in its dataset
    *,
    seed: int,
    temperature: float,
    span: int | None = None,
) -> Tensor:
    """Draw one token a row [R, N] int64: argmax of logits / T + noise; greedy below 1e-5. Ties: the lowest id.

    Rows of one request at one position share their noise. `span` says that a request's positions lie in
    [its least, its least + span); without it, finding out costs one device-to-host copy.
    """
    if temperature < GREEDY_BELOW:
        return _argmax(logits)
    requests, rows, vocab = logits.shape
    first = positions.amin(1, keepdim=True)
    if span is None:
        span = int((positions - first).max()) + 1
    scores = logits.float() / temperature
    if span >= rows:
        return _argmax(scores.add_(gumbel(seed, indices, positions, vocab)))
    # siblings and cousins share a position: one noise row a depth instead of one a node
    distinct = first + torch.arange(span, device=positions.device)
    noise = gumbel(seed, indices, distinct, vocab).view(requests * span, vocab)
    row = positions - first + torch.arange(requests, device=positions.device)[:, None] * span
    return _argmax(scores.add_(noise.index_select(0, row.flatten()).view_as(scores)))


def gumbel(seed: int, indices: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return standard Gumbel noise [R, N, vocab] float32 for `indices` [R] and `positions` [R, N]; always finite.

    The bits under it are the same on every device; the two logarithms may differ in the last place between devices.
    """
    bits = _stream(_position_key(seed, indices[:, None], positions), vocab)
    return gumbel_from_bits(_shift_right(bits, 32))


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Map 32-bit integers (int64 tensor, 0 to 2**32 - 1) to Gumbel noise float32, between -2.9 and 22.9.

    The fine end of the uniform lies at large noise, where it decides; a 24-bit uniform would round to 1 there.
    """
    below_one = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return below_one.neg_().log1p_().neg_().log_().neg_()


def uniform(seed: int, indices: Tensor, positions: Tensor, stream: int, count: int) -> Tensor:
    """Return `count` uniforms a request, [R, count] float64 in (0, 1), for `indices` [R] and `positions` [R].

    `stream` (>= 1) keeps them independent of the Gumbel noise of the same position and of other streams.
    """
    if stream < 1:
        raise ValueError(f"stream: {stream!r} is not allowed (allowed: an integer >= 1); 0 is the noise of next_tokens")
    key = root_keys(seed, indices, positions, stream)
    return (_shift_right(_stream(key, count), 12).double() + 0.5) * 2.0**-52


def root_keys(seed: int, indices: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Return the noise key [R] int64 of a draft tree's root for `indices` [R] and root `positions` [R]."""
    return _mix(_position_key(seed, indices, positions) ^ _signed(_mix_word(stream)))


def child_keys(parents: Tensor, tokens: Tensor) -> Tensor:
    """Return the keys of nodes from their parents' keys and their tokens, both [...] int64: a path has one key."""
    return _mix((parents ^ _signed(_MIX_1)) + (tokens + 1) * _signed(_POSITION))


def token_gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return Gumbel noise [..., K] float32 for tokens [..., K] at nodes with `keys` [...]."""
    return gumbel_from_bits(_shift_right(_mix(keys[..., None] + (tokens + 1) * _signed(_GOLDEN)), 32))


def _argmax(scores: Tensor) -> Tensor:
    # the first of equal maxima, as torch.argmax, and about three times as fast on a CPU
    return scores.max(-1).indices


def _position_key(seed: int, indices: Tensor, positions: Tensor) -> Tensor:
    """Hash (seed, index, position) to int64; `indices` and `positions` broadcast."""
    return _mix(indices * _signed(_INDEX) + positions * _signed(_POSITION) + _signed(_mix_word(seed)))


def _stream(key: Tensor, count: int) -> Tensor:
    """Return the first `count` outputs [..., count] of the splitmix64 generator whose state is `key` [...]."""
    steps = torch.arange(1, count + 1, device=key.device) * _signed(_GOLDEN)
    return _mix(key[..., None] + steps)


def _mix(value: Tensor) -> Tensor:
    """The finaliser of splitmix64, a bijection of 64-bit words; overwrites `value`. int64 products wrap mod 2**64."""
    value ^= _shift_right(value, 30)
    value *= _signed(_MIX_1)
    value ^= _shift_right(value, 27)
    value *= _signed(_MIX_2)
    value ^= _shift_right(value, 31)
    return value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically: mask off the copies of the sign bit
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_word(word: int) -> int:
    """One output of splitmix64 whose state is `word`, in Python integers."""
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    """The int64 with the bits of `word` modulo 2**64."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word
