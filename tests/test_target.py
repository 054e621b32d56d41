"""The target: equal to transformers, blind to its cache's past, and the same whatever tree it is asked about."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tfm.target import Target, TargetConfig
from tfm.tree import DraftTree

CONFIG = TargetConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    layer_types=("linear_attention", "linear_attention", "full_attention"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    rope_theta=1e4,
)


def toy_target(dtype=torch.float64, seed=0, taps=(0, 2)) -> Target:
    """The toy model of the cases: two GDN layers and one attention layer, vocabulary 128, width 64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = Target(CONFIG, taps)
        for name, parameter in target.named_parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.15)
            elif "norm" in name or "dt_bias" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return target.to(dtype).eval().requires_grad_(False)


def prefilled(target, prompt, room=80):
    cache = target.new_cache(len(prompt), prompt.shape[1] + room)
    target.prefill(prompt, torch.full((len(prompt),), prompt.shape[1]), cache)
    return cache


def draw_tokens(*shape, seed=0, vocab=128):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def random_tree(nodes: int, seed: int, requests: int = 1) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    parents, tokens = [], []
    for _ in range(requests):
        row = [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes))]
        seen: dict[int, int] = {}
        tokens.append([int(torch.randint(0, 128, (1,), generator=generator))])
        for parent in row[1:]:
            seen[parent] = seen.get(parent, -1) + 1
            tokens[-1].append((17 * parent + 5 * seen[parent] + seed) % 128)
        parents.append(row)
    return DraftTree.build(torch.tensor(tokens), torch.tensor(parents))


def path_to(tree: DraftTree, node: int, request: int = 0) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[request, node])
    return path


def hugging_face_twin(**changes):
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
        linear_value_head_dim=16, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]
        },
    )  # fmt: skip
    config = transformers.Qwen3_5TextConfig(**{**sizes, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        reference = transformers.Qwen3_5ForCausalLM(config).eval()
        for name, parameter in reference.named_parameters():
            if "norm" in name or "dt_bias" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
            elif parameter.dim() > 1:
                parameter.data.mul_(4)
    target = Target(TargetConfig.from_dict(config.to_dict()), (1, 3))
    names = {key.removeprefix("model."): value for key, value in reference.state_dict().items()}
    if config.tie_word_embeddings:
        names.pop("lm_head.weight")
    target.load_state_dict(names)
    return reference, target.eval()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="untied"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"linear_num_value_heads": 2, "num_key_value_heads": 4}, id="no_grouping"),
        pytest.param({"linear_conv_kernel_dim": 3, "linear_value_head_dim": 24}, id="other_conv_and_value_dim"),
        pytest.param({"layer_types": ["full_attention", "linear_attention"] * 2}, id="other_layer_order"),
    ],
)
def test_equals_transformers_in_prefill_and_step_by_step(changes):
    reference, target = hugging_face_twin(**changes)
    tokens = draw_tokens(2, 90, vocab=96)
    with torch.inference_mode():
        expected = reference(tokens, output_hidden_states=True)
        output = target(tokens)
        assert torch.allclose(output.logits, expected.logits, atol=1e-4)
        # tap index: the output of layer id is entry id + 1 of hidden_states; the last entry there is after the norm
        assert torch.allclose(output.taps[..., :48], expected.hidden_states[2], atol=1e-4)
        assert torch.allclose(output.hidden, expected.hidden_states[-1], atol=1e-4)
        cache = target.new_cache(2, 90)
        lengths = torch.tensor([70, 41])
        first = target.prefill(tokens[:, :70], lengths, cache)
        for row, length in enumerate(lengths.tolist()):
            assert torch.allclose(first.logits[row, 0], expected.logits[row, length - 1], atol=1e-4)
        for step in range(20):
            at = lengths + step
            roots = tokens[torch.arange(2), at]
            output = target.verify(DraftTree.root_only(roots), cache)
            cache.commit(output.scratch, torch.zeros(2, 1, dtype=torch.int64))
            for row in range(2):
                assert torch.allclose(output.logits[row, 0], expected.logits[row, at[row]], atol=1e-4)


