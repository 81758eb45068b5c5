"""Checks the machine's devices and the installed versions."""

from __future__ import annotations

import os
import platform
import resource
import sqlite3
import sys
from collections.abc import Iterator

from appliance.models.gpus import GpuReport
from appliance.models.topology import Topology, describe_links, read_topology
from appliance.monitoring.findings import Area, Finding
from appliance.monitoring.versions import product_version, requirements, version_of
from appliance.protocol import FindingLevel
from appliance.quantities import of_bytes

_MIN_PYTHON = (3, 11)
# The first version of SQLite in which two connections may safely write or checkpoint at the same time
# (https://sqlite.org/wal.html#walresetbug).
_WAL_RESET_MENDED = (3, 51, 3)
_MIN_DESCRIPTORS = 4096
_LITTLE_MEMORY_BYTES = 1 << 30


def versions() -> Iterator[Finding]:
    """Check the versions of the product and its dependencies using the metadata of the installed packages."""
    yield _python()
    missing = [name for name in requirements() if version_of(name) is None]
    if product_version().startswith("unknown"):
        yield _finding(
            "versions",
            "appliance",
            "warning",
            "the appliance package is not installed in this environment, so its requirements cannot be "
            "checked",
            "install the package: pip install --editable .",
        )
    elif missing:
        yield _finding(
            "versions",
            "requirements",
            "problem",
            f"required packages are not installed: {', '.join(missing)}",
            f"install the packages: {sys.executable} -m pip install {' '.join(missing)}",
        )
    for name in ("torch", "tokenizers", "httptools", "msgspec"):
        if found := version_of(name):
            yield _finding("versions", name, "ok", f"{name} {found}")
    yield _sqlite()
    yield _kernels_package()


def devices(report: GpuReport) -> Iterator[Finding]:
    """Check GPUs, processors, memory and the open-file limit."""
    yield from _gpus(report)
    yield from gpu_links(read_topology())
    yield _processors()
    yield _memory()
    yield _descriptors()


def _python() -> Finding:
    text = (
        f"appliance {product_version()} · Python {platform.python_version()} ({sys.executable}) · "
        f"{platform.system()} {platform.release()} {platform.machine()}"
    )
    if sys.version_info < _MIN_PYTHON:
        return _finding("versions", "Python", "problem", text, "use Python 3.11 or newer")
    return _finding("versions", "appliance", "ok", text)


def _sqlite() -> Finding:
    note = ""
    if sqlite3.sqlite_version_info < _WAL_RESET_MENDED:
        note = (
            " (in versions before 3.51.3, two programs that write to a WAL database at the same time "
            "can corrupt it; the service uses a single writing connection, so open its databases "
            "read-only)"
        )
    return _finding("versions", "SQLite", "ok", f"SQLite {sqlite3.sqlite_version}{note}")


def _kernels_package() -> Finding:
    if found := version_of("kernels"):
        return _finding(
            "versions",
            "kernels",
            "problem",
            f"kernels {found} from PyPI conflicts with the product's package of the same name",
            f"uninstall that package and reinstall appliance: {sys.executable} -m pip uninstall kernels",
        )
    return _finding("versions", "kernels", "ok", "no conflicting kernels package is installed")


def _gpus(report: GpuReport) -> Iterator[Finding]:
    if report.error:
        yield _finding(
            "devices",
            "GPU",
            "warning",
            f"the NVIDIA driver is not responding: {report.error}",
            "check nvidia-smi and the kernel log (dmesg); until the driver responds, only the CPU "
            "backend can be used",
        )
    elif not report.gpus:
        yield _finding("devices", "GPU", "ok", "no NVIDIA GPU found: using the CPU backend")
    for gpu in report.gpus:
        yield _finding(
            "devices",
            f"GPU {gpu.number}",
            "ok",
            f"{gpu.name}, {of_bytes(gpu.memory_bytes)}, {of_bytes(gpu.used_bytes)} used, compute capability "
            f"{gpu.compute_capability or 'unknown'}, driver {report.driver} (CUDA {report.cuda})",
        )
    torch = version_of("torch") or ""
    if report.gpus and torch.endswith("+cpu"):
        yield _finding(
            "devices",
            "torch",
            "problem",
            f"torch {torch} was built without CUDA, so it cannot use a GPU",
            "install the CUDA build of torch (https://pytorch.org/get-started/locally)",
        )


def gpu_links(topology: Topology) -> Iterator[Finding]:
    """Check the links between GPUs. With only one GPU, there is no finding."""
    gpus = range(len(topology.uuids))
    links = topology.between(gpus)
    if not links:
        return
    if all(link.peer_access for link in links):
        yield _finding("devices", "GPU links", "ok", describe_links(topology, gpus))
        return
    yield _finding(
        "devices",
        "GPU links",
        "warning",
        f"{describe_links(topology, gpus)}: a model that spans GPUs without peer access exchanges data "
        "through host memory with NCCL, so each decode step is slower",
        "enable peer access (disable PCIe ACS, or use NVLink), or use tensor_parallel_size only across "
        "linked GPUs",
    )


def _processors() -> Finding:
    usable = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return _finding(
        "devices",
        "CPU",
        "ok",
        f"{usable} of {os.cpu_count()} CPUs usable, load average {load:.1f} ({_processor_name()})",
    )


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{of_bytes(memory.available)} of {of_bytes(memory.total)} memory available"
    if memory.available < _LITTLE_MEMORY_BYTES:
        return _finding("devices", "memory", "warning", text, "stop other programs, or serve a smaller model")
    return _finding("devices", "memory", "ok", text)


def _descriptors() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "no limit on open files" if hard == resource.RLIM_INFINITY else f"at most {hard:,} open files"
    if hard != resource.RLIM_INFINITY and hard < _MIN_DESCRIPTORS:
        return _finding(
            "devices",
            "open files",
            "warning",
            f"{text}: each connection uses one file descriptor",
            f"raise the hard limit to {_MIN_DESCRIPTORS} or more (ulimit -Hn, systemd: LimitNOFILE=)",
        )
    return _finding("devices", "open files", "ok", text)


def _finding(area: Area, subject: str, level: FindingLevel, text: str, remedy: str = "") -> Finding:
    return Finding(area=area, subject=subject, level=level, text=text, remedy=remedy)
