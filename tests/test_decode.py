"""The loop: every method emits what autoregressive decoding emits, and counts what it emitted."""

import pytest
import torch
from test_target import CONFIG, cache_tensors, draw_tokens, toy_target

from baselines.methods import check
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, decode, visible_text
from tfm.tree import DraftTree

PROMPTS = [Prompt(f"p{i}", i, draw_tokens(3 + 5 * i, seed=i).tolist()) for i in range(5)]


class Scripted:
    """Proposes chains written beforehand: `script(emitted)` is what follows the root after `emitted` tokens."""

    def __init__(self, script, outputs=None):
        self.script, self.step, self.outputs = script, 0, outputs

    def propose(self, context, clock):
        drafts = self.script(self.step)
        self.step += 1
        root = context.roots.tolist()
        return DraftTree.build(torch.tensor([root + drafts]), torch.arange(-1, len(drafts))[None])


class Oracle:
    """Proposes what autoregressive decoding will emit, with `wrong` put at given places of each chain."""

    def __init__(self, emitted, length, spoil=lambda step: None, branch=False):
        self.emitted, self.length, self.spoil, self.branch, self.step, self.at = emitted, length, spoil, branch, 0, 1

    def propose(self, context, clock):
        del clock
        rows = [self._row(root, emitted) for root, emitted in zip(context.roots.tolist(), self.emitted, strict=True)]
        self.step += 1
        return DraftTree.build(torch.tensor(rows), torch.arange(-1, self.length)[None].expand(len(rows), -1))

    def _row(self, root, emitted):
        # the root is the last token emitted; find where we are by counting, not by searching
        drafts = (emitted[self.at :] + [0] * self.length)[: self.length]
        bad = self.spoil(self.step)
        if bad is not None:
            drafts = [(token + 1) % CONFIG.vocab_size if i >= bad else token for i, token in enumerate(drafts)]
        self.at += (self.length if bad is None else min(bad, self.length)) + 1
        return [root, *drafts]


def run(target, prompts, proposer=None, traced=False, **settings):
    config = DecodeConfig(**{"method": "ar", "max_new_tokens": 12, **settings})
    done = []
    proposer = proposer or Scripted(lambda step: [])
    if proposer.__class__ is Scripted and config.requests > 1:
        raise AssertionError("scripted proposers are for one request")
    decode(prompts, Models(target), config, proposer=proposer, on_finish=done.append, traced=traced)
    return done


class RootOnly:
    def propose(self, context, clock):
        del clock
        return DraftTree.root_only(context.roots)


def ar_tokens(target, prompt, **settings):
    return run(target, [prompt], RootOnly(), **settings)[0].output_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_state_after_every_round_equals_the_autoregressive_state(temperature):
    """C001: rounds of four right drafts, of none, and of two wrong ones, twenty times."""
    target, prompt = toy_target(torch.float32), PROMPTS[1]
    settings = dict(temperature=temperature, max_new_tokens=141)
    emitted = ar_tokens(target, prompt, **settings)

    class Rounds(Oracle):
        def propose(self, context, clock):
            kind = self.step % 3
            self.length, bad = [(4, None), (0, None), (2, 0)][kind]
            self.spoil = lambda step: bad
            return super().propose(context, clock)

    caches = []
    original = target.new_cache
    target.new_cache = lambda *args: caches.append(original(*args)) or caches[-1]
    compared = []

    class Checked(Rounds):
        def propose(self, context, clock):
            cache, line = caches[-1], prompt.tokens + emitted[: self.at - 1]
            replay = original(1, len(line) + 160)
            target.prefill(torch.tensor([line]), torch.tensor([len(line)]), replay)
            pairs = zip(cache.layers, replay.layers, strict=True)
            compared.append(max((a.state - b.state).abs().max().item() for a, b in pairs if hasattr(a, "state")))
            return super().propose(context, clock)

    trace = run(target, [prompt], Checked([emitted], 4), **settings)[0]
    assert trace.output_tokens == emitted
    assert [step.accepted for step in trace.steps[:6]] == [4, 0, 0, 4, 0, 0]
    assert len(compared) >= 60
    assert max(compared) < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_width_one_tree_equals_the_chain(temperature):
    """C013: the same drafts as a chain flagged as one and as a tree that happens to be one."""
    target, prompt = toy_target(torch.float32), PROMPTS[2]
    emitted = ar_tokens(target, prompt, temperature=temperature, max_new_tokens=40)

    class Tree(Oracle):
        def propose(self, context, clock):
            tree = super().propose(context, clock)
            return DraftTree(tree.tokens, tree.parents, tree.depths, tree.log_probs, tree.num_nodes, is_chain=False)

    spoil = lambda step: step % 5  # noqa: E731
    settings = dict(temperature=temperature, max_new_tokens=40)
    chain = run(target, [prompt], Oracle([emitted], 6, spoil), **settings)[0]
    tree = run(target, [prompt], Tree([emitted], 6, spoil), **settings)[0]
    assert chain.output_tokens == tree.output_tokens == emitted
    assert [step.accepted for step in chain.steps] == [step.accepted for step in tree.steps]


