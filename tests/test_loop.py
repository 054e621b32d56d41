"""What faults shared by all methods would hide: the loop against an independent one, its context, its clock."""

from types import SimpleNamespace

import pytest
import torch
from test_decode import PROMPTS, Oracle, RootOnly, Scripted, ar_tokens, run
from test_target import CONFIG, toy_target

import tfm.clock
from baselines.dflash import DFlashProposer
from baselines.methods import METHODS, resolve
from tfm.cache import TargetCache
from tfm.clock import Clock
from tfm.config import DecodeConfig
from tfm.decode import Models, Prompt, decode
from tfm.drafter import Drafter, DrafterConfig, init_drafter
from tfm.sampling import gumbel


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_ar_equals_a_loop_over_whole_sequences(temperature):
    """No cache and no tree here: the token at position p is the noised argmax of the row before it."""
    target = toy_target(torch.float32)
    for prompt in PROMPTS[:3]:
        line = list(prompt.tokens)
        for _ in range(12):
            scores = target(torch.tensor([line])).logits[0, -1]
            if temperature > 0:
                noise = gumbel(5, torch.tensor([prompt.index]), torch.tensor([[len(line)]]), CONFIG.vocab_size)
                scores = scores / temperature + noise[0, 0]
            line.append(int(scores.argmax()))
        assert ar_tokens(target, prompt, temperature=temperature, seed=5) == line[len(prompt.tokens) :]


def toy_drafter() -> Drafter:
    config = DrafterConfig(
        hidden_size=64,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        layer_types=("sliding_attention", "full_attention"),
        target_layer_ids=(0, 2),
        mask_token_id=127,
        block_size=6,
        sliding_window=8,
    )
    drafter = Drafter(config)
    init_drafter(drafter, 0)
    return drafter.eval().requires_grad_(False)


def test_after_any_accepted_path_the_context_equals_a_replay():
    """The weaver's hidden row is the leaf's, and the drafter has seen the taps of the path, no more and no less."""
    target, drafter, prompt = toy_target(torch.float32), toy_drafter(), PROMPTS[2]
    emitted, compared = ar_tokens(target, prompt, temperature=1.0, max_new_tokens=40), []

    class Inspecting(Oracle):
        def propose(self, context, clock):
            line = prompt.tokens + emitted[: self.at - 1]
            replay = target(torch.tensor([line]))
            assert context.roots.tolist() == [emitted[self.at - 1]]
            # what addresses the noise of drawn siblings
            assert (context.root_positions.tolist(), context.indices.tolist()) == ([len(line)], [prompt.index])
            assert torch.allclose(context.target_hidden[0], replay.hidden[0, -1], atol=1e-4)
            fresh = drafter.new_cache(1, len(line) + 1)
            drafter.append(replay.taps, torch.tensor([len(line)]), fresh)
            logits, hidden = drafter.draft(context.roots, fresh, target)
            marginals = context.draft(5)
            assert torch.allclose(marginals.hidden, hidden, atol=1e-4)
            best = logits.log_softmax(-1).max(-1).values
            assert torch.allclose(marginals.log_probs[..., 0], best, atol=1e-4)
            compared.append(len(line))
            return super().propose(context, clock)

    config = DecodeConfig(method="ar", temperature=1.0, max_new_tokens=40)
    done = []
    decode(
        [prompt],
        Models(target, drafter),
        config,
        proposer=Inspecting([emitted], 4, lambda step: [None, 2, 0][step % 3]),
        on_finish=done.append,
    )
    assert done[0].output_tokens == emitted
    assert {4, 2, 0} <= {step.accepted for step in done[0].steps}
    assert len(compared) == len(done[0].steps)


