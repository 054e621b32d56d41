"""Damaged, ambiguous and foreign checkpoints: a ValueError with file, key, what was found and the remedy."""

import json

import pytest
import torch
from test_checkpoints import WEAVER, make_drafter, make_target, make_weaver, rewrite, shard

from baselines.loading import load_models
from tfm import checkpoints


def test_untied_head_of_a_tied_config_is_named_with_the_directory(tmp_path):
    checkpoints.save_target(make_target(), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(32, 16)}))
    with pytest.raises(ValueError, match=f"{tmp_path}: lm_head.weight in model.safetensors differs"):
        checkpoints.load_target(tmp_path)


@pytest.mark.parametrize(
    ("save", "load", "other", "names"),
    [
        pytest.param(
            lambda path: checkpoints.save_target(make_target(), path),
            checkpoints.load_target,
            "model.language_model.norm.weight",
            "model.language_model.norm.weight and model.norm.weight are both norm.weight",
            id="target",
        ),
        pytest.param(
            lambda path: checkpoints.save_drafter(make_drafter(), path),
            checkpoints.load_drafter,
            "model.norm.weight",
            "model.norm.weight and norm.weight are both norm.weight",
            id="drafter",
        ),
    ],
)
def test_two_tensors_of_one_name_are_refused_naming_both(tmp_path, save, load, other, names):
    save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({other: torch.full((16,), 7.0)}))
    with pytest.raises(ValueError, match=f"{tmp_path}: {names}.*remove the one"):
        load(tmp_path)


@pytest.mark.parametrize("text", ['{"vocab_size": 32,', "[]", "", "null"], ids=["cut", "list", "empty", "null"])
@pytest.mark.parametrize("load", [checkpoints.load_target, checkpoints.load_drafter, checkpoints.load_weaver])
def test_config_that_is_no_object_is_named(tmp_path, load, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: .*; download it again") as error:
        load(tmp_path)
    assert not isinstance(error.value, json.JSONDecodeError)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"weight_map"', "damaged JSON file"),
        ("[]", r"found list \[\], expected an object"),
        ("{}", "weight_map: found NoneType None, expected an object from tensor names to file names"),
        ('{"weight_map": ["a"]}', r"weight_map: found list \['a'\], expected"),
        ('{"weight_map": {"norm.weight": 3}}', r"weight_map: found dict \{'norm.weight': 3\}, expected"),
    ],
    ids=["cut", "list", "no_map", "map_is_list", "file_is_number"],
)
def test_index_that_maps_no_names_to_files_is_named(tmp_path, text, found):
    checkpoints.save_target(make_target(), tmp_path)
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path}/model.safetensors.index.json: {found}.*; download it again"):
        checkpoints.load_target(tmp_path)


@pytest.mark.parametrize(
    ("save", "load", "change", "message"),
    [
        pytest.param(
            lambda path: checkpoints.save_target(make_target(), path),
            checkpoints.load_target,
            {"hidden_act": "gelu"},
            ": config.json: hidden_act 'gelu' is not supported",
            id="target",
        ),
        pytest.param(
            lambda path: checkpoints.save_drafter(make_drafter(), path),
            checkpoints.load_drafter,
            {"dflash_config": None},
            "/config.json: dflash_config: None is not allowed .*; take the config.json",
            id="drafter",
        ),
        pytest.param(
            lambda path: checkpoints.save_weaver(make_weaver(), path),
            checkpoints.load_weaver,
            {"K": "15"},
            "/config.json: K: '15' is not allowed .*; take the config",
            id="weaver",
        ),
    ],
)
def test_config_that_is_refused_is_named_with_its_file(tmp_path, save, load, change, message):
    save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=str(tmp_path) + message):
        load(tmp_path)


def test_damaged_and_absent_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: missing"):
        checkpoints.load_target(tmp_path)
    checkpoints.save_target(make_target(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged safetensors file"):
        checkpoints.load_target(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="no safetensors file"):
        checkpoints.load_target(tmp_path)


def test_pickled_objects_are_refused(tmp_path):
    torch.save({"config": WEAVER, "state_dict": {}}, tmp_path / "weaver.pth")
    with pytest.raises(ValueError, match="not readable as plain tensors"):
        checkpoints.load_weaver(tmp_path / "weaver.pth")
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="expected the keys config and state_dict"):
        checkpoints.load_weaver(tmp_path / "list.pth")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, "config: found NoneType None, expected a dictionary"),
        ({"config": {"K": 3, 4: 5}}, r"config: found dict \{.*\}, expected a dictionary with names as keys"),
        ({"state_dict": [1]}, r"state_dict: found list \[1\], expected a dictionary"),
        ({"state_dict": {"pos_emb": 3}}, "state_dict: pos_emb: found int 3, expected a tensor"),
        ({"state_dict": {"a": torch.zeros(1), 3: torch.zeros(1)}}, "state_dict: found dict .* with names as keys"),
        ({"config": {**WEAVER.to_dict(), "norm_eps": "x"}}, "norm_eps: 'x' is not allowed"),
    ],
    ids=["config_null", "config_mixed_keys", "state_list", "state_of_ints", "state_mixed_keys", "config_refused"],
)
def test_pth_of_other_content_is_named_with_file_key_and_remedy(tmp_path, change, message):
    path = tmp_path / "weaver.pth"
    torch.save({"config": WEAVER.to_dict(), "state_dict": make_weaver().state_dict()} | change, path)
    with pytest.raises(ValueError, match=f"{path}: {message}.*; take the"):
        checkpoints.load_weaver(path)


def test_pth_with_mixed_keys_and_no_weights_is_named(tmp_path):
    path = tmp_path / "weaver.pth"
    torch.save({"config": WEAVER.to_dict(), 3: 1}, path)
    with pytest.raises(ValueError, match=rf"{path}: holds \['3', 'config'\], expected the keys config and state_dict"):
        checkpoints.load_weaver(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("part", "save", "name"),
    [
        ("target", lambda path: checkpoints.save_target(make_target(), path), "norm.weight"),
        ("drafter", lambda path: checkpoints.save_drafter(make_drafter(), path), "fc.weight"),
        ("weaver", lambda path: checkpoints.save_weaver(make_weaver(), path), "pos_emb"),
    ],
)
def test_a_weight_that_is_no_number_is_refused_by_part_and_name(tmp_path, part, save, name, value):
    """No draft of such weights is accepted, and the method would stand in the tables as one that gains nothing."""
    checkpoints.save_target(make_target(), tmp_path / "target")
    save(tmp_path / part)

    def spoil(tensors):
        key = next(key for key in tensors if key.removeprefix("model.") == name)
        tensors[key] = tensors[key].clone()
        tensors[key].flatten()[3] = value

    rewrite(tmp_path / part, spoil)
    folders = {"target": tmp_path / "target", part: tmp_path / part}
    with pytest.raises(ValueError, match=f"weights.{part}: {tmp_path / part}: {name} hold NaN or infinite values"):
        load_models(folders, device=torch.device("cpu"), dtype=torch.float32)