def test_a_drafter_that_is_always_wrong_changes_nothing():
    """C045: it proposes id 5 for ever, on eight prompts; acceptance is what ar says 5 by itself: near 0."""
    target = toy_target(torch.float32)
    prompts = [Prompt(f"q{i}", i, draw_tokens(4 + i, seed=50 + i).tolist()) for i in range(8)]
    accepted = steps = 0
    for prompt in prompts:
        expected = ar_tokens(target, prompt, temperature=0.0)
        trace = run(target, [prompt], Scripted(lambda step: [5]), temperature=0.0)[0]
        assert trace.output_tokens == expected
        # a draft is right exactly where ar says 5 after the token that roots the step
        assert sum(step.accepted for step in trace.steps) <= expected[1:].count(5)
        accepted, steps = accepted + sum(step.accepted for step in trace.steps), steps + len(trace.steps)
    assert accepted / steps < 0.1


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_eos_inside_accepted_drafts_ends_the_output_there(k, temperature):
    """C046: output equals autoregressive output cut at the EOS, which is kept."""
    target, prompt = toy_target(torch.float32, seed=3), PROMPTS[3]
    free = ar_tokens(target, prompt, temperature=temperature, max_new_tokens=20)
    eos = free[k]
    cut = free[: free.index(eos) + 1]
    settings = dict(temperature=temperature, max_new_tokens=20, eos_tokens=(eos,))
    trace = run(target, [prompt], Oracle([free], 8), **settings)[0]
    assert ar_tokens(target, prompt, **settings) == trace.output_tokens == cut
    assert trace.finish_reason == "stop"
    assert sum(step.committed for step in trace.steps) == len(cut) - 1
    assert all(step.accepted <= step.committed for step in trace.steps)


@pytest.mark.parametrize("cap", [1, 2, 3, 5, 16, 17, 20])
def test_the_cap_is_exact_with_a_drafter_that_is_always_right(cap):
    """C047 and C048: exactly `cap` tokens; counters count what was emitted, and what the rule accepted beside it."""
    target, prompt = toy_target(torch.float32), PROMPTS[0]
    emitted = ar_tokens(target, prompt, temperature=0.0, max_new_tokens=60)
    trace = run(target, [prompt], Oracle([emitted], 15), temperature=0.0, max_new_tokens=cap)[0]
    assert trace.output_tokens == emitted[:cap]
    assert trace.finish_reason == "length"
    assert 1 + sum(step.committed for step in trace.steps) == cap
    for step in trace.steps:
        assert step.accepted_untrimmed == 15
        assert step.accepted == min(15, step.committed)


def test_an_eos_that_ends_a_run_under_the_cap():
    """C051: eight tokens so far, cap 10, a run [EOS, t, t']: nine tokens, finish "stop"."""
    target, prompt = toy_target(torch.float32, seed=3), PROMPTS[3]
    free = ar_tokens(target, prompt, temperature=1.0, max_new_tokens=30)
    eos = free[8]
    assert eos not in free[:8]
    proposer = Oracle([free], 3, spoil=lambda step: 2 if step < 2 else 0 if step == 2 else None)
    trace = run(target, [prompt], proposer, temperature=1.0, max_new_tokens=10, eos_tokens=(eos,))[0]
    assert trace.steps[-1].accepted_untrimmed >= 1
    assert (len(trace.output_tokens), trace.finish_reason) == (9, "stop")


