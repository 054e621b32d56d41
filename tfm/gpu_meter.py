"""What the card says of itself: energy, clocks, temperature, throttle reasons, power. Read beside a timed span."""

import importlib
from dataclasses import asdict, dataclass

import torch

# NVML's bits; idle and the application's own settings slow nothing down by themselves
THROTTLE = {
    1 << 0: "idle",
    1 << 1: "application_clocks",
    1 << 2: "power_cap",
    1 << 3: "hardware_slowdown",
    1 << 4: "sync_boost",
    1 << 5: "thermal",
    1 << 6: "hardware_thermal",
    1 << 7: "power_brake",
}


@dataclass(frozen=True)
class Reading:
    energy_mj: int  # since the driver was loaded
    power_mw: int
    sm_mhz: int
    memory_mhz: int
    temperature_c: int
    throttle: tuple[str, ...]


class GpuMeter:
    """NVML of one card. Raises ValueError where nvidia-ml-py is not installed or the card is no CUDA device."""

    def __init__(self, device: torch.device | str):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device: {device} has no NVML (allowed: a CUDA device); leave energy out there")
        try:
            self._nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError as error:
            raise ValueError("energy: needs the package nvidia-ml-py; pip install nvidia-ml-py") from error
        self._nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._card = self._nvml.nvmlDeviceGetHandleByUUID(name)

    def read(self) -> Reading:
        """Return the card's state now."""
        nvml, card = self._nvml, self._card
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)
        return Reading(
            energy_mj=nvml.nvmlDeviceGetTotalEnergyConsumption(card),
            power_mw=nvml.nvmlDeviceGetPowerUsage(card),
            sm_mhz=nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
            memory_mhz=nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM),
            temperature_c=nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
            throttle=tuple(name for bit, name in THROTTLE.items() if bits & bit),
        )


def facts(before: Reading, after: Reading) -> dict:
    """Return what two readings say of the span between them."""
    return {"joule": (after.energy_mj - before.energy_mj) / 1e3, "before": asdict(before), "after": asdict(after)}
