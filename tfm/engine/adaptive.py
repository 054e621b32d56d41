"""Method adaptive on static memory: one set of graphs a budget over one memory, chosen a step ahead on the host."""

from tfm.adaptive import BudgetPolicy


class StaticAdaptiveProposer:
    """The proposers of every budget and the policy that chooses among them; see tfm.adaptive.AdaptiveProposer."""

    def __init__(self, proposers: dict[int, object], policy: BudgetPolicy):
        self.proposers, self.policy = proposers, policy
