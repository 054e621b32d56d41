"""A card for a server: the first one that nobody holds, of those that CUDA may see."""

import fcntl
import os

import pytest

from baselines.serving import card
from tfm import device

SMI = """#!/bin/sh
case "$1" in *memory.used*) echo "$3" | wc -c ;; *)
echo "WARNING: infoROM is corrupted at gpu 0000:01:00.0"
echo "GPU-aaaa-1, NVIDIA Fake, 143771, 9.0, 580.1"; echo "GPU-bbbb-2, NVIDIA Fake, 143771, 9.0, 580.1" ;; esac
"""
TWO = [{"uuid": "GPU-aaaa-1"}, {"uuid": "GPU-bbbb-2"}]


@pytest.fixture
def two_cards(tmp_path, monkeypatch):
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "LOCKS", tmp_path)
    return tmp_path


def test_a_held_card_is_left_to_its_holder(two_cards):
    # the name that the loop's cells lock, whose torch knows the UUID without its prefix
    with open(two_cards / "tfm-gpu-aaaa-1.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with card.claim("cuda") as (environment, facts):
            assert environment == {"CUDA_VISIBLE_DEVICES": "GPU-bbbb-2"}
            assert facts["name"] == "NVIDIA Fake" and facts["memory_gib"] == 140.4 and facts["driver"] == "580.1"
    with card.claim("cuda") as (environment, _), card.claim("cuda") as (other, _):
        assert (environment["CUDA_VISIBLE_DEVICES"], other["CUDA_VISIBLE_DEVICES"]) == ("GPU-aaaa-1", "GPU-bbbb-2")


def test_a_card_that_cuda_may_not_see_is_not_taken(two_cards, monkeypatch):
    """Work that takes no lock is kept apart by this variable alone, which nvidia-smi does not heed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with card.claim("cuda") as (environment, _):
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb-2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="lists no card here that CUDA_VISIBLE_DEVICES"), card.claim("cuda"):
        pass


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (None, [0, 1]),
        ("0,1", [0, 1]),
        ("1,0", [1, 0]),
        ("GPU-bbbb-2", [1]),
        ("GPU-b, 0", [1, 0]),
        ("0,7,1", [0]),
        ("-1", []),
        ("GPU-", []),
        ("", []),
    ],
)
def test_names_are_read_as_cuda_reads_them(names, left):
    assert card.visible(TWO, names) == [TWO[place] for place in left]


def test_a_machine_without_a_driver_has_no_card(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card.cards() == []
    with pytest.raises(ValueError, match="set device: cpu"), card.claim("cuda"):
        pass
    with card.claim("cpu") as (environment, facts):
        assert environment == {} and facts["kind"] == "cpu"


def test_a_card_that_does_not_say_its_memory_is_taken_without(two_cards):
    smi = two_cards / "bin/nvidia-smi"
    smi.write_text(SMI.replace("143771", "[N/A]").replace('echo "$3" | wc -c', "echo '[N/A]'"))
    with card.claim("cuda") as (_, facts):
        assert facts["memory_gib"] is None and facts["name"] == "NVIDIA Fake"
    with pytest.raises(ValueError, match=r"memory.used: nvidia-smi says \['\[N/A\]'\] of card GPU-aaaa-1"):
        card.memory_used_mib("GPU-aaaa-1")


def test_memory_in_use_is_asked_of_the_card(two_cards):
    # the fake counts the letters of the UUID that it was asked for, and the line's end
    assert card.memory_used_mib("GPU-aaaa-1") == len("GPU-aaaa-1") + 1
