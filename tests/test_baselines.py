"""The proposers: brute force for DDTree, the argmax chain, the root alone, and the registry of methods."""

import dataclasses
import itertools
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import make_marginals, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.ddtree import build_best_first
from baselines.dflash import build_chain
from baselines.methods import METHODS, resolve
from tfm.builder import count_expansions
from tfm.config import DecodeConfig
from tfm.marginals import Marginals
from tfm.weaver import Weaver, WeaverConfig, init_weaver

VOCAB, HIDDEN, ROWS = 40, 8, 15
SETTINGS = {
    "ar": DecodeConfig(method="ar"),
    "dflash": DecodeConfig(method="dflash"),
    "ddtree": DecodeConfig(method="ddtree", budget=64),
    "dartree": DecodeConfig(method="dartree", budget=64, candidates=20),
    "tfm": DecodeConfig(method="tfm", budget=64, candidates=20),
    "adaptive": DecodeConfig(method="adaptive", budget=64, candidates=20),
    "headchain": DecodeConfig(method="headchain", candidates=20),
    "headddtree": DecodeConfig(method="headddtree", budget=64, candidates=20),
    "dartfixed": DecodeConfig(method="dartfixed", budget=64, candidates=20),
    "overgrown": DecodeConfig(method="overgrown", budget=64, candidates=20, children=16),
    "heap": DecodeConfig(method="heap", budget=64, candidates=20, depth_bonus=-0.2),
}

# adaptive follows one request at a time: tests/test_adaptive.py
TOGETHER = [name for name in METHODS if name != "adaptive"]


class FakeContext:
    """Two requests whose drafter gives fixed logits; remembers how often it ran."""

    def __init__(self, requests=2, rows=ROWS):
        generator = torch.Generator().manual_seed(0)
        self.roots = torch.arange(requests) + 3
        self.target_hidden = torch.randn(requests, HIDDEN, generator=generator)
        self.logits = 2 * torch.randn(requests, rows, VOCAB, generator=generator)
        self.hidden = torch.randn(requests, rows, HIDDEN, generator=generator)
        self.drafts = []

    def draft(self, candidates):
        self.drafts.append(candidates)
        return Marginals.from_logits(self.logits, self.hidden, candidates)


class RecordingClock:
    def __init__(self):
        self.open, self.stages = [], []

    @contextmanager
    def stage(self, name):
        self.open.append(name)
        self.stages.append("/".join(self.open))
        yield
        self.open.pop()


def make_models():
    generator = torch.Generator().manual_seed(1)
    config = WeaverConfig(d_model=HIDDEN, d_embed=HIDDEN, d_rank=16, num_heads=2, mlp_dim=16, K=ROWS)
    weaver = Weaver(config).requires_grad_(False)
    init_weaver(weaver, seed=0, std=0.3)
    weaver.lm_head_query_in.weight.copy_(torch.randn(HIDDEN, 16, generator=generator))
    tables = torch.randn(2, VOCAB, HIDDEN, generator=generator)
    target = SimpleNamespace(head_weight=tables[0], embed_weight=tables[1])
    return SimpleNamespace(target=target, drafter=object(), weaver=weaver)


def propose(method, config=None, context=None):
    proposer = resolve(method)(config or SETTINGS[method], make_models())
    clock = RecordingClock()
    tree = proposer.propose(context or FakeContext(), clock)
    tree.validate()
    return tree, clock, proposer


# --- the registry


def test_the_registry_holds_the_methods_that_these_tests_know():
    assert set(METHODS) == set(SETTINGS)
    fields = {field.name for field in dataclasses.fields(DecodeConfig)}
    assert all({*method.knobs, *method.options} <= fields for method in METHODS.values())


def test_an_unknown_method_is_refused_with_the_allowed_ones():
    with pytest.raises(
        ValueError,
        match=rf"method: 'dflsh' .*\(allowed: {', '.join(METHODS)}\)",
    ):
        resolve("dflsh")


@pytest.mark.parametrize("method", TOGETHER)
def test_every_method_proposes_valid_trees_under_its_stages(method):
    context = FakeContext()
    tree, clock, _ = propose(method, context=context)
    assert tree.tokens[:, 0].tolist() == context.roots.tolist()
    assert len(context.drafts) == (method != "ar")
    stages = ["draft", "build"] if method != "ar" else ["build"]
    if "weaver" in METHODS[method].parts:
        stages += ["build/weaver_prefix", "build/grow"]
    assert clock.stages == stages


