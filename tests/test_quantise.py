"""int8 rows: the dequantised weights are the model, exactly, whichever way they are stored, exported and loaded."""

import gzip
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoints import make_drafter, make_target, make_weaver

from baselines.serving.site import checkpoint_folder
from tfm import checkpoints
from tfm.manifest import sha256_weights
from tfm.quantise import dequantise_rows, pack, quantise_rows, unpack
from tfm.train.export import promote


def random_matrix(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # rows from 1e-6 to 1e4, one of zeros, one whose largest value is exactly 127 times a power of two
    matrix = torch.randn(64, 48, generator=generator) * torch.logspace(-6, 4, 64)[:, None]
    matrix[3], matrix[5] = 0.0, torch.linspace(-1, 1, 48) * 127 * 2.0**-9
    return matrix


def test_each_row_is_within_half_a_step_of_the_finest_power_of_two_that_holds_it():
    matrix = random_matrix()
    codes, scales = quantise_rows(matrix)
    steps = scales.double()
    assert ((dequantise_rows(codes, scales).double() - matrix.double()).abs() <= steps[:, None] / 2).all()
    assert torch.equal(torch.frexp(steps).mantissa, torch.full_like(steps, 0.5))
    largest = matrix.double().abs().amax(1)
    is_finest = (largest > 127 * steps / 2) | (steps == 2.0**-24) | (largest == 0)
    assert (largest <= 127 * steps).all() and is_finest.all()


def test_quantising_the_model_again_changes_nothing_and_bfloat16_holds_it():
    tensors = {"layer.weight": random_matrix(), "norm.weight": torch.randn(9), "conv1d.weight": torch.randn(6, 1, 4)}
    stored = pack(tensors)
    model = unpack(stored, str)
    assert set(stored) == {*tensors, "layer.weight.scale"} and stored["layer.weight"].dtype == torch.int8
    assert torch.equal(model["layer.weight"].bfloat16().float(), model["layer.weight"])
    again = pack(model)
    assert all(torch.equal(again[name], stored[name]) for name in stored)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e7])
def test_a_value_that_no_scale_holds_is_refused(value):
    matrix = torch.ones(2, 3)
    matrix[1, 2] = value
    with pytest.raises(ValueError, match="weight: largest value"):
        quantise_rows(matrix)


PARTS = {
    "target": (make_target, checkpoints.save_target, checkpoints.load_target),
    "drafter": (make_drafter, checkpoints.save_drafter, checkpoints.load_drafter),
    "weaver": (make_weaver, checkpoints.save_weaver, checkpoints.load_weaver),
}


@pytest.mark.parametrize("part", PARTS)
def test_stored_and_exported_directories_load_as_one_model(tmp_path, part):
    make, save, load = PARTS[part]
    save(make(), tmp_path / "stored", storage="int8")
    (tmp_path / "stored" / "tokenizer.json").write_text("{}")
    checkpoints.export(tmp_path / "stored", tmp_path / "public")
    stored, public = load(tmp_path / "stored").state_dict(), load(tmp_path / "public").state_dict()
    assert all(torch.equal(stored[name], public[name]) for name in stored)
    written = load_file(tmp_path / "public" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert not [name for name in written if name.endswith(".scale")]
    assert (tmp_path / "public" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "stored" / "config.json").read_text()) == json.loads(
        (tmp_path / "public" / "config.json").read_text()
    )
    # what was loaded, stored anew, gives the same bytes: later training starts from the model itself
    save(load(tmp_path / "stored"), tmp_path / "again", storage="int8")
    first, again = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("stored", "again"))
    assert first == again


def damage(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight.scale"), "fc.weight is int8 but fc.weight.scale is missing"),
        (lambda t: t.pop("fc.weight"), "fc.weight: missing"),
        (lambda t: t.update({"fc.weight.scale": torch.ones(3).half()}), "fc.weight.scale: torch.float16 of shape"),
        (lambda t: t.update({"fc.weight.scale": t["fc.weight.scale"].float()}), "torch.float32 of shape"),
        (lambda t: t["fc.weight.scale"].fill_(float("inf")), "each positive and finite"),
        (lambda t: t["fc.weight.scale"].zero_(), "each positive and finite"),
    ],
    ids=["no_scale", "no_codes", "short_scale", "wide_scale", "infinite_scale", "zero_scale"],
)
def test_damaged_rows_are_refused_naming_tensor_and_file(tmp_path, change, message):
    checkpoints.save_drafter(make_drafter(), tmp_path, storage="int8")
    damage(tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        checkpoints.load_drafter(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_scales_that_bfloat16_cannot_follow_load_but_are_not_exported(tmp_path):
    checkpoints.save_drafter(make_drafter(), tmp_path, storage="int8")
    damage(tmp_path, lambda tensors: tensors["fc.weight.scale"].mul_(1.0009765625))
    checkpoints.load_drafter(tmp_path)
    with pytest.raises(ValueError, match="fc.weight would change in bfloat16"):
        checkpoints.export(tmp_path, tmp_path / "public")
    assert not (tmp_path / "public").exists()


def test_unknown_storage_is_refused(tmp_path):
    with pytest.raises(ValueError, match="storage: 'int4' is not allowed"):
        checkpoints.save_drafter(make_drafter(), tmp_path, storage="int4")


def test_a_compressed_checkpoint_is_the_same_model_with_the_same_digest(tmp_path):
    checkpoints.save_drafter(make_drafter(), tmp_path / "plain", storage="int8")
    (tmp_path / "README.md").write_text("card")
    assert promote(tmp_path, tmp_path / "shipped")[1:] == ["plain/config.json", "plain/model.safetensors.gz"]
    shipped = tmp_path / "shipped/plain"
    assert sha256_weights(shipped) == sha256_weights(tmp_path / "plain") is not None
    one, other = (checkpoints.load_drafter(folder).state_dict() for folder in (tmp_path / "plain", shipped))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert checkpoint_folder(shipped, tmp_path / "site") != shipped  # servers read the public format alone
    file = shipped / "model.safetensors.gz"
    for damaged in (file.read_bytes()[:-20], b"no gzip", gzip.compress(b"no tensors")):
        file.write_bytes(damaged)
        assert sha256_weights(shipped) != sha256_weights(tmp_path / "plain")
        with pytest.raises(ValueError, match=f"{file}: damaged"):
            checkpoints.load_drafter(shipped)
