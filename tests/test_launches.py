"""One switch for launches that come up early: what it turns off, and that a manifest says it."""

import pytest
import torch

from tfm import device
from tfm_kernels import launches
from tfm_kernels.gdn import fused_cuda


@pytest.fixture
def card(monkeypatch):
    """What kernels ask of a card, answered without one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    return torch.device("cuda")


@pytest.mark.parametrize(("value", "is_overlapped"), [(None, True), ("early", True), ("cuda", True), ("plain", False)])
def test_the_cuda_library_is_built_as_the_switch_says(card, monkeypatch, value, is_overlapped):
    monkeypatch.delenv(launches.VARIABLE, raising=False)
    if value:
        monkeypatch.setenv(launches.VARIABLE, value)
    monkeypatch.setattr(fused_cuda, "library", lambda *words: words)
    assert fused_cuda.library_of(card, 3, "bf16x2")[:4] == ("90a", 3, "bf16x2", is_overlapped)
    # who asks for one form gets it
    assert fused_cuda.library_of(card, 3, "bf16x2", not is_overlapped)[3] is not is_overlapped


@pytest.mark.parametrize(("value", "is_early"), [("", True), ("early", True), ("cuda", False), ("plain", False)])
def test_triton_kernels_are_launched_as_the_switch_says(card, monkeypatch, value, is_early):
    pytest.importorskip("triton")
    from tfm_kernels import pdl_triton

    monkeypatch.setenv(launches.VARIABLE, value)
    assert pdl_triton.options(card) == ({"PDL": True, "launch_pdl": True} if is_early else {"PDL": False})
    assert pdl_triton.options(torch.device("cpu")) == {"PDL": False}


def test_a_choice_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv(launches.VARIABLE, "later")
    with pytest.raises(ValueError, match="TFM_LAUNCHES: 'later' is not allowed"):
        launches.chosen()


def test_a_manifest_of_a_card_says_how_kernels_were_launched(monkeypatch):
    monkeypatch.setenv(launches.VARIABLE, "cuda")
    card = type("Card", (), {"name": "card", "total_memory": 2**34, "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert device.facts(torch.device("cuda"))["launches"] == "cuda"
