"""Correction heads beside the weaver: they add a residual to the drafter's logits that depends on the drafted path.

All heads, the weaver too, give the same two forms. `path_queries` is the definition and what training differentiates:
a query [d_model] for each position of a path, whose dot with a head row of the target is that token's residual.
`make_head_scorer` gives the ConditionalScorer that a tree is built with; it equals the definition along every path.

Markov (the kind of DSpark): a low-rank function of the token before alone. Recurrent (the kind of Domino): a gated
recurrent state along the path, read together with the drafter's hidden row. The authors' heads end in matrices over
the vocabulary; here the target's head stands there, so that a head stays small.
"""

from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfm.layers import RMSNorm

REMEDY = "take the config that belongs to the weights"


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head; `state` is of the recurrent one alone."""

    kind: str  # a key of HEADS
    d_model: int  # hidden size of target and drafter
    d_embed: int  # width of the target's embedding
    rank: int  # of the residual
    state: int = 0  # width of the recurrent state
    candidate_pool_size: int = 64  # candidates a row that training scores; a decode may keep fewer or more
    norm_eps: float = 1e-6

    @staticmethod
    def from_dict(raw: dict) -> "HeadConfig":
        """Read a config.json. Raises ValueError naming the key, its value and what is allowed."""
        known = {field.name for field in fields(HeadConfig)}
        unknown = sorted(set(raw) - known)
        missing = sorted({"kind", "d_model", "d_embed", "rank"} - set(raw))
        if unknown or missing:
            found = ", ".join([*(f"unknown key {key}" for key in unknown), *(f"missing key {key}" for key in missing)])
            raise ValueError(f"head config: {found} (known: {', '.join(sorted(known))}); {REMEDY}")
        return HeadConfig(**raw).check()

    def check(self) -> "HeadConfig":
        """Return self, or raise ValueError naming the key, its value and what is allowed."""
        if self.kind not in HEADS:
            raise ValueError(f"kind: {self.kind!r} is not allowed (allowed: {', '.join(HEADS)}); {REMEDY}")
        least = {"state": int(self.kind == "recurrent")}
        for key in ("d_model", "d_embed", "rank", "state", "candidate_pool_size"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least.get(key, 1):
                allowed = f"an integer >= {least.get(key, 1)}"
                raise ValueError(f"{key}: {value!r} is not allowed (allowed: {allowed}); {REMEDY}")
        eps = self.norm_eps
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < float("inf"):
            raise ValueError(f"norm_eps: {eps!r} is not allowed (allowed: a number > 0); {REMEDY}")
        return self

    def to_dict(self) -> dict:
        """Return the dictionary that `from_dict` reads back."""
        return asdict(self)


class MarkovHead(nn.Module):
    """residual(v | token before) = head row of v . up(down(norm(embedding of the token before)))."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.embed_norm = RMSNorm(config.d_embed, config.norm_eps)
        self.down = nn.Linear(config.d_embed, config.rank, bias=False)
        self.up = nn.Linear(config.rank, config.d_model, bias=False)

    def token_rows(self, embeds: Tensor) -> Tensor:
        """Return what `up` takes [..., rank] of nodes with embeddings [..., d_embed]."""
        return self.down(self.embed_norm(embeds.to(self.down.weight.dtype)))

    def path_queries(self, target_hidden: Tensor, draft_hidden: Tensor, embeds: Tensor) -> Tensor:
        """Return queries [N, D, d_model] for embeddings [N, D, d_embed] of the root and the D - 1 tokens after it."""
        return self.up(self.token_rows(embeds))


class RecurrentHead(nn.Module):
    """s = cell(s of the parent, token); residual(v) = head row of v . up(silu(draft_in(hidden row) + state_in(s))).

    The root's parent has state 0. The cell is the gated recurrent unit: reset r, update z, new n;
    n = tanh(input_n + r state_n), s' = (1 - z) n + z s.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.embed_norm = RMSNorm(config.d_embed, config.norm_eps)
        self.draft_norm = RMSNorm(config.d_model, config.norm_eps)
        self.input_gates = nn.Linear(config.d_embed, 3 * config.state)
        self.state_gates = nn.Linear(config.state, 3 * config.state)
        self.draft_in = nn.Linear(config.d_model, config.rank)
        self.state_in = nn.Linear(config.state, config.rank, bias=False)
        self.up = nn.Linear(config.rank, config.d_model, bias=False)

    def gates(self, embeds: Tensor) -> Tensor:
        """Return a token's part of the cell's gates [..., 3 state] from its embedding [..., d_embed]."""
        return self.input_gates(self.embed_norm(embeds.to(self.up.weight.dtype)))

    def cell(self, gates: Tensor, state: Tensor) -> Tensor:
        """Return the state [..., state] after a token with `gates` [..., 3 state]."""
        reset, update, new = gates.chunk(3, dim=-1)
        reset_state, update_state, new_state = self.state_gates(state).chunk(3, dim=-1)
        update = torch.sigmoid(update + update_state)
        fresh = torch.tanh(new + torch.sigmoid(reset + reset_state) * new_state)
        return fresh + update * (state - fresh)

    def draft_rows(self, draft_hidden: Tensor) -> Tensor:
        """Return the drafter's part [..., rank] of the residual's input."""
        return self.draft_in(self.draft_norm(draft_hidden.to(self.up.weight.dtype)))

    def path_queries(self, target_hidden: Tensor, draft_hidden: Tensor, embeds: Tensor) -> Tensor:
        """Return queries [N, D, d_model] along a path, one step of the cell after the other.

        draft_hidden [N, D, d_model] are the drafter's rows; embeds [N, D, d_embed] of the root and the D - 1 tokens
        after it.
        """
        gates = self.gates(embeds)
        state, states = gates.new_zeros(len(gates), self.config.state), []
        for depth in range(embeds.shape[1]):
            state = self.cell(gates[:, depth], state)
            states.append(state)
        rows = self.draft_rows(draft_hidden[:, : embeds.shape[1]])
        return self.up(F.silu(rows + self.state_in(torch.stack(states, dim=1))))


HEADS = {"markov": MarkovHead, "recurrent": RecurrentHead}


def build_head(config: HeadConfig) -> nn.Module:
    """Return the head of a config, with random weights."""
    return HEADS[config.check().kind](config)


def init_head(head: nn.Module, seed: int, std: float = 0.02) -> None:
    """Fill the weights from `seed`; `up` starts at zero, so that the residual starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() > 1 and name != "up.weight":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.fill_(1.0 if "norm" in name else 0.0)
