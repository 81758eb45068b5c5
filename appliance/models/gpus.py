"""Finds NVIDIA GPUs through NVML. NVML creates no CUDA context, so it uses no GPU memory."""

from __future__ import annotations

import contextlib
from typing import NamedTuple


class DetectedGpu(NamedTuple):
    """A GPU as currently reported by NVML."""

    number: int
    name: str
    memory_bytes: int
    used_bytes: int
    compute_capability: str
    """Compute capability, such as "9.0", or empty if unknown."""


class GpuReport(NamedTuple):
    """The machine's GPUs. If NVML does not respond although a driver seems to be installed, `error` gives the
    reason."""

    gpus: list[DetectedGpu]
    driver: str = ""
    cuda: str = ""
    """Newest CUDA version that the driver supports."""
    error: str = ""


def find_gpus() -> GpuReport:
    """Query NVML. An empty report means that the machine has no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return GpuReport([], error="" if error.value in absent else str(error))
    try:
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return GpuReport(
            [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())],
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
        )
    except pynvml.NVMLError as error:
        return GpuReport([], error=str(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpu(index: int) -> DetectedGpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability = ""
    with contextlib.suppress(pynvml.NVMLError):
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = f"{major}.{minor}"
    return DetectedGpu(index, _text(pynvml.nvmlDeviceGetName(handle)), memory.total, memory.used, capability)


def _text(value: str | bytes) -> str:
    # Old NVML bindings return bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
