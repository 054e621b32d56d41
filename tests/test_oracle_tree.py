"""The oracle tree holds the most probable prefixes: equal to brute force at any width, and a bound on any tree."""

import itertools
import types

import pandas as pd
import pytest
import torch
from helpers import ToyLaw, draft_trees, stack_trees
from hypothesis import given, settings
from test_checkpoints import TARGET, make_target

from tfm import oracle
from tfm.acceptance import edge_log_probs, expected_accepted
from tfm.tree import DraftTree

VOCAB, LENGTH = 4, 4


def every_prefix(law: ToyLaw, temperature: float) -> list[tuple[float, tuple[int, ...]]]:
    """All prefixes of a toy law with their probability, most probable first."""
    found = []
    for length in range(1, LENGTH + 1):
        for path in itertools.product(range(VOCAB), repeat=length):
            steps = [(law.levels[at][path[:at]] / temperature).softmax(-1)[path[at]] for at in range(length)]
            found.append((float(torch.stack(steps).prod()), path))
    return sorted(found, key=lambda item: -item[0])


def score_of(laws: list[ToyLaw]):
    """Logits of a padded tree batch, one law a request; counts its calls."""

    def score(tree: DraftTree) -> torch.Tensor:
        score.calls += 1
        rows = torch.zeros(*tree.tokens.shape, VOCAB, dtype=torch.float64)
        for request, law in enumerate(laws):
            count = int(tree.num_nodes[request])
            one = DraftTree.build(
                tree.tokens[request : request + 1, :count], tree.parents[request : request + 1, :count]
            )
            rows[request, :count] = law.logits(one)[0]
        return rows

    score.calls = 0
    return score


def prefixes_of(tree: DraftTree, request: int) -> list[tuple[int, ...]]:
    paths = [()]
    for node in range(1, int(tree.num_nodes[request])):
        paths.append((*paths[int(tree.parents[request, node])], int(tree.tokens[request, node])))
    return paths[1:]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize("budget", [1, 7, 40])
def test_search_finds_the_most_probable_prefixes(budget, width, temperature):
    laws = [ToyLaw.random(VOCAB, LENGTH, seed=seed) for seed in (0, 1, 2)]
    found = oracle.search(
        score_of(laws),
        torch.zeros(3, dtype=torch.int64),
        budget=budget,
        width=width,
        depth=LENGTH,
        temperature=temperature,
    )
    for request, law in enumerate(laws):
        wanted = every_prefix(law, temperature)[:budget]
        assert prefixes_of(found.tree, request) == [path for _, path in wanted]
        assert found.probabilities[request].tolist() == pytest.approx([p for p, _ in wanted], abs=1e-12)
        for smaller in (1, budget):
            limit = float(found.expected_accepted(smaller)[request])
            assert limit == pytest.approx(sum(p for p, _ in wanted[:smaller]), abs=1e-12)


def test_wider_passes_are_fewer():
    law = ToyLaw.random(VOCAB, LENGTH, seed=3)
    calls = []
    for width in (1, 64):
        score = score_of([law])
        oracle.search(score, torch.zeros(1, dtype=torch.int64), budget=30, width=width, depth=LENGTH, temperature=1.0)
        calls.append(score.calls)
    assert calls[1] <= LENGTH + 1 < calls[0]


def test_a_law_with_fewer_prefixes_than_the_budget_gives_them_all():
    laws = [ToyLaw.random(VOCAB, LENGTH, seed=4)]
    found = oracle.search(
        score_of(laws), torch.zeros(1, dtype=torch.int64), budget=50, width=8, depth=2, temperature=1.0
    )
    assert int(found.tree.num_nodes[0]) == 1 + VOCAB + VOCAB**2
    # each depth holds the whole law
    assert float(found.expected_accepted(50)[0]) == pytest.approx(2.0, abs=1e-12)


@given(tree=draft_trees(vocab=VOCAB, max_nodes=8, max_depth=LENGTH - 1))
@settings(max_examples=40, deadline=None)
def test_no_tree_accepts_more(tree):
    law = ToyLaw.random(VOCAB, LENGTH, seed=5)
    edges = edge_log_probs(tree, law.logits(tree), 1.0)
    reached = float(expected_accepted(tree, edges, int(tree.depths.max()))[0])
    drafted = int(tree.num_nodes[0]) - 1
    if drafted:
        best = oracle.search(
            score_of([law]), torch.zeros(1, dtype=torch.int64), budget=drafted, width=4, depth=LENGTH, temperature=1.0
        )
        assert reached <= float(best.expected_accepted(drafted)[0]) + 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [({"temperature": 0.0}, "temperature: 0.0"), ({"budget": 0}, "budget: 0"), ({"width": 0}, "width: 0")],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"budget": 4, "width": 2, "depth": 2, "temperature": 1.0} | change
    with pytest.raises(ValueError, match=message):
        oracle.search(score_of([]), torch.zeros(0, dtype=torch.int64), **arguments)


