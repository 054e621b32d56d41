"""Grow a draft tree best first, scoring w frontier nodes at once with a conditional head (the paper's Appendix A).

By default the tree is a function of the context: siblings are the top C candidates. With `SampledSiblings` they are
drawn without replacement, at most C a node, and a slot's value is the chance that it is reached. Growing takes
ceil(B / w) expansions of which the root's is the first; the last batch of nodes is not expanded. More are needed only
while the frontier holds fewer than w entries (w > C at the start, or a tree that runs out of depth or candidates).
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from tfm.config import DecodeConfig
from tfm.heads_scoring import make_head_scorer
from tfm.marginals import Marginals
from tfm.siblings import SampledSiblings
from tfm.tree import DraftTree
from tfm.weaver import WeaverScorer


class ConditionalScorer(Protocol):
    """Scores the candidates of a node's children given the node's path."""

    def begin(self, marginals: Marginals, target_hidden: Tensor, slots: int) -> None:
        """Start a tree batch with room for `slots` nodes; target_hidden [R, d] belongs to the root's predecessor."""

    def expand(self, slots: Tensor, parent_slots: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        """Return log-probs [R, W, K] float32 over the candidates of the children of the nodes given by [R, W].

        Row d of the candidates belongs to the children of a node at depth d; log-probs are normalised over the
        candidates, and -inf (as in the marginals) marks one that is not drafted. Slot -1 is padding: any value.
        """


class MarginalScorer:
    """ConditionalScorer without conditioning (residual 0): isolates the search from the weaver."""

    def begin(self, marginals: Marginals, target_hidden: Tensor, slots: int) -> None:
        self._rows = marginals.log_probs.log_softmax(-1)
        self._request = torch.arange(len(self._rows), device=self._rows.device)[:, None]

    def expand(self, slots: Tensor, parent_slots: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
        return self._rows[self._request, depths]


def default_width(budget: int) -> int:
    """Return ceil(budget / 16), the width of the public code: 4 at budget 64."""
    return -(-budget // 16)


def count_expansions(budget: int, width: int, children: int) -> int:
    """Return the expansions of a tree whose frontier never runs dry; ceil(budget / width) when width <= children."""
    if min(budget, width, children) < 1:
        raise ValueError(f"budget, width, children: {budget}, {width}, {children} (allowed: integers >= 1); raise them")
    nodes, frontier, expansions = 0, children, 1
    while True:
        taken = min(width, frontier, budget - nodes)
        nodes += taken
        frontier += taken * (children - 1)
        if nodes == budget or frontier == 0:
            return expansions
        expansions += 1


def grow(
    marginals: Marginals,
    scorer: ConditionalScorer,
    roots: Tensor,  # [R] int64
    *,
    target_hidden: Tensor,  # [R, d]
    budget: int,
    width: int,
    children: int,
    depth: int,
) -> DraftTree:
    """Return R trees of at most `budget` drafted nodes, none deeper than `depth`; see the module for the order.

    Entries are taken by cumulative log-probability, ties by the lowest frontier index, candidates of equal
    log-probability by the lowest candidate index. A tree that runs out of entries is smaller and padded.
    """
    marginals = without_repeats(marginals)
    scorer.begin(marginals, target_hidden, budget + 1)
    return Growth(marginals, scorer, roots, budget=budget, width=width, children=children, depth=depth).run()


def without_repeats(marginals: Marginals) -> Marginals:
    """Return marginals where a token that a row lists again has log-probability -inf there: siblings are distinct."""
    tokens, order = marginals.tokens.sort(dim=-1, stable=True)
    is_repeat = torch.zeros_like(tokens, dtype=torch.bool)
    is_repeat.scatter_(-1, order[..., 1:], tokens[..., 1:] == tokens[..., :-1])
    return replace(marginals, log_probs=marginals.log_probs.masked_fill(is_repeat, -torch.inf))


class Growth:
    """One run of `grow` after `scorer.begin`. Frontier entry `slot * C + rank` is the rank-th child of node `slot`."""

    def __init__(
        self,
        marginals: Marginals,
        scorer: ConditionalScorer,
        roots: Tensor,
        *,
        budget: int,
        width: int,
        children: int,
        depth: int,
        siblings: SampledSiblings | None = None,
    ):
        requests, rows, candidates = marginals.tokens.shape
        for key, value in (("budget", budget), ("width", width), ("children", children)):
            if value < 1:
                raise ValueError(f"{key}: {value} is not allowed (allowed: an integer >= 1); raise {key}")
        if not 1 <= depth <= rows:
            raise ValueError(f"depth: {depth} is not allowed (allowed: 1 to {rows}, the drafter's rows); lower depth")
        self.expansions = 0
        self._siblings = siblings
        self._scorer, self._candidates, self._depth_limit = scorer, marginals.tokens.flatten(1), depth
        self._budget, self._width, self._children = budget, width, min(children, candidates)
        # one row more than the tree: what does not fit is written there
        self._bin = budget + 1
        shape = (requests, budget + 2, self._children)
        self._scores = torch.full(shape, -torch.inf, device=roots.device)  # cumulative; -inf: absent or taken
        self._local = self._scores.clone()  # given the parent
        self._picks = torch.zeros(shape, dtype=torch.int64, device=roots.device)  # into the flat candidates
        self._entry = self._picks[..., 0].clone()  # of each slot
        self._depths = torch.zeros_like(self._entry)
        self._totals = self._scores[..., 0].clone()  # log-probability of the path to each slot, for drawn siblings
        self._roots, self._counts = roots, torch.ones_like(roots)
        self._offsets = torch.arange(width, device=roots.device)

    def run(self) -> DraftTree:
        batch = self._first_batch()
        planned = count_expansions(self._budget, self._width, self._children)
        # one device-to-host copy a tree, once the planned batches are written
        while self.expansions < planned or not bool(self._is_done().all()):
            self._expand(*batch)
            batch = self._take()
        return self._tree()

    def _first_batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        # the root alone, as `_take` returns nodes
        zero = torch.zeros_like(self._roots)[:, None]
        return zero, zero, self._roots[:, None], zero, zero.float()

    def _expand(self, slots: Tensor, parents: Tensor, tokens: Tensor, depths: Tensor, scores: Tensor) -> None:
        """Push the best C children of the nodes [R, W]; nodes at the depth limit get none."""
        self.expansions += 1
        is_closed = depths >= self._depth_limit
        rows = depths.clamp(max=self._depth_limit - 1)
        log_probs = self._scorer.expand(slots.masked_fill(is_closed, -1), parents, tokens, rows)
        if self._siblings is None:
            # a stable sort: topk promises no order among equals
            local, ranks = log_probs.sort(dim=-1, descending=True, stable=True)
            reach = local
        else:
            own = slots.masked_fill(is_closed, self._bin)
            reach, local, ranks = self._siblings.draw(own, parents, tokens, rows, log_probs)
            self._totals.scatter_(1, slots, scores)
        reach = reach[..., : self._children].masked_fill(is_closed[..., None], -torch.inf)
        places = slots[..., None].expand_as(reach)
        self._scores.scatter_(1, places, reach + scores[..., None])
        self._local.scatter_(1, places, local[..., : self._children])
        self._picks.scatter_(1, places, ranks[..., : self._children] + (rows * log_probs.shape[-1])[..., None])

    def _take(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Move the w best entries to the next slots; return their slots, parents, tokens, depths and scores [R, W].

        An entry that is absent or past the budget lands in the bin, at the depth limit so that it stays childless.
        """
        # nothing is ever pushed past the slots written so far
        reach = min(1 + (self.expansions - 1) * self._width, self._bin) * self._children
        frontier = self._scores.flatten(1)
        scores, entries = frontier[:, :reach].sort(dim=-1, descending=True, stable=True)
        scores, entries = scores[:, : self._width], entries[:, : self._width]
        slots = self._counts[:, None] + self._offsets[: scores.shape[1]]
        is_left = (scores == -torch.inf).logical_or_(slots >= self._bin)
        slots.masked_fill_(is_left, self._bin)
        self._counts = self._counts + slots.shape[1] - is_left.sum(1)
        parents = entries // self._children
        depths = self._depths.gather(1, parents).add_(1).masked_fill_(is_left, self._depth_limit)
        tokens = self._tokens_of(entries)
        self._depths.scatter_(1, slots, depths)
        self._entry.scatter_(1, slots, entries)
        frontier.scatter_(1, entries, -torch.inf)
        if self._siblings is not None:
            # a slot is taken by the chance that it is reached; what comes out of it has another
            scores = self._totals.gather(1, parents) + self._local.flatten(1).gather(1, entries)
        return slots, parents, tokens, depths, scores

    def _tokens_of(self, entries: Tensor) -> Tensor:
        return self._candidates.gather(1, self._picks.flatten(1).gather(1, entries))

    def _is_done(self) -> Tensor:
        # [R] bool: the tree is full, or its frontier is empty
        is_full = self._counts == self._bin
        is_dry = (self._scores[:, : self._bin] == -torch.inf).flatten(1).all(1)
        return is_full | is_dry

    def _tree(self) -> DraftTree:
        entries = self._entry[:, : self._bin]
        is_drafted = torch.arange(self._bin, device=entries.device) < self._counts[:, None]
        is_drafted[:, 0] = False
        tokens = torch.where(is_drafted, self._tokens_of(entries), 0)
        tokens[:, 0] = self._roots
        return DraftTree(
            tokens=tokens,
            parents=torch.where(is_drafted, entries // self._children, -1),
            depths=torch.where(is_drafted, self._depths[:, : self._bin], 0),
            log_probs=torch.where(is_drafted, self._local.flatten(1).gather(1, entries), 0.0),
            num_nodes=self._counts,
            law=None if self._siblings is None else self._siblings.law(self._bin),
        )


class TreeProposer:
    """Drafts marginals, then builds a tree from them: what all methods with a conditional head share."""

    def __init__(self, config: DecodeConfig, scorer: ConditionalScorer):
        self._config, self._scorer = config, scorer

    def propose(self, context, clock) -> DraftTree:
        with clock.stage("draft"):
            marginals = context.draft(self._config.candidates)
        with clock.stage("build"):
            return self._build(marginals, context, clock)

    def _build(self, marginals: Marginals, context, clock) -> DraftTree:
        raise NotImplementedError


class TfmProposer(TreeProposer):
    """The paper's method: the drafter's marginals, conditioned by a weaver, grown into a tree."""

    def __init__(self, config: DecodeConfig, scorer: ConditionalScorer):
        super().__init__(config, scorer)
        self._width = config.width or default_width(config.budget)
        self.expansions = 0  # of the last tree

    def _build(self, marginals: Marginals, context, clock) -> DraftTree:
        marginals = without_repeats(marginals)
        with clock.stage("weaver_prefix"):
            self._scorer.begin(marginals, context.target_hidden, self._config.budget + 1)
        with clock.stage("grow"):
            return self._grow(marginals, context)

    def _grow(self, marginals: Marginals, context) -> DraftTree:
        growth = self._growth(Growth, marginals, context)
        tree = growth.run()
        self.expansions = growth.expansions
        return tree

    def _growth(self, kind: type[Growth], marginals: Marginals, context) -> Growth:
        config, siblings = self._config, None
        if config.siblings == "sampled":
            siblings = SampledSiblings(
                marginals.tokens,
                seed=config.seed,
                indices=context.indices,
                root_positions=context.root_positions,
                slots=config.budget + 2,
            )
        return kind(
            marginals,
            self._scorer,
            context.roots,
            budget=config.budget,
            width=self._width,
            children=config.children,
            depth=config.depth or marginals.tokens.shape[1],
            siblings=siblings,
        )


def make_scorer(config: DecodeConfig, models) -> ConditionalScorer:
    """Return what scores children: the config's head, or the marginals alone when the residual is off.

    Raises ValueError naming the part of `models` that the config needs and that is None.
    """
    is_weaver = config.head == DecodeConfig.head
    needed = {"drafter": models.drafter}
    if config.residual:
        needed[config.head] = models.weaver if is_weaver else models.head
    for part, found in needed.items():
        if found is None:
            raise ValueError(
                f"{part}: None is not allowed for method {config.method} (allowed: loaded weights); load the {part}"
            )
    if not config.residual:
        return MarginalScorer()
    if is_weaver:
        return WeaverScorer(models.weaver, models.target)
    if models.head.config.kind != config.head:
        raise ValueError(f"head: {config.head!r}, but the loaded head is {models.head.config.kind!r}; load that one")
    return make_head_scorer(models.head, models.target)


def make_proposer(config: DecodeConfig, models) -> TfmProposer:
    """Return the proposer of method tfm; needs models.drafter, and the config's head unless the residual is off."""
    return TfmProposer(config, make_scorer(config, models))