def test_is_at_least_as_close_to_float64_as_transformers_is():
    reference, target = hugging_face_twin()
    tokens = draw_tokens(1, 150, vocab=96)
    with torch.inference_mode():
        exact = Target(target.config).double()
        exact.load_state_dict(target.state_dict())
        truth = exact(tokens).logits
        ours, theirs = (target(tokens).logits - truth).abs().max(), (reference(tokens).logits - truth).abs().max()
    assert ours <= 2 * theirs + 1e-6


@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 40))
def test_verify_of_any_node_equals_replaying_its_path(seed, nodes, length):
    target = toy_target()
    prompt, tree = draw_tokens(1, length, seed=seed), random_tree(nodes, seed)
    output = target.verify(tree, prefilled(target, prompt))
    for node in {0, nodes // 2, nodes - 1}:
        path = path_to(tree, node)
        replay = target(torch.cat([prompt, tree.tokens[:, path]], dim=1))
        assert torch.allclose(output.logits[0, node], replay.logits[0, -1], atol=1e-9)
        assert torch.allclose(output.hidden[0, node], replay.hidden[0, -1], atol=1e-9)
        assert torch.allclose(output.taps[0, node], replay.taps[0, -1], atol=1e-9)


def cache_tensors(cache):
    return [getattr(layer, name) for layer in cache.layers for name in vars(layer)] + [cache.lengths]


@given(st.integers(0, 10**6), st.integers(1, 16), st.integers(1, 30))
def test_commit_of_any_path_equals_replay(seed, nodes, length):
    target = toy_target()
    prompt, tree = draw_tokens(1, length, seed=seed), random_tree(nodes, seed)
    path = path_to(tree, (seed // 7) % nodes)
    cache = prefilled(target, prompt, room=40)
    cache.commit(target.verify(tree, cache).scratch, torch.tensor([path]))
    replay = target.new_cache(1, length + 40)
    line = torch.cat([prompt, tree.tokens[:, path]], dim=1)
    target.prefill(line, torch.tensor([line.shape[1]]), replay)
    assert cache.lengths.item() == line.shape[1]
    for got, expected in zip(cache_tensors(cache), cache_tensors(replay), strict=True):
        assert torch.allclose(got.double(), expected.double(), atol=1e-9)


def test_commit_of_non_contiguous_nodes_keeps_their_rows_in_order():
    """C011: path 0, 3, 4, 5: the KV rows kept are those four, in that order."""
    target = toy_target()
    tree = DraftTree.build(torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 0, 3, 4]]))
    cache = prefilled(target, draw_tokens(1, 9))
    output = target.verify(tree, cache)
    cache.commit(output.scratch, torch.tensor([[0, 3, 4, 5]]))
    kept = cache.layers[2].keys[0, :, 9:13]
    assert torch.equal(kept, output.scratch[2].keys[0][:, [0, 3, 4, 5]])
    assert not cache.layers[2].keys[0, :, 13:].any()


def test_verify_reads_the_cache_and_never_writes_it():
    target = toy_target(torch.float32)
    cache = prefilled(target, draw_tokens(1, 12))
    before = [x.clone() for x in cache_tensors(cache)]
    first = target.verify(random_tree(64, 1), cache)
    small = target.verify(random_tree(7, 2), cache)
    again = target.verify(random_tree(64, 1), cache)
    assert all(torch.equal(a, b) for a, b in zip(before, cache_tensors(cache), strict=True))
    # C007: nothing stale after trees of other sizes
    assert torch.equal(first.logits, again.logits)
    assert torch.equal(small.logits, target.verify(random_tree(7, 2), prefilled(target, draw_tokens(1, 12))).logits)


