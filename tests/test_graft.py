"""A family widened to another shape computes what it computed, at that shape's cost; padding is never a token."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from engine_models import assert_same_records, run_reference, run_static
from graft_family import DRAFTER, MIDDLE, SHAPES, TARGET, VOCAB, WEAVER, WIDTH, narrow, one_pass, random_family
from helpers import assert_no_worse, make_tree, stack_trees
from test_nano import ARMS, WEIGHTS, embedded_prompts

from baselines.loading import load_models
from baselines.methods import resolve
from tfm import graft_shape
from tfm.config import DecodeConfig
from tfm.decode import Models, decode
from tfm.graft import WHISPER, WRITERS, graft
from tfm.marginals import Marginals
from tfm.sampling import next_tokens
from tfm.target import Target

CPU = torch.device("cpu")
PROMPTS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([9, 6])
TREE = stack_trees([make_tree([3, 5, 7, 9, 4], [-1, 0, 0, 1, 3]), make_tree([1, 6, 2, 8], [-1, 0, 0, 2])])


@cache
def pair(shape: str, dtype: torch.dtype = torch.float64, *, tied: bool = True, seed: int = 0) -> tuple[Models, Models]:
    """A random family, and the same one in a shape."""
    source = random_family(torch.float64, tied=tied)
    wide = graft(source, SHAPES[shape], seed=seed, device=CPU, dtype=dtype)
    wide.check()
    return source, wide


def parameters(models: Models):
    for part in graft_shape.PARTS:
        yield from ((f"{part}.{name}", value) for name, value in getattr(models, part).named_parameters())


# --- the function


@pytest.mark.parametrize("tied", [True, False], ids=["tied_head", "untied_head"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_of_every_part_is_the_source_s(shape, tied):
    """Float64, where only the function shows: sums of up to 300 terms of size 10 differ by 1e-13, a wrong eps by 1e-3.

    Prefill, tree verify before and after a commit, taps, drafter rows, weaver residuals; each copy of a vector.
    """
    source, wide = pair(shape, tied=tied)
    with torch.inference_mode():
        expected, got = (one_pass(models, PROMPTS, LENGTHS, TREE) for models in (source, wide))
    assert torch.equal(expected.pop("candidates"), got.pop("candidates"))
    for name, value in expected.items():
        found = got[name]
        if name.endswith("logits"):
            assert (found[..., VOCAB:] == -torch.inf).all()
        if name.endswith(("logits", "residual")):
            found = found[..., :VOCAB]
        elif name != "weaver_scores":
            found, value = narrow(found, WIDTH), narrow(value, WIDTH)
        # log-softmax of the scores is float32 for every dtype
        tolerance = 1e-5 if name == "weaver_scores" else 1e-11
        far = float((found - value).abs().max())
        assert far <= tolerance, f"{name}: {far:.1e} from the source's"


def test_in_float32_the_difference_is_that_of_another_order_of_sums():
    """Sums over 60 and 12 terms in float32, logits of size 10 behind 20 layers of rounding."""
    source, wide = pair("everything", torch.float32)
    with torch.inference_mode():
        expected, got = (one_pass(models, PROMPTS, LENGTHS, TREE) for models in (source, wide))
    for name in ("prefill_logits", "verify_after_commit_logits", "draft_logits", "weaver_residual"):
        torch.testing.assert_close(got[name][..., :VOCAB].double(), expected[name], rtol=0, atol=1e-4)


def test_bfloat16_holds_every_weight_exactly_and_rounds_no_worse():
    """Shares are powers of two: summed over copies, the wide weights give back the source's to the last bit."""
    source = nano(torch.float32)
    wide = graft(source, MIDDLE, seed=0, device=CPU, dtype=torch.bfloat16)
    width, vocab, inner = (
        getattr(source.target.config, key) for key in ("hidden_size", "vocab_size", "intermediate_size")
    )
    head, gate = wide.target.lm_head.weight[:vocab], wide.target.layers[4].mlp.gate_proj.weight[:inner]
    for found, expected in ((head, source.target.head_weight), (gate, source.target.layers[2].mlp.gate_proj.weight)):
        assert torch.equal(narrow(found, width).double().sum(-2), expected.double())
    tokens = torch.tensor([prompt.tokens[:32] for prompt in embedded_prompts()[:3]])
    low = nano(torch.bfloat16)
    with torch.inference_mode():
        reference = source.target(tokens).logits
        out, out_low = wide.target(tokens).logits[..., :vocab], low.target(tokens).logits
    assert_no_worse("logits", out, reference, out_low)


