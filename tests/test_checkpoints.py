"""Checkpoint formats: round trips, public names, and errors that name the tensor, the shapes, the file, the remedy."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tfm import checkpoints
from tfm.drafter import Drafter, DrafterConfig, init_drafter
from tfm.target import Target, TargetConfig
from tfm.weaver import Weaver, WeaverConfig, init_weaver

TARGET = TargetConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    layer_types=("linear_attention", "full_attention"),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    rope_theta=1e4,
    tie_word_embeddings=True,
    eos_token_id=(2,),
)
DRAFTER = DrafterConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    layer_types=("sliding_attention", "full_attention"),
    target_layer_ids=(0, 1),
    mask_token_id=5,
    block_size=4,
    sliding_window=8,
)
WEAVER = WeaverConfig(d_model=16, d_embed=16, d_rank=8, num_heads=2, mlp_dim=12, K=3, candidate_pool_size=4)


def make_target(config: TargetConfig = TARGET) -> Target:
    generator = torch.Generator().manual_seed(0)
    target = Target(config)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).bfloat16() * 0.25)
    return target


def make_weaver() -> Weaver:
    weaver = Weaver(WEAVER)
    init_weaver(weaver, 1, std=0.25)
    return weaver


def make_drafter() -> Drafter:
    drafter = Drafter(DRAFTER)
    init_drafter(drafter, 1)
    return drafter


def assert_same_weights(model, other, *, dtype=torch.bfloat16):
    assert list(model.state_dict()) == list(other.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to(dtype).float(), other.state_dict()[name].float()), name


def rewrite(directory, change):
    """Apply `change` to the stored tensors, by name."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def shard(directory):
    """Split the single file in two, with an index; return the names of each shard."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    return shards


@pytest.mark.parametrize("tied", [True, False])
def test_target_survives_a_round_trip_in_bfloat16(tmp_path, tied):
    config = TargetConfig(**{**TARGET.__dict__, "tie_word_embeddings": tied})
    target = make_target(config)
    checkpoints.save_target(target, tmp_path)
    loaded = checkpoints.load_target(tmp_path, tap_layers=(1,))
    assert_same_weights(target, loaded)
    assert loaded.config == config and loaded.tap_layers == (1,)
    assert loaded.embed_weight.dtype == torch.float32
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.linear_attn.A_log" in stored and ("lm_head.weight" in stored) != tied
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_saved_target_is_what_transformers_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    target = make_target()
    checkpoints.save_target(target, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.tensor([[1, 5, 9, 3, 30, 2, 7]])
    with torch.no_grad():
        expected, found = theirs(tokens).logits, checkpoints.load_target(tmp_path)(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_target_is_read_under_every_public_prefix(tmp_path, prefix):
    target = make_target()
    checkpoints.save_target(target, tmp_path)

    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    assert_same_weights(target, checkpoints.load_target(tmp_path))


def test_vision_and_mtp_tensors_are_skipped_and_named(tmp_path, caplog):
    target = make_target()
    checkpoints.save_target(target, tmp_path)
    extra = {"model.visual.patch.weight": torch.zeros(2), "mtp.layers.0.fc.weight": torch.zeros(2)}
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.INFO, logger="tfm.checkpoints"):
        assert_same_weights(target, checkpoints.load_target(tmp_path))
    assert all(name in caplog.text for name in extra)


def test_target_is_read_from_shards(tmp_path):
    target = make_target()
    checkpoints.save_target(target, tmp_path)
    shard(tmp_path)
    assert_same_weights(target, checkpoints.load_target(tmp_path))


def test_missing_shard_is_named_with_its_tensors(tmp_path):
    checkpoints.save_target(make_target(), tmp_path)
    shards = shard(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b\.safetensors: missing, it holds \d+ tensors") as error:
        checkpoints.load_target(tmp_path)
    assert shards["b.safetensors"][0] in str(error.value)


def test_tensor_without_an_index_entry_is_named(tmp_path):
    checkpoints.save_target(make_target(), tmp_path)
    name = shard(tmp_path)["a.safetensors"][0]
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][name]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{name} are not listed for a.safetensors"):
        checkpoints.load_target(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"),
            r"layers\.1\.self_attn\.q_norm\.weight: missing, expected shape \(8,\)",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}),
            r"norm\.weight: shape \(7,\) in model\.safetensors, expected \(16,\)",
        ),
        (
            lambda tensors: tensors.update({"model.layers.9.extra.weight": torch.zeros(2)}),
            r"layers\.9\.extra\.weight: not part of the model \(shape \(2,\) in model\.safetensors\)",
        ),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(32, 16)}), r"set tie_word_embeddings to false"),
    ],
    ids=["missing", "misshapen", "unexpected", "tied_but_different"],
)
def test_target_tensor_that_does_not_fit_is_named(tmp_path, change, message):
    checkpoints.save_target(make_target(), tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        checkpoints.load_target(tmp_path)


def test_skipped_tensors_collide_with_nothing(tmp_path):
    target = make_target()
    checkpoints.save_target(target, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({f"{p}mtp.norm.weight": torch.zeros(2) for p in ("", "model.")}))
    assert_same_weights(target, checkpoints.load_target(tmp_path))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_drafter_survives_a_round_trip(tmp_path, prefix):
    drafter = make_drafter()
    checkpoints.save_drafter(drafter, tmp_path)
    rewrite(tmp_path, lambda tensors: [tensors.update({prefix + name: tensors.pop(name)}) for name in list(tensors)])
    loaded = checkpoints.load_drafter(tmp_path)
    assert_same_weights(drafter, loaded)
    assert loaded.config == drafter.config


def test_drafter_tensor_that_does_not_fit_is_named(tmp_path):
    checkpoints.save_drafter(make_drafter(), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"fc.weight": torch.zeros(16, 16)}))
    with pytest.raises(ValueError, match=r"fc\.weight: shape \(16, 16\) in model\.safetensors, expected \(16, 32\)"):
        checkpoints.load_drafter(tmp_path)


def test_weaver_survives_a_round_trip_as_directory_and_as_file(tmp_path):
    weaver = make_weaver()
    checkpoints.save_weaver(weaver, tmp_path / "weaver")
    checkpoints.save_weaver_pth(weaver, tmp_path / "weaver.pth")
    assert_same_weights(weaver, checkpoints.load_weaver(tmp_path / "weaver"))
    loaded = checkpoints.load_weaver(tmp_path / "weaver.pth")
    assert_same_weights(weaver, loaded, dtype=torch.float32)
    assert loaded.config == WEAVER


def write_pth(path, change):
    state = make_weaver().state_dict()
    change(state)
    torch.save({"config": WEAVER.to_dict(), "state_dict": state}, path)


def fuse(state):
    parts = [state.pop(f"blocks.0.{part}_proj.weight") for part in "qkv"]
    state["blocks.0.attn.qkv_proj.weight"] = torch.cat(parts)


def nest(state):
    for name in list(state):
        if name.startswith("blocks.0."):
            state[name.replace("blocks.0.", "module.blocks.0.inner.")] = state.pop(name)


def test_a_folder_with_one_released_file_is_a_weaver_and_one_with_two_is_refused(tmp_path):
    checkpoints.save_weaver_pth(make_weaver(), tmp_path / "first.pth", dtype=torch.bfloat16)
    assert_same_weights(make_weaver(), checkpoints.load_weaver(tmp_path))
    checkpoints.save_weaver_pth(make_weaver(), tmp_path / "second.pth")
    with pytest.raises(ValueError, match=r"holds first\.pth, second\.pth; leave one weaver in the folder"):
        checkpoints.load_weaver(tmp_path)


def test_the_caller_decides_whether_sliding_layers_are_causal(tmp_path):
    checkpoints.save_drafter(Drafter(DRAFTER), tmp_path)
    for flag, expected in ((None, True), (False, False), (True, True)):
        assert checkpoints.load_drafter(tmp_path, swa_causal=flag).config.swa_causal is expected


@pytest.mark.parametrize("change", [fuse, nest], ids=["fused_qkv", "nested_block"])
def test_weaver_is_matched_by_suffix_and_shape(tmp_path, change):
    write_pth(tmp_path / "weaver.pth", change)
    assert_same_weights(make_weaver(), checkpoints.load_weaver(tmp_path / "weaver.pth"), dtype=torch.float32)


def test_fused_and_split_projections_together_are_refused(tmp_path):
    path = tmp_path / "weaver.pth"
    write_pth(path, lambda state: state.update({"blocks.0.qkv_proj.weight": torch.full((24, 8), 9.0)}))
    names = "blocks.0.k_proj.weight and blocks.0.qkv_proj.weight are both blocks.0.k_proj.weight"
    with pytest.raises(ValueError, match=f"{path}: {names.replace('k_proj', '[qkv]_proj')}.*remove the one"):
        checkpoints.load_weaver(path)


@pytest.mark.parametrize("shape", [(25, 8), ()], ids=["rows", "scalar"])
def test_fused_projection_of_another_shape_is_named(tmp_path, shape):
    path = tmp_path / "weaver.pth"
    write_pth(path, lambda state: state.update({"blocks.0.qkv_proj.weight": torch.zeros(shape)}))
    with pytest.raises(ValueError, match=f"{path}: blocks.0.qkv_proj.weight: shape .* is no q, k and v of one width"):
        checkpoints.load_weaver(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("token_in.weight", r"token_in\.weight: shape \(8, 3\) in model\.safetensors, expected \(8, 16\)"),
        ("module.token_in.weight", r"\(found module\.token_in\.weight \(8, 3\) in model\.safetensors\)"),
    ],
    ids=["exact_name", "by_suffix"],
)
def test_misshapen_tensor_of_a_weaver_directory_is_named_with_its_file(tmp_path, name, message):
    checkpoints.save_weaver(make_weaver(), tmp_path)

    def change(tensors):
        del tensors["token_in.weight"]
        tensors[name] = torch.zeros(8, 3)

    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        checkpoints.load_weaver(tmp_path)


def make_ambiguous(state):
    state["blocks.0.one.fc1.bias"] = state.pop("blocks.0.fc1.bias")
    state["blocks.0.two.fc1.bias"] = state["blocks.0.one.fc1.bias"] + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (make_ambiguous, r"blocks\.0\.fc1\.bias \(12,\) could be any of blocks\.0\.one\.fc1\.bias, blocks\.0\.two"),
        (lambda state: state.pop("pos_emb"), r"Missing: pos_emb \(3, 8\)"),
        (
            lambda state: state.update({"token_in.weight": torch.zeros(8, 3)}),
            r"token_in\.weight: shape \(8, 3\) in weaver\.pth, expected \(8, 16\)",
        ),
        (
            lambda state: state.update({"blocks.0.gate_proj.weight": torch.zeros(8, 8)}),
            r"Not understood: blocks\.0\.gate_proj\.weight \(8, 8\)",
        ),
    ],
    ids=["ambiguous", "missing", "misshapen", "later_form"],
)
def test_weaver_tensor_that_does_not_fit_is_named(tmp_path, change, message):
    write_pth(tmp_path / "weaver.pth", change)
    with pytest.raises(ValueError, match=message):
        checkpoints.load_weaver(tmp_path / "weaver.pth")


def test_loading_a_family_does_not_load_torchs_compiler():
    """Three seconds of a core in every cell."""
    code = "import sys; from tfm import checkpoints as c; w = 'tfm/weights/nano/'; c.load_target(w + 'target')\n"
    code += "c.load_drafter(w + 'drafter'); c.load_weaver(w + 'weaver'); sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0
