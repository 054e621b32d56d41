"""The rehearsal of suite paper through its files and loader: everything equal, and what is not equal is named."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "workflows/scripts"))


@pytest.fixture
def rehearse(tmp_path, monkeypatch):
    import rehearse_paper

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(rehearse_paper, "SHARD_BYTES", 400_000)

    def run() -> tuple[int, dict]:
        words = ["rehearse_paper.py", "--device", "cpu", "--shape", "small", "--prompt-tokens", "20"]
        words += ["--max-new-tokens", "4", "--folder", str(tmp_path / "weights"), "--out", str(tmp_path / "out.json")]
        monkeypatch.setattr(sys, "argv", words)
        status = rehearse_paper.main()
        return status, json.loads((tmp_path / "out.json").read_text()) if status != 2 else {}

    return run


def test_weights_come_back_from_their_shards_and_decode_the_same(rehearse, tmp_path):
    status, report = rehearse()
    assert (status, report["wrong"], report["tokens"]) == (0, [], {"ar": 4, "tfm": 4})
    assert report["shards"] > 3 and report["tensors"] > 100 and report["layers"] == 8
    assert report["bytes"]["target"] > report["bytes"]["drafter"] > 0
    assert not (tmp_path / "weights").exists()


def test_one_changed_weight_is_named(rehearse, monkeypatch):
    import rehearse_paper

    load = rehearse_paper.load_models

    def damaged(*arguments, **named):
        models = load(*arguments, **named)
        models.target.layers[5].mlp.down_proj.weight[1, 2] += 0.5
        return models

    monkeypatch.setattr(rehearse_paper, "load_models", damaged)
    status, report = rehearse()
    assert status == 1 and "tensor target.layers.5.mlp.down_proj.weight" in report["wrong"]
    assert not any("drafter" in text for text in report["wrong"])


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(rehearse, monkeypatch, capsys, tmp_path):
    import rehearse_paper

    monkeypatch.setattr(rehearse_paper.shutil, "disk_usage", lambda _: type("Disk", (), {"free": 10**6}))
    assert rehearse()[0] == 2
    assert "1000000 bytes are free" in capsys.readouterr().err and not (tmp_path / "weights").exists()


def test_the_checksum_sees_values_in_each_others_place():
    from rehearse_paper import checksum

    row = torch.arange(8, dtype=torch.bfloat16)
    assert checksum(row) != checksum(row.flip(0)) and checksum(row) == checksum(row.clone())