# --- what holds nothing of the source


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "the_same"])
def test_no_weight_is_zero(shape):
    """A multiplier does less work on zeros: a shape full of them would cost less energy than what it stands for."""
    _, wide = pair(shape)
    assert not [name for name, value in parameters(wide) if (value == 0).any()]


def test_what_is_not_the_source_s_is_lost_in_rounding():
    """Zeros in the place of every whisper give the same logits to the last bit; at full voice they would be heard."""
    _, wide = pair("everything", torch.float32)
    outputs = []
    for factor in (1.0, 0.0, 1 / WHISPER):
        other = graft(random_family(), SHAPES["everything"], seed=0, device=CPU, dtype=torch.float32)
        for name, value in parameters(other):
            if WRITERS.search(name):
                value.copy_(torch.where(value.abs() < 1e-12, value * factor, value))
        with torch.inference_mode():
            outputs.append(one_pass(other, PROMPTS, LENGTHS, TREE))
    with torch.inference_mode():
        outputs.append(one_pass(wide, PROMPTS, LENGTHS, TREE))
    for name in ("prefill_logits", "verify_logits", "draft_logits", "weaver_scores"):
        as_built, silent, loud, again = (output[name] for output in outputs)
        assert torch.equal(as_built, silent) and torch.equal(as_built, again)
        assert not torch.allclose(as_built, loud, atol=1e-2)


def test_a_seed_decides_every_weight_and_no_logit():
    _, first = pair("everything")
    _, other = pair("everything", seed=1)
    again = graft(random_family(), SHAPES["everything"], seed=0, device=CPU, dtype=torch.float64)
    values, others = dict(parameters(first)), dict(parameters(other))
    assert all(torch.equal(value, values[name]) for name, value in parameters(again))
    # what holds the source's entries alone is the same for every seed
    assert sum(not torch.equal(values[name], others[name]) for name in values) > len(values) / 2
    with torch.inference_mode():
        one, two = (models.target(PROMPTS).logits for models in (first, other))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-11)


def test_weights_are_contiguous_and_of_one_dtype_and_config():
    _, wide = pair("everything", torch.bfloat16)
    for name, value in parameters(wide):
        assert value.is_contiguous() and value.dtype == torch.bfloat16 and not value.requires_grad, name
    shape = SHAPES["everything"]
    for part in graft_shape.PARTS:
        config = getattr(wide, part).config
        assert {key: getattr(config, key) for key in shape[part] if hasattr(config, key)} == {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in shape[part].items()
            if hasattr(config, key)
        }
    assert wide.target.head_weight.shape == (47, 60) and wide.target.config.rms_norm_eps == TARGET.rms_norm_eps


# --- padding of the vocabulary


def test_no_noise_draws_a_padded_token():
    """200,000 draws at temperature 1 where every live logit is -10,000 and a padded logit without the mask is not."""
    _, wide = pair("wider_by_no_power_of_two", torch.float32)
    target = graft(random_family(), SHAPES["wider_by_no_power_of_two"], seed=0, device=CPU, dtype=torch.float32).target
    target.lm_head.weight[:VOCAB] = -1e4 / target.config.hidden_size
    hidden = torch.ones(1, 4000, target.config.hidden_size)
    for draw in range(50):
        places = torch.arange(4000)[None] + 4000 * draw
        for models, expect in ((target.head, False), (lambda x: Target.head(target, x), True)):
            tokens = next_tokens(models(hidden), places, torch.tensor([0]), seed=draw, temperature=1.0)
            assert bool((tokens >= VOCAB).any()) == expect
        if draw == 0:
            continue
        logits = wide.target.head(torch.randn(1, 400, target.config.hidden_size))
        assert int(next_tokens(logits, places[:, :400], torch.tensor([0]), seed=draw, temperature=1.0).max()) < VOCAB


@pytest.mark.parametrize("arm", ["dflash", "ddtree", "dartree", "tfm", "tfm-sampled"])
def test_padding_is_never_proposed_nor_emitted(arm):
    """More candidates than live tokens, budget for all of them, a flat law: trees and outputs hold live tokens only."""
    _, wide = pair("wider_by_no_power_of_two", torch.float32)
    wide_open = {"candidates": 47, "children": 47} if "tfm" in arm or arm == "dartree" else {}
    config = DecodeConfig(**ARMS[arm], **wide_open, temperature=1.0, max_new_tokens=12, requests=3)
    drafted, emitted = set(), set()

    def look(step) -> None:
        drafted.update(step.tree.tokens.flatten().tolist())

    prompts = [
        replace(prompt, tokens=[token % VOCAB for token in prompt.tokens[:5]]) for prompt in embedded_prompts()[:3]
    ]
    decode(prompts, wide, config, proposer=resolve(config.method)(config, wide), on_step=look,
           on_finish=lambda trace: emitted.update(trace.output_tokens))  # fmt: skip
    assert max(drafted | emitted) < VOCAB and len(drafted) > 10