@pytest.mark.parametrize("method", TOGETHER)
def test_a_tree_does_not_depend_on_the_other_requests(method):
    context = FakeContext(requests=3)
    together, _, _ = propose(method, context=context)
    for request in range(3):
        alone = FakeContext(requests=3)
        one = slice(request, request + 1)
        for name in ("roots", "target_hidden", "logits", "hidden"):
            setattr(alone, name, getattr(context, name)[one])
        tree, _, _ = propose(method, context=alone)
        assert paths_of(tree) == paths_of(together, request)
        torch.testing.assert_close(tree.log_probs[0], together.log_probs[request], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["ddtree", "dartree", "tfm", "headddtree", "dartfixed", "heap", "overgrown"])
def test_a_budget_of_64_verifies_65_rows(method):
    """C019: the root is extra, for every tree method."""
    tree, _, _ = propose(method)
    assert tree.num_nodes.tolist() == [65, 65]
    assert tree.tokens.shape == (2, 65)
    assert not tree.is_chain


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.parts])
def test_a_method_without_its_parts_is_refused(method):
    models = SimpleNamespace(target=object(), drafter=None, weaver=None)
    with pytest.raises(ValueError, match=rf"drafter: None is not allowed for method {method}"):
        resolve(method)(SETTINGS[method], models)


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if "weaver" in method.parts])
def test_a_method_without_its_weaver_is_refused(method):
    models = SimpleNamespace(target=object(), drafter=object(), weaver=None)
    with pytest.raises(ValueError, match=rf"weaver: None is not allowed for method {method}"):
        resolve(method)(SETTINGS[method], models)


@pytest.mark.parametrize("method", ["dartree", "tfm"])
def test_residual_0_equals_a_weaver_whose_query_projection_is_zero(method):
    """Bit for bit, and it needs no weaver."""
    models, context = make_models(), FakeContext(requests=3)
    models.weaver.lm_head_query_in.weight.zero_()
    weaverless = SimpleNamespace(target=models.target, drafter=models.drafter, weaver=None)
    config = SETTINGS[method]
    one = resolve(method)(config, models).propose(context, RecordingClock())
    other = resolve(method)(replace(config, residual=False), weaverless).propose(context, RecordingClock())
    for name in ("tokens", "parents", "depths", "log_probs", "num_nodes"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    conditioned, _, _ = propose(method, context=context)
    assert not torch.equal(conditioned.tokens, one.tokens)


@pytest.mark.parametrize("method", ["ddtree", "dartree", "tfm"])
def test_more_candidates_than_the_vocabulary_are_all_of_it(method):
    """mlx-swift-lm#459 (C065): K = 512 over 40 tokens; a suite's config refuses it before."""
    config = replace(SETTINGS[method], candidates=512, budget=60)
    tree, _, _ = propose(method, config=config)
    whole, _, _ = propose(method, config=replace(config, candidates=VOCAB))
    assert torch.equal(tree.tokens, whole.tokens) and torch.equal(tree.parents, whole.parents)


def test_drawn_siblings_come_from_the_same_scores_and_differ_by_seed_and_position():
    """The batched growth through the method's own proposer; the same context gives the same tree."""
    context = FakeContext()
    context.indices, context.root_positions = torch.tensor([0, 1]), torch.tensor([9, 9])
    config = replace(SETTINGS["tfm"], siblings="sampled")
    first, again, other = (propose("tfm", config=replace(config, seed=seed), context=context)[0] for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens) and not torch.equal(first.tokens, other.tokens)
    assert first.num_nodes.tolist() == [65, 65] and first.law is not None
    context.root_positions = context.root_positions + 1
    moved, _, _ = propose("tfm", config=config, context=context)
    assert not torch.equal(first.tokens, moved.tokens)
    assert torch.equal(first.law.log_probs[:, 0], moved.law.log_probs[:, 0])


@pytest.mark.parametrize("method", ["dflash", "ddtree", "dartree", "tfm"])
@pytest.mark.parametrize("depth", [1, 3])
def test_depth_limits_the_tree(method, depth):
    config = DecodeConfig(method=method, depth=depth, budget=None if method == "dflash" else 24, candidates=20)
    tree, _, _ = propose(method, config=config)
    assert tree.depths.max() == depth


def test_tfm_records_the_expansions_of_its_last_tree():
    _, _, proposer = propose("tfm")
    assert proposer.expansions == count_expansions(64, 4, 8) == 16


def test_dartree_keeps_twelve_branches_a_depth_unless_told():
    default, _, _ = propose("dartree")
    for width, same in ((12, True), (2, False)):
        tree, _, _ = propose("dartree", config=replace(SETTINGS["dartree"], width=width))
        assert torch.equal(tree.tokens, default.tokens) == same
        assert max(tree.depths[0].bincount()[1:]) <= width


# --- chains


def test_dflash_drafts_the_argmax_of_every_row():
    context = FakeContext()
    tree, _, _ = propose("dflash", context=context)
    assert tree.is_chain
    assert torch.equal(tree.tokens[:, 1:], context.logits.argmax(-1))
    assert torch.equal(tree.parents, torch.arange(-1, ROWS).expand(2, ROWS + 1))
    torch.testing.assert_close(tree.log_probs[:, 1:], context.logits.log_softmax(-1).amax(-1))


def test_dflash_ties_go_to_the_lowest_id():
    """C039 in the draft path."""
    marginals = Marginals.from_logits(torch.tensor([[[1.0, 3.0, 3.0, 0.0]]]), torch.zeros(1, 1, 1), 1)
    assert build_chain(marginals, torch.tensor([0]), depth=1).tokens.tolist() == [[0, 1]]


def test_ar_is_the_root_alone():
    tree, _, _ = propose("ar")
    assert (tree.tokens.tolist(), tree.is_chain) == ([[3], [4]], True)


# --- DDTree


def brute_force(log_probs, budget, depth):
    """The `budget` most probable prefixes by the float64 sum of float32 log-probs, ties by ranks."""
    rows = log_probs[:depth].double().tolist()
    prefixes = []
    for length in range(1, depth + 1):
        for ranks in itertools.product(range(log_probs.shape[1]), repeat=length):
            score = 0.0
            for row, rank in zip(rows, ranks, strict=False):
                score += row[rank]
            prefixes.append((-score, ranks))
    return [ranks for _, ranks in sorted(prefixes)[:budget]]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 5),
    depth=st.integers(1, 4),
    budget=st.integers(1, 40),
    step=st.sampled_from([0.0, 0.5]),
)
def test_ddtree_is_the_brute_force_top_prefixes(seed, vocab, depth, budget, step):
    """C017: same set and same order; `step` rounds the log-probs so that many prefixes tie."""
    log_probs = torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    if step:
        log_probs = (log_probs / step).round() * step
    log_probs = log_probs.sort(dim=-1, descending=True, stable=True).values
    marginals = make_marginals(log_probs, torch.arange(vocab).expand(4, vocab))
    tree = build_best_first(marginals, torch.tensor([0]), budget=budget, depth=depth)
    tree.validate()
    assert paths_of(tree)[1:] == brute_force(log_probs, budget, depth)
    assert tree.tokens.shape == (1, budget + 1)


