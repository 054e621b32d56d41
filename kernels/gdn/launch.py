"""What every Triton backend checks before it launches, and how its operands are laid out."""

import torch
from torch import Tensor

MIN_CAPABILITY = (8, 0)  # bf16 and TF32 matrix instructions


def check_device(name: str, device: torch.device, dtype: torch.dtype, *, interpreted: bool) -> None:
    """Raise ValueError unless backend `name` runs on `device` with a state of `dtype`."""
    if dtype != torch.float32:
        raise ValueError(f"gdn_backend: {name} keeps its state in float32, not {dtype}; use solve for {dtype}")
    if interpreted:
        return
    if device.type != "cuda":
        raise ValueError(f"gdn_backend: {name} needs a CUDA device, not {device}; use solve there")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise ValueError(
            f"gdn_backend: {name} needs compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer, "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; use solve there"
        )


def check_dims(name: str, key_dim: int, value_dim: int, allowed: tuple[int, ...]) -> None:
    """Raise ValueError unless a tile can hold the head dimensions."""
    for what, size in (("key", key_dim), ("value", value_dim)):
        if size not in allowed:
            raise ValueError(
                f"gdn_backend: {name} takes heads of {', '.join(map(str, allowed))}, "
                f"not {what} heads of {size}; use solve"
            )


def is_interpreted(kernel) -> bool:
    """Return whether Triton runs this kernel in its interpreter, on any device, for tests."""
    return type(kernel).__name__ == "InterpretedFunction"


def rows_last(x: Tensor) -> Tensor:
    """Return `x` with its last dimension contiguous: as it is if it already is, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def same_rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as a kernel reads them: last dimension contiguous, q and k of one dtype."""
    if q.dtype != k.dtype:
        q, k = q.float(), k.float()
    return rows_last(q), rows_last(k), rows_last(v)
