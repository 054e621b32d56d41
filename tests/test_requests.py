"""What a request may meet: the end of its context, its cap, a mask token, neighbours with other drafts, seeds."""

import dataclasses

import pytest
import torch
from test_decode import PROMPTS, Oracle, RootOnly, ar_tokens, run
from test_loop import toy_drafter
from test_target import draw_tokens, toy_target

from baselines.ar import ArProposer
from baselines.dflash import DFlashProposer
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, decode, visible_text
from tfm.engine.loop import Engine
from tfm.metrics import accept_rate
from tfm.tree import DraftTree

WORDS = [f"<{token}>" for token in range(128)]


def detokenise(ids) -> str:
    return "".join(WORDS[token] for token in ids)


def test_drafts_past_the_cap_are_counted_as_drafted_and_as_emitted():
    """lucebox#667 (C026): eight right drafts where three tokens remain: 8 accepted by the rule, 3 emitted; no 3/8."""
    import pandas as pd

    target, prompt = toy_target(torch.float32), PROMPTS[1]
    emitted = ar_tokens(target, prompt, temperature=0.0, max_new_tokens=40)
    trace = run(target, [prompt], Oracle([emitted], 8), temperature=0.0, max_new_tokens=13)[0]
    assert [step.committed for step in trace.steps] == [9, 3] and len(trace.output_tokens) == 13
    last = trace.steps[-1]
    assert (last.depth, last.accepted_untrimmed, last.accepted) == (8, 8, 3)
    assert accept_rate(pd.DataFrame([vars(step) for step in trace.steps])) == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_fills_its_context_to_the_last_token_equals_ar(temperature):
    """llama.cpp#26894 (C072): room for 64 tokens, prompt 50, 14 new ones, drafts of 15 that overshoot at the end."""
    target, prompt = toy_target(torch.float32), Prompt("long", 0, draw_tokens(50, seed=9).tolist())
    emitted = ar_tokens(target, prompt, temperature=temperature, max_new_tokens=14)
    for bad in (None, 0, 2, 5):
        proposer = Oracle([emitted], 15, lambda step, bad=bad: bad)
        trace = run(target, [prompt], proposer, temperature=temperature, max_new_tokens=14)[0]
        assert trace.output_tokens == emitted and len(emitted) == 14
        assert trace.prompt_tokens + len(trace.output_tokens) == 64