def test_a_stop_string_ends_ids_with_the_token_that_completes_it():
    """C049: the text ends before the stop string, the ids with the token that completes it."""
    target, prompt = toy_target(torch.float32, seed=3), PROMPTS[3]
    free = ar_tokens(target, prompt, temperature=1.0, max_new_tokens=20)
    words = [f"<{token}>" for token in range(CONFIG.vocab_size)]
    stop = (words[free[4]] + words[free[5]],)

    def detokenise(ids):
        return "".join(words[token] for token in ids)

    config = DecodeConfig(method="ar", temperature=1.0, max_new_tokens=20, stop=stop)
    done = []
    decode([prompt], Models(target), config, proposer=Oracle([free], 10), on_finish=done.append, detokenise=detokenise)
    assert done[0].output_tokens == free[:6]
    assert done[0].finish_reason == "stop"
    assert visible_text(detokenise(done[0].output_tokens), stop) == detokenise(free[:4])
    with pytest.raises(ValueError, match="stop: .* needs a tokenizer"):
        decode([prompt], Models(target), config, proposer=RootOnly(), on_finish=done.append)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_of_one_token_runs(temperature):
    """C073, at the level of the loop."""
    target, prompt = toy_target(torch.float32), Prompt("one", 0, [7])
    emitted = ar_tokens(target, prompt, temperature=temperature)
    trace = run(target, [prompt], Oracle([emitted], 15), temperature=temperature)[0]
    assert trace.output_tokens == emitted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_do_not_depend_on_the_batch_or_its_order(temperature):
    """C063, C078: alone, together, reversed; committed tokens add up whenever rows finish."""
    target = toy_target(torch.float32)
    settings = dict(temperature=temperature, max_new_tokens=15, eos_tokens=tuple(range(0, 128, 9)))
    alone = {prompt.id: ar_tokens(target, prompt, **settings) for prompt in PROMPTS}
    assert len({len(tokens) for tokens in alone.values()}) > 1
    for prompts in (PROMPTS, PROMPTS[::-1]):
        for requests in (2, 5):
            done = run(target, prompts, RootOnly(), requests=requests, **settings)
            assert {trace.id: trace.output_tokens for trace in done} == alone
            for trace in done:
                assert 1 + sum(step.committed for step in trace.steps) == len(trace.output_tokens)


def test_the_configured_backend_is_the_one_that_verifies(monkeypatch):
    from tfm_kernels.gdn import naive

    calls, original = [], naive.naive_tree_verify
    monkeypatch.setattr(naive, "naive_tree_verify", lambda *args: calls.append(1) or original(*args))
    target, prompt = toy_target(torch.float32), PROMPTS[1]
    emitted = ar_tokens(target, prompt, temperature=0.0)
    assert not calls
    trace = run(target, [prompt], Oracle([emitted], 4, lambda step: 2), temperature=0.0, gdn_backend="naive")[0]
    assert calls
    assert trace.output_tokens == emitted


def test_different_seeds_give_different_outputs_and_equal_seeds_equal_ones():
    target, prompt = toy_target(torch.float32), PROMPTS[1]
    outputs = [ar_tokens(target, prompt, temperature=1.0, seed=seed) for seed in (0, 1, 2, 0)]
    assert outputs[0] == outputs[3]
    assert len({tuple(output) for output in outputs}) == 3


