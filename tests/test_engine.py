"""The static engine decides and emits exactly what the reference loop does, for every method."""

import itertools

import pytest
import torch
from engine_models import assert_same_records, make_engine, prompts_of, random_family, run_reference, run_static

from baselines.ddtree import build_best_first
from baselines.loading import load_models
from baselines.static_ddtree import build_by_levels, rank_pairs
from tfm.builder import count_expansions
from tfm.config import DecodeConfig
from tfm.engine.builder import PlannedTfmProposer
from tfm.engine.candidates import chunk_of, marginals_from_logits
from tfm.engine.graphs import GraphClock
from tfm.marginals import Marginals
from tfm.trace import STAGES

NANO = "tfm/weights/nano"
SETTINGS = {
    "ar": {},
    "dflash": {},
    "ddtree": dict(budget=24),
    "dartree": dict(budget=24, width=6),
    "tfm": dict(budget=24),
    "tfm-w5": dict(method="tfm", budget=17, width=5, children=4, depth=6),
    "tfm-sampled": dict(method="tfm", budget=16, siblings="sampled"),
    "dflash-d3": dict(method="dflash", depth=3),
}


@pytest.fixture(scope="module")
def nano():
    parts = {part: f"{NANO}/{part}" for part in ("target", "drafter", "weaver")}
    return load_models(parts, device=torch.device("cpu"), dtype=torch.float32)


def settings_of(name, **more):
    return DecodeConfig(**{"method": name, "max_new_tokens": 16, "seed": 3, **SETTINGS[name], **more})


@pytest.mark.parametrize(
    ("name", "temperature"), [*((name, 1.0) for name in SETTINGS), ("ar", 0.0), ("ddtree", 0.0), ("tfm", 0.0)]
)
def test_the_static_engine_makes_the_records_of_the_reference_loop(nano, name, temperature):
    """Tokens, trees, accepted paths and bounds: one request after another in the same memory."""
    config, prompts = settings_of(name, temperature=temperature), prompts_of(nano, (5, 42))
    assert_same_records(run_static(nano, config, prompts), run_reference(nano, config, prompts))


def test_stages_of_a_step_sum_to_its_wall(nano):
    config = settings_of("tfm")
    trace = run_static(nano, config, prompts_of(nano)[:1], clock="stages")[0]
    for step in trace.steps:
        assert all(step.stage_us[name] > 0 for name in STAGES)
        assert step.stage_us["target_gdn"] > 0
        assert step.stage_us["grow"] <= step.stage_us["build"]
    assert sum(step.stage_us[name] for step in trace.steps for name in STAGES) <= trace.decode_us


def test_an_eos_and_the_cap_end_a_request_as_in_the_reference_loop(nano):
    prompts = prompts_of(nano)
    free = run_reference(nano, settings_of("dflash"), prompts)[0].output_tokens
    config = settings_of("tfm", eos_tokens=(free[7],), max_new_tokens=13)
    assert_same_records(run_static(nano, config, prompts), run_reference(nano, config, prompts))


@pytest.mark.parametrize(
    ("settings", "forms", "message"),
    [
        (dict(rule="traversal"), {}, "rule: 'traversal' .*greedy, target_only"),
        (dict(requests=2), {}, "requests: 2 .*allowed: 1"),
        (dict(gdn_backend="naive"), {}, "gdn_backend: 'naive' .*use solve"),
        ({}, dict(graphs=True), "graphs: True .*CUDA device"),
        ({}, dict(attention="flash"), "attention: 'flash' .*torch, triton"),
    ],
)
def test_what_the_static_engine_lacks_is_refused_by_name(nano, settings, forms, message):
    with pytest.raises(ValueError, match=message):
        run_static(nano, settings_of("ar", **settings), prompts_of(nano)[:1], **forms)


