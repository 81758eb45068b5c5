"""NVIDIA GPUs through NVML: no CUDA context, so looking never takes memory from a model."""

from __future__ import annotations

import contextlib
from typing import NamedTuple


class Gpu(NamedTuple):
    """One GPU, as NVML sees it now."""

    number: int
    name: str
    memory_bytes: int
    used_bytes: int
    compute_capability: str
    """Such as "9.0"; empty where unknown."""


class GpuReport(NamedTuple):
    """The box's GPUs. `error` says why NVML cannot be asked although a driver seems to be there."""

    gpus: list[Gpu]
    driver: str = ""
    cuda: str = ""
    """The newest CUDA that the driver carries."""
    error: str = ""


def find_gpus() -> GpuReport:
    """Ask NVML. An empty report means a box without NVIDIA's driver."""
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


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability = ""
    with contextlib.suppress(pynvml.NVMLError):
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = f"{major}.{minor}"
    return Gpu(index, _text(pynvml.nvmlDeviceGetName(handle)), memory.total, memory.used, capability)


def _text(value: str | bytes) -> str:
    # Old bindings of NVML answer in bytes.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
