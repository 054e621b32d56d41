"""Pins of checkpoints: every byte is compared before a run; what is wrong is named with hashes and a remedy."""

import hashlib
import json
import os

import pytest

from tfm import manifest
from tfm.tokenizer import check_folder_tokenizers, end_tokens, load_tokenizer
from tfm.weight_pins import check_checkpoints, download_command

REVISION, OTHER = "a" * 40, "b" * 40
SHARD, CONFIG, PTH = b"shard bytes", b'{"a": 1}', b"weaver bytes"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def record(root, file: str, etag: str, revision: str = REVISION) -> None:
    """Write the download record with the hub client's own function."""
    local_folder = pytest.importorskip("huggingface_hub._local_folder")
    local_folder.write_download_metadata(root, file, revision, etag)


@pytest.fixture
def downloaded(tmp_path):
    """A target with a record of each file, and a weaver in a repository that holds it as a folder."""
    for name, content in {"target/model.safetensors": SHARD, "target/config.json": CONFIG, "weaver/w.pth": PTH}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    blob = hashlib.sha1(b"blob %d\0" % len(CONFIG) + CONFIG).hexdigest()  # what `git hash-object` prints
    record(tmp_path / "target", "model.safetensors", sha256(SHARD))
    record(tmp_path / "target", "config.json", blob)
    return tmp_path


PINS = {
    "target": {"repo": "org/target", "revision": REVISION, "sha256": {}},
    "weaver": {"repo": "org/w", "revision": REVISION, "files": ["weaver/w.pth"], "sha256": {"w.pth": sha256(PTH)}},
}


def test_files_are_compared_with_the_config_or_with_their_download_record(downloaded):
    found = {(entry.part, entry.file): (entry.sha256, entry.by) for entry in check_checkpoints(downloaded, PINS)}
    assert found == {
        ("target", "model.safetensors"): (sha256(SHARD), "download record"),
        ("target", "config.json"): (sha256(CONFIG), "download record"),
        ("weaver", "w.pth"): (sha256(PTH), "config"),
    }


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("target/model.safetensors", "differs from its download record, expected "),
        ("target/config.json", "differs from its download record, expected "),
        ("weaver/w.pth", "SHA-256 differs, expected "),
    ],
)
def test_one_changed_byte_is_named_with_both_hashes_and_the_download_command(downloaded, file, expected):
    content = bytearray((downloaded / file).read_bytes())
    content[3] ^= 1
    (downloaded / file).write_bytes(content)
    with pytest.raises(ValueError, match="no model was loaded") as caught:
        check_checkpoints(downloaded, PINS)
    text = str(caught.value)
    assert f"{downloaded / file}: {expected}" in text and "1 files" in text
    part = file.split("/")[0]
    assert download_command(downloaded, part, PINS[part]) in text
    if "config.json" not in file:
        assert sha256(bytes(content)) in text


def test_another_revision_a_file_that_nothing_pins_and_an_absent_part_are_named_together(downloaded):
    record(downloaded / "target", "config.json", "c" * 40, revision=OTHER)
    (downloaded / "target/extra.json").write_text("{}")
    (downloaded / "weaver/w.pth").unlink()
    with pytest.raises(ValueError, match="3 files are not the pinned ones") as caught:
        check_checkpoints(downloaded, PINS)
    text = str(caught.value)
    assert f"config.json: downloaded at revision {OTHER}, expected {REVISION}" in text
    assert "extra.json: nothing pins it (no download record, no entry in checkpoints.target.sha256)" in text
    assert f"{downloaded / 'weaver'}: holds no weight file" in text


def test_a_pinned_file_that_is_missing_is_named_with_its_hash(downloaded):
    pins = {"target": {**PINS["target"], "sha256": {"model-2.safetensors": "d" * 64}}}
    with pytest.raises(ValueError, match=f"model-2.safetensors: missing, expected SHA-256 {'d' * 64}"):
        check_checkpoints(downloaded, pins)


def test_a_damaged_download_record_is_named(downloaded):
    file = downloaded / "target/.cache/huggingface/download/config.json.metadata"
    file.write_text("")
    with pytest.raises(ValueError, match="config.json.metadata: damaged download record"):
        check_checkpoints(downloaded, PINS)


def test_the_download_command_puts_files_where_the_suite_looks():
    assert download_command("w", "target", PINS["target"]) == (
        f"hf download org/target --revision {REVISION} --local-dir w/target"
    )
    # the repository holds weaver/w.pth: over the parent folder, or it would be weaver/weaver/w.pth
    assert download_command("w", "weaver", PINS["weaver"]) == (
        f"hf download org/w weaver/w.pth --revision {REVISION} --local-dir w"
    )


def test_a_large_file_is_hashed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "LARGE", 4)
    file, calls = tmp_path / "model.safetensors", []
    file.write_bytes(SHARD)
    whole = manifest.sha256_file

    def counted(path):
        calls.append(path)
        return whole(path)

    monkeypatch.setattr(manifest, "sha256_file", counted)
    first = manifest.sha256_weights(tmp_path)
    assert manifest.sha256_weights(tmp_path) == first and len(calls) == 1
    before = file.stat()
    file.write_bytes(SHARD[::-1])  # same size, and the old modification time put back
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert manifest.sha256_weights(tmp_path) != first and len(calls) == 2
    (tmp_path / manifest.HASHED).write_text("cut")
    manifest.sha256_weights(tmp_path)
    assert len(calls) == 3


def test_parts_with_another_vocabulary_than_the_targets_are_refused_naming_both(tmp_path):
    """Two tokenizers of equal size with ten ids swapped: content tells them apart (vllm#42775, vllm#5203)."""
    source = json.loads((manifest.REPOSITORY / "tfm/weights/nano/target/tokenizer.json").read_text())
    for part in ("target", "drafter", "weaver"):
        (tmp_path / part).mkdir()
    (tmp_path / "target/tokenizer.json").write_text(json.dumps(source))
    folders = {part: tmp_path / part for part in ("target", "drafter", "weaver")}
    check_folder_tokenizers(folders)  # the others bring none
    vocabulary = source["model"]["vocab"]
    words = [word for word, index in sorted(vocabulary.items(), key=lambda pair: pair[1]) if index >= 1000][:10]
    ids = [vocabulary[word] for word in words]
    vocabulary.update(zip(words, [*ids[1:], ids[0]], strict=True))
    (tmp_path / "drafter/tokenizer.json").write_text(json.dumps(source))
    with pytest.raises(ValueError, match=rf"target' and '.*drafter' .*differ, first at ids \[{ids[0]}, "):
        check_folder_tokenizers(folders)


def test_an_answer_ends_at_the_turn_end_and_at_the_ids_of_the_models_generation_config(tmp_path):
    tokenizer = load_tokenizer(manifest.REPOSITORY / "tfm/weights/nano/target")
    assert end_tokens(tmp_path, tokenizer) == (tokenizer.eos_id,)
    for value, expected in (([0, tokenizer.eos_id], (tokenizer.eos_id, 0)), (0, (tokenizer.eos_id, 0))):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert end_tokens(tmp_path, tokenizer) == expected
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "<|im_end|>"}')
    with pytest.raises(ValueError, match="eos_token_id '<|im_end|>' is not allowed .allowed: an id or a list of ids"):
        end_tokens(tmp_path, tokenizer)