class FakeTime:
    """A clock that moves only when told to."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def spend(self, milliseconds: float) -> None:
        self.seconds += milliseconds / 1e3


def test_prefill_is_no_decode_time_and_stages_add_up(monkeypatch):
    """C033: prefill 100 ms, then three rounds of draft 5, build 1, verify 20, commit 1: decode 81 ms, other 0."""
    fake, target, prompt = FakeTime(), toy_target(torch.float32), PROMPTS[1]
    monkeypatch.setattr(tfm.clock, "time", SimpleNamespace(perf_counter=fake.perf_counter))

    def slowed(function, milliseconds):
        def call(*args, **named):
            fake.spend(milliseconds)
            return function(*args, **named)

        return call

    target.prefill = slowed(target.prefill, 100)
    target.verify = slowed(target.verify, 20)
    monkeypatch.setattr(TargetCache, "commit", slowed(TargetCache.commit, 1))

    class Drafting(RootOnly):
        def propose(self, context, clock):
            with clock.stage("draft"):
                fake.spend(5)
            with clock.stage("build"):
                fake.spend(1)
            return super().propose(context, clock)

    done = []
    config = DecodeConfig(method="ar", temperature=0.0, max_new_tokens=4)
    decode([prompt], Models(target), config, proposer=Drafting(), on_finish=done.append, clock=Clock("stages"))
    trace = done[0]
    assert trace.prefill_us == pytest.approx(100e3)
    assert trace.decode_us == pytest.approx(81e3)
    for step in trace.steps:
        expected = {"draft": 5e3, "build": 1e3, "verify": 20e3, "accept": 0, "commit": 1e3, "other": 0}
        assert {name: step.stage_us[name] for name in expected} == pytest.approx(expected, abs=1e-6)
        assert step.stage_us["target_other"] == pytest.approx(20e3)
    assert [step.context for step in trace.steps] == [len(prompt.tokens) + 1 + i for i in range(3)]


def test_a_wall_clock_times_requests_and_no_stage():
    target = toy_target(torch.float32)
    config = DecodeConfig(method="ar", temperature=0.0, max_new_tokens=3)
    for mode, requests, is_timed in (("wall", 1, True), ("wall", 2, False), ("off", 1, False)):
        done = []
        chosen = DecodeConfig(**{**vars(config), "requests": requests})
        decode(PROMPTS[:2], Models(target), chosen, proposer=RootOnly(), on_finish=done.append, clock=Clock(mode))
        assert all((trace.decode_us is not None) == is_timed for trace in done)
        assert all(step.stage_us is None for trace in done for step in trace.steps)


def test_parts_that_do_not_fit_are_refused_before_a_step():
    target, drafter = toy_target(torch.float32), toy_drafter()
    config = DecodeConfig(method="dflash", temperature=0.0, max_new_tokens=3)

    def refused(models, message, prompt=PROMPTS[0], proposer=None):
        with pytest.raises(ValueError, match=message):
            decode([prompt], models, config, proposer=proposer or RootOnly(), on_finish=lambda trace: None)

    refused(Models(target), "drafter: None is not allowed for a method that drafts", proposer=DFlashProposer(None))
    refused(Models(toy_target(torch.float32, taps=(2, 0)), drafter), r"target.tap_layers: \(2, 0\) .*\(0, 2\)")
    for change, message in (
        ({"target_layer_ids": (0, 9)}, r"target_layer_ids: \(0, 9\) .*has 3 layers"),
        ({"mask_token_id": 128}, "mask_token_id: 128 .*allowed: 127"),
        ({"hidden_size": 32}, "drafter.hidden_size: 32 .*allowed: 64"),
    ):
        other = Drafter(DrafterConfig(**{**vars(drafter.config), **change}))
        refused(Models(target, other), message)
    refused(Models(target, drafter), "prompt far: token 128 .*0 to 127", Prompt("far", 0, [3, 128]))


def test_logits_that_are_no_numbers_fail_the_request_by_name():
    target = toy_target(torch.float32)
    target.norm.weight.data.fill_(float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="logits: NaN .*prompt p1, after 0 tokens"):
            run(target, [PROMPTS[1]], RootOnly(), temperature=temperature)


@pytest.mark.parametrize("value", ["NaN", "-inf", "inf"])
def test_a_broken_row_inside_an_accepted_path_is_refused_like_one_at_its_end(monkeypatch, value):
    """Its argmax is token 0: where 0 was drafted, the row would pass for one that chose it."""
    target, prompt = toy_target(torch.float32), PROMPTS[1]
    whole = target.verify

    def broken_at_the_root(*arguments, **named):
        output = whole(*arguments, **named)
        output.logits[:, 0] = float(value)
        return output

    monkeypatch.setattr(target, "verify", broken_at_the_root)
    with pytest.raises(ValueError, match=f"logits: {value} .*prompt p1, after 1 tokens"):
        run(target, [prompt], Scripted(lambda step: [0]), temperature=0.0)


def test_a_broken_row_off_the_path_is_refused_where_the_bound_reads_it(monkeypatch):
    """Nothing is chosen by it, but the bound would be NaN and stand in the records as one that does not exist."""
    target, prompt = toy_target(torch.float32), PROMPTS[1]
    right, whole = run(target, [prompt], RootOnly(), temperature=1.0)[0].output_tokens[1], target.verify

    def broken_at_the_first_draft(*arguments, **named):
        output = whole(*arguments, **named)
        output.logits[:, 1] = float("nan")
        return output

    monkeypatch.setattr(target, "verify", broken_at_the_first_draft)
    with pytest.raises(ValueError, match="logits: NaN at a drafted node .prompt p1, step 0."):
        run(target, [prompt], Scripted(lambda step: [right + 1, 7]), temperature=1.0)


@pytest.mark.parametrize("method", ["dflash", "ddtree", "tfm", "dartree", "heap"])
def test_a_drafter_that_gives_no_numbers_fails_the_request_by_name(method):
    """A builder that drops them drafts nothing, which would stand in the tables as a method that gains nothing."""
    target, drafter = toy_target(torch.float32, taps=(0, 2)), toy_drafter()
    drafter.norm.weight.data.fill_(float("nan"))
    sizes = {key: 4 for key in ("budget", "width", "candidates", "children") if key in METHODS[method].knobs}
    config, models = DecodeConfig(method, residual=method in ("dflash", "ddtree"), **sizes), Models(target, drafter)
    proposer = resolve(method)(config, models)
    with pytest.raises(ValueError, match="drafts: (NaN|none that has a probability) .*prompt p1, step 0"):
        decode([PROMPTS[1]], models, config, proposer=proposer, on_finish=[].append)


@pytest.mark.parametrize("backend", ["naive", "solve"])
def test_a_state_that_forgets_everything_decodes_the_same_alone_and_together(backend):
    """C084's A_log = 100: a decay of -inf must not become NaN in a padded prefill or in a commit."""
    target = toy_target(torch.float32)
    for layer in target.layers[:2]:
        layer.linear_attn.A_log.data.fill_(100.0)
    prompts = [Prompt("short", 0, [1, 2, 3]), Prompt("long", 1, [1, 2, 3, 4, 5])]
    alone = [ar_tokens(target, prompt, temperature=1.0, gdn_backend=backend) for prompt in prompts]
    together = run(target, prompts, RootOnly(), temperature=1.0, requests=2, gdn_backend=backend)
    assert [trace.output_tokens for trace in together] == alone


def test_a_watcher_sees_every_step_as_it_was_decided():
    """The tree, the target's rows and the untrimmed walk, with what was emitted so far; the output is the same."""
    target, prompt, steps = toy_target(torch.float32), PROMPTS[1], []
    config = DecodeConfig("oracle", temperature=1.0, seed=5, max_new_tokens=10)
    emitted = ar_tokens(target, prompt, temperature=1.0, seed=5, max_new_tokens=40)
    finished = []
    decode(
        [prompt],
        Models(target),
        config,
        proposer=Oracle([emitted], 4, spoil=lambda step: 2 if step % 2 else None),
        on_finish=finished.append,
        on_step=lambda step: steps.append((step, list(step.outputs[0]))),
    )
    assert len(steps) == len(finished[0].steps) and steps[-1][1] == finished[0].output_tokens == emitted[:10]
    before = 1
    for step, output in steps:
        path = step.result.path[0, 1 : int(step.result.accepted) + 1]
        walked = [*step.tree.tokens[0, path].tolist(), int(step.result.bonus)]
        assert output[before:] == walked[: len(output) - before] and len(output) > before
        assert step.logits.shape[:2] == step.tree.tokens.shape
        before = len(output)
