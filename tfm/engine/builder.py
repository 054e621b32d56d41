"""The paper's tree builder without a host copy: the number of expansions is planned, a flag says if it was enough."""

import torch
from torch import Tensor

from tfm.builder import Growth, TfmProposer, count_expansions, make_scorer, without_repeats
from tfm.config import DecodeConfig
from tfm.engine.forms import Forms
from tfm.tree import DraftTree


class PlannedGrowth(Growth):
    """Growth with exactly the planned expansions; `unfinished` [1] bool: a frontier that ran low wants more."""

    unfinished: Tensor

    def run(self) -> DraftTree:
        zero = torch.zeros_like(self._roots)[:, None]
        batch = (zero, zero, self._roots[:, None], zero, zero.float())
        for _ in range(count_expansions(self._budget, self._width, self._children)):
            self._expand(*batch)
            batch = self._take()
        is_full = self._counts == self._bin
        is_dry = (self._scores[:, : self._bin] == -torch.inf).flatten(1).all(1)
        self.unfinished = ~(is_full | is_dry)
        return self._tree()


class PlannedTfmProposer(TfmProposer):
    """TfmProposer whose growth never waits for the device; `unfinished` [1] is that of the last tree."""

    unfinished: Tensor | None = None

    def propose(self, context, clock) -> DraftTree:
        config = self._config
        with clock.stage("draft"):
            marginals = context.draft(config.candidates)
        with clock.stage("build"):
            marginals = without_repeats(marginals)
            with clock.stage("weaver_prefix"):
                self._scorer.begin(marginals, context.target_hidden, config.budget + 1)
            with clock.stage("grow"):
                growth = PlannedGrowth(
                    marginals,
                    self._scorer,
                    context.roots,
                    budget=config.budget,
                    width=self._width,
                    children=config.children,
                    depth=config.depth or marginals.tokens.shape[1],
                    siblings=self._draws(marginals, context) if config.siblings == "sampled" else None,
                )
                tree = growth.run()
        self.expansions, self.unfinished = growth.expansions, growth.unfinished
        return tree


def make_proposer(config: DecodeConfig, models, forms: Forms) -> PlannedTfmProposer:
    """Return the proposer of method tfm for the static engine; needs what tfm.builder.make_proposer needs."""
    del forms
    return PlannedTfmProposer(config, make_scorer(config, models))
