"""The Triton kernels in the target: verify and commit choose the tokens of solve."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: .ci/run tests it in a venv of its own")
from test_triton import BACKENDS, DEVICE, DIM, HEADS, VALUE_HEADS, error, pytestmark, random_parents  # noqa: E402, F401


def toy_target():
    from tfm.target import Target
    from tfm.target_config import TargetConfig

    config = TargetConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        layer_types=("linear_attention", "linear_attention", "full_attention"),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=DIM,
        linear_value_head_dim=DIM,
        rope_theta=1e4,
    )
    target = Target(config)
    for name, parameter in target.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.2)
        elif "norm" in name or "dt_bias" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return target.to(DEVICE).eval().requires_grad_(False)


def follow(target, backend, prompt, trees):
    """Verify and commit one tree after another along the target's own greedy choices; the logits of every tree."""
    cache, logits = target.new_cache(len(prompt), 120), []
    target.prefill(prompt, torch.full((len(prompt),), prompt.shape[1], device=DEVICE), cache)
    for tree in trees:
        output = target.verify(tree, cache, gdn_backend=backend)
        logits.append(output.logits)
        best, path = output.logits.argmax(-1).tolist(), []
        for request, parents in enumerate(tree.parents.tolist()):
            # the child that the target's best token leads to, or any child: paths of some length are wanted here
            node, walk = 0, [0]
            while children := [i for i, parent in enumerate(parents) if parent == node]:
                node = next((i for i in children if int(tree.tokens[request, i]) == best[request][node]), children[-1])
                walk.append(node)
            path.append(walk)
        width = max(map(len, path))
        padded = [walk + [-1] * (width - len(walk)) for walk in path]
        cache.commit(output.scratch, torch.tensor(padded, device=DEVICE))
    return logits


@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_and_commit_in_the_target_choose_the_tokens_of_solve(backend):
    """Four steps with two requests; a first difference would need two logits within 1e-4 of each other."""
    from tfm.tree import DraftTree

    target, trees = toy_target(), []
    for seed in range(4):
        tokens = torch.stack(
            [torch.randperm(64, generator=torch.Generator().manual_seed(seed + i))[:21] for i in (0, 9)]
        )
        trees.append(DraftTree.build(tokens.to(DEVICE), random_parents(21, seed, requests=2).to(DEVICE)))
    prompt = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected, got = (follow(target, name, prompt, trees) for name in ("solve", backend))
    for one, other in zip(expected, got, strict=True):
        assert error(one, other) < 1e-4
        best, second = one.topk(2, dim=-1).values.unbind(-1)
        assert torch.equal(one.argmax(-1)[best - second > 1e-4], other.argmax(-1)[best - second > 1e-4])
        assert int((best - second <= 1e-4).sum()) <= 1
