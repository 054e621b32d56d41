"""What drafter and weaver training share: blocks at anchors of sampled sequences and the target's answer to each row.

An anchor is the position of a root in the answer. Row d (0-based) drafts the token at anchor + d + 1; the target's
law for it follows the tokens up to anchor + d of the sampled continuation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tfm.drafter import Drafter
from tfm.target import Target
from tfm.train.rows import Rows


@dataclass(frozen=True)
class Blocks:
    """Rows of A anchors a sequence: [R, A, D, ...]."""

    tokens: Tensor  # [R, A, D] the target's own token of each row
    inputs: Tensor  # [R, A, D] the token before it: the root, then the continuation
    valid: Tensor  # [R, A, D] bool, False past the end of the answer
    target_logits: Tensor  # [R, A, D, vocab]
    target_hidden: Tensor  # [R, A, d] final-norm hidden state at the root's predecessor
    draft_logits: Tensor  # [R, A, D, vocab]
    draft_hidden: Tensor  # [R, A, D, d]


def compute_blocks(target: Target, drafter: Drafter, batch: dict[str, Tensor], *, train_drafter: bool) -> Blocks:
    """Run the frozen target over the batch and the drafter at its anchors (with gradients if `train_drafter`)."""
    tokens, anchors = batch["tokens"], batch["anchors"]
    rows = torch.arange(drafter.draft_rows, device=tokens.device)
    places = anchors[..., None] + rows  # the position of each row's input token
    valid = places + 1 < batch["lengths"][:, None, None]
    safe = places.clamp(max=tokens.shape[1] - 2)
    with torch.no_grad():
        every, taps = _read(target, batch)
        target_logits = target.head(pick(every, safe))
        before = pick(every, (anchors - 1).clamp(min=0))
    with torch.set_grad_enabled(train_drafter):
        draft_hidden = drafter.forward_blocks(taps, anchors, tokens.gather(1, anchors), target)
        draft_logits = target.head(draft_hidden)
    return Blocks(
        tokens=pick(tokens, safe + 1),
        inputs=pick(tokens, safe),
        valid=valid,
        target_logits=target_logits,
        target_hidden=before,
        draft_logits=draft_logits,
        draft_hidden=draft_hidden,
    )


@torch.no_grad()
def keep_outputs(target: Target, rows: Rows, tokens: int) -> None:
    """Run the frozen target once over all `rows`, `tokens` at a time; batches then carry its "hidden" and "taps".

    They are read again and again: about 3 kB a token for mini, on the device of the rows. Raises ValueError when a
    CUDA device has no room for them.
    """
    width = (1 + len(target.tap_layers)) * target.config.hidden_size * target.embed_weight.element_size()
    needed = width * sum(bucket.tokens.numel() for bucket in rows.buckets)
    device = rows.buckets[0].tokens.device
    if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
        raise ValueError(
            f"keep_outputs: the target's outputs take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free; sample "
            "fewer conversations, or set it to false"
        )
    for bucket in rows.buckets:
        shape = bucket.tokens.shape
        new = target.embed_weight.new_empty
        hidden = new(*shape, target.config.hidden_size)
        taps = new(*shape, len(target.tap_layers) * target.config.hidden_size)
        for part in torch.arange(len(bucket.tokens), device=device).split(max(1, tokens // shape[1])):
            output = target(bucket.tokens[part].long())
            hidden[part], taps[part] = output.hidden, output.taps
        bucket.kept.update(hidden=hidden, taps=taps)


def _read(target: Target, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if "taps" in batch:
        return batch["hidden"], batch["taps"]
    output = target(batch["tokens"])
    return output.hidden, output.taps


def pick(values: Tensor, places: Tensor) -> Tensor:
    """Return values [R, L, ...] at places [R, ...]."""
    request = torch.arange(len(values), device=values.device).view(-1, *[1] * (places.dim() - 1))
    return values[request, places]


class RowMeans:
    """Means of row values over valid rows, in all and by position, gathered over validation batches."""

    def __init__(self):
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, valid: Tensor) -> None:
        """Add values [..., D] where `valid` [..., D]."""
        rows = (values.double() * valid).flatten(0, -2).sum(0).cpu()
        self.sums[name] = self.sums.get(name, 0) + rows
        self.counts[name] = self.counts.get(name, 0) + valid.double().flatten(0, -2).sum(0).cpu()

    def means(self, *, by_position: bool = True) -> dict[str, float]:
        """Return {name: mean, name_1: mean of the first draft position, ...}."""
        result = {}
        for name, sums in self.sums.items():
            counts = self.counts[name]
            result[name] = float(sums.sum() / counts.sum())
            if by_position and len(sums) > 1:
                pairs = enumerate(zip(sums.tolist(), counts.tolist(), strict=True), start=1)
                result |= {f"{name}_{place}": total / count for place, (total, count) in pairs if count}
        return result
