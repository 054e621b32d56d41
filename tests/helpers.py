"""What several test files share: tree strategies, a toy target law, and an oracle that enumerates every branch."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from tfm.acceptance import accept_by_traversal, edge_log_probs, walk
from tfm.marginals import Marginals
from tfm.tree import DraftTree


def assert_no_worse(name, out, ref, ref_low, slack=2.0, floor=1e-5):
    """`out` may be at most `slack` times as far from the fp32 reference as the same maths in `out`'s dtype."""
    err, allowed = (out.float() - ref).abs().max(), slack * (ref_low.float() - ref).abs().max() + floor
    assert err <= allowed, f"{name}: max error {err:.3e} > {allowed:.3e} (shape {tuple(out.shape)}, {out.dtype})"


# --- trees


@st.composite
def parent_arrays(draw, max_nodes: int = 24) -> list[int]:
    """Parents of a random rooted tree in topological order; chains, stars and all between."""
    nodes = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, nodes)]


@st.composite
def draft_trees(draw, vocab: int = 4, max_nodes: int = 6, max_depth: int = 3) -> DraftTree:
    """One random tree (R = 1) with distinct siblings and mismatched draft log-probabilities."""
    edges = {(-1, 0): 0}
    parents, tokens, depths = [-1], [0], [0]
    for node in range(1, draw(st.integers(1, max_nodes))):
        free = [
            (parent, token)
            for parent in range(node)
            for token in range(vocab)
            if depths[parent] < max_depth and (parent, token) not in edges
        ]
        parent, token = draw(st.sampled_from(free))
        edges[parent, token] = node
        parents.append(parent)
        tokens.append(token)
        depths.append(depths[parent] + 1)
    log_probs = [0.0] + [draw(st.floats(-6, 0)) for _ in parents[1:]]
    return make_tree(tokens, parents, log_probs)


def make_tree(tokens: Sequence[int], parents: Sequence[int], log_probs: Sequence[float] | None = None) -> DraftTree:
    """A checked tree of one request."""
    local = None if log_probs is None else torch.tensor([log_probs], dtype=torch.float64)
    return DraftTree.build(torch.tensor([tokens]), torch.tensor([parents]), local)


def stack_trees(trees: Sequence[DraftTree]) -> DraftTree:
    """One tree of R requests from R trees of one request, padded to the widest."""
    width = max(tree.tokens.shape[1] for tree in trees)

    def pad(name: str, value) -> Tensor:
        rows = [getattr(tree, name) for tree in trees]
        return torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[1]), value=value) for row in rows])

    return DraftTree(
        tokens=pad("tokens", 0),
        parents=pad("parents", -1),
        depths=pad("depths", 0),
        log_probs=pad("log_probs", 0.0),
        num_nodes=torch.cat([tree.num_nodes for tree in trees]),
    )


def paths_of(tree: DraftTree, request: int = 0) -> list[tuple[int, ...]]:
    """Tokens from the root (exclusive) to every node."""
    paths: list[tuple[int, ...]] = [()]
    count = int(tree.num_nodes[request])
    for parent, token in zip(
        tree.parents[request, 1:count].tolist(), tree.tokens[request, 1:count].tolist(), strict=True
    ):
        paths.append(paths[parent] + (token,))
    return paths


def make_marginals(log_probs: Tensor, tokens: Tensor | None = None) -> Marginals:
    """Marginals of one request from log-probabilities [D, vocab] (all candidates kept), or of given candidates."""
    if tokens is not None:
        return Marginals(tokens[None], log_probs[None].float(), torch.zeros(1, len(tokens), 1))
    return Marginals.from_logits(log_probs[None], torch.zeros(1, len(log_probs), 1), log_probs.shape[-1])


# --- a toy target: any conditional law over a small vocabulary, as a table


@dataclass(frozen=True)
class ToyLaw:
    """Conditional logits of every prefix: `levels[t]` has t prefix dimensions and one of the next token, float64."""

    levels: list[Tensor]

    @staticmethod
    def random(vocab: int, length: int, seed: int, scale: float = 1.5) -> "ToyLaw":
        generator = torch.Generator().manual_seed(seed)
        shapes = [(vocab,) * (level + 1) for level in range(length)]
        return ToyLaw([scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes])

    def joint(self) -> Tensor:
        """Probability of every sequence, one dimension a token."""
        joint = torch.ones((), dtype=torch.float64)
        for level in self.levels:
            joint = joint[..., None] * level.softmax(-1)
        return joint

    def logits(self, tree: DraftTree) -> Tensor:
        """The target's rows at the nodes of a tree of one request, [1, N, vocab]."""
        return torch.stack([self.levels[len(path)][path] for path in paths_of(tree)])[None]

    def path_mass(self, tree: DraftTree) -> float:
        """Sum over drafted nodes of the probability of the node's path."""
        joint = self.joint()
        return sum(float(joint[path].sum()) for path in paths_of(tree)[1:])