@pytest.mark.parametrize("name", ["ar", "tfm"])
def test_proposing_ahead_changes_no_record(nano, name):
    """The tree that is proposed after a request's last step must not reach the next request."""
    config, prompts = settings_of(name), prompts_of(nano)
    assert_same_records(run_static(nano, config, prompts, ahead=True), run_reference(nano, config, prompts))


def test_a_tree_proposed_ahead_of_the_end_stays_inside_the_memory(nano):
    """The last step may accept a whole path although the cap keeps one token of it: the next block stands behind it."""
    config, prompts = settings_of("dflash", max_new_tokens=3), prompts_of(nano)[:1]
    engine = make_engine(nano, config, prompts, ahead=True)
    engine.decode(prompts, on_finish=lambda _: None)
    step = engine.step
    with torch.inference_mode():
        # before the last step all but the root and one token are committed
        step.target.length.fill_(step.capacity - 2 + step.path_rows)
        step.drafter.pending_count.fill_(step.path_rows)
        step.propose()


def test_the_planned_expansions_count_no_more_children_than_candidates():
    config = settings_of("tfm", budget=24, width=6, children=8, candidates=2)
    assert PlannedTfmProposer(config, None).expansions == count_expansions(24, 6, 2) > count_expansions(24, 6, 8)


def test_a_prompt_that_outgrows_the_memory_is_refused(nano):
    prompts = prompts_of(nano)
    engine = make_engine(nano, settings_of("ar"), prompts[:1])
    with pytest.raises(ValueError, match="prompt p1: 35 tokens .*allowed: 21"):
        engine.decode(prompts, on_finish=lambda _: None)


@pytest.mark.parametrize("name", ["dflash", "ddtree", "tfm"])
def test_a_random_family_with_every_feature_decodes_alike(name):
    """Sliding window shorter than the context, drafter block 6, two weaver blocks, grouped heads."""
    models = random_family()
    more = {"budget": 12, "width": 3} if name in ("dartree", "tfm") else {"budget": 12} if name == "ddtree" else {}
    config = (
        DecodeConfig(method=name, max_new_tokens=16, seed=1, candidates=20, **more)
        if "width" in more
        else (DecodeConfig(method=name, max_new_tokens=16, seed=1, **more))
    )
    prompts = prompts_of(models)
    assert_same_records(run_static(models, config, prompts), run_reference(models, config, prompts))


@pytest.mark.parametrize("levels", [None, 3], ids=["free", "many_ties"])
@pytest.mark.parametrize("count", [1, 5, 60])
def test_candidates_by_chunks_are_those_of_the_whole_row(levels, count):
    """Also where equal scores straddle the cut, with fewer chunks than candidates, with a last chunk not full."""
    for seed, vocab in enumerate((640, 1000, 5003)):
        logits = torch.randn(1, 4, vocab, generator=torch.Generator().manual_seed(seed))
        if levels:
            logits = (logits.clamp(-2, 2) * levels).round() / levels
        logits[0, 1, 7:] = -torch.inf
        expected = Marginals.from_logits(logits, logits, count)
        got = marginals_from_logits(logits, logits, count, chunk=8)
        assert torch.equal(got.tokens, expected.tokens)
        assert torch.equal(got.log_probs, expected.log_probs)


def test_chunks_follow_how_many_candidates_are_wanted():
    """248,320 ids: 15,520 maxima and 8,192 scores for 512 candidates, where chunks of 64 had 32,768 scores."""
    assert [chunk_of(248_320, count) for count in (1, 64, 512, 4096)] == [64, 64, 16, 8]
    assert chunk_of(96, 20) == 8


def random_marginals(seed, rows=6, vocab=40, grid=None):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, rows, vocab, generator=generator) * 2
    if grid:
        logits = (logits * grid).round() / grid
    return Marginals.from_logits(logits, torch.zeros(1, rows, 1), 24)


