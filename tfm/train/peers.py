"""The processes of one training run: one alone, or those that torchrun started, each with its share of every batch.

Every process computes its rows' part of the global loss, so gradients add up; batches, weights and reports are those of
one process with the same global batch, up to the order of sums.
"""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

WAIT = datetime.timedelta(minutes=30)  # others wait while the first one trains the tokenizer


@dataclass(frozen=True)
class Peers:
    """Process `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Return `value` summed over the processes, without gradient."""
        if self.size == 1:
            return value.detach()
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def add_up(self, tensors: list[Tensor]) -> None:
        """Sum each tensor over the processes, in place and in one message a dtype."""
        if self.size == 1:
            return
        for dtype in {tensor.dtype for tensor in tensors}:
            members = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.flatten() for tensor in members])
            dist.all_reduce(flat)
            for tensor, summed in zip(members, flat.split([t.numel() for t in members]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def any(self, flag: bool, device: str | torch.device) -> bool:
        """Return whether `flag` holds in any process."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag), device=device)) > 0)

    def wait(self) -> None:
        """Return once every process is here."""
        if self.size > 1:
            dist.barrier()


ALONE = Peers()


def join(device: str) -> Peers:
    """Return this process's place among those that torchrun started on this host, or ALONE; binds it to its GPU."""
    if not dist.is_torchelastic_launched():
        return ALONE
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=WAIT)
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    return Peers(dist.get_rank(), dist.get_world_size())