def test_a_block_after_a_prefix_equals_one_token_at_a_time():
    """C005: prefix of 37, then five tokens (a) one by one and (b) as one block."""
    target, prompt, block = toy_target(torch.float32), draw_tokens(1, 37), draw_tokens(1, 5, seed=1)
    stepped, whole = prefilled(target, prompt), prefilled(target, prompt)
    logits = []
    for token in block[0]:
        output = target.verify(DraftTree.root_only(token[None]), stepped)
        stepped.commit(output.scratch, torch.tensor([[0]]))
        logits.append(output.logits[0, 0])
    output = target.verify(DraftTree.build(block, torch.tensor([[-1, 0, 1, 2, 3]])), whole)
    whole.commit(output.scratch, torch.tensor([[0, 1, 2, 3, 4]]))
    assert (torch.stack(logits) - output.logits[0]).abs().max() < 1e-4
    for a, b in zip(cache_tensors(stepped), cache_tensors(whole), strict=True):
        assert (a - b).abs().max() < 1e-4


def test_keeping_two_of_five_verified_tokens_equals_a_fresh_run_over_them():
    """C004: there is nothing to roll back: what is not committed was never written."""
    target, prompt, block = toy_target(torch.float32), draw_tokens(1, 20), draw_tokens(1, 5, seed=1)
    cache = prefilled(target, prompt)
    output = target.verify(DraftTree.build(block, torch.tensor([[-1, 0, 1, 2, 3]])), cache)
    cache.commit(output.scratch, torch.tensor([[0, 1]]))
    fresh = target.new_cache(1, 100)
    target.prefill(torch.cat([prompt, block[:, :2]], dim=1), torch.tensor([22]), fresh)
    for a, b in zip(cache_tensors(cache), cache_tensors(fresh), strict=True):
        assert (a - b).abs().max() < 1e-4


def test_requests_of_a_batch_do_not_see_each_other():
    target = toy_target()
    prompts = [draw_tokens(length, seed=length) for length in (5, 17, 1)]
    padded = torch.stack([torch.nn.functional.pad(prompt, (0, 17 - len(prompt))) for prompt in prompts])
    cache = target.new_cache(3, 40)
    first = target.prefill(padded, torch.tensor([5, 17, 1]), cache)
    tree = random_tree(12, 3, requests=3)
    output = target.verify(tree, cache)
    cache.commit(output.scratch, torch.tensor([path_to(tree, 0, 0) + [-1], [-1, -1], [0, -1]]))
    assert cache.lengths.tolist() == [6, 17, 2]
    for row, prompt in enumerate(prompts):
        alone = target.new_cache(1, 40)
        expected = target.prefill(prompt[None], torch.tensor([len(prompt)]), alone)
        assert torch.allclose(first.logits[row], expected.logits[0], atol=1e-10)
        single = DraftTree.build(tree.tokens[row : row + 1], tree.parents[row : row + 1])
        assert torch.allclose(output.logits[row], target.verify(single, alone).logits[0], atol=1e-10)


def test_padding_nodes_change_no_real_node():
    target, prompt = toy_target(), draw_tokens(1, 8)
    tree = random_tree(6, 1)
    pad = torch.full((1, 3), -1)
    padded = DraftTree.build(
        torch.cat([tree.tokens, pad * 0], dim=1), torch.cat([tree.parents, pad], dim=1), num_nodes=torch.tensor([6])
    )
    cache = prefilled(target, prompt)
    assert torch.allclose(target.verify(padded, cache).logits[:, :6], target.verify(tree, cache).logits, atol=1e-12)


