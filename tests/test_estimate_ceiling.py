"""The ceiling's script on the shipped models: its rows are the target's and the weaver's own, in any batch."""

import sys

import pytest
import torch
from test_nano import ROOT, embedded_prompts, models

from tfm.weaver import WeaverScorer

sys.path.insert(0, str(ROOT / "workflows/scripts"))
from estimate_ceiling import DRAFTERS, Anchor, continue_text, draft_at, estimate, fork, weaver_laws

COUNT, STEPS = 3, 15


@pytest.fixture(scope="module")
def anchors() -> list[Anchor]:
    prompts = sorted(embedded_prompts(), key=lambda prompt: len(prompt.tokens))
    return [Anchor("set", "math", p.id, p.index, 4, [*p.tokens, 11, 12, 13, 14]) for p in (prompts[0], prompts[5])]


@pytest.fixture(scope="module")
def drawn(anchors):
    with torch.inference_mode():
        draft = draft_at(anchors, models(), candidates=16)
        before = [layer.clone() for layer in tensors(draft.cache)]
        indices = torch.arange(len(anchors) * COUNT)
        tokens, logits = continue_text(draft, models(), COUNT, STEPS, indices=indices, seed=0, temperature=1.0)
        assert all(torch.equal(a, b) for a, b in zip(before, tensors(draft.cache), strict=True))
    return draft, tokens, logits


def tensors(cache) -> list[torch.Tensor]:
    return [value for layer in cache.layers for value in vars(layer).values()]


def test_rows_of_continuations_are_the_targets_rows_along_them(anchors, drawn):
    _, tokens, logits = drawn
    for number, anchor in enumerate(anchors):
        for row in range(number * COUNT, (number + 1) * COUNT):
            line = torch.tensor([[*anchor.tokens, *tokens[row].tolist()]])
            with torch.inference_mode():
                expected = models().target(line).logits[0, len(anchor.tokens) - 1 : -1]
            torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def test_a_forked_cache_holds_every_request_side_by_side(drawn):
    draft = drawn[0]
    copy = fork(draft.cache, COUNT)
    assert copy.lengths.tolist() == [int(n) for n in draft.cache.lengths for _ in range(COUNT)]
    for one, many in zip(tensors(draft.cache), tensors(copy), strict=True):
        assert torch.equal(many[COUNT : 2 * COUNT], one[1:2].expand(COUNT, *one.shape[1:]))


def test_the_weavers_laws_are_those_that_grow_its_trees(anchors, drawn):
    draft, tokens, _ = drawn
    with torch.inference_mode():
        laws = weaver_laws(1, draft, tokens[COUNT:], models())
        scorer = WeaverScorer(models().weaver, models().target)
        scorer.begin(draft.marginals, draft.target_hidden, STEPS)
        line = torch.cat([draft.roots[1:].expand(1, 1), tokens[COUNT : COUNT + 1, :-1]], dim=1)
        for depth in range(STEPS):
            at = torch.full((len(anchors), 1), depth)
            step = scorer.expand(at, at - 1, line[:, [depth]].expand(len(anchors), 1), at)[1, 0].exp()
            found = laws[0, depth, draft.marginals.tokens[1, depth]]
            torch.testing.assert_close(found, step, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(laws.sum(-1), torch.ones(COUNT, STEPS))


def test_an_anchor_says_the_same_alone_and_beside_others(anchors):
    settings = {"continuations": 4, "temperature": 1.0, "seed": 0, "candidates": 16}
    together = estimate(anchors, models(), settings, (2,))
    alone = [row for anchor in anchors for row in estimate([anchor], models(), settings, (2,))]
    assert [row["drafter"] for row in alone[::15]] == [*DRAFTERS] * len(anchors)
    for one, other in zip(alone, together, strict=True):
        assert {
            key: pytest.approx(value, abs=1e-4) if isinstance(value, float) else value for key, value in one.items()
        } == other
    first = next(row for row in together if row["drafter"] == "oracle")
    assert first["position"] == 1 and first["accepted"] == pytest.approx(1, abs=1e-5)


def test_noise_of_continuations_never_meets_that_of_requests(anchors):
    starts = [
        Anchor("set", "math", "x", index, place, []).noise_index for index in (0, 1, 999) for place in (1, 2, 4000)
    ]
    spans = sorted(starts)
    assert min(spans) >= 2**40 and all(b - a >= 2**10 for a, b in zip(spans, spans[1:], strict=False))
