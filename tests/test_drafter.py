"""The drafter: its block, its cache, and that training and decoding compute the same rows."""

import pytest
import torch

from tfm.drafter import Drafter, DrafterConfig, init_drafter

VOCAB, HIDDEN, MASK = 50, 16, 49


class LentTarget:
    """Embedding and head, all that the drafter takes from a target."""

    def __init__(self, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)

    def embed(self, tokens):
        return self.weight[tokens]

    def head(self, hidden):
        return hidden @ self.weight.T


def make_drafter(*, window: int = 6, swa_causal: bool = True, block_size: int = 5, seed: int = 1) -> Drafter:
    config = DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=("sliding_attention", "full_attention"),
        target_layer_ids=(0, 2),
        mask_token_id=MASK,
        block_size=block_size,
        sliding_window=window,
        swa_causal=swa_causal,
        rope_theta=1e4,
        initializer_range=0.3,
    )
    drafter = Drafter(config).double()
    init_drafter(drafter, seed)
    return drafter


def random_taps(requests: int, length: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(requests, length, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drafted(drafter, taps, lengths, roots, target):
    """Logits and hidden of `draft` after committing lengths[r] taps of each request."""
    cache = drafter.new_cache(len(lengths), taps.shape[1] + 1)
    drafter.append(taps, torch.tensor(lengths), cache)
    return drafter.draft(torch.tensor(roots), cache, target)


def test_block_of_a_committed_token_is_itself_and_fifteen_masks():
    """C023."""
    drafter = make_drafter(block_size=16)
    ids, positions = drafter.block_input(torch.tensor([42]), torch.tensor([7]))
    assert ids.tolist() == [[42] + [MASK] * 15]
    assert positions.tolist() == [list(range(7, 23))]
    assert drafter.draft_rows == 15


@pytest.mark.parametrize("swa_causal", [True, False])
def test_training_form_equals_draft(swa_causal):
    drafter, target, length = make_drafter(swa_causal=swa_causal), LentTarget(), 12
    taps = random_taps(2, length)
    anchors = torch.tensor([[3, 7, 11], [0, 5, 11]])
    roots = torch.tensor([[4, 9, 2], [8, 8, 1]])
    hidden = drafter.forward_blocks(taps, anchors, roots, target)
    for place in range(3):
        lengths, own = anchors[:, place].tolist(), roots[:, place].tolist()
        logits, expected = drafted(drafter, taps, lengths, own, target)
        torch.testing.assert_close(hidden[:, place], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(target.head(hidden[:, place]), logits, rtol=1e-10, atol=1e-10)


def test_appending_in_pieces_equals_appending_at_once():
    drafter, target, taps = make_drafter(), LentTarget(), random_taps(2, 9)
    expected, _ = drafted(drafter, taps, [9, 6], [3, 4], target)
    cache = drafter.new_cache(2, 16)
    drafter.append(taps[:, :4], torch.tensor([4, 4]), cache)
    drafter.append(torch.stack([taps[0, 4:7], taps[1, 3:6]]), torch.tensor([3, 0]), cache)
    drafter.append(torch.stack([taps[0, 7:9], taps[1, 4:6]]), torch.tensor([2, 2]), cache)
    assert cache.lengths.tolist() == [9, 6]
    logits, _ = drafter.draft(torch.tensor([3, 4]), cache, target)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_rows_do_not_depend_on_the_other_requests():
    drafter, target, taps = make_drafter(), LentTarget(), random_taps(3, 10)
    together, _ = drafted(drafter, taps, [10, 2, 0], [1, 2, 3], target)
    for request, (length, root) in enumerate([(10, 1), (2, 2), (0, 3)]):
        alone, _ = drafted(drafter, taps[request : request + 1], [length], [root], target)
        torch.testing.assert_close(together[request : request + 1], alone, rtol=1e-10, atol=1e-10)


def test_draft_reads_the_cache_and_does_not_write_it():
    drafter, target = make_drafter(), LentTarget()
    cache = drafter.new_cache(1, 8)
    drafter.append(random_taps(1, 5), torch.tensor([5]), cache)
    keys, values = cache.keys.clone(), cache.values.clone()
    drafter.draft(torch.tensor([1]), cache, target)
    assert torch.equal(cache.keys, keys) and torch.equal(cache.values, values) and cache.lengths.tolist() == [5]


def test_first_sliding_layer_sees_its_window_only():
    # with sliding layers alone, taps further back than window - 1 positions from row 0 change nothing
    drafter, target, taps = make_drafter(window=4), LentTarget(), random_taps(1, 12)
    drafter.layers = drafter.layers[:1]
    _, before = drafted(drafter, taps, [12], [5], target)
    changed = taps.clone()
    changed[:, :9] += 1.0  # row 0 is mask 1 at position 13: it sees positions 10 to 13
    _, after = drafted(drafter, changed, [12], [5], target)
    assert torch.equal(before, after)
    changed[:, 10] += 1.0
    _, after = drafted(drafter, changed, [12], [5], target)
    assert not torch.allclose(before[:, 0], after[:, 0])
    assert torch.equal(before[:, 1:], after[:, 1:])


@pytest.mark.parametrize(("swa_causal", "changes"), [(True, False), (False, True)])
def test_causal_sliding_layer_hides_later_masks(swa_causal, changes):
    drafter, target, taps = make_drafter(swa_causal=swa_causal), LentTarget(), random_taps(1, 4)
    drafter.layers = drafter.layers[:1]
    ids, positions = drafter.block_input(torch.tensor([3]), torch.tensor([4]))
    table = drafter._table(torch.arange(4)[None])
    contexts = [drafter.layers[0].self_attn.keys_values(drafter.context_features(taps), table)]
    starts, blocks = torch.full_like(ids, 4), torch.zeros_like(ids)
    embeds = target.embed(ids)
    before = drafter._run(embeds, positions, starts, blocks, contexts)
    embeds[:, -1] += 1.0
    after = drafter._run(embeds, positions, starts, blocks, contexts)
    assert torch.equal(before[:, :-1], after[:, :-1]) != changes


def test_full_layer_is_bidirectional_inside_the_block():
    drafter, target = make_drafter(), LentTarget()
    drafter.layers = drafter.layers[1:]
    ids, positions = drafter.block_input(torch.tensor([3]), torch.tensor([0]))
    empty = torch.zeros(1, 2, 0, 8, dtype=torch.float64)
    starts, blocks = torch.zeros_like(ids), torch.zeros_like(ids)
    embeds = target.embed(ids)
    before = drafter._run(embeds, positions, starts, blocks, [(empty, empty)])
    embeds[:, -1] += 1.0
    after = drafter._run(embeds, positions, starts, blocks, [(empty, empty)])
    assert not torch.allclose(before[:, 0], after[:, 0])


def test_outgrown_cache_is_an_error_with_the_numbers():
    drafter = make_drafter()
    cache = drafter.new_cache(1, 4)
    with pytest.raises(ValueError, match="holds 4 tokens, 5 are committed"):
        drafter.append(random_taps(1, 5), torch.tensor([5]), cache)


def test_config_survives_a_round_trip():
    config = make_drafter().config
    assert DrafterConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention", "linear_attention"]}, r"layer_types\[1\]: 'linear_attention'"),
        ({"sliding_window": None}, "sliding_window: None"),
        ({"num_hidden_layers": 3}, "num_hidden_layers: 3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3"),
        ({"block_size": 1}, "block_size: 1"),
        ({"dflash_config": {"mask_token_id": 3}}, "no target_layer_ids"),
        ({"dflash_config": None}, "dflash_config: None is not allowed"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": 1}}, "target_layer_ids: 1 is not allowed"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1]}}, r"target_layer_ids\[0\]: -1"),
        ({"dflash_config": {"mask_token_id": -5, "target_layer_ids": [0]}}, "mask_token_id: -5 is not allowed"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0], "swa_causal": "false"}},
            "swa_causal: 'false' is not allowed",
        ),
        ({"layer_types": None, "num_hidden_layers": None}, r"layer_types: \(\) is not allowed"),
        ({"layer_types": [["full_attention"]] * 2}, r"layer_types\[0\]: \['full_attention'\]"),
        ({"num_attention_heads": "a"}, "num_attention_heads: 'a' is not allowed"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0 is not allowed"),
        ({"sliding_window": "8"}, "sliding_window: '8' is not allowed"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps: 'x' is not allowed"),
        ({"rope_theta": -1.0}, "rope_theta: -1.0 is not allowed"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type: 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling.rope_type: 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5.0}}, "rope_parameters.rope_type: 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "keys of rope_parameters: "),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor: 0.5"),
        ({"rope_scaling": "yarn"}, "rope_scaling: 'yarn' is not allowed"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
    ],
)
def test_bad_config_is_an_error_naming_the_key(change, message):
    with pytest.raises(ValueError, match=f"{message}.*; (take|use|a DFlash config.json holds)"):
        DrafterConfig.from_dict(make_drafter().config.to_dict() | change)


def test_default_rope_and_nulls_are_what_their_absence_is():
    raw = make_drafter().config.to_dict()
    theta = raw.pop("rope_theta")
    rope = {"rope_type": "default", "rope_theta": theta}
    same = raw | {"rope_parameters": rope, "rope_scaling": None, "hidden_act": None, "attention_bias": None}
    assert DrafterConfig.from_dict(same) == make_drafter().config
    bare = {key: value for key, value in same.items() if key not in ("head_dim", "num_key_value_heads")}
    config = DrafterConfig.from_dict(bare | {"layer_types": None})
    assert (config.head_dim, config.num_key_value_heads) == (HIDDEN // 4, 4)
    assert config.layer_types == ("full_attention",) * 2