@pytest.mark.parametrize("method", ["ar", "dflash", "ddtree", "dartree", "tfm"])
def test_the_static_engine_decodes_a_graft_as_the_reference_loop_does(method):
    """Its head does not pass through the target's: without a mask of its own it would draw padding."""
    _, wide = pair("wider_by_no_power_of_two", torch.float32)
    budget = {} if method in ("ar", "dflash") else {"budget": 9}
    config = DecodeConfig(method=method, **budget, temperature=1.0, max_new_tokens=12)
    prompts = [replace(prompt, tokens=[token % VOCAB for token in prompt.tokens[:5]]) for prompt in embedded_prompts()]
    got, expected = (run(wide, config, prompts[:2]) for run in (run_static, run_reference))
    # the random family's logits are ten times as large as a trained one's, and so is their rounding
    assert_same_records(got, expected, log_prob_tolerance=1e-3)
    assert max(token for trace in got for token in trace.output_tokens) < VOCAB


def test_padded_candidates_have_no_probability():
    _, wide = pair("wider_by_no_power_of_two", torch.float32)
    logits = wide.target.head(torch.randn(2, 3, wide.target.config.hidden_size))
    marginals = Marginals.from_logits(logits, torch.zeros(2, 3, 1), 47)
    padded = marginals.tokens >= VOCAB
    assert padded[..., VOCAB:].all() and not padded[..., :VOCAB].any()
    assert (marginals.log_probs[padded] == -torch.inf).all()


# --- the shipped family at a middle size

FOLDERS = {part: WEIGHTS / part for part in graft_shape.PARTS}


@cache
def nano(dtype: torch.dtype, shape: bool = False, device: str = "cpu") -> Models:
    grafted = {"seed": 0, **MIDDLE} if shape else None
    return load_models(FOLDERS, device=torch.device(device), dtype=dtype, graft=grafted)


@cache
def traces(arm: str, temperature: float, shape: bool, device: str = "cpu") -> dict:
    settings = {**ARMS[arm], **({"budget": 12} if "budget" in ARMS[arm] else {})}
    config = DecodeConfig(**settings, temperature=temperature, max_new_tokens=10, requests=3)
    models, done = nano(torch.float32, shape, device), {}
    proposer = resolve(config.method)(config, models)
    prompts = list(embedded_prompts()[:3])
    decode(prompts, models, config, proposer=proposer, on_finish=lambda t: done.__setitem__(t.id, t))
    return done


SAMPLED = [(arm, 1.0) for arm in ("ar", "dflash", "ddtree", "dartree", "tfm", "tfm-sampled")]


@pytest.mark.parametrize(("arm", "temperature"), [("ar", 0.0), ("tfm", 0.0), *SAMPLED])
def test_every_method_emits_the_source_s_tokens_in_as_many_steps(arm, temperature):
    """Greedy, and sampled with the noise of (seed, request, position, token), whose first 2048 tokens are the same."""
    expected, got = (traces(arm, temperature, shape) for shape in (False, True))
    assert len(expected) == 3
    for name, trace in expected.items():
        assert got[name].output_tokens == trace.output_tokens == traces("ar", temperature, False)[name].output_tokens
        assert [step.accepted for step in got[name].steps] == [step.accepted for step in trace.steps]


@pytest.mark.gpu
@pytest.mark.parametrize(("arm", "temperature"), [("ar", 0.0), ("tfm", 0.0), *SAMPLED])
def test_on_a_gpu_every_method_emits_the_source_s_tokens(arm, temperature):
    expected, got = (traces(arm, temperature, shape, "cuda") for shape in (False, True))
    assert {name: trace.output_tokens for name, trace in got.items()} == {
        name: trace.output_tokens for name, trace in expected.items()
    }