class Ragged:
    """Right drafts of another length for every request, cut where its output is known to end."""

    def __init__(self, emitted, lengths):
        self.emitted, self.lengths, self.at = emitted, lengths, [1] * len(emitted)

    def propose(self, context, clock):
        del clock
        width = max(self.lengths)
        tokens = torch.zeros(len(self.lengths), width + 1, dtype=torch.int64)
        parents = torch.full_like(tokens, -1)
        tokens[:, 0] = context.roots
        for row, length in enumerate(self.lengths):
            drafts = (self.emitted[row][self.at[row] :] + [0] * length)[:length]
            tokens[row, 1 : length + 1] = torch.tensor(drafts, dtype=torch.int64)
            parents[row, : length + 1] = torch.arange(-1, length)
            self.at[row] += length + 1
        return DraftTree.build(tokens, parents, num_nodes=torch.tensor(self.lengths) + 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_draft_nothing_some_and_much_equal_themselves_alone(temperature):
    """vllm#34871 (C076): three requests with 0, 5 and 15 drafts a step, which finish at different steps."""
    target, prompts, lengths = toy_target(torch.float32), PROMPTS[:3], [0, 5, 15]
    settings = dict(temperature=temperature, max_new_tokens=20)
    emitted = [ar_tokens(target, prompt, **settings) for prompt in prompts]
    done = run(target, prompts, Ragged(emitted, lengths), requests=3, **settings)
    assert [trace.output_tokens for trace in done] == emitted
    assert [len(trace.steps) for trace in done] == [19, 4, 2]
    for trace, tokens, length in zip(done, emitted, lengths, strict=True):
        alone = run(target, [prompts[lengths.index(length)]], Ragged([tokens], [length]), **settings)[0]
        assert alone.output_tokens == tokens
        assert [step.accepted_untrimmed for step in alone.steps] == [step.accepted_untrimmed for step in trace.steps]
        assert 1 + sum(step.committed for step in trace.steps) == len(trace.output_tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_that_holds_the_mask_token_is_a_prompt_like_any_other(temperature):
    """C053: the drafter's mask id stands in the prompt; ids and counts are untouched, output equals ar's."""
    target, drafter = toy_target(torch.float32), toy_drafter()
    mask = drafter.config.mask_token_id
    tokens = [5, mask, 9, mask, mask, 3]
    prompt, done = Prompt("masked", 0, list(tokens)), []
    config = DecodeConfig(method="dflash", temperature=temperature, max_new_tokens=12)
    decode([prompt], Models(target, drafter), config, proposer=DFlashProposer(None), on_finish=done.append)
    assert prompt.tokens == tokens and done[0].prompt_tokens == 6
    assert done[0].output_tokens == ar_tokens(target, prompt, temperature=temperature, max_new_tokens=12)
    assert done[0].steps[0].context == 7


def test_what_follows_an_eos_or_a_stop_string_is_in_no_count():
    """vllm#47616, sglang#39826 (C050, C031): the ids are the text, and every count is of the ids that are kept."""
    target, prompt = toy_target(torch.float32, seed=3), PROMPTS[3]
    free = ar_tokens(target, prompt, temperature=1.0, max_new_tokens=20)
    stop = WORDS[free[2]]
    first = free.index(free[2])
    for settings in ({"eos_tokens": (free[2],)}, {"stop": (stop,)}):
        config, done = DecodeConfig(method="ar", temperature=1.0, max_new_tokens=20, **settings), []
        decode(
            [prompt], Models(target), config, proposer=Oracle([free], 6), on_finish=done.append, detokenise=detokenise
        )
        trace = done[0]
        assert trace.finish_reason == "stop" and trace.output_tokens == free[: first + 1]
        assert visible_text(detokenise(trace.output_tokens), (stop,)) == detokenise(free[:first])
        assert 1 + sum(step.committed for step in trace.steps) == len(trace.output_tokens)
        assert sum(step.accepted for step in trace.steps) <= len(trace.output_tokens)


def test_seeds_and_temperature_decide_the_output_and_the_batch_does_not():
    """EAGLE#301, vllm#6038 (C060, C063): three seeds differ; a prompt and seed give one output, alone and in a list."""
    target = toy_target(torch.float32)
    outputs = {}
    for seed in (0, 1, 2):
        settings = dict(temperature=1.0, seed=seed, max_new_tokens=10)
        alone = [ar_tokens(target, prompt, **settings) for prompt in PROMPTS]
        drafts = [Oracle([tokens], 4, lambda step: step % 3) for tokens in alone]
        traces = [run(target, [p], d, **settings)[0] for p, d in zip(PROMPTS, drafts, strict=True)]
        assert [trace.output_tokens for trace in traces] == alone
        outputs[seed] = tuple(alone[0])
    assert len(set(outputs.values())) == 3


@pytest.mark.parametrize("engine", ["loop", "static"])
@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        (
            [3] * 60,
            {"max_new_tokens": 5},
            r"prompt far: 60 tokens \+ 5 new ones are not allowed \(allowed: 64, the target",
        ),
        ([3] * 65, {"max_new_tokens": 1}, r"prompt far: 65 tokens \+ 1 new ones"),
        ([3], {"eos_tokens": (4, 128)}, r"eos_tokens: 128 is not allowed \(allowed: 0 to 127\)"),
        ([3], {"eos_tokens": (-1,)}, "eos_tokens: -1 is not allowed"),
        ([3, 1.5], {}, r"prompt far: token 1.5 is not allowed \(allowed: 0 to 127\)"),
        ([True], {}, "prompt far: token True is not allowed"),
        ("a word", {}, "prompt far: token 'a' is not allowed"),
    ],
)
def test_what_the_targets_positions_or_ids_do_not_hold_is_refused(engine, tokens, settings, message):
    """Positions that were never trained give text all the same, and an end that is no id never comes."""
    target = toy_target(torch.float32)
    target.config = dataclasses.replace(target.config, max_position_embeddings=64)
    models, config, prompt = Models(target), DecodeConfig("ar", **settings), Prompt("far", 0, tokens)
    with pytest.raises(ValueError, match=message):
        if engine == "loop":
            decode([prompt], models, config, proposer=RootOnly(), on_finish=[].append)
        else:
            loop = Engine(models, config, proposer=ArProposer(), capacity=128)
            loop.decode([prompt], on_finish=[].append)
