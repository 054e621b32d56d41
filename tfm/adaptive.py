"""tfm-adaptive: the paper's builder with a budget that is chosen a step ahead, by expected tokens over the step's cost.

A tree's nodes come best first, so the first b of them are about the tree of budget b, and the sum of their path
probabilities is what the drafter expects b nodes to gain. What was gained scales that expectation. The choice for a
step knows the trees before the last one: while the last one's decision travels to the host, an engine already drafts.
So it depends on emitted tokens and on drafts alone, and every lossless rule stays lossless.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from tfm.builder import ConditionalScorer, TfmProposer, make_scorer
from tfm.config import DecodeConfig
from tfm.tree import DraftTree

COSTS = Path(__file__).parent / "adaptive_costs.json"
RATE = 0.25  # of a new observation in the running means


@dataclass(frozen=True)
class Costs:
    """Measured ms of a step by budget, and what they were measured on."""

    ms: dict[int, float]
    measured: dict

    @staticmethod
    def read(path: Path = COSTS) -> "Costs":
        """Return the costs in a file that `write` made."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return Costs({int(budget): ms for budget, ms in found["ms"].items()}, found["measured"])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"measured": self.measured, "ms": self.ms}, indent=1) + "\n", encoding="utf-8")

    def up_to(self, budget: int) -> dict[int, float]:
        """Return the costs of the budgets that `budget` allows; raises ValueError where it allows none."""
        found = {size: self.ms[size] for size in sorted(self.ms) if size <= budget}
        if not found:
            raise ValueError(
                f"budget: {budget} is not allowed for adaptive (allowed: {min(self.ms)} or more, the smallest measured "
                "step); raise it"
            )
        return found


class BudgetPolicy:
    """Chooses among the budgets of `ms` for one request at a time; `observe` tells it what a tree was worth."""

    def __init__(self, ms: dict[int, float]):
        self._ms, self.budgets = ms, sorted(ms)
        self.reset()

    def reset(self) -> None:
        """Forget everything: another request starts."""
        # running means of what the nodes between one budget and the next are expected to gain; none: not seen yet
        self._steps: list[float | None] = [None] * len(self.budgets)
        self._expected, self._accepted = 0.0, 0.0

    def choose(self) -> int:
        """Return the budget with the most expected tokens a ms, the smaller of equals; the largest to begin with."""
        if self._steps[-1] is None:
            return self.budgets[-1]
        scale = self._accepted / self._expected if self._expected > 0 else 1.0
        gain, best, best_rate = 0.0, self.budgets[-1], 0.0
        for budget, step in zip(self.budgets, self._steps, strict=True):
            gain += step * scale
            rate = (1.0 + gain) / self._ms[budget]
            if rate > best_rate:
                best, best_rate = budget, rate
        return best

    def observe(self, gains: list[float], accepted: int) -> None:
        """Take in a tree: `gains[i]` is expected of its first budgets[i] nodes, as far as it has them."""
        ratio, below = 1.0, 0.0
        for index, gain in enumerate(gains):
            step, old = gain - below, self._steps[index]
            below = gain
            self._steps[index] = step if old is None else old + RATE * (step - old)
            ratio = step / old if old else 1.0
        for index in range(len(gains), len(self.budgets)):
            # not seen in this tree: it moves with the last that was
            if self._steps[index] is not None:
                self._steps[index] *= 1.0 + RATE * (min(ratio, 2.0) - 1.0)
        self._expected += RATE * (below - self._expected)
        self._accepted += RATE * (accepted - self._accepted)


def expected_gains(parents: list[int], log_probs: list[float], count: int, budgets: list[int]) -> list[float]:
    """Return what the drafter expects of the first b nodes of a tree, for each budget b that was asked of it.

    `parents` and `log_probs` are a tree's columns, padded to its budget + 1; `count` of its nodes are real.
    """
    paths, total, sums = [0.0], 0.0, [0.0]
    for node in range(1, count):
        paths.append(paths[parents[node]] + log_probs[node])
        total += math.e ** paths[node]
        sums.append(total)
    return [sums[min(budget, count - 1)] for budget in budgets if budget < len(parents)]


class AdaptiveProposer:
    """Drafts as TfmProposer, one request at a time, each tree with the budget that the policy chose."""

    def __init__(self, config: DecodeConfig, scorer: ConditionalScorer, ms: dict[int, float]):
        self._proposers = {size: TfmProposer(replace(config, budget=size), scorer) for size in ms}
        self.policy = BudgetPolicy(ms)
        self._context, self._last = None, None

    def propose(self, context, clock) -> DraftTree:
        if len(context.roots) != 1:
            raise ValueError(
                f"requests: {len(context.roots)} is not allowed for method adaptive (allowed: 1); set it to 1"
            )
        if context is not self._context:
            self.policy.reset()
            self._context, self._last = context, None
        budget, place = self.policy.choose(), int(context.root_positions)
        if self._last is not None:
            gains, before = self._last
            self.policy.observe(gains, place - before - 1)
        tree = self._proposers[budget].propose(context, clock)
        # device-to-host copies: the policy decides on the host
        columns = (tree.parents[0].tolist(), tree.log_probs[0].tolist(), int(tree.num_nodes[0]))
        self._last = expected_gains(*columns, self.policy.budgets), place
        return tree


def make_proposer(config: DecodeConfig, models) -> AdaptiveProposer:
    """Return the proposer of method adaptive; needs what tfm.builder.make_proposer needs and measured costs."""
    return AdaptiveProposer(config, make_scorer(config, models), Costs.read().up_to(config.budget))
