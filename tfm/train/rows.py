"""Rows of token ids in buckets of equal length, on the device; batches are functions of (seed, step)."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tfm.train.peers import ALONE, Peers
from tfm.train.text import TokenisedText


@dataclass(frozen=True)
class Bucket:
    tokens: Tensor  # [rows, length] int16, or int32 where an id needs it, zero padded
    lengths: Tensor  # [rows] int64, real tokens
    starts: Tensor  # [rows] int64, first token of the answer (0 where that has no meaning)
    kept: dict[str, Tensor] = field(default_factory=dict)  # [rows, ...], what batches carry beside them


class Rows:
    """Rows of one split. A batch takes rows of one bucket, drawn with replacement, so it resumes from its step."""

    def __init__(self, buckets: list[Bucket], seed: int):
        self.buckets, self.seed = [bucket for bucket in buckets if len(bucket.lengths)], seed
        if not self.buckets:
            raise ValueError("training rows: none are left; give more text or lower held_out_every")
        sizes = torch.tensor([float(bucket.tokens.numel()) for bucket in self.buckets])
        self.shares = sizes / sizes.sum()

    @property
    def total_tokens(self) -> int:
        return sum(int(bucket.lengths.sum()) for bucket in self.buckets)

    def batch(self, step: int, tokens: int, anchors: int = 0, peers: Peers = ALONE) -> dict[str, Tensor]:
        """Return tokens [R, L], lengths [R], starts [R] and, if asked for, anchor positions [R, anchors].

        Of several processes each gets every size-th row. Raises ValueError when there are fewer rows than processes.
        """
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        bucket = self.buckets[int(torch.multinomial(self.shares, 1, generator=generator))]
        rows = max(1, tokens // bucket.tokens.shape[1])
        if rows < peers.size:
            raise ValueError(f"tokens_per_step: {tokens} makes {rows} rows for {peers.size} processes; raise it")
        picked = torch.randint(len(bucket.lengths), (rows,), generator=generator).to(bucket.tokens.device)
        batch = self._take(bucket, picked, anchors, generator)
        return batch if peers.size == 1 else {name: x[peers.rank :: peers.size] for name, x in batch.items()}

    def fixed_batches(self, tokens: int, count: int, anchors: int = 0) -> Iterable[dict[str, Tensor]]:
        """Yield up to `count` batches a bucket of its first rows, the same on every call: for validation."""
        for bucket in self.buckets:
            rows = max(1, tokens // bucket.tokens.shape[1])
            generator = torch.Generator().manual_seed(self.seed)
            every = torch.arange(len(bucket.lengths), device=bucket.tokens.device)
            for picked in list(every.split(rows))[:count]:
                yield self._take(bucket, picked, anchors, generator)

    def _take(self, bucket: Bucket, picked: Tensor, anchors: int, generator: torch.Generator) -> dict[str, Tensor]:
        batch = {
            "tokens": bucket.tokens[picked].long(),
            "lengths": bucket.lengths[picked],
            "starts": bucket.starts[picked],
        } | {name: values[picked] for name, values in bucket.kept.items()}
        if anchors:
            # the root is a token of the answer with at least one token after it
            share = torch.rand(len(picked), anchors, generator=generator).to(picked.device)
            places = batch["lengths"] - 1 - batch["starts"]
            batch["anchors"] = batch["starts"][:, None] + (share * places[:, None]).long()
        return batch


def hash_of(tokens: np.ndarray) -> int:
    """Return a number in [0, 2^64) that depends on a conversation's tokens alone."""
    return int.from_bytes(hashlib.sha256(tokens.tobytes()).digest()[:8], "big")


def is_held_out(tokens: np.ndarray, every: int) -> bool:
    """Whether a conversation belongs to validation, by the hash of its tokens."""
    return hash_of(tokens) % every == 0


def split_text(text: TokenisedText, *, buckets: tuple[int, ...], held_out_every: int, seed: int, device) -> tuple:
    """Return (training Rows, validation Rows) of whole conversations; longer ones are cut into rows."""
    kept, held = [], []
    for index in range(len(text)):
        tokens, _ = text.row(index)
        side = held if is_held_out(tokens, held_out_every) else kept
        side += [(tokens[at : at + buckets[-1]], 0) for at in range(0, len(tokens) - 1, buckets[-1])]
    return tuple(Rows(fill_buckets(rows, buckets, device), seed) for rows in (kept, held))


def fill_buckets(rows: list[tuple[np.ndarray, int]], buckets: tuple[int, ...], device) -> list[Bucket]:
    """Put (tokens, start) rows into the smallest bucket that holds them, in order. Rows must fit the last one."""
    largest = max((int(tokens.max()) for tokens, _ in rows if len(tokens)), default=0)
    dtype = np.int16 if largest < 2**15 else np.int32
    placed: list[list[tuple[np.ndarray, int]]] = [[] for _ in buckets]
    for tokens, start in rows:
        placed[int(np.searchsorted(buckets, len(tokens)))].append((tokens, start))
    result = []
    for length, members in zip(buckets, placed, strict=True):
        padded = np.zeros((len(members), length), dtype=dtype)
        for row, (tokens, _) in zip(padded, members, strict=True):
            row[: len(tokens)] = tokens
        result.append(
            Bucket(
                torch.from_numpy(padded).to(device),
                torch.tensor([len(tokens) for tokens, _ in members], dtype=torch.int64, device=device),
                torch.tensor([start for _, start in members], dtype=torch.int64, device=device),
            )
        )
    return result
