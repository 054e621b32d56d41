"""Accept on the device, and the packet that carries a step's decisions to the host in one copy.

The rules are those of tfm/acceptance.py for which the tree decides the shape of nothing: greedy and target_only.
"""

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from tfm.acceptance import VerifyResult, edge_log_probs, expected_accepted, walk
from tfm.config import GREEDY_BELOW, DecodeConfig
from tfm.sampling import _position_key, next_tokens
from tfm.tree import DraftTree

RULES = ("greedy", "target_only")
COLUMNS = ("tokens", "parents", "depths", "log_probs")  # of the tree, one value a node


def draw_rows(logits: Tensor, positions: Tensor, indices: Tensor, *, seed: int, temperature: float, span: int):
    """Return (drawn tokens [1, N], their logits [1, N], log-sums [1, N] or None at temperature 0)."""
    drawn = next_tokens(logits, positions, indices, seed=seed, temperature=temperature, span=span)
    chosen = logits.gather(-1, drawn[..., None])[..., 0]
    return drawn, chosen, None


def make_fast_draw():
    """Return `draw_rows` in Triton: one pass over the logits gives tokens and log-sums, no noise is stored."""
    kernel = importlib.import_module("tfm_kernels.sampling_triton")

    def draw(logits: Tensor, positions: Tensor, indices: Tensor, *, seed: int, temperature: float, span: int):
        del span
        keys = _position_key(seed, indices[:, None], positions)
        is_greedy = temperature < GREEDY_BELOW
        columns = kernel.draw(logits[0], keys[0], None if is_greedy else temperature)
        drawn, chosen, log_sums = (column[None] for column in columns)
        return drawn, chosen, None if is_greedy else log_sums

    return draw


def accept_static(
    tree: DraftTree, logits: Tensor, config: DecodeConfig, *, indices: Tensor, length: Tensor, path_rows: int, draw
) -> tuple[VerifyResult, Tensor]:
    """Return what `tfm.acceptance.accept` returns with `path` padded to `path_rows`, and the bonus token's logit [1].

    `draw` is `draw_rows` or its fast form, which also returns the log-sums of logits / T.
    """
    deepest = path_rows - 1
    positions = length[:, None] + tree.depths + 1
    drawn, chosen, log_sums = draw(
        logits, positions, indices, seed=config.seed, temperature=config.temperature, span=path_rows
    )
    path, accepted, bonus = walk(tree, drawn, deepest)
    leaf = path.gather(1, accepted[:, None])
    logit = chosen.gather(1, leaf)[:, 0]
    if config.is_greedy:
        return VerifyResult(path, accepted, bonus, accepted.double()), logit
    if log_sums is None:
        edges = edge_log_probs(tree, logits, config.temperature)
    else:
        edges = _edges(tree, logits, log_sums, config.temperature)
    return VerifyResult(path, accepted, bonus, expected_accepted(tree, edges, deepest)), logit


def _edges(tree: DraftTree, logits: Tensor, log_sums: Tensor, temperature: float) -> Tensor:
    # edge_log_probs with the log-sums at hand: no second pass over the logits
    parents = tree.parents.clamp(min=0)
    picked = logits.flatten(1).gather(1, parents * logits.shape[-1] + tree.tokens).float() / temperature
    return torch.where(tree.parents >= 0, picked - log_sums.gather(1, parents), 0.0)


def pack(tree: DraftTree, result: VerifyResult, logit: Tensor, unfinished: Tensor | None) -> Tensor:
    """Return everything that the host reads of a step as one int64 vector."""
    floats = torch.cat([result.expected_accepted.double(), logit.double(), tree.log_probs[0].double()])
    numbers = torch.stack([tree.tokens[0], tree.parents[0], tree.depths[0]]).flatten()
    flag = torch.zeros_like(result.accepted) if unfinished is None else unfinished.to(torch.int64).view(1)
    head = torch.cat([tree.num_nodes, result.accepted, result.bonus, flag])
    return torch.cat([head, result.path[0], numbers, floats.view(torch.int64)])


@dataclass
class Decision:
    """A step's decisions on the host, under the names that tfm.decode records: one request each."""

    num_nodes: list[int]
    accepted: list[int]
    bonus: list[int]
    path: list[list[int]]
    tokens: list[list[int]]
    parents: list[list[int]]
    depths: list[list[int]]
    log_probs: list[list[float]]
    expected_accepted: list[float]
    bonus_logit: float
    is_unfinished: bool  # the tree wanted more expansions than the static plan has


def unpack(packet: Tensor, path_rows: int) -> Decision:
    """Return the decision in a packet on the host."""
    nodes = (len(packet) - 4 - path_rows - 2) // len(COLUMNS)
    num_nodes, accepted, bonus, flag = packet[:4].tolist()
    path = packet[4 : 4 + path_rows].tolist()
    rest = packet[4 + path_rows :]
    tokens, parents, depths = rest[: 3 * nodes].view(3, nodes).tolist()
    expected, logit, *log_probs = rest[3 * nodes :].view(torch.float64).tolist()
    return Decision(
        [num_nodes], [accepted], [bonus], [path], [tokens], [parents], [depths], [log_probs], [expected], logit,
        bool(flag),
    )  # fmt: skip
