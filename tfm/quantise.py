"""Weights as int8 rows with a float16 scale a row. The dequantised weights are the model; nothing else is.

The writer's scales are powers of two: int8 times a power of two has at most seven significant bits, so the model is the
same in float32, float16 and bfloat16 wherever the exponents fit, and quantising it again changes nothing. That costs at
most one bit of a row against the finest scale. A reader takes any positive finite scale.
"""

from collections.abc import Callable

import torch
from torch import Tensor

SCALE = ".scale"
LARGEST = 127  # -128 is not used: the code is symmetric
SMALLEST_EXPONENT, LARGEST_EXPONENT = -24, 15  # of float16, subnormal ones included


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes int8 [rows, columns], scales float16 [rows]) of a matrix [rows, columns].

    The scale is the smallest power of two that keeps a row's largest value within 127. Raises ValueError for another
    shape and for values that no such scale holds.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight: {weight.dtype} of shape {tuple(weight.shape)} is not allowed (allowed: a float matrix)"
        )
    wide = weight.detach().double()
    largest = wide.abs().amax(1)
    limit = LARGEST * 2.0**LARGEST_EXPONENT
    if not bool((largest <= limit).all()):  # NaN fails too
        raise ValueError(f"weight: largest value {float(largest.max())} (allowed: finite, up to {limit}); train anew")
    exponents = torch.frexp(largest / LARGEST).exponent
    # frexp gives 2^e > x; an x that is a power of two fits its own
    exponents = exponents - (torch.ldexp(torch.ones_like(largest), exponents - 1) == largest / LARGEST).int()
    scales = torch.ldexp(torch.ones_like(largest), exponents.clamp(min=SMALLEST_EXPONENT))
    codes = (wide / scales[:, None]).round()
    return codes.to(torch.int8), scales.half()


def dequantise_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes times scales in float32 [rows, columns]: exact, 7 and 11 significant bits make at most 18."""
    return codes.float() * scales.float()[:, None]


def as_bfloat16(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in bfloat16 on the CPU, contiguous."""
    return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def inexact_in_bfloat16(tensors: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that bfloat16 would change."""
    return [name for name, tensor in tensors.items() if not torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)]


def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what is stored: a matrix as `<name>` int8 and `<name>.scale` float16, the rest in bfloat16.

    Packing what `unpack` returns gives the same bytes.
    """
    stored = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            stored[name], stored[name + SCALE] = quantise_rows(tensor)
        else:
            stored[name] = tensor.detach().to(torch.bfloat16)
    return {name: tensor.cpu().contiguous() for name, tensor in stored.items()}


def unpack(stored: dict[str, Tensor], where: Callable[[str], str]) -> dict[str, Tensor]:
    """Return tensors with every int8 `<name>` dequantised by its `<name>.scale`; the others as they are.

    `where(name)` names the tensor's file in errors: ValueError for codes without a scale, a scale without codes, and
    scales of another shape, type or range.
    """
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in stored:
            continue
        if tensor.dtype == torch.int8:
            tensor = dequantise_rows(tensor, _checked_scales(name, stored, where))
        tensors[name] = tensor
    return tensors


def _checked_scales(name: str, stored: dict[str, Tensor], where: Callable[[str], str]) -> Tensor:
    codes, scales = stored[name], stored.get(name + SCALE)
    wanted = f"float16 of shape {(len(codes),)}, each positive and finite"
    if scales is None:
        raise ValueError(
            f"{where(name)}: {name} is int8 but {name}{SCALE} is missing (expected: {wanted}); export again"
        )
    is_scale = codes.dim() == 2 and scales.dtype == torch.float16 and scales.shape == codes.shape[:1]
    if not is_scale or not bool((scales.isfinite() & (scales > 0)).all()):
        found = f"{scales.dtype} of shape {tuple(scales.shape)} for {tuple(codes.shape)} codes"
        raise ValueError(f"{where(name)}: {name}{SCALE}: {found} (expected: {wanted}); export the weights again")
    return scales