@pytest.mark.parametrize("grid", [None, 4, 1], ids=["free", "quarters", "many_ties"])
@pytest.mark.parametrize("budget", [1, 2, 7, 24])
def test_best_prefixes_by_levels_are_those_of_the_heap(grid, budget):
    """Also where scores tie: equal scores go by their ranks, which a coarse grid of logits makes common."""
    roots = torch.tensor([9])
    for seed in range(12):
        marginals = random_marginals(seed, grid=grid)
        if grid == 1:
            # equal rows, powers of one half: sums tie exactly across levels
            flat = torch.arange(24).div(3, rounding_mode="floor") * -0.5
            marginals = Marginals(marginals.tokens, flat.expand(1, 6, 24), marginals.hidden)
        for depth in (1, 3, 6):
            expected = build_best_first(marginals, roots, budget=budget, depth=depth)
            got = build_by_levels(
                marginals, roots, budget=budget, depth=depth, pairs=rank_pairs(budget, 24, roots.device)
            )
            got.validate()
            for field in ("tokens", "parents", "depths", "log_probs", "num_nodes"):
                assert torch.equal(getattr(got, field), getattr(expected, field)), (seed, depth, field)


def test_a_candidate_without_mass_is_no_node():
    marginals = random_marginals(0, rows=2)
    log_probs = marginals.log_probs.clone()
    log_probs[:, :, 3:] = -torch.inf
    marginals = Marginals(marginals.tokens, log_probs, marginals.hidden)
    roots = torch.tensor([9])
    expected = build_best_first(marginals, roots, budget=20, depth=2)
    got = build_by_levels(marginals, roots, budget=20, depth=2, pairs=rank_pairs(20, 24, roots.device))
    assert int(got.num_nodes) == 13
    assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.parents, expected.parents)


@pytest.mark.parametrize("name", ["ar", "tfm"])
def test_a_prefill_in_chunks_changes_no_record(nano, name, monkeypatch):
    """Prompts shorter than a chunk, of one, of several and a rest, one after the other in the same memory."""
    monkeypatch.setattr("tfm.engine.step.ROWS", 32)
    config, prompts = settings_of(name), prompts_of(nano, (70, 5, 32, 96))
    assert_same_records(run_static(nano, config, prompts, prefill="chunks"), run_reference(nano, config, prompts))


def test_a_warm_up_is_never_longer_than_the_memory(nano):
    config, prompts, done = settings_of("ar", max_new_tokens=3), prompts_of(nano)[:1], []
    engine = make_engine(nano, config, prompts)
    engine.decode(prompts, on_finish=done.append, max_new_tokens=64)
    assert len(done[0].output_tokens) == 3


def test_a_commit_that_moves_no_rows_changes_the_records(nano):
    """The comparison can fail: here the accepted rows stay where the tree put them."""
    config, prompts = settings_of("tfm"), prompts_of(nano)[:1]
    engine, done = make_engine(nano, config, prompts), []
    engine.step.target.commit = lambda path: engine.step.target.length.add_((path >= 0).sum())
    engine.decode(prompts, on_finish=done.append, traced=True)
    assert done[0].output_tokens != run_reference(nano, config, prompts)[0].output_tokens


def test_a_step_counts_the_stages_of_the_graphs_that_it_replays(monkeypatch):
    """A sweep's other graphs, whose events were never recorded, are not read; one replayed twice counts once."""
    clock = GraphClock("stages")
    times = itertools.count()
    monkeypatch.setattr(clock, "_mark", lambda: next(times) / 1e6)
    captured = []
    for stage in ("draft", "draft", "verify"):
        with clock.capture() as spans, clock.stage(stage):
            pass
        captured.append(spans)
    first, other, verify = captured
    clock.start_step()
    for spans in (first, verify, first):
        clock.replay(spans)
    spent = clock.end_step()
    assert (spent["draft"], spent["verify"]) == (pytest.approx(1), pytest.approx(1))
    clock.replay(other)  # ahead of its step
    clock.start_step()
    spent = clock.end_step()
    assert (spent["draft"], spent["verify"]) == (pytest.approx(1), 0)
