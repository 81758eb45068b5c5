"""Compiling kernels before they are needed: which, by running their launchers dry; then in many processes.

`record` runs code that launches kernels, on meta tensors, and notes each specialisation that Triton would
have compiled: nothing is compiled and nothing runs, so no GPU is needed. `compile_jobs` compiles what was
noted into Triton's cache (TRITON_CACHE_DIR), with one process a core; a later launch finds it there.

Triton specialises a kernel on what its arguments are (dtypes, None), on integers that are 1 or multiples of
16, on addresses that are multiples of 16, on constexprs and launch options. A dry run gives it the very
arguments of the real one, so that nothing here repeats its rules.
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
    """There is no GPU that can be used."""


class CompilerError(RuntimeError):
    """The processes that compile ended with work to do: the message has their exit codes."""


@dataclass(frozen=True, slots=True)
class Job:
    """One specialisation of one kernel."""

    name: str
    """Of the kernel, with its module."""
    function: Any
    """Triton's `JITFunction`."""
    specialisation: str
    """Triton's own description, for `JITFunction.preload`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that did not compile."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernels are compiled for."""

    name: str
    """As its driver names it: "NVIDIA H200"."""
    target: GPUTarget

    @classmethod
    def of(cls, name: str, capability: int) -> Gpu:
        """capability: compute capability times ten."""
        return cls(name, GPUTarget("cuda", capability, 32))

    @property
    def shared_bytes(self) -> int:
        """Of shared memory, that one program can have."""
        return shared_bytes(self.target.arch)

    @property
    def hopper(self) -> bool:
        return bool(self.target.arch == 90)

    @property
    def pdl(self) -> bool:
        """Whether it knows programmatic dependent launch: nothing that asks for it compiles where it does
        not."""
        return bool(self.target.arch >= PDL_FROM)


def this_gpu() -> Gpu:
    """The first NVIDIA GPU. Asked in a child process: this one stays free of CUDA, so it may fork.

    Raises GpuError where none can be used.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_gpu, args=(sender,))
    child.start()
    sender.close()
    try:
        gpu: Gpu = receiver.recv()
    except EOFError:
        raise GpuError("no NVIDIA GPU can be used here: see nvidia-smi") from None
    finally:
        child.join()
    return gpu


def _send_gpu(sender: Any) -> None:
    if torch.cuda.is_available():
        sender.send(current_gpu())


def current_gpu(device: torch.device | None = None) -> Gpu:
    """A GPU, for a process that uses CUDA itself; None: the one that torch uses."""
    major, minor = torch.cuda.get_device_capability(device)
    return Gpu.of(torch.cuda.get_device_name(device), 10 * major + minor)


def record(target: GPUTarget, run: Callable[[], object]) -> list[Job]:
    """What `run`, which launches kernels on meta tensors, needs on `target`; each once."""
    found: dict[tuple[str, str], Job] = {}

    def note(fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        job = Job(f"{fn.module}.{fn.name}", fn.jit_function, compile["specialization_data"])
        found.setdefault((job.name, job.specialisation), job)
        return True  # "done": Triton neither compiles nor launches

    with _offline(target), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        run()
    return list(found.values())


def compile_jobs(
    target: GPUTarget,
    jobs: list[Job],
    processes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Failure]:
    """Compiles into Triton's cache what is not there; returns what failed. Forks: no CUDA before. Raises
    CompilerError."""
    triton_key()  # Triton's hash of itself, which every worker would work out
    context = multiprocessing.get_context("fork")
    following = context.Value("i", 0)
    results = context.SimpleQueue()
    workers = [
        context.Process(target=_work, args=(target, jobs, following, results), daemon=True)
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
                raise CompilerError(f"compilers ended (exit codes {codes}) with {left} kernels to do")
            time.sleep(0.01)
        failure = results.get()
        if failure is not None:
            failures.append(failure)
        progress(done + 1, len(jobs))
    for worker in workers:
        worker.join()
    return failures


def _work(target: GPUTarget, jobs: list[Job], following: Any, results: Any) -> None:
    launcher = _launcher_class()
    with _offline(target):
        while True:
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
                results.put(Failure(job.name, f"{type(error).__name__}: {error}"))


def _launcher_class() -> Any:
    """What makes the C part of a launch, which Triton 3.6 compiles for each signature; None where there is no
    driver library to link it with."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    try:
        utils = CudaUtils()
    except (AssertionError, OSError, RuntimeError):
        return None
    driver.active.utils = utils
    return CudaLauncher


class _Offline:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self.utils: Any = None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
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
    """One for each core that this process may use."""
    return len(os.sched_getaffinity(0))
