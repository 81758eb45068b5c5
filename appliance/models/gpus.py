"""Finds NVIDIA GPUs through NVML, which creates no CUDA context and therefore uses no GPU memory. If a GPU is
split into MIG instances, the instances are listed instead, and each of them can run a rank as if it were a
separate GPU. GPUs and instances share one numbering, in the order of the machine's GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple


class DetectedGpu(NamedTuple):
    """A GPU or MIG instance, as currently reported by NVML."""

    number: int
    name: str
    memory_bytes: int
    used_bytes: int
    compute_capability: str
    """Compute capability, such as "9.0", or empty if unknown."""


class GpuReport(NamedTuple):
    """The machine's GPUs. If a driver appears to be installed but NVML does not respond, `error` gives the
    reason."""

    gpus: list[DetectedGpu]
    driver: str = ""
    cuda: str = ""
    """Newest CUDA version supported by the driver."""
    error: str = ""


@contextlib.contextmanager
def nvml_session() -> Iterator[None]:
    """Keep NVML initialised while the context is active. Raises pynvml.NVMLError if NVML cannot be used."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def find_gpus() -> GpuReport:
    """Return the GPUs reported by NVML. The report is empty if the machine has no NVIDIA driver."""
    import pynvml

    try:
        with nvml_session():
            version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            return GpuReport(
                [_gpu(number, device) for number, device in enumerate(devices())],
                driver=pynvml.nvmlSystemGetDriverVersion(),
                cuda=f"{version // 1000}.{version % 1000 // 10}",
            )
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return GpuReport([], error="" if error.value in absent else str(error))


def gpu_processes() -> dict[int, set[int]]:
    """Return the ids of the processes that use each device's memory, keyed by GPU or MIG instance number. The
    result is empty if NVML lists no processes."""
    import pynvml

    try:
        with nvml_session():
            return {
                number: {one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(device.handle)}
                for number, device in enumerate(devices())
            }
    except pynvml.NVMLError:
        return {}


class NvmlDevice(NamedTuple):
    """A GPU or MIG instance, as accepted by NVML's functions."""

    handle: Any
    gpu: Any
    """The handle of the GPU that contains the device; the same as `handle` unless the device is a MIG
    instance."""
    is_instance: bool


def devices() -> Iterator[NvmlDevice]:
    """Yield the machine's GPUs and MIG instances. NVML must be initialised. Raises pynvml.NVMLError if an
    NVML call fails."""
    import pynvml

    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        instances = mig_instances(pynvml, gpu)
        if instances is None:
            yield NvmlDevice(gpu, gpu, False)
        else:
            yield from (NvmlDevice(handle, gpu, True) for handle in instances)


def mig_instances(nvml: Any, gpu: Any) -> list[Any] | None:
    """Return the handles of a GPU's MIG instances, or None if the GPU is not split. `nvml` is the NVML
    module, and `gpu` is a handle."""
    split = False
    with contextlib.suppress(nvml.NVMLError):  # GPUs without MIG raise an error
        split = nvml.nvmlDeviceGetMigMode(gpu)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    if not split:
        return None
    found = []
    for instance in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with contextlib.suppress(nvml.NVMLError):  # there is no instance with this index
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, instance))
    return found


def _gpu(number: int, device: NvmlDevice) -> DetectedGpu:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(device.handle)
    capability = ""
    with contextlib.suppress(pynvml.NVMLError):
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device.gpu)
        capability = f"{major}.{minor}"
    name = pynvml.nvmlDeviceGetName(device.handle)
    return DetectedGpu(number, name, memory.total, memory.used, capability)