def test_a_full_cache_refuses_before_it_writes():
    target = toy_target(torch.float32)
    cache = target.new_cache(1, 10)
    target.prefill(draw_tokens(1, 9), torch.tensor([9]), cache)
    output = target.verify(random_tree(3, 0), cache)
    before = [x.clone() for x in cache_tensors(cache)]
    with pytest.raises(ValueError, match="exceeds 10 rows; make the cache with a larger max_tokens"):
        cache.commit(output.scratch, torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="path: .*nodes 0 to 2"):
        cache.commit(output.scratch, torch.tensor([[0, 3]]))
    assert all(torch.equal(a, b) for a, b in zip(before, cache_tensors(cache), strict=True))


@pytest.mark.parametrize(("path", "kept"), [([0], 1), ([0, 1, 2, 3, 4], 5)], ids=["no_draft", "every_draft"])
def test_commit_takes_no_draft_and_every_draft_and_refuses_one_more(path, kept):
    """vllm#50021, vllm#40756, vllm#41190: an accepted count taken for an index without bounds reads past the tree."""
    target, prompt = toy_target(torch.float32), draw_tokens(1, 6)
    cache, line = prefilled(target, prompt), draw_tokens(1, 5, seed=1)
    output = target.verify(DraftTree.build(line, torch.tensor([[-1, 0, 1, 2, 3]])), cache)
    before = [x.clone() for x in cache_tensors(cache)]
    for wrong in ([0, 1, 2, 3, 4, 5], [0, -1, 2], [5], [-2]):
        with pytest.raises(ValueError, match=r"path: .*nodes 0 to 4, then -1 as padding"):
            cache.commit(output.scratch, torch.tensor([wrong]))
        assert all(torch.equal(a, b) for a, b in zip(before, cache_tensors(cache), strict=True))
    cache.commit(output.scratch, torch.tensor([path]))
    fresh = prefilled(target, torch.cat([prompt, line[:, :kept]], dim=1), room=80 - kept)
    for got, expected in zip(cache_tensors(cache), cache_tensors(fresh), strict=True):
        assert torch.allclose(got, expected, atol=1e-4)


def test_prefill_refuses_empty_prompts_and_used_caches():
    target = toy_target(torch.float32)
    cache = target.new_cache(2, 10)
    with pytest.raises(ValueError, match="lengths: .*0"):
        target.prefill(draw_tokens(2, 4), torch.tensor([4, 0]), cache)
    target.prefill(draw_tokens(2, 4), torch.tensor([4, 2]), cache)
    with pytest.raises(ValueError, match="needs a new one"):
        target.prefill(draw_tokens(2, 4), torch.tensor([4, 2]), cache)


def test_the_config_names_what_is_missing_or_unsupported():
    raw = {"hidden_size": 64, "vocab_size": 128, "num_hidden_layers": 4}
    with pytest.raises(ValueError, match="missing intermediate_size, num_attention_heads"):
        TargetConfig.from_dict(raw)
    with pytest.raises(ValueError, match="rope_type 'yarn' is not supported"):
        TargetConfig.from_dict({**raw, "rope_parameters": {"rope_type": "yarn"}})
    with pytest.raises(ValueError, match="layer_types"):
        TargetConfig.from_dict({**raw, "layer_types": ["mamba"]})


def test_a_multimodal_config_gives_its_text_config():
    text = {name: getattr(CONFIG, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
    text |= {name: getattr(CONFIG, name) for name in vars(CONFIG) if name.startswith(("linear_", "num_"))}
    text |= {"num_hidden_layers": 8, "full_attention_interval": 4, "tie_word_embeddings": False}
    config = TargetConfig.from_dict({"text_config": text, "tie_word_embeddings": True})
    assert config.tie_word_embeddings  # the outer entry decides, as in transformers
    assert config.layer_types.count("full_attention") == 2
    assert config.layer_types[3] == "full_attention"


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_tap_behind_the_layers_is_refused_when_the_target_is_made(layer):
    with pytest.raises(ValueError, match=f"tap_layers: {layer} is not allowed .allowed: 0 to 2, .*take the drafter"):
        toy_target(torch.float32, taps=(0, layer))
