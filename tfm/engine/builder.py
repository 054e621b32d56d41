"""The paper's tree builder without a host copy: the number of expansions is planned, a flag says if it was enough."""

from dataclasses import replace

from torch import Tensor

from tfm.adaptive import BudgetPolicy, Costs
from tfm.builder import Growth, TfmProposer, count_expansions, make_scorer
from tfm.config import DecodeConfig
from tfm.engine.adaptive import StaticAdaptiveProposer
from tfm.engine.forms import Forms
from tfm.marginals import Marginals
from tfm.tree import DraftTree


class PlannedGrowth(Growth):
    """Growth with exactly the planned expansions; `unfinished` [1] bool: a frontier that ran low wants more."""

    unfinished: Tensor

    def run(self) -> DraftTree:
        batch = self._first_batch()
        for _ in range(count_expansions(self._budget, self._width, self._children)):
            self._expand(*batch)
            batch = self._take()
        self.unfinished = ~self._is_done()
        return self._tree()


class StaticTfmProposer(TfmProposer):
    """The paper's method with a growth that never waits for the device; `unfinished` [1] is that of the last tree."""

    unfinished: Tensor | None = None

    def __init__(self, config: DecodeConfig, scorer):
        super().__init__(config, scorer)
        # as Growth: no node has more children than candidates
        self.expansions = count_expansions(config.budget, self._width, min(config.children, config.candidates))

    def _grow(self, marginals: Marginals, context) -> DraftTree:
        raise NotImplementedError


class PlannedTfmProposer(StaticTfmProposer):
    """The planned growth in PyTorch."""

    def _grow(self, marginals: Marginals, context) -> DraftTree:
        growth = self._growth(PlannedGrowth, marginals, context)
        tree = growth.run()
        self.unfinished = growth.unfinished
        return tree


def make_proposer(config: DecodeConfig, models, forms: Forms) -> PlannedTfmProposer:
    """Return the proposer of method tfm for the static engine; needs what tfm.builder.make_proposer needs."""
    del forms
    return PlannedTfmProposer(config, make_scorer(config, models))


def adaptive_of(config: DecodeConfig, make) -> StaticAdaptiveProposer:
    """Return one proposer for every measured budget up to the config's, each of `make(config)`."""
    ms = Costs.read().up_to(config.budget)
    return StaticAdaptiveProposer({size: make(replace(config, budget=size)) for size in ms}, BudgetPolicy(ms))


def make_adaptive_proposer(config: DecodeConfig, models, forms: Forms) -> StaticAdaptiveProposer:
    """Return the proposer of method adaptive; needs what tfm.adaptive.make_proposer needs."""
    del forms
    scorer = make_scorer(config, models)
    return adaptive_of(config, lambda sized: PlannedTfmProposer(sized, scorer))
