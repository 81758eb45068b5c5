"""Reads the figures of GPUs through NVML, which creates no CUDA context. A figure that a GPU or its driver
does not report is None."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from appliance.snapshot import Gpu, GpuProcess

Figure = TypeVar("Figure")

_RETRY_S = 30.0
"""Delay before the GPUs are read again after the driver could not be used. Loading NVML is slow."""
_THROTTLE_REASONS = (
    ("nvmlClocksThrottleReasonSwPowerCap", "power cap"),
    ("nvmlClocksThrottleReasonHwSlowdown", "hardware slowdown"),
    ("nvmlClocksThrottleReasonSwThermalSlowdown", "temperature (software)"),
    ("nvmlClocksThrottleReasonHwThermalSlowdown", "temperature (hardware)"),
    ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", "power brake"),
    ("nvmlClocksThrottleReasonSyncBoost", "sync boost"),
)


class GpuReader:
    """Reads the GPUs. Must not be used on an event loop, because a driver that does not respond blocks the
    call."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        self._open = False
        self._retry_at = 0.0
        self.error = ""
        """Reason why the GPUs could not be read. Empty on a machine without an NVIDIA driver."""

    def read(self) -> list[Gpu]:
        """Return all GPUs, in NVML's order."""
        nvml = self._nvml
        if time.monotonic() < self._retry_at:
            return []
        try:
            if not self._open:
                nvml.nvmlInit()
                self._open = True
            gpus = [self._gpu(number) for number in range(nvml.nvmlDeviceGetCount())]
            self.error = ""
            return gpus
        except nvml.NVMLError as error:
            absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            self.error = "" if error.value in absent else str(error)
            self.close()
            self._retry_at = time.monotonic() + _RETRY_S
            return []

    def close(self) -> None:
        """Release NVML."""
        if self._open:
            self._open = False
            self._known(self._nvml.nvmlShutdown)

    def _gpu(self, number: int) -> Gpu:
        nvml, known = self._nvml, self._known
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        memory = known(nvml.nvmlDeviceGetMemoryInfo, handle)
        load = known(nvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = known(nvml.nvmlDeviceGetPowerUsage, handle)
        limit_mw = known(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        mask = known(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        running = known(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        volatile, corrected, uncorrected = (
            nvml.NVML_VOLATILE_ECC,
            nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        )
        return Gpu(
            number=number,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            uuid=_text(known(nvml.nvmlDeviceGetUUID, handle) or ""),
            utilization_percent=None if load is None else float(load.gpu),
            memory_bytes=None if memory is None else int(memory.total),
            used_bytes=None if memory is None else int(memory.used),
            power_w=None if power_mw is None else power_mw / 1000.0,
            power_limit_w=None if limit_mw is None else limit_mw / 1000.0,
            temperature_c=known(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=known(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            max_sm_clock_mhz=known(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=known(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            throttle_reasons=None if mask is None else self._reasons(mask),
            ecc_corrected=known(nvml.nvmlDeviceGetTotalEccErrors, handle, corrected, volatile),
            ecc_uncorrected=known(nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, volatile),
            processes=None
            if running is None
            else [GpuProcess(pid=one.pid, memory_bytes=one.usedGpuMemory) for one in running],
        )

    def _reasons(self, mask: int) -> list[str]:
        return [text for name, text in _THROTTLE_REASONS if mask & getattr(self._nvml, name, 0)]

    def _known(self, read: Callable[..., Figure], *arguments: Any) -> Figure | None:
        """Return the value that NVML reports, or None if this GPU or driver does not report it."""
        try:
            return read(*arguments)
        except self._nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    # Old NVML bindings return bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
