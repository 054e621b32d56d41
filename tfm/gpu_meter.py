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
    """NVML of one card.

    Raises ValueError where nvidia-ml-py is not installed, NVML does not answer, or the device is no CUDA device.
    """

    def __init__(self, device: torch.device | str):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device: {device} has no NVML (allowed: a CUDA device); leave energy out there")
        try:
            self._nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError as error:
            raise ValueError("energy: needs the package nvidia-ml-py; pip install nvidia-ml-py") from error
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        try:
            self._nvml.nvmlInit()
            self._card = self._nvml.nvmlDeviceGetHandleByUUID(name)
            self.read()
        except self._nvml.NVMLError as error:
            raise ValueError(f"{device}: NVML does not answer ({error}); leave energy and clocks out there") from error

    @property
    def error(self) -> type[Exception]:
        """What `read` raises when the card does not answer."""
        return self._nvml.NVMLError

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


class CardSpan:
    """The card's state at the start and at the end of a span of work, for its record; nothing on a CPU."""

    def __init__(self, device: torch.device):
        self._meter, self._before, self._reason = None, None, ""
        if device.type == "cuda":
            try:
                self._meter = GpuMeter(device)
            except ValueError as error:
                self._reason = str(error)

    def start(self) -> None:
        """Read the card; call it once the card is warm, or the clock of an idle card is what is noted."""
        if self._meter:
            try:
                self._before = self._meter.read()
            except self._meter.error as error:
                self._reason = f"NVML stopped answering ({error})"

    def end(self) -> dict | None:
        """Return {"before", "after"}, a Reading's fields each; {"reason"} where no card was read; None on a CPU."""
        if self._meter and self._before:
            try:
                return {"before": asdict(self._before), "after": asdict(self._meter.read())}
            except self._meter.error as error:  # the prompts are decoded, and their records stand without it
                self._reason = f"NVML stopped answering ({error})"
        return {"reason": self._reason} if self._reason else None


def facts(before: Reading, after: Reading) -> dict:
    """Return what two readings say of the span between them."""
    return {"joule": (after.energy_mj - before.energy_mj) / 1e3, "before": asdict(before), "after": asdict(after)}
