"""What two readings of the card say of a span, and where there is none to read."""

import pytest

from tfm.gpu_meter import GpuMeter, Reading, facts


def test_energy_is_the_difference_of_two_readings():
    before = Reading(1_000, 100_000, 1_980, 3_201, 41, ())
    after = Reading(351_000, 600_000, 1_755, 3_201, 55, ("power_cap",))
    found = facts(before, after)
    assert found["joule"] == 350.0
    assert found["after"]["throttle"] == ("power_cap",)


def test_a_cpu_has_no_meter():
    with pytest.raises(ValueError, match="device: cpu has no NVML .*CUDA device"):
        GpuMeter("cpu")
