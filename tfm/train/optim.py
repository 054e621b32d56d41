"""Muon for matrices, AdamW for the rest, in one optimizer whose step needs no host value but the learning rate.

Muon orthogonalises the momentum of a matrix (five Newton-Schulz iterations) and scales the update to the size an AdamW
update has, 0.2 sqrt(max(rows, columns)), so that learning rates are comparable. Matrices of one shape are updated
together. All state lies on the device and is changed in place: the step can be captured in a CUDA graph.
"""

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
SMALLEST_MATRIX = 16  # a shorter side is left to AdamW


def takes_muon(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a hidden matrix: not an embedding, a head, a position table or a thin projection."""
    lookup = ("embed_tokens" in name and "weight" in name) or name.endswith(("lm_head.weight", "pos_emb"))
    return parameter.dim() == 2 and not lookup and min(parameter.shape) >= SMALLEST_MATRIX


class MuonAdamW:
    """See the module. `set_scale` then `step`; gradients are read from `.grad`."""

    def __init__(self, model: nn.Module, *, muon_lr: float, adam_lr: float, weight_decay: float, clip: float):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.muon_lr, self.adam_lr, self.weight_decay, self.clip = muon_lr, adam_lr, weight_decay, clip
        self.momentum, self.beta1, self.beta2, self.eps = 0.95, 0.9, 0.95, 1e-8
        shapes: dict[tuple[int, int], list[Tensor]] = {}
        for name, parameter in named:
            if takes_muon(name, parameter):
                shapes.setdefault(tuple(parameter.shape), []).append(parameter)
        self.groups = list(shapes.values())
        muon = {id(p) for group in self.groups for p in group}
        self.others = [p for p in self.parameters if id(p) not in muon]
        self.buffers = [torch.zeros_like(torch.stack([p.detach() for p in group])) for group in self.groups]
        self.first = [torch.zeros_like(p) for p in self.others]
        self.second = [torch.zeros_like(p) for p in self.others]
        device = self.parameters[0].device
        self.count = torch.zeros((), device=device)
        self.scale = torch.zeros((), device=device)

    def set_scale(self, scale: float) -> None:
        """Set the learning rates to `scale` times their peaks for the next step."""
        self.scale.fill_(scale)

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients to a total norm of `clip` and update every parameter in place."""
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            self._muon(group, buffer)
        if self.others:
            self._adam()

    def _muon(self, group: list[Tensor], buffer: Tensor) -> None:
        grads = torch.stack([p.grad for p in group])
        buffer.lerp_(grads, 1 - self.momentum)
        update = orthogonalise(torch.lerp(grads, buffer, self.momentum))
        lr = self.muon_lr * self.scale
        step = lr * 0.2 * max(group[0].shape) ** 0.5
        for parameter, change in zip(group, update, strict=True):
            parameter.mul_(1 - lr * self.weight_decay).sub_(step * change)

    def _adam(self) -> None:
        grads = [p.grad for p in self.others]
        self.count += 1
        torch._foreach_lerp_(self.first, grads, 1 - self.beta1)
        torch._foreach_mul_(self.second, self.beta2)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - self.beta2)
        scales = torch._foreach_sqrt(self.second)
        torch._foreach_div_(scales, (1 - self.beta2**self.count).sqrt())
        torch._foreach_add_(scales, self.eps)
        updates = torch._foreach_div(self.first, scales)
        torch._foreach_mul_(updates, self.adam_lr * self.scale / (1 - self.beta1**self.count))
        torch._foreach_sub_(self.others, updates)

    def state_dict(self) -> dict:
        return {"buffers": self.buffers, "first": self.first, "second": self.second, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        for name in ("buffers", "first", "second"):
            for own, saved in zip(getattr(self, name), state[name], strict=True):
                own.copy_(saved)
        self.count.copy_(state["count"])


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return matrices [n, rows, columns] with their singular values moved close to 1 (Newton-Schulz iteration)."""
    a, b, c = NEWTON_SCHULZ
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT
