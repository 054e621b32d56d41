"""What two readings of the card say of a span, and where there is none to read."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tfm import device
from tfm.gpu_meter import CardSpan, GpuMeter, Reading, facts


class Nvml:
    """NVML of one card whose clock falls by 15 MHz a reading, or that does not answer."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, *, answers: bool = True, readings: int = 9):
        self.mhz, self.answers, self.readings = 1980, answers, readings

    def nvmlInit(self):  # noqa: N802
        if not self.answers:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        assert uuid == "GPU-1234"
        return "card"

    def nvmlDeviceGetClockInfo(self, card, kind):  # noqa: N802
        self.readings -= kind == self.NVML_CLOCK_SM
        if self.readings < 0:
            raise self.NVMLError("GPU is lost")
        self.mhz -= 15 * (kind == self.NVML_CLOCK_SM)
        return self.mhz if kind == self.NVML_CLOCK_SM else 3201

    def __getattr__(self, name):
        known = {
            "TotalEnergyConsumption": 7,
            "PowerUsage": 9,
            "Temperature": 41,
            "CurrentClocksThrottleReasons": 1 << 5,
        }
        return lambda *_: known[name.removeprefix("nvmlDeviceGet")]


@pytest.fixture
def card(monkeypatch):
    """Put an Nvml in pynvml's place."""

    def plant(nvml) -> torch.device:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
        return torch.device("cuda", 0)

    return plant


NEW = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22-I3)\nGCC 12.3"
)
OLD = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: 11.4.0"


@pytest.mark.parametrize(
    ("text", "said", "version"),
    [
        (NEW, None, "580.65.06"),
        (OLD, None, "535.129.03"),
        (None, "WARNING: infoROM is corrupted\n580.1\n580.1", "580.1"),
        (None, None, None),
    ],
)
def test_a_record_names_the_driver(tmp_path, monkeypatch, text, said, version):  # C101
    monkeypatch.setattr(device, "DRIVER", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))
    if text is not None:
        (tmp_path / "version").write_text(text)
    if said is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert device.driver_version.__wrapped__() == version


def test_energy_is_the_difference_of_two_readings():
    before = Reading(1_000, 100_000, 1_980, 3_201, 41, ())
    after = Reading(351_000, 600_000, 1_755, 3_201, 55, ("power_cap",))
    found = facts(before, after)
    assert found["joule"] == 350.0
    assert found["after"]["throttle"] == ("power_cap",)


def test_a_cpu_has_no_meter():
    with pytest.raises(ValueError, match="device: cpu has no NVML .*CUDA device"):
        GpuMeter("cpu")


def test_a_span_is_empty_on_a_cpu():
    span = CardSpan(torch.device("cpu"))
    span.start()
    assert span.end() is None


def test_a_span_holds_the_card_before_and_after(card):
    span = CardSpan(card(Nvml()))
    span.start()
    found = span.end()
    # the first of three readings was the meter's own, to see whether the card answers
    assert [found[name]["sm_mhz"] for name in ("before", "after")] == [1950, 1935]
    assert found["after"]["throttle"] == ("thermal",) and found["after"]["temperature_c"] == 41


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (None, "nvidia-ml-py"),
        (Nvml(answers=False), "Driver Not Loaded"),
        *((Nvml(readings=count), "GPU is lost") for count in (0, 1, 2)),
    ],
)
def test_a_card_that_cannot_be_read_is_named_in_the_record_and_fails_no_cell(card, nvml, words):
    span = CardSpan(card(nvml))
    span.start()
    assert words in span.end()["reason"]
