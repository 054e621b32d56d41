"""A small random family and the comparison of records that the tests of the static engine share."""

from dataclasses import asdict

import pytest
import torch

from baselines.methods import METHODS, resolve
from baselines.static_methods import make_static_proposer
from tfm.decode import Models, Prompt, decode
from tfm.drafter import Drafter, DrafterConfig
from tfm.engine.forms import Forms
from tfm.engine.loop import Engine
from tfm.target import Target
from tfm.target_config import TargetConfig
from tfm.weaver import Weaver, WeaverConfig

VOCAB = 96


def random_family(*, hidden=32, head_dim=16, gdn_dim=8, heads=(4, 2), gdn_heads=(1, 3), vocab=VOCAB, block=6, seed=0):
    """Models with every feature: gated attention, GDN, sliding and full drafter layers, two weaver blocks."""
    target = Target(
        TargetConfig(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            layer_types=("linear_attention", "full_attention", "linear_attention", "full_attention"),
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            head_dim=head_dim,
            linear_num_key_heads=gdn_heads[0],
            linear_num_value_heads=gdn_heads[1],
            linear_key_head_dim=gdn_dim,
            linear_value_head_dim=gdn_dim,
            rope_theta=1e4,
        ),
        (0, 3),
    )
    drafter = Drafter(
        DrafterConfig(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            head_dim=head_dim,
            layer_types=("sliding_attention", "full_attention"),
            target_layer_ids=(0, 3),
            mask_token_id=5,
            block_size=block,
            sliding_window=11,
        )
    )
    weaver = Weaver(
        WeaverConfig(
            d_model=hidden, d_embed=hidden, d_rank=hidden, num_heads=2, mlp_dim=2 * hidden, num_layers=2, K=block - 1
        )
    )
    generator = torch.Generator().manual_seed(seed)
    for part, scale in ((target, 2.5), (drafter, 1.0), (weaver, 1.0)):
        for name, parameter in part.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.data.copy_(noise * scale / parameter.shape[-1] ** 0.5)
            elif "A_log" not in name:
                parameter.data.add_(0.1 * noise)
    return Models(*(part.eval().requires_grad_(False) for part in (target, drafter, weaver)))


def prompts_of(models, lengths=(5, 19, 42)):
    generator = torch.Generator().manual_seed(1)
    vocab = models.target.config.vocab_size
    rows = [torch.randint(6, vocab, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(f"p{i}", i, row) for i, row in enumerate(rows)]


def parts_of(models, config):
    parts = METHODS[config.method].parts_for(config)
    return Models(models.target, *(getattr(models, part) if part in parts else None for part in ("drafter", "weaver")))


def run_reference(models, config, prompts):
    done, models = [], parts_of(models, config)
    decode(prompts, models, config, proposer=resolve(config.method)(config, models), on_finish=done.append, traced=True)
    return done


def make_engine(models, config, prompts, clock="off", **forms):
    models, forms = parts_of(models, config), Forms(**forms)
    capacity = max(len(prompt.tokens) for prompt in prompts) + config.max_new_tokens
    proposer = make_static_proposer(config, models, forms)
    return Engine(models, config, proposer=proposer, capacity=capacity, forms=forms, clock=clock)


def run_static(models, config, prompts, clock="off", **forms):
    done = []
    make_engine(models, config, prompts, clock, **forms).decode(prompts, on_finish=done.append, traced=True)
    return done


def assert_same_records(got, expected, log_prob_tolerance=2e-5):
    """Tokens, finish reasons, every step's counts and every tree are equal; log-probabilities up to rounding.

    Nodes are compared by their path: two that are equally probable within the tolerance may stand in either order.
    """
    assert [trace.output_tokens for trace in got] == [trace.output_tokens for trace in expected]
    for one, other in zip(got, expected, strict=True):
        assert (one.id, one.prompt_tokens, one.finish_reason) == (other.id, other.prompt_tokens, other.finish_reason)
        for left, right in zip(one.steps, other.steps, strict=True):
            left, right = asdict(left), asdict(right)
            bounds = [row.pop("expected_accepted") for row in (left, right)]
            assert left | {"stage_us": None} == right | {"stage_us": None}
            assert bounds[0] == pytest.approx(bounds[1], abs=1e-4, nan_ok=True)
        left, right = (_by_path(trace.trees, ordered=log_prob_tolerance == 0) for trace in (one, other))
        assert left.keys() == right.keys()
        for path, (log_prob, facts) in left.items():
            assert facts == right[path][1]
            assert log_prob == pytest.approx(right[path][0], abs=log_prob_tolerance)


def _by_path(trees, *, ordered: bool) -> dict:
    """Return (step, tokens from the root) -> (log-probability, the node's other facts); its number and its parent's
    are among them when `ordered`."""
    paths, found = {}, {}
    for node in trees:
        path = (*paths.get((node.step, node.parent), ()), node.token)
        paths[node.step, node.node] = path
        numbers = (node.node, node.parent) if ordered else ()
        assert (node.step, path) not in found
        found[node.step, path] = (node.log_prob, (node.depth, node.accepted, *numbers))
    return found
