"""SmolLM2-135M-Instruct from its GGUF file: tokenizer, chat template and a Llama that decodes large static batches.

It writes training text (tfm/train/generate.py) and is no part of what is measured. The file is read with the package
`gguf` alone. Matrices keep the file's order, in which rotary pairs are neighbours (2i, 2i + 1).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tfm.llama_gguf import GGUF_SHA256, SYSTEM, build_tokenizer, open_gguf


@dataclass(frozen=True)
class LlamaConfig:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    rope_theta: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class ChatTokenizer:
    """Byte-level BPE with the model's chat template; texts never become control tokens."""

    def __init__(self, tokens: list[str], types: list[int], merges: list[str]):
        self._text = build_tokenizer(tokens, types, merges)
        self._text.encode_special_tokens = True  # a text that spells a control token stays text
        self.start, self.end = tokens.index("<|im_start|>"), tokens.index("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        return self._text.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, computed on all cores."""
        return [encoding.ids for encoding in self._text.encode_batch_fast(texts, add_special_tokens=False)]

    def decode_many(self, rows: list[list[int]]) -> list[str]:
        """Return the text of each row of ids, control tokens left out; computed on all cores."""
        return self._text.decode_batch(rows, skip_special_tokens=True)

    def answer_prompts(self, messages: list[str], system: str = SYSTEM) -> list[list[int]]:
        """Return for each message the ids up to where the model answers it."""
        opening, line_end = self.message_prompt(system), self.encode("\n")
        closing = [self.end, *line_end, self.start, *self.encode("assistant\n")]
        return [[*opening, *ids, *closing] for ids in self.encode_many(messages)]

    def message_prompt(self, system: str = SYSTEM) -> list[int]:
        """Return the ids up to where a user writes: from here the model makes up a message."""
        turn = [self.start, *self.encode(f"system\n{system}"), self.end, *self.encode("\n")]
        return [*turn, self.start, *self.encode("user\n")]


@dataclass(frozen=True)
class KvCache:
    """Keys and values [layers, R, kv heads, rows, head dim] of a static batch."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def empty(config: LlamaConfig, requests: int, rows: int, like: Tensor) -> "KvCache":
        """Return room for `rows` tokens of `requests` requests, on the device and in the dtype of `like`."""
        shape = (config.layers, requests, config.kv_heads, rows, config.head_dim)
        return KvCache(like.new_zeros(shape), like.new_zeros(shape))

    def part(self, requests: slice) -> "KvCache":
        """Return the cache of some of the requests, sharing memory."""
        return KvCache(self.keys[:, requests], self.values[:, requests])


class Llama:
    """Weights by GGUF name; no gradients."""

    def __init__(self, config: LlamaConfig, weights: dict[str, Tensor]):
        self.config, self.weights = config, weights

    def to(self, device: str, dtype: torch.dtype) -> "Llama":
        """Return the model on `device` in `dtype`."""
        return Llama(self.config, {name: tensor.to(device, dtype) for name, tensor in self.weights.items()})

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: KvCache, rows: int) -> Tensor:
        """Return hidden rows [R, n, hidden] of tokens [R, n] at `positions` [R, n]; writes them into `cache`.

        Attention sees cache rows up to each token's position, of the first `rows`. `logits` turns rows into logits.
        """
        config, weights = self.config, self.weights
        x = F.embedding(tokens, weights["token_embd.weight"])
        table = self._table(positions, x.dtype)
        seen = torch.arange(rows, device=tokens.device) <= positions[:, None, :, None]  # [R, 1, n, rows]
        # the query heads of one key head stand side by side as rows, so that keys are not copied for each of them
        mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill_(~seen, float("-inf"))
        mask = mask.repeat(1, 1, config.heads // config.kv_heads, 1)
        for layer in range(config.layers):
            name = f"blk.{layer}."
            normed = self._norm(x, name + "attn_norm.weight")
            x = x + self._attend(normed, layer, table, positions, mask, cache)
            normed = self._norm(x, name + "ffn_norm.weight")
            inner = F.silu(F.linear(normed, weights[name + "ffn_gate.weight"]))
            inner = inner * F.linear(normed, weights[name + "ffn_up.weight"])
            x = x + F.linear(inner, weights[name + "ffn_down.weight"])
        return self._norm(x, "output_norm.weight")

    @property
    def device(self) -> torch.device:
        return self.weights["token_embd.weight"].device

    def new_cache(self, requests: int, rows: int) -> KvCache:
        return KvCache.empty(self.config, requests, rows, self.weights["token_embd.weight"])

    def prefill(self, tokens: Tensor, lengths: Tensor, cache: KvCache, requests: slice) -> Tensor:
        """As `tfm.train.sampler.StepModel` has it."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self.forward(tokens, places, cache.part(requests), tokens.shape[1])
        return hidden[torch.arange(len(tokens), device=tokens.device), lengths - 1]

    def step(self, tokens: Tensor, positions: Tensor, cache: KvCache, rows: int) -> Tensor:
        """As `tfm.train.sampler.StepModel` has it."""
        return self.forward(tokens[:, None], positions[:, None], cache, rows)[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocab] of hidden rows [..., hidden]."""
        return F.linear(hidden, self.weights["token_embd.weight"])

    def _attend(self, x: Tensor, layer: int, table, positions: Tensor, mask: Tensor, cache: KvCache) -> Tensor:
        config, name = self.config, f"blk.{layer}.attn_"
        heads, group = config.kv_heads, config.heads // config.kv_heads
        query, key, value = (
            F.linear(x, self.weights[f"{name}{part}.weight"]).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for part in "qkv"
        )
        query, key = _turn(query, table), _turn(key, table)
        place = positions[:, None, :, None].expand_as(key)
        keys, values = cache.keys[layer], cache.values[layer]
        keys.scatter_(2, place, key)
        values.scatter_(2, place, value)
        rows = mask.shape[-1]
        out = F.scaled_dot_product_attention(
            query.unflatten(1, (heads, group)).flatten(2, 3),
            keys[:, :, :rows],
            values[:, :, :rows],
            attn_mask=mask.expand(-1, heads, -1, -1),
        )
        out = out.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2).flatten(2)
        return F.linear(out, self.weights[f"{name}output.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = F.rms_norm(x.float(), x.shape[-1:], self.weights[name].float(), self.config.norm_eps)
        return wide.to(x.dtype)

    def _table(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.config.head_dim, 2, device=positions.device) / self.config.head_dim
        angles = (positions[..., None].float() / self.config.rope_theta**half)[:, None]  # [R, 1, n, head_dim / 2]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _turn(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = table
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def load_gguf(path: Path, *, sha256: str | None = GGUF_SHA256) -> tuple[Llama, ChatTokenizer]:
    """Return the model in float32 on the CPU and its tokenizer.

    Raises ValueError for a file with another hash, another architecture, or without the package gguf.
    """
    reader = open_gguf(path, sha256=sha256)
    import gguf  # lazy: only reading a file needs it

    facts = reader.fields
    config = LlamaConfig(
        layers=facts["llama.block_count"].contents(),
        hidden=facts["llama.embedding_length"].contents(),
        heads=facts["llama.attention.head_count"].contents(),
        kv_heads=facts["llama.attention.head_count_kv"].contents(),
        rope_theta=facts["llama.rope.freq_base"].contents(),
        norm_eps=facts["llama.attention.layer_norm_rms_epsilon"].contents(),
    )
    weights = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in reader.tensors
    }
    listed = (facts[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    return Llama(config, weights), ChatTokenizer(*listed)