# with a target, over contexts of different lengths


def brute_force(target, context: list[int], budget: int, temperature: float) -> list[float]:
    """The largest probabilities over all continuations of one and two tokens, by plain forward passes."""
    vocab = target.config.vocab_size
    with torch.no_grad():
        first = (target(torch.tensor([context])).logits[0, -1].double() / temperature).softmax(-1)
        longer = torch.tensor([[*context, token] for token in range(vocab)])
        second = (target(longer).logits[:, -1].double() / temperature).softmax(-1) * first[:, None]
    return torch.cat([first, second.flatten()]).sort(descending=True).values[:budget].tolist()


def test_limits_of_a_target_equal_brute_force():
    target = make_target()
    contexts = [[3, 9, 11, 7], [5, 8], [20, 4, 6, 6, 1, 30, 2]]
    found = oracle.limits(target, contexts, budget=12, width=5, depth=2, temperature=0.7, backend="solve")
    for row, context in zip(found.tolist(), contexts, strict=True):
        # float32 through two differently shaped passes
        assert row == pytest.approx(brute_force(target, context, 12, 0.7), abs=1e-5)


def records_of(prompts: dict[str, list[int]]) -> types.SimpleNamespace:
    """Records of two cells: an ar cell, which has no tree, and one of tfm with two requests of two steps."""
    requests, steps = [], []
    for cell, method in enumerate(("ar", "tfm")):
        for request, name in enumerate(prompts):
            fields = {"cell": cell, "request": request, "prompt_tokens": len(prompts[name]), "target": "toy"}
            requests.append(fields | {"output_tokens": [7, 1, 4, 9, 9], "reasoning": False})
            for step, context in enumerate((len(prompts[name]) + 1, len(prompts[name]) + 3)):
                row = {"cell": cell, "request": request, "step": step, "context": context, "method": method}
                row |= {"dataset": "d", "id": name, "seed": 0, "temperature": 1.0, "clock": "off", "budget": 6.0}
                steps.append(
                    row | {"variant": f"{method}-b6", "setting": "t1", "depth_limit": 2, "expected_accepted": 0.0}
                )
    return types.SimpleNamespace(requests=pd.DataFrame(requests), steps=pd.DataFrame(steps))


def test_share_from_records_meets_the_contexts_of_their_steps():
    target, prompts = make_target(), {"a": [3, 9, 11], "b": [5, 8, 30, 2]}
    records = records_of(prompts)
    steps = oracle.sampled_steps(records, lambda _target, _name: prompts, each=10)
    assert set(steps["method"]) == {"tfm"} and len(steps) == 4
    wanted = {(name, 0): [*tokens, 7] for name, tokens in prompts.items()}
    wanted |= {(name, 1): [*tokens, 7, 1, 4] for name, tokens in prompts.items()}
    assert {(row.id, row.step): row.tokens for row in steps.itertuples()} == wanted
    steps = oracle.add_limits(steps, target, width=4, batch=3, chain_budget=64, backend="solve")
    for row in steps.itertuples():
        assert row.limit == pytest.approx(sum(brute_force(target, row.tokens, 6, 1.0)), abs=1e-5)
    # a method that reaches half of the limit everywhere has a share of a half
    share = oracle.shares(steps.assign(expected_accepted=steps["limit"] / 2))["tfm-b6/t1"]
    assert (share.value, share.n) == (pytest.approx(0.5), 2)


def test_unused_padding_of_a_batch_changes_nothing():
    laws = [ToyLaw.random(VOCAB, LENGTH, seed=seed, scale=scale) for seed, scale in ((6, 0.2), (7, 6.0))]
    together = oracle.search(
        score_of(laws), torch.zeros(2, dtype=torch.int64), budget=20, width=4, depth=LENGTH, temperature=1.0
    )
    alone = [
        oracle.search(
            score_of([law]), torch.zeros(1, dtype=torch.int64), budget=20, width=4, depth=LENGTH, temperature=1.0
        )
        for law in laws
    ]
    assert torch.equal(together.probabilities, torch.cat([one.probabilities for one in alone]))
    assert torch.equal(together.tree.tokens, stack_trees([one.tree for one in alone]).tokens)
    assert TARGET.vocab_size == 32  # what brute_force enumerates
