"""Determines which kernels a program will launch and compiles them ahead of time in parallel processes.

`record` runs code that launches kernels on meta tensors and records each specialisation that Triton would
compile. Nothing is compiled or executed, so no GPU is needed. `compile_jobs` compiles the recorded
specialisations and stores them in Triton's cache (TRITON_CACHE_DIR), where later launches find them.

Triton specialises a kernel for each combination of argument dtypes, constexprs and launch options, and also
for arguments that are None, integers that are 1 or multiples of 16, and addresses that are multiples of 16.
The recorded run passes the same arguments as a real one, so these rules need not be reimplemented here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import triton_key

from kernels import PDL_FROM
from kernels.limits import shared_bytes


class GpuError(RuntimeError):
    """Raised if no usable GPU is found."""


class CompilerError(RuntimeError):
    """Raised if the compiler processes exit before compiling all kernels. The message contains their exit
    codes."""


@dataclass(frozen=True, slots=True)
class CompileJob:
    """One specialisation of one kernel."""

    name: str
    """The kernel's qualified name (module and function)."""
    function: Any
    """Triton's `JITFunction`."""
    specialisation: str
    """Triton's description of the specialisation, for `JITFunction.preload`."""


@dataclass(frozen=True, slots=True)
class CompileFailure:
    """A compile job that failed."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class GpuModel:
    """The GPU model to compile kernels for."""

    name: str
    """The name reported by the driver, e.g. "NVIDIA H200"."""
    target: GPUTarget

    @classmethod
    def of(cls, name: str, capability: int) -> GpuModel:
        """Return the GPU model with the given name. capability: compute capability times ten."""
        return cls(name, GPUTarget("cuda", capability, 32))

    @property
    def shared_bytes(self) -> int:
        """Shared memory available to one program, in bytes."""
        return shared_bytes(self.target.arch)

    @property
    def hopper(self) -> bool:
        return bool(self.target.arch == 90)

    @property
    def pdl(self) -> bool:
        """Whether the GPU supports programmatic dependent launch (PDL). Kernels that use PDL do not compile
        for other GPUs."""
        return bool(self.target.arch >= PDL_FROM)


def this_gpu() -> GpuModel:
    """Return the model of the first NVIDIA GPU. The query runs in a child process, so that this process does
    not initialise CUDA and can still fork.

    Raises GpuError if there is no usable GPU.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_gpu, args=(sender,))
    child.start()
    sender.close()
    try:
        gpu: GpuModel = receiver.recv()
    except EOFError:
        raise GpuError("no usable NVIDIA GPU found: check nvidia-smi") from None
    finally:
        child.join()
    return gpu


def _send_gpu(sender: Any) -> None:
    if torch.cuda.is_available():
        sender.send(current_gpu())


def current_gpu(device: torch.device | None = None) -> GpuModel:
    """Return the GPU model of a torch device (by default, the current one). Initialises CUDA in this
    process."""
    major, minor = torch.cuda.get_device_capability(device)
    return GpuModel.of(torch.cuda.get_device_name(device), 10 * major + minor)


def record(target: GPUTarget, run: Callable[[], object]) -> list[CompileJob]:
    """Return each kernel specialisation that `run` would launch on `target`, without duplicates. `run` must
    launch the kernels on meta tensors."""
    found: list[CompileJob] = []

    def note(key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        function = fn.jit_function
        found.append(CompileJob(f"{fn.module}.{fn.name}", function, compile["specialization_data"]))
        kernels, *_others = function.device_caches[compile["device"]]
        kernels[key] = _RecordedKernel()
        return True  # returning True keeps Triton from compiling and launching the kernel

    with _offline(target), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        run()
    return found


class _RecordedKernel:
    """Takes the place of a compiled kernel in Triton's cache. Without an entry in the cache, Triton would
    describe the same specialisation again at each launch."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        return

    def run(self, *_: object) -> None:
        return


def compile_jobs(
    target: GPUTarget,
    jobs: list[CompileJob],
    processes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[CompileFailure]:
    """Compile the jobs that are not yet in Triton's cache and return those that failed. Compilation runs in
    forked processes, so this process must not have initialised CUDA. Raises CompilerError if the compiler
    processes exit early."""
    triton_key()  # hash Triton's sources here, so that the forked workers inherit the result
    context = multiprocessing.get_context("fork")
    following = context.Value("i", 0)
    results = context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(target, jobs, following, results, os.getpid()), daemon=True)
        for _ in range(min(processes, len(jobs)))
    ]
    for worker in workers:
        worker.start()
    failures = []
    for done in range(len(jobs)):
        while results.empty():
            if not any(worker.is_alive() for worker in workers) and results.empty():
                codes = ", ".join(str(worker.exitcode) for worker in workers)
                left = len(jobs) - done
                kernels = "1 kernel" if left == 1 else f"{left} kernels"
                raise CompilerError(
                    f"compiler processes exited (exit codes {codes}) with {kernels} left to compile"
                )
            time.sleep(0.01)
        failure = results.get()
        if failure is not None:
            failures.append(failure)
        progress(done + 1, len(jobs))
    for worker in workers:
        worker.join()
    return failures


def _work(target: GPUTarget, jobs: list[CompileJob], following: Any, results: Any, parent: int) -> None:
    launcher = _launcher_class()
    with _offline(target):
        # If the parent is killed, it cannot end its workers.
        while os.getppid() == parent:
            with following.get_lock():
                index = following.value
                following.value += 1
            if index >= len(jobs):
                return
            job = jobs[index]
            try:
                kernel = job.function.preload(job.specialisation)
                if launcher is not None:
                    launcher(kernel.src, kernel.metadata)
                results.put(None)
            except Exception as error:
                results.put(CompileFailure(job.name, f"{type(error).__name__}: {error}"))


def _launcher_class() -> Any:
    """Return Triton's class for compiling C launchers (Triton 3.6 needs one per kernel signature), or None if
    the driver library that the launchers link against is missing."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    try:
        utils = CudaUtils()
    except (AssertionError, OSError, RuntimeError):
        return None
    driver.active.utils = utils
    return CudaLauncher


class _Offline:
    """Implements the parts of Triton's driver interface that compilation needs, so that no GPU is
    required."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self.utils: Any = None

    def get_current_device(self) -> _Offline:
        """Return this object as the device. Triton has a cache of kernels for each device, so each recording
        starts with empty caches, and its entries cannot be launched on a GPU."""
        return self

    def get_current_stream(self, _device: object) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextlib.contextmanager
def _offline(target: GPUTarget) -> Iterator[None]:
    before = driver._active
    driver.set_active(_Offline(target))
    try:
        yield
    finally:
        driver._active = before


def default_processes() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