def test_ddtree_prefers_wide_over_a_weak_spine():
    """C017: top-1 of .3 at depths 1 to 8 beside 40 near-equal tokens at depth 1; no spine is kept."""
    probs = torch.full((8, 41), 0.7 / 40)
    probs[:, 0] = 0.3
    probs[0, 1:] -= 1e-5 * torch.arange(40)
    marginals = make_marginals(probs.log())
    tree = build_best_first(marginals, torch.tensor([0]), budget=16, depth=8)
    # .3, .09, .027 stay above .0175; .3^4 = .0081 does not
    assert paths_of(tree)[1:4] == [(0,), (0, 0), (0, 0, 0)]
    assert (0, 0, 0, 0) not in paths_of(tree)
    assert tree.num_nodes.tolist() == [17]


def test_ddtree_takes_no_more_than_exists():
    marginals = make_marginals(torch.zeros(2, 2).log_softmax(-1))
    tree = build_best_first(marginals, torch.tensor([9]), budget=64, depth=2)
    tree.validate()
    assert tree.num_nodes.tolist() == [7]
    assert not tree.tokens[~tree.is_real].any()


def test_ddtree_never_drafts_a_token_of_probability_zero():
    marginals = make_marginals(torch.tensor([[0.5, 0.5, 0.0]] * 2).log())
    tree = build_best_first(marginals, torch.tensor([0]), budget=12, depth=2)
    assert sorted(paths_of(tree)) == [(), (0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_ddtree_asks_for_as_many_candidates_as_its_budget():
    context = FakeContext()
    propose("ddtree", config=DecodeConfig(method="ddtree", budget=7), context=context)
    assert context.drafts == [7]


@pytest.mark.parametrize("build", [build_chain, lambda *args, depth: build_best_first(*args, budget=3, depth=depth)])
@pytest.mark.parametrize("depth", [0, 3])
def test_a_depth_without_drafter_rows_is_refused(build, depth):
    with pytest.raises(ValueError, match=rf"depth: {depth} is not allowed \(allowed: 1 to 2, the drafter's rows\)"):
        build(make_marginals(torch.zeros(2, 3)), torch.tensor([0]), depth=depth)
