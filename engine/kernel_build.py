"""Compiles a replica's kernels before their first launch, either in `python -m engine.build` or while the
replica's weights load. Worker processes compile the kernels on all cores. Otherwise, kernels would be
compiled one after another, each at its first launch, while requests wait. By hashing a few files, a starting
replica determines whether all of its kernels are already compiled."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from engine.replica_model import ReplicaModel

if TYPE_CHECKING:
    from kernels import compiling

log = logging.getLogger(__name__)

_SOURCES = ("engine", "kernels")
"""Packages whose source code determines which kernels are launched and what the kernels contain."""


class KernelBuild:
    """A running compilation of one replica's kernels. Call `wait` before the first kernel launch."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process

    @property
    def running(self) -> bool:
        """Whether the compilation is still running."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Block until the compilation has ended. If a kernel failed to compile, its first launch compiles it
        again and raises the error. The compiler messages are in the log."""
        if self._process is not None and (code := self._process.wait()):
            log.warning(
                "compiling the kernels in advance failed (exit code %d): see the messages above", code
            )


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The result of a kernel build."""

    kernels: int
    failures: list[compiling.CompileFailure]
    seconds: float


def check_kernels(served: ReplicaModel, device: torch.device) -> None:
    """Raise UnsupportedError if the model cannot be split across the ranks, or if it is not supported by the
    GPU kernels or on this GPU. The CPU backend, and float32 models on a GPU, do not use these kernels."""
    served.config.check_parallel(served.tensor_parallel_size)
    if _has_kernels(served, device):
        # Imported here because a replica on a CPU does not need Triton.
        from kernels import compiling

        served.check_shapes()
        served.check_gpu(compiling.current_gpu(device))


def start_build(served: ReplicaModel, device: torch.device) -> KernelBuild:
    """Start worker processes that compile the kernels missing from Triton's cache, and return the running
    compilation."""
    if not _has_kernels(served, device):
        return KernelBuild()
    from kernels import compiling

    gpu = compiling.current_gpu(device)
    return KernelBuild() if is_built(served, gpu) else KernelBuild(_start_process(served, gpu))


def build(served: ReplicaModel, gpu: compiling.GpuModel, processes: int) -> BuildResult:
    """Compile the kernels missing from Triton's cache. This function forks, so the calling process must not
    have used CUDA. Raises TableError if the GPU's table of kernel plans is invalid."""
    # Imported here because a process that only calls `is_built` does not need these modules.
    from engine.launch_enumeration import launch_all
    from kernels import compiling
    from kernels.triton.linear_table import load_table

    began = time.perf_counter()
    torch.set_num_threads(1)  # avoids OpenMP threads, which must not exist when this process forks
    table = load_table(gpu.name, gpu.shared_bytes)
    jobs = compiling.record(gpu.target, lambda: launch_all(served, gpu, table))
    failures = compiling.compile_jobs(gpu.target, jobs, processes)
    if not failures:
        mark = _mark(served, gpu)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return BuildResult(len(jobs), failures, time.perf_counter() - began)


def is_built(served: ReplicaModel, gpu: compiling.GpuModel) -> bool:
    """Return whether `build` has already succeeded in this cache folder for the same model, GPU, kernel
    plans, source code and library versions."""
    return _mark(served, gpu).exists()


def _has_kernels(served: ReplicaModel, device: torch.device) -> bool:
    return device.type == "cuda" and served.dtype != "float32"


def _start_process(served: ReplicaModel, gpu: compiling.GpuModel) -> subprocess.Popen[bytes]:
    """Start a separate process that runs `build`, because this process uses CUDA and must not fork. Errors go
    to standard error. The process ends when the calling thread ends."""
    command = [sys.executable, "-P", "-m", "engine.build", "--served", msgspec.json.encode(served).decode()]
    command += ["--replica-pid", str(os.getpid()), "--gpu", gpu.name, "--capability", str(gpu.target.arch)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def _mark(served: ReplicaModel, gpu: compiling.GpuModel) -> Path:
    """Return the path of the marker file in the cache folder, named after a hash of everything that
    determines the compiled kernels."""
    import triton
    from triton import knobs

    from kernels.triton.linear_table import table_path

    facts = [msgspec.json.encode(served).decode(), gpu.name, str(gpu.target)]
    digest = hashlib.sha256("\n".join([*facts, triton.__version__, torch.__version__]).encode())
    root = Path(__file__).resolve().parents[1]
    sources = [source for package in _SOURCES for source in sorted((root / package).rglob("*.py"))]
    for source in [*sources, table_path(gpu.name)]:
        with contextlib.suppress(FileNotFoundError):
            digest.update(source.read_bytes())
    return Path(knobs.cache.dir) / "appliance-kernels" / digest.hexdigest()
