"""Reads GPU measurements through NVML, which creates no CUDA context. Values that a GPU or its driver does
not report are None. `Gpu.unsupported` names the fields that NVML reports as unsupported."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from appliance.models.gpus import mig_instances
from appliance.snapshot import Gpu, GpuProcess, MigInstance

log = logging.getLogger(__name__)

Value = TypeVar("Value")

_RETRY_S = 30.0
"""Delay in seconds before the GPUs are read again after a driver failure. The delay is long because loading
NVML is slow."""
_THROTTLE_REASONS = (
    ("nvmlClocksThrottleReasonSwPowerCap", "power cap"),
    ("nvmlClocksThrottleReasonHwSlowdown", "hardware slowdown"),
    ("nvmlClocksThrottleReasonSwThermalSlowdown", "temperature (software)"),
    ("nvmlClocksThrottleReasonHwThermalSlowdown", "temperature (hardware)"),
    ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", "power brake"),
    ("nvmlClocksThrottleReasonSyncBoost", "sync boost"),
)


_ALL_LINKS = 0xFFFFFFFF
"""NVML scope id that requests a field's total over all of a GPU's NVLinks."""
_MAX_EVENTS = 100
"""Maximum number of events per read. Without this limit, a continuous stream of events could prevent a read
from ever ending."""


class _LinkBytes(NamedTuple):
    """NVLink bytes sent and received by a GPU, at one point in time."""

    at: float
    sent: int
    received: int


class GpuReader:
    """Reads GPU measurements. Must not be used on an event loop, because an unresponsive driver would block
    it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        import pynvml

        self._nvml = pynvml
        self._clock = clock
        self._open = False
        self._retry_at = 0.0
        self._events: Any = None
        """The NVML event set that receives Xid errors."""
        self._xids: dict[int, int] = {}
        """Each GPU's latest Xid error, or 0. GPUs that cannot report Xid errors are omitted."""
        self._without_xids: set[int] = set()
        """The GPUs that cannot report Xid errors."""
        self._links: dict[int, _LinkBytes] = {}
        self.error = ""
        """Reason why the GPUs could not be read; empty on machines without an NVIDIA driver."""

    def read(self) -> list[Gpu]:
        """Return all GPUs' measurements, in NVML's order. A GPU that cannot be read has an error. If no GPU
        can be read, return an empty list."""
        nvml = self._nvml
        if self._clock() < self._retry_at:
            return []
        try:
            if not self._open:
                nvml.nvmlInit()
                self._open = True
                self._register_events()
            self._read_events()
            gpus, errors = [], []
            for number in range(nvml.nvmlDeviceGetCount()):
                try:
                    gpus.append(self._gpu(number))
                except Exception as error:
                    errors.append(error)
                    reason = str(error) or repr(error)
                    gpus.append(Gpu(number=number, name="", error=reason, last_xid=self._xids.get(number)))
            if errors and len(errors) == len(gpus):
                raise errors[0]  # The driver is not responding.
            self.error = ""
            return gpus
        except Exception as error:
            if not isinstance(error, nvml.NVMLError):
                log.exception("failed to read the GPUs")
            absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            self.error = "" if getattr(error, "value", None) in absent else str(error) or repr(error)
            self.close()
            self._retry_at = self._clock() + _RETRY_S
            return []

    def close(self) -> None:
        """Close the connection to NVML."""
        if self._open:
            self._open = False
            if self._events is not None:
                self._known(self._nvml.nvmlEventSetFree, self._events)
                self._events = None
            self._links.clear()
            self._known(self._nvml.nvmlShutdown)

    def _gpu(self, number: int) -> Gpu:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        unsupported: list[str] = []

        def known(names: str, read: Callable[..., Value], *arguments: Any) -> Value | None:
            """Return the value that `read` returns, or None if NVML does not report it. `names` lists the GPU
            fields that are computed from this value. Raises NVMLError if the GPU is lost."""
            try:
                return read(*arguments)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                    raise
                if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                    unsupported.extend(names.split())
                return None

        memory = known("memory_bytes used_bytes", nvml.nvmlDeviceGetMemoryInfo, handle)
        load = known("utilization_percent", nvml.nvmlDeviceGetUtilizationRates, handle)
        power_mw = known("power_w", nvml.nvmlDeviceGetPowerUsage, handle)
        limit_mw = known("power_limit_w", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        mask = known("throttle_reasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        running = known("processes", nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        sm, memory_clock, ecc = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.nvmlDeviceGetTotalEccErrors
        corrected, uncorrected = (
            nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        )
        sent, received = self._link_rates(number, handle, unsupported)
        if number in self._without_xids:
            unsupported.append("last_xid")
        return Gpu(
            number=number,
            name=nvml.nvmlDeviceGetName(handle),
            uuid=known("uuid", nvml.nvmlDeviceGetUUID, handle) or "",
            utilization_percent=None if load is None else float(load.gpu),
            memory_bytes=None if memory is None else int(memory.total),
            used_bytes=None if memory is None else int(memory.used),
            power_w=None if power_mw is None else power_mw / 1000.0,
            power_limit_w=None if limit_mw is None else limit_mw / 1000.0,
            temperature_c=known(
                "temperature_c", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
            sm_clock_mhz=known("sm_clock_mhz", nvml.nvmlDeviceGetClockInfo, handle, sm),
            max_sm_clock_mhz=known("max_sm_clock_mhz", nvml.nvmlDeviceGetMaxClockInfo, handle, sm),
            memory_clock_mhz=known("memory_clock_mhz", nvml.nvmlDeviceGetClockInfo, handle, memory_clock),
            throttle_reasons=None if mask is None else self._reasons(mask),
            ecc_corrected=known("ecc_corrected", ecc, handle, corrected, nvml.NVML_VOLATILE_ECC),
            ecc_uncorrected=known("ecc_uncorrected", ecc, handle, uncorrected, nvml.NVML_VOLATILE_ECC),
            nvlink_tx_bytes_per_s=sent,
            nvlink_rx_bytes_per_s=received,
            last_xid=self._xids.get(number),
            processes=None
            if running is None
            else [
                GpuProcess(pid=one.pid, memory_bytes=one.usedGpuMemory, name=_process_name(one.pid))
                for one in running
            ],
            unsupported=unsupported,
            mig_instances=self._instances(handle),
        )

    def _instances(self, handle: Any) -> list[MigInstance] | None:
        """Return a GPU's MIG instances, or None if the GPU is not split."""
        handles = mig_instances(self._nvml, handle)
        if handles is None:
            return None
        found = []
        for one in handles:
            name = self._known(self._nvml.nvmlDeviceGetName, one)
            memory = self._known(self._nvml.nvmlDeviceGetMemoryInfo, one)
            found.append(
                MigInstance(
                    name=name or "",
                    memory_bytes=None if memory is None else int(memory.total),
                    used_bytes=None if memory is None else int(memory.used),
                )
            )
        return found

    # ── Xid errors ──

    def _register_events(self) -> None:
        """Ask NVML to report all GPUs' Xid errors from now on."""
        nvml, known = self._nvml, self._known
        self._events = known(nvml.nvmlEventSetCreate)
        if self._events is None:
            return
        for number in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                    self._without_xids.add(number)
                continue  # this GPU does not report Xid errors
            self._xids.setdefault(number, 0)

    def _read_events(self) -> None:
        """Read the Xid errors received since the last call."""
        nvml = self._nvml
        if self._events is None:
            return
        for _ in range(_MAX_EVENTS):
            event = self._known(nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:  # no more events have arrived
                return
            number = self._known(nvml.nvmlDeviceGetIndex, event.device)
            if number is not None and event.eventType & nvml.nvmlEventTypeXidCriticalError:
                self._xids[number] = int(event.eventData)

    # ── NVLink ──

    def _link_rates(
        self, number: int, handle: Any, unsupported: list[str]
    ) -> tuple[float | None, float | None]:
        """Return the bytes per second that a GPU has sent and received over all its NVLinks since the
        previous read. If the GPU does not support the counters, add both field names to `unsupported`."""
        before, now = self._links.get(number), self._link_bytes(handle, unsupported)
        if now is None:
            return None, None
        self._links[number] = now
        if before is None or now.at <= before.at:
            return None, None
        span_s = now.at - before.at
        # A counter that has decreased was reset.
        sent = (now.sent - before.sent) / span_s if now.sent >= before.sent else None
        received = (now.received - before.received) / span_s if now.received >= before.received else None
        return sent, received

    def _link_bytes(self, handle: Any, unsupported: list[str]) -> _LinkBytes | None:
        nvml = self._nvml
        fields = [
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
        ]
        values = self._known(nvml.nvmlDeviceGetFieldValues, handle, fields)
        if values is None:
            return None
        if any(one.nvmlReturn != nvml.NVML_SUCCESS for one in values):
            if any(one.nvmlReturn == nvml.NVML_ERROR_NOT_SUPPORTED for one in values):
                unsupported += ["nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"]
            return None
        # NVML counts in KiB.
        sent, received = (int(one.value.ullVal) * 1024 for one in values)
        return _LinkBytes(self._clock(), sent, received)

    def _reasons(self, mask: int) -> list[str]:
        return [text for name, text in _THROTTLE_REASONS if mask & getattr(self._nvml, name, 0)]

    def _known(self, read: Callable[..., Value], *arguments: Any) -> Value | None:
        """Return the value reported by NVML, or None if this GPU or driver does not report it."""
        try:
            return read(*arguments)
        except self._nvml.NVMLError:
            return None


def _process_name(pid: int) -> str:
    """Return a process's name, or an empty string if it is in a different PID namespace."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