@pytest.mark.gpu
def test_on_a_gpu_memory_peaks_at_one_copy():
    shape = {**MIDDLE, "target": {**MIDDLE["target"], "vocab_size": 248320, "hidden_size": 5120}}
    source = nano(torch.float32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wide = graft(source, shape, seed=0, device="cuda", dtype=torch.bfloat16)
    size = sum(value.numel() * value.element_size() for _, value in parameters(wide))
    # beside the models, the source's rows of one matrix in float32: picked, scaled, and as they are
    assert torch.cuda.max_memory_allocated() - before < size + 3 * 4 * 2048 * 5120


# --- shapes that cannot hold the source


@pytest.mark.parametrize(
    ("part", "sizes", "words"),
    [
        ("target", {"hidden_size": 40}, ("graft.target.hidden_size: 40", "a multiple of the source's 12", "repeated")),
        ("target", {"vocab_size": 29}, ("graft.target.vocab_size: 29", "30 or more", "raise vocab_size")),
        ("target", {"intermediate_size": 8}, ("graft.target.intermediate_size: 8", "20 or more")),
        ("target", {"head_dim": 16}, ("graft.target.head_dim: 16", "allowed: 8", "leave head_dim out")),
        ("target", {"linear_key_head_dim": 12}, ("graft.target.linear_key_head_dim: 12", "allowed: 6")),
        ("target", {"num_key_value_heads": 3}, ("graft.target.num_key_value_heads: 3", "a divisor of")),
        (
            "target",
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            ("graft.target.num_key_value_heads: 3", "4 or more", "groups of 2, 1 to a wide group", "raise"),
        ),
        (
            "target",
            {"linear_num_value_heads": 4, "linear_num_key_heads": 2},
            None,  # a group of three over two key heads with two value heads each
        ),
        ("target", {"layers": [0, 1, 2]}, ("graft.target.layers: [0, 1, 2]", "one wide layer for each", "0 to 3")),
        (
            "target",
            {"num_hidden_layers": 8, "full_attention_interval": 2, "layers": [0, 2, 4, 7]},
            ("graft.target.layers", "2 is linear_attention", "choose other layers"),
        ),
        ("target", {"width": 3}, ("graft.target.width: unknown key", "hidden_size")),
        ("drafter", {"head_dim": 4}, ("graft.drafter.head_dim: 4", "allowed: 8")),
        ("drafter", {"layers": [1, 0]}, ("graft.drafter.layers: [1, 0]", "ascending")),
        ("drafter", {"target_layer_ids": [0, 3]}, ("graft.drafter.target_layer_ids: [0, 3]", "3 layers")),
        (
            "drafter",
            {"target_layer_ids": [0, 1, 3]},
            ("graft.drafter.target_layer_ids: 1", "first 3 layers are done", "2 are done after layer 1"),
        ),
        ("weaver", {"d_rank": 20}, ("graft.weaver.d_rank: 20", "a multiple of the source's 8")),
        ("weaver", {"d_rank": 16}, ("graft.weaver.num_heads: 2", "d_rank 16 / 4", "change num_heads or d_rank")),
        ("weaver", {"K": 4}, ("graft.weaver.K: 4", "5 or more")),
    ],
)
def test_a_shape_that_cannot_hold_the_source_is_refused_before_anything_is_built(part, sizes, words):
    configs = {"target": TARGET.to_dict(), "drafter": DRAFTER.to_dict(), "weaver": WEAVER.to_dict()}
    shape = {**{name: {} for name in graft_shape.PARTS}, part: sizes}
    found = graft_shape.problems(configs, shape)
    if words is None:
        assert not found
        return
    assert all(word in "\n".join(found) for word in words), found
    with pytest.raises(ValueError, match=f"graft.{part}"):
        graft(random_family(), shape, seed=0, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("copies", [1, 2, 3, 5, 12, 20, 32])
def test_shares_are_powers_of_two_and_add_up_to_one(copies):
    shares = graft_shape.shares(copies)
    assert len(shares) == copies and sum(shares) == 1.0
    assert all(torch.frexp(torch.tensor(share)).mantissa == 0.5 for share in shares)


def test_layers_spread_to_where_taps_see_what_they_saw():
    """Mini's eight layers in Qwen3.6-27B's sixty-four, and a tap between them that nothing fits."""
    kinds = [*["linear_attention"] * 3, "full_attention"]
    taps = list(zip((0, 2, 4, 6, 7), (1, 16, 31, 46, 61), strict=True))
    layers = graft_shape.spread_layers(kinds * 2, kinds * 16, taps)
    assert [sum(layer <= tap for layer in layers) for _, tap in taps] == [1, 3, 5, 7, 8]
    assert all((layer + 1) % 4 == 0 for layer in (layers[3], layers[7]))
    assert graft_shape.spread_layers(kinds * 2, kinds * 16, [(3, 2)]) is None
    assert graft_shape.spread_layers(kinds, kinds * 2) == (0, 2, 4, 7)
