"""Correction heads as ConditionalScorers: the residual of a node's children from tables that are made once.

The target's head rows are folded into `up` [vocab, rank] and its embedding into the token's part of a head, so that an
expansion gathers rows, takes one product for each node and normalises over the candidates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfm.heads import MarkovHead, RecurrentHead
from tfm.marginals import Marginals


class HeadScorer:
    """What both heads share: the candidates of a tree batch and the residual of a row [rank]."""

    def __init__(self, head: nn.Module, target):
        self.head = head
        with torch.no_grad():
            self.head_table = target.head_weight.to(head.up.weight.dtype) @ head.up.weight  # [vocab, rank]

    def begin(self, marginals: Marginals, target_hidden: Tensor, slots: int) -> None:
        """Take the candidates of every request; target_hidden is the weaver's, no head here reads it."""
        requests, self.depth = marginals.tokens.shape[:2]
        candidates = marginals.tokens.flatten(0, 1)
        self.first_row = torch.arange(requests, device=candidates.device)[:, None] * self.depth
        # [R * D, K, rank]: a depth's candidates are gathered from the vocabulary once, not for each node
        self.candidate_rows = self.head_table[candidates.clamp(min=0)]
        scores = marginals.log_probs.float().flatten(0, 1)
        self.candidate_scores = scores.masked_fill(candidates < 0, float("-inf"))

    def expand(self, slots: Tensor, parent_slots: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        """Return log-probs [R, W, K] float32 of the children of the nodes given by [R, W]; see ConditionalScorer."""
        depths = depths.clamp(0, self.depth - 1)
        rows = self._rows(slots, parent_slots, tokens, depths).flatten(0, 1)
        place = (self.first_row + depths).flatten()
        residual = torch.bmm(self.candidate_rows.index_select(0, place), rows[:, :, None])[:, :, 0]
        scores = self.candidate_scores.index_select(0, place) + residual.float()
        return scores.log_softmax(-1).unflatten(0, slots.shape)

    def _rows(self, slots: Tensor, parent_slots: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        raise NotImplementedError


class MarkovScorer(HeadScorer):
    """Nothing of a path but its last token: a node's row is looked up."""

    def __init__(self, head: MarkovHead, target):
        super().__init__(head, target)
        with torch.no_grad():
            self.token_table = head.token_rows(target.embed_weight)  # [vocab, rank]

    def _rows(self, slots: Tensor, parent_slots: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        return self.token_table[tokens]


class RecurrentScorer(HeadScorer):
    """Keeps the state of every expanded node in its slot; request r owns rows r * stride on, the last one spare."""

    def __init__(self, head: RecurrentHead, target):
        super().__init__(head, target)
        with torch.no_grad():
            self.gate_table = head.gates(target.embed_weight)  # [vocab, 3 state]

    def begin(self, marginals: Marginals, target_hidden: Tensor, slots: int) -> None:
        """Run the drafter's part of every depth and make room for `slots` expanded nodes."""
        super().begin(marginals, target_hidden, slots)
        requests = len(marginals.tokens)
        self.draft_rows = self.head.draft_rows(marginals.hidden).flatten(0, 1)  # [R * D, rank]
        self.stride = slots + 1
        self.base = torch.arange(requests, device=self.draft_rows.device)[:, None] * self.stride
        self.states = self.draft_rows.new_zeros(requests * self.stride, self.head.config.state)

    def _rows(self, slots: Tensor, parent_slots: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        parents = self.states[self._place(parent_slots)].masked_fill((depths == 0)[..., None], 0.0)
        states = self.head.cell(self.gate_table[tokens], parents)
        self.states[self._place(slots).flatten()] = states.flatten(0, 1)
        return F.silu(self.draft_rows[self.first_row + depths] + self.head.state_in(states))

    def _place(self, slots: Tensor) -> Tensor:
        return self.base + torch.where(slots < 0, self.stride - 1, slots)


SCORERS = {"markov": MarkovScorer, "recurrent": RecurrentScorer}


def make_head_scorer(head: nn.Module, target) -> HeadScorer:
    """Return the scorer of a head of tfm/heads.py for a target's embedding and head."""
    return SCORERS[head.config.kind](head, target)
