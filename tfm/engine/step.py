"""A step on static memory: propose (draft, build), verify (and accept), commit. No part of it waits for the host."""

import torch
from torch import Tensor

from tfm.config import DecodeConfig
from tfm.decode import Models, Proposer
from tfm.drafter import Drafter
from tfm.engine.accept import RULES, accept_static, draw_rows, make_fast_draw, pack
from tfm.engine.candidates import marginals_from_logits
from tfm.engine.drafter import StaticDrafter
from tfm.engine.forms import CHUNKS, TRITON, Forms
from tfm.engine.graphs import WARM_UPS, GraphClock, Part
from tfm.engine.ops import make_ops
from tfm.engine.prefill import ROWS, ChunkPrefill
from tfm.engine.target import StaticTarget
from tfm.marginals import Marginals
from tfm.target import TargetOutput
from tfm.tree import DraftTree


class StaticContext:
    """What a proposer reads, as tfm.decode.Context, in buffers that keep their addresses."""

    def __init__(self, models: Models, target: StaticTarget, drafter: StaticDrafter | None):
        weight = models.target.embed_weight
        self._drafter = drafter
        self.indices = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.root_positions = target.length
        self.roots = torch.zeros_like(self.indices)
        self.target_hidden = weight.new_zeros(1, weight.shape[1])

    def draft(self, candidates: int) -> Marginals:
        """Run the drafter once and return its `candidates` best tokens for each of its rows."""
        if self._drafter is None:
            raise ValueError("drafter: None is not allowed for a method that drafts; load the drafter")
        logits, hidden = self._drafter.draft(self.roots)
        return marginals_from_logits(logits, hidden, candidates)


class StaticStep:
    """One method's step: `prefill` starts a request, then `propose`, `verify` and `commit` in turn."""

    def __init__(
        self,
        models: Models,
        config: DecodeConfig,
        proposer: Proposer,
        *,
        capacity: int,
        forms: Forms,
        clock: GraphClock,
    ):
        self.models, self.config, self.proposer, self.forms, self.clock = models, config, proposer, forms, clock
        self.capacity, ops = capacity, make_ops(forms)
        self.path_rows = _path_rows(config, models.drafter)
        in_chunks = forms.prefill == CHUNKS
        rows = max(self.path_rows, (config.budget or 0) + 1, ROWS if in_chunks else 0)
        self.target = StaticTarget(models.target, capacity=capacity, rows=rows, ops=ops, gdn_backend=config.gdn_backend)
        self.drafter = None
        if models.drafter is not None:
            self.drafter = StaticDrafter(
                models.drafter,
                models.target,
                length=self.target.length,
                capacity=capacity,
                path_rows=self.path_rows,
                ops=ops,
            )
        self.context = StaticContext(models, self.target, self.drafter)
        self._draw = _draw_of(forms)
        self._prefill = ChunkPrefill(self.target, ROWS, graphs=forms.graphs) if in_chunks else None
        # one for every budget that a step may have, on the same memory
        self._proposers = getattr(proposer, "proposers", {None: proposer})
        runs = (self._run_propose, self._run_verify, self._run_commit)
        self._sets = {size: tuple(Part(run, clock) for run in runs) for size in self._proposers}
        for size in self._proposers:
            self.select(size)
            if forms.graphs:
                self._capture()

    def select(self, size: int | None) -> None:
        """Take another size of tree for the steps that follow; between a commit and a propose."""
        self.proposer = self._proposers[size]
        self._propose, self._verify, self._commit = self._sets[size]

    def propose(self) -> None:
        """Draft and build the next tree; nothing is committed by that."""
        self._propose()

    def verify(self) -> Tensor:
        """Verify the tree and accept a path; return the step's packet. Nothing is committed yet."""
        return self._verify()

    def commit(self) -> None:
        """Make the last decision permanent; a request that ended with it is simply not asked again."""
        self._commit()

    def prefill(self, tokens: list[int], index: int, root_of) -> Tensor:
        """Start a request: prefill in chunks, or as tfm.decode does and copy its rows; return the logits [1, 1, vocab].

        `root_of(logits, lengths, indices)` draws the first token [1].
        """
        target, device = self.models.target, self.context.roots.device
        lengths = torch.tensor([len(tokens)], device=device)
        self.context.indices.fill_(index)
        if self._prefill is not None:
            output = self._prefill(tokens)
        else:
            cache = target.new_cache(1, len(tokens))
            output = target.prefill(torch.tensor([tokens], device=device), lengths, cache)
            self.target.load(cache)
        self.context.roots.copy_(root_of(output.logits, lengths, self.context.indices))
        self.context.target_hidden.copy_(output.hidden[:, 0])
        if self.drafter is not None:
            rows = self.models.drafter.new_cache(1, len(tokens))
            self.models.drafter.append(output.taps, lengths, rows)
            self.drafter.load(rows)
        return output.logits

    def _run_propose(self) -> None:
        self._tree: DraftTree = self.proposer.propose(self.context, self.clock)

    def _run_verify(self) -> Tensor:
        tree = self._tree
        with self.clock.stage("verify"):
            self._output: TargetOutput = self.target.verify(tree, self.clock)
        with self.clock.stage("accept"):
            self._result, logit = accept_static(
                tree,
                self._output.logits,
                self.config,
                indices=self.context.indices,
                length=self.target.length,
                path_rows=self.path_rows,
                draw=self._draw,
            )
            return pack(tree, self._result, logit, getattr(self.proposer, "unfinished", None))

    def _run_commit(self) -> None:
        output, result, context = self._output, self._result, self.context
        with self.clock.stage("commit"):
            nodes = result.path[0].clamp(min=0)
            self.target.commit(result.path)
            context.target_hidden.copy_(output.hidden[0].index_select(0, nodes.gather(0, result.accepted)))
            context.roots.copy_(result.bonus)
            if self.drafter is not None:
                self.drafter.pending.copy_(output.taps[0].index_select(0, nodes))
                self.drafter.pending_count.copy_(result.accepted + 1)

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        for _ in range(WARM_UPS):
            self._reset()
            for part in (self._propose, self._verify, self._commit):
                part.warm_up(stream)
        self._reset()
        for part in (self._propose, self._verify, self._commit):
            part.capture()

    def _reset(self) -> None:
        # any committed length does; what warm-up leaves behind is overwritten by the next prefill
        self.target.length.fill_(1)
        if self.drafter is not None:
            self.drafter.pending_count.zero_()


def _path_rows(config: DecodeConfig, drafter: Drafter | None) -> int:
    if drafter is None:
        return 1
    return (config.depth or drafter.draft_rows) + 1


def _draw_of(forms: Forms):
    if forms.sampling != TRITON:
        return draw_rows
    return make_fast_draw()


def check(config: DecodeConfig, models: Models, forms: Forms) -> None:
    """Raise ValueError for what the static engine does not do, before anything is allocated."""
    if config.rule not in RULES:
        raise ValueError(
            f"rule: {config.rule!r} is not allowed in the static engine (allowed: {', '.join(RULES)}); the others walk "
            "trees on the host, use the reference loop"
        )
    if config.requests != 1:
        raise ValueError(f"requests: {config.requests} is not allowed in the static engine (allowed: 1); set it to 1")
    forms.check(models.target.embed_weight.device)
