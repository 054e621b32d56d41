"""Mixed precision: a bfloat16 copy computes, the float32 original is updated.

Norm weights and decay parameters stay float32 in the copy; the modules widen them anyway. With precision float32 the
copy is the model itself and nothing is moved.
"""

import copy

import torch
from torch import nn

PRECISIONS = ("float32", "bfloat16")


class Shadow:
    """`model` holds the float32 weights, `compute` is what a stage's loss runs; see the module."""

    def __init__(self, model: nn.Module, precision: str):
        self.model = model
        self.compute = model if precision == "float32" else lower(copy.deepcopy(model))
        self._pairs = [
            (master, copied)
            for master, copied in zip(model.parameters(), self.compute.parameters(), strict=True)
            if master.requires_grad and master is not copied
        ]
        for _, copied in self._pairs:
            copied.grad = torch.zeros_like(copied)

    @torch.no_grad()
    def pull(self) -> None:
        """Bring the copy up to date with the model and clear its gradients."""
        if self._pairs:
            masters, copies = (list(side) for side in zip(*self._pairs, strict=True))
            torch._foreach_copy_(copies, masters)
            torch._foreach_zero_([copied.grad for copied in copies])

    @torch.no_grad()
    def push(self) -> None:
        """Move the copy's gradients to the model's, which must exist."""
        if self._pairs:
            masters, copies = (list(side) for side in zip(*self._pairs, strict=True))
            torch._foreach_copy_([master.grad for master in masters], [copied.grad for copied in copies])


def lower(model: nn.Module) -> nn.Module:
    """Convert `model` in place to bfloat16, except norm weights and decay parameters; return it."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith(".bias"):
            parameter.data = parameter.data.bfloat16()
    return model
