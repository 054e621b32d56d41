"""Pieces that target, drafter and weaver share: norms, rotary positions, the feed-forward block."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or unchanged when it is float64 (reference runs)."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed wide. `offset` 1 is the (1 + weight) form of Qwen3.5, 0 the plain one."""

    def __init__(self, dim: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        wide = widen(x)
        weight = widen(self.weight) + self.offset if self.offset else widen(self.weight)
        return nn.functional.rms_norm(wide, wide.shape[-1:], weight, self.eps).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's scaled rotary positions: slow rotations are slowed further, fast ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # tokens

    def scale(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies [rotary_dim / 2], radians a position."""
        # rotations in the original context
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


def rotary_table(
    positions: Tensor, rotary_dim: int, theta: float, dtype: torch.dtype, *, scaling: Llama3Rope | None = None
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) [.., rotary_dim] of `positions` [..]; angles in float32, halves repeated (not interleaved)."""
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    frequencies = 1.0 / theta**steps
    if scaling is not None:
        frequencies = scaling.scale(frequencies)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first rotary_dim channels of x [R, heads, N, dim] by `table` [R, N, rotary_dim]; pass the rest."""
    cos, sin = (part[:, None] for part in table)
    turning, still = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    low, high = turning.chunk(2, dim=-1)
    turned = turning * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([turned, still], dim=-1) if still.shape[-1] else turned
