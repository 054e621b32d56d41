"""Best-first growth with a head, node by node: the sequential order that DARTree's depth-wise build does away with.

A heap on the host holds scored prefixes. The best one is taken into the tree, the head scores its children in a call
of its own, and they enter the heap: `budget` calls, each waiting for the one before. Scores carry DARTree's depth
bonus, so that the two builds choose alike: with a width of at least the budget DARTree's supertree holds every prefix
that can be among the best, and both return the same nodes in the same order, ties included.
"""

import heapq

import torch
from torch import Tensor

from baselines.scored import ScoredProposer, checked_marginals
from tfm.builder import ConditionalScorer, make_scorer
from tfm.clock import OFF, Clock
from tfm.config import DecodeConfig, check_depth_bonus
from tfm.marginals import Marginals
from tfm.tree import DraftTree


class _Heap:
    """The frontier and the nodes of one request.

    Entries are (-score with bonus, depth, order, child): `order` compares prefixes of one depth as DARTree's supertree
    lists them, by cumulative log-probability, then by their parents' order, then by rank.
    """

    def __init__(self, root: int):
        self.nodes = [(root, -1, 0, 0.0, 0.0)]  # token, parent, depth, log-prob given the parent, cumulative
        self._orders: list[tuple] = [()]
        self._entries: list[tuple] = []

    def push(self, parent: int, tokens: list, local: list, total: list, score: list) -> None:
        """Enter a node's children, best first; a score of -inf is no child."""
        depth = self.nodes[parent][2] + 1
        for rank, (token, own, sum_, value) in enumerate(zip(tokens, local, total, score, strict=True)):
            if value > -float("inf"):
                order = (-sum_, self._orders[parent], rank)
                heapq.heappush(self._entries, (-value, depth, order, (token, parent, depth, own, sum_)))

    def take(self) -> bool:
        """Move the best prefix to the nodes; False when there is none."""
        if not self._entries:
            return False
        _, _, order, node = heapq.heappop(self._entries)
        self.nodes.append(node)
        self._orders.append(order)
        return True


def build_sequential(
    marginals: Marginals,
    scorer: ConditionalScorer,
    roots: Tensor,  # [R] int64
    *,
    target_hidden: Tensor,  # [R, d]
    budget: int,
    children: int,
    depth: int,
    depth_bonus: float = 0.0,
    clock: Clock = OFF,
) -> DraftTree:
    """Return R trees of at most `budget` drafted nodes, best first, none deeper than `depth`, in `budget` expansions.

    Requests take their steps together. Raises ValueError for a depth without drafter rows and for a bonus above 0.
    """
    check_depth_bonus(depth_bonus)
    marginals = checked_marginals(marginals, depth)
    with clock.stage("weaver_prefix"):
        scorer.begin(marginals, target_hidden, budget)
    with clock.stage("grow"):
        heaps = _grown(marginals, scorer, roots, budget=budget, children=children, depth=depth, depth_bonus=depth_bonus)
        return _tree(heaps, budget, roots.device)


def _grown(marginals, scorer, roots, *, budget: int, children: int, depth: int, depth_bonus: float) -> list[_Heap]:
    heaps = [_Heap(root) for root in roots.tolist()]
    fresh = [0] * len(heaps)  # the node that each request scores next; -1 for none
    for _ in range(budget):
        open_ = [node >= 0 and heap.nodes[node][2] < depth for heap, node in zip(heaps, fresh, strict=True)]
        _expand(heaps, fresh, open_, marginals, scorer, children, depth_bonus)
        fresh = [len(heap.nodes) - 1 if heap.take() else -1 for heap in heaps]
        if max(fresh) < 0:
            break
    return heaps


def _expand(heaps, fresh, open_, marginals, scorer, children: int, depth_bonus: float) -> None:
    if not any(open_):
        return
    device = marginals.tokens.device
    picked = [heap.nodes[max(node, 0)] for heap, node in zip(heaps, fresh, strict=True)]
    table = torch.tensor(
        [
            (node if is_open else -1, parent, token, level if is_open else 0)
            for (token, parent, level, _, _), node, is_open in zip(picked, fresh, open_, strict=True)
        ],
        device=device,
    )
    slots, parents, tokens, depths = table.T[..., None]
    above = torch.tensor([node[4] for node in picked], device=device, dtype=torch.float32)[:, None]
    log_probs = scorer.expand(slots, parents, tokens, depths)[:, 0]
    local, ranks = log_probs.sort(dim=-1, descending=True, stable=True)
    local, ranks = local[:, :children], ranks[:, :children]
    ids = marginals.tokens[torch.arange(len(heaps), device=device), depths[:, 0]].gather(1, ranks)
    total = local + above
    score = total + depth_bonus * (depths + 1)
    # the wait that a depth-wise build has once a tree, not once a node
    columns = torch.stack([local, total, score]).tolist()
    for row, (heap, node, is_open) in enumerate(zip(heaps, fresh, open_, strict=True)):
        if is_open:
            heap.push(node, ids[row].tolist(), *(column[row] for column in columns))


def _tree(heaps: list[_Heap], budget: int, device) -> DraftTree:
    padded = [heap.nodes + [(0, -1, 0, 0.0, 0.0)] * (budget + 1 - len(heap.nodes)) for heap in heaps]
    token, parent, depth, local, _ = (
        torch.tensor(column, device=device) for column in zip(*(zip(*row, strict=True) for row in padded), strict=True)
    )
    counts = torch.tensor([len(heap.nodes) for heap in heaps], device=device)
    return DraftTree(token, parent, depth, local.float(), counts)


class HeapProposer(ScoredProposer):
    """Drafts the best `budget` prefixes, one call of the head a node."""

    build = staticmethod(build_sequential)

    def _options(self) -> dict:
        return {"depth_bonus": self._config.depth_bonus}


def make_proposer(config: DecodeConfig, models) -> HeapProposer:
    """Return the proposer of method heap; needs models.drafter, and the config's head unless the residual is off."""
    return HeapProposer(config, make_scorer(config, models))
