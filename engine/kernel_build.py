"""Compiles the kernels of a replica before they are launched: by `python -m engine.build`, or while weights
load.

If the kernels are already compiled, a starting replica only hashes a few files. Otherwise worker processes
compile them on all cores, so that no request waits for a compilation. Without them the replica itself would
compile each kernel at its first launch, one after the other.
"""

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
"""The packages whose code determines which kernels are launched, and what they contain."""


class KernelBuild:
    """The compilation of one replica's kernels. Call `wait` before the first kernel is launched."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process

    @property
    def running(self) -> bool:
        """Whether `wait` would block."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Block until the compilation has ended. A kernel that could not be compiled here is compiled again
        at its first launch, and then raises its error; the log has the reason."""
        if self._process is not None and (code := self._process.wait()):
            log.warning(
                "kernels could not be compiled before the start (exit code %d): see the messages above", code
            )


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The outcome of a build."""

    kernels: int
    failures: list[compiling.CompileFailure]
    seconds: float


def check_kernels(served: ReplicaModel, device: torch.device) -> None:
    """Raise UnsupportedError if the model cannot be split over the ranks, or if our GPU kernels or this GPU
    cannot serve it. The CPU, and float32 on a GPU, do not use our kernels."""
    served.config.check_parallel(served.tensor_parallel_size)
    if _has_kernels(served, device):
        # Imported here because a replica on a CPU does not need Triton.
        from kernels import compiling

        served.check_shapes()
        served.check_gpu(compiling.current_gpu(device))


def start_build(served: ReplicaModel, device: torch.device) -> KernelBuild:
    """Start worker processes that compile the kernels missing from Triton's cache."""
    if not _has_kernels(served, device):
        return KernelBuild()
    from kernels import compiling

    gpu = compiling.current_gpu(device)
    return KernelBuild() if is_built(served, gpu) else KernelBuild(_start_process(served, gpu))


def build(served: ReplicaModel, gpu: compiling.GpuModel, processes: int) -> BuildResult:
    """Compile the kernels missing from Triton's cache. Forks, so this process must not have used CUDA. Raises
    TableError if the GPU's table of plans cannot be used."""
    # Imported here because a process that only calls `is_built` does not need them.
    from engine.launch_enumeration import launch_all
    from kernels import compiling
    from kernels.triton.linear_table import load_table

    began = time.perf_counter()
    torch.set_num_threads(1)  # keeps this process free of OpenMP threads when it forks
    table = load_table(gpu.name, gpu.shared_bytes)
    jobs = compiling.record(gpu.target, lambda: launch_all(served, gpu, table))
    failures = compiling.compile_jobs(gpu.target, jobs, processes)
    if not failures:
        mark = _mark(served, gpu)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return BuildResult(len(jobs), failures, time.perf_counter() - began)


def is_built(served: ReplicaModel, gpu: compiling.GpuModel) -> bool:
    """Return whether `build` has succeeded for the same model, GPU, table, code and versions, into this
    cache."""
    return _mark(served, gpu).exists()


def _has_kernels(served: ReplicaModel, device: torch.device) -> bool:
    return device.type == "cuda" and served.dtype != "float32"


def _start_process(served: ReplicaModel, gpu: compiling.GpuModel) -> subprocess.Popen[bytes]:
    """Start `build` in another process, since this one uses CUDA. Its errors go to standard error."""
    command = [sys.executable, "-P", "-m", "engine.build", "--served", msgspec.json.encode(served).decode()]
    command += ["--gpu", gpu.name, "--capability", str(gpu.target.arch)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def _mark(served: ReplicaModel, gpu: compiling.GpuModel) -> Path:
    """Return the path of a file in the cache whose name is a hash of everything that determines the compiled
    kernels."""
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