def emitted_law(outcomes: Sequence[tuple[float, tuple[int, ...]]], law: ToyLaw) -> Tensor:
    """The law of the first tokens when each outcome (probability, emitted tokens) is continued by the target."""
    joint = law.joint()
    emitted = torch.zeros_like(joint)
    for probability, tokens in outcomes:
        tokens = tokens[: joint.dim()]
        emitted[tokens] += probability * joint[tokens] / joint[tokens].sum()
    return emitted


def total_variation(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().sum() / 2)


# --- enumeration of every branch of a rule


class ReplayChance:
    """Chance that follows a script of choices, then takes the first possible one; remembers what was possible."""

    def __init__(self, script: Sequence[int]):
        self._script = list(script)
        self.taken: list[int] = []
        self.weights: list[list[float]] = []

    @property
    def probability(self) -> float:
        return math.prod(weights[choice] for weights, choice in zip(self.weights, self.taken, strict=True))

    def bernoulli(self, probability: float) -> bool:
        if not 0.0 < probability < 1.0:
            return probability >= 1.0
        return bool(self.choose([1.0 - probability, probability]))

    def choose(self, weights) -> int:
        weights = weights.tolist() if isinstance(weights, Tensor) else list(weights)
        total = sum(weights)
        self.weights.append([weight / total for weight in weights])
        position = len(self.taken)
        if position < len(self._script):
            self.taken.append(self._script[position])
        else:
            self.taken.append(next(index for index, weight in enumerate(weights) if weight > 0))
        return self.taken[-1]

    def next_script(self) -> list[int] | None:
        """The script of the next branch, or None after the last one."""
        for position in reversed(range(len(self.taken))):
            weights = self.weights[position]
            for choice in range(self.taken[position] + 1, len(weights)):
                if weights[choice] > 0:
                    return [*self.taken[:position], choice]
        return None


def enumerate_branches(run: Callable) -> list[tuple[float, object]]:
    """Every (probability, result) of `run(chance)`."""
    branches, script = [], []
    while script is not None:
        chance = ReplayChance(script)
        result = run(chance)
        branches.append((chance.probability, result))
        script = chance.next_script()
    return branches


def outcomes_of(tree: DraftTree, logits: Tensor, rule: str) -> list[tuple[float, tuple[int, ...]]]:
    """Every (probability, emitted tokens) of a rule at temperature 1 on a tree of one request, by enumeration."""
    if rule == "target_only":
        return _target_only_outcomes(tree, logits)

    def run(chance):
        return accept_by_traversal(tree, logits, [chance], rule=rule, temperature=1.0)

    return [(probability, _emitted(tree, result)) for probability, result in enumerate_branches(run)]


def _emitted(tree: DraftTree, result) -> tuple[int, ...]:
    nodes = result.path[0][result.path[0] > 0]
    return (*tree.tokens[0, nodes].tolist(), int(result.bonus[0]))


def _target_only_outcomes(tree: DraftTree, logits: Tensor) -> list[tuple[float, tuple[int, ...]]]:
    """Every assignment of a drawn token to every node, all walked in one call."""
    nodes, vocab = logits.shape[1:]
    drawn = torch.tensor(list(itertools.product(range(vocab), repeat=nodes)))
    probs = logits[0].softmax(-1)[torch.arange(nodes), drawn].prod(-1)
    many = DraftTree(
        *(getattr(tree, name).expand(len(drawn), nodes) for name in ("tokens", "parents", "depths", "log_probs")),
        num_nodes=tree.num_nodes.expand(len(drawn)),
    )
    path, accepted, bonus = walk(many, drawn, int(tree.depths.max()))
    law: dict[tuple[int, ...], float] = {}
    rows = zip(path.tolist(), accepted.tolist(), bonus.tolist(), probs.tolist(), strict=True)
    tokens = tree.tokens[0].tolist()
    for way, count, last, probability in rows:
        emitted = (*(tokens[node] for node in way[1 : count + 1]), last)
        law[emitted] = law.get(emitted, 0.0) + probability
    return [(probability, emitted) for emitted, probability in law.items()]


def path_mass(tree: DraftTree, logits: Tensor) -> float:
    """Sum over drafted nodes of the target's path probability, node by node."""
    edges = edge_log_probs(tree, logits, 1.0)[0].exp().tolist()
    masses = [1.0]
    for node, parent in enumerate(tree.parents[0, 1:].tolist(), start=1):
        masses.append(masses[parent] * edges[node])
    return sum(masses[1:])


def chi_square_tail(statistic, freedom) -> float:
    """P(chi-square of `freedom` > `statistic`)."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)))