def test_a_traced_step_holds_its_tree_and_marks_the_path():
    target, prompt = toy_target(torch.float32), PROMPTS[1]
    emitted = ar_tokens(target, prompt, temperature=0.0)
    trace = run(target, [prompt], Oracle([emitted], 4, lambda step: 2), traced=True, temperature=0.0)[0]
    first = [node for node in trace.trees if node.step == 0]
    assert [node.parent for node in first] == [-1, 0, 1, 2, 3]
    assert [node.depth for node in first] == [0, 1, 2, 3, 4]
    assert [node.accepted for node in first] == [True, True, True, False, False]
    assert [node.token for node in first][:3] == emitted[:3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "dflsh"}, "method: 'dflsh' .*allowed: ar, dflash, ddtree, dartree, tfm"),
        ({"temperature": -1.0}, "temperature: -1.0 .*>= 0"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"temperature": float("inf")}, "temperature: inf"),
        ({"method": "tfm", "budget": 0}, "budget: 0 .*>= 1"),
        ({"method": "tfm", "budget": -3}, "budget: -3"),
        ({"method": "tfm"}, "budget: None .*for example 64"),
        ({"method": "ar", "budget": 4}, "budget: 4 .*leave it out"),
        ({"method": "ddtree", "budget": 8, "depth": 16}, "depth: 16 .*1 to 15.*lower depth"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 .*>= 1"),
        ({"seed": None}, "seed: None"),
        ({"rule": "greedy", "temperature": 1.0}, "rule: 'greedy' .*use target_only"),
        ({"rule": "lossy"}, "rule: 'lossy' .*target_only"),
        ({"width": 0, "method": "tfm", "budget": 8}, "width: 0"),
        ({"budget": True, "method": "tfm"}, "budget: True"),
        ({"residual": False, "method": "ddtree", "budget": 8}, "residual: False .*ddtree takes none, leave it out"),
        ({"method": "dartree"}, "budget: None .*dartree needs"),
        ({"method": "dartree", "budget": 8, "depth_bonus": 0.5}, "depth_bonus: 0.5 .*<= 0.*pass its parent"),
        ({"method": "dartree", "budget": 8, "depth_bonus": float("nan")}, "depth_bonus: nan"),
        ({"method": "tfm", "budget": 8, "depth_bonus": -0.2}, "depth_bonus: -0.2 .*tfm takes none"),
        ({"method": "tfm", "budget": 8, "siblings": "random"}, "siblings: 'random' .*top, sampled"),
        ({"method": "ddtree", "budget": 8, "siblings": "sampled"}, "siblings: 'sampled' .*ddtree takes none"),
        (
            {"method": "tfm", "budget": 8, "siblings": "sampled", "rule": "legacy_traversal"},
            "rule: 'legacy_traversal' .*target_only, traversal.*sampled",
        ),
        ({"top_p": 0.9}, "top_p: 0.9 .*allowed: 1.0.*keep the target's law.*leave it out"),
        ({"top_k": 3}, "top_k: 3 .*allowed: -1"),
        ({"min_p": 0.1}, "min_p: 0.1 .*allowed: 0.0"),
        ({"repetition_penalty": 1.3, "temperature": 0.0}, "repetition_penalty: 1.3 .*no method filters or penalises"),
        ({"presence_penalty": 1.5}, "presence_penalty: 1.5"),
        ({"gdn_backend": "fastest"}, "gdn_backend: 'fastest' .*allowed: naive, solve"),
        ({"residual": 0, "method": "tfm", "budget": 8}, "residual: 0 .*true or false"),
        ({"method": "adaptive", "budget": 64, "requests": 2}, "requests: 2 .*method adaptive .allowed: 1.*set it to 1"),
        ({"method": "adaptive", "budget": 15}, "budget: 15 .*method adaptive .allowed: 16 or more.*raise it"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_bad_setting_names_key_value_and_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        check(DecodeConfig(**{"method": "ar", **settings}), draft_rows=15)


def test_an_empty_prompt_is_refused_by_name():
    with pytest.raises(ValueError, match="prompt empty: .*skip empty prompts"):
        run(toy_target(torch.float32), [Prompt("empty", 0, [])], RootOnly())


@pytest.mark.parametrize("index", [-1, 2**31, None, 0.0])
def test_an_index_that_no_record_holds_is_refused_before_a_step(index):
    with pytest.raises(ValueError, match=f"prompt far: index {index} is not allowed .allowed: 0 to 2"):
        run(toy_target(torch.float32), [Prompt("far", index, [3])], RootOnly())


def test_a_tree_of_another_root_is_refused_and_not_decoded():
    """hipfire#483: what follows another token than the last one is text of another prompt."""

    class Other:
        def propose(self, context, clock):
            return DraftTree.root_only((context.roots + 1) % CONFIG.vocab_size)

    with pytest.raises(
        ValueError, match=r"tree: root \d+ is not allowed .allowed: \d+, the last token; prompt p1, step 0"
    ):
        run(toy_target(torch.float32), [PROMPTS[1]], Other())


def test_a_request_that_ends_at_prefill_has_no_step():
    target = toy_target(torch.float32)
    trace = run(target, [PROMPTS[0]], RootOnly(), max_new_tokens=1)[0]
    assert (len(trace.output_tokens), trace.steps, trace.finish_reason) == (1, [], "length")


def test_finished_requests_leave_their_cache_rows_alone():
    target = toy_target(torch.float32)
    cache = target.new_cache(2, 40)
    target.prefill(draw_tokens(2, 6), torch.tensor([6, 6]), cache)
    before = [x[1].clone() for x in cache_tensors(cache)]
    output = target.verify(DraftTree.root_only(torch.tensor([3, 4])), cache)
    cache.commit(output.scratch, torch.tensor([[0], [-1]]))
    assert all(torch.equal(a, b[1]) for a, b in zip(before, cache_tensors(cache), strict=True))
