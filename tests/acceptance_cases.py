"""Hand-made trees and what the tests of the rules read off their results."""

import pytest
import torch

from tfm.acceptance import accept
from tfm.tree import DraftTree

EXACT = ("target_only", "traversal")


SAMPLED = ("target_only", "traversal", "legacy_traversal")


# hand-made trees over four tokens: tokens, parents, draft log-probabilities far from any target here
HAND_MADE = {
    "chain": ([0, 1, 2, 3], [-1, 0, 1, 2], [0.0, -0.1, -0.2, -0.3]),
    "star": ([0, 0, 1, 2], [-1, 0, 0, 0], [0.0, -0.3, -1.5, -2.5]),
    "two_levels": ([0, 1, 2, 0, 3, 1], [-1, 0, 0, 1, 1, 2], [0.0, -0.2, -1.8, -0.4, -1.2, -0.1]),
    "all_children": ([0, 3, 2, 1, 0, 2], [-1, 0, 0, 0, 0, 1], [0.0, -0.7, -1.1, -1.6, -4.0, -0.2]),
}


HAND_MADE_CASES = pytest.mark.parametrize("name", HAND_MADE)


def accept_at(tree, logits, rule, temperature=1.0, seed=0, indices=None):
    indices = torch.arange(len(logits)) if indices is None else indices
    return accept(
        tree,
        logits,
        rule=rule,
        temperature=temperature,
        seed=seed,
        indices=indices,
        root_positions=torch.full((len(logits),), 7),
    )


def rows(*probs):
    return torch.tensor([probs], dtype=torch.float64).log()


def repeat(tree, requests):
    width = tree.tokens.shape[1]
    fields = [getattr(tree, name).expand(requests, width) for name in ("tokens", "parents", "depths", "log_probs")]
    return DraftTree(*fields, num_nodes=tree.num_nodes.expand(requests))


def emitted_tokens(tree, result):
    tokens = tree.tokens.tolist()
    return [
        (*(tokens[request][node] for node in path if node > 0), bonus)
        for request, (path, bonus) in enumerate(zip(result.path.tolist(), result.bonus.tolist(), strict=True))
    ]


def mean_accepted(outcomes):
    return sum(probability * (len(tokens) - 1) for probability, tokens in outcomes)


def first_token_law(outcomes):
    law: dict[int, float] = {}
    for probability, tokens in outcomes:
        law[tokens[0]] = law.get(tokens[0], 0.0) + probability
    return law
