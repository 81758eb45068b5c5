"""`python -m kernels.build`: compile every kernel that serving a model needs, so that no start compiles.

    python -m kernels.build --config FOLDER
    python -m kernels.build --config FOLDER --fp8 --kv-fp8 --max-num-seqs 256

FOLDER has a model's config.json: a checkpoint, or a public shape (docs/kernels.md says how to write one).
The kernels go to Triton's cache (TRITON_CACHE_DIR, or --cache), for the GPU of this machine or the one that
is named (--gpu with --capability). A replica whose kernels are not there builds them the same way while its
weights load (`start`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

from kernels import compiling
from kernels.dimensions import (
    DTYPES,
    LEAST_CAPABILITY,
    Dimensions,
    DimensionsError,
    check_gpu,
    read_dimensions,
)
from kernels.triton.linear_table import TableError, load_table, table_path
from kernels.writable import UnwritableError


@dataclass(frozen=True, slots=True)
class Built:
    """What a build did."""

    kernels: int
    failures: list[compiling.Failure]
    seconds: float


def build(dimensions: Dimensions, gpu: compiling.Gpu, processes: int) -> Built:
    """Compile what is not in Triton's cache yet. Forks: this process must not have used CUDA. Raises
    TableError for a table of the GPU's that cannot be used."""
    # Here, so that a process which only asks `is_built` does not load the kernels.
    from kernels.rehearsal import launch_all

    began = time.perf_counter()
    table = load_table(gpu.name, gpu.shared_bytes)
    jobs = compiling.record(gpu.target, lambda: launch_all(dimensions, table, gpu))
    failures = compiling.compile_jobs(gpu.target, jobs, processes)
    if not failures:
        mark = _mark(dimensions, gpu)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return Built(len(jobs), failures, time.perf_counter() - began)


def is_built(dimensions: Dimensions, gpu: compiling.Gpu) -> bool:
    """Whether `build` has succeeded for these, with the same kernels, table and Triton, into this cache."""
    return _mark(dimensions, gpu).exists()


def start(dimensions: Dimensions, gpu: compiling.Gpu) -> subprocess.Popen[bytes]:
    """`build` in a process of its own, for callers that use CUDA; its errors go to standard error."""
    command = [sys.executable, "-P", "-m", "kernels.build", "--dimensions", json.dumps(asdict(dimensions))]
    command += ["--gpu", gpu.name, "--capability", str(gpu.target.arch)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def _mark(dimensions: Dimensions, gpu: compiling.Gpu) -> Path:
    """A file in the cache whose name is a hash of all that decides what is compiled."""
    said = [json.dumps(asdict(dimensions)), gpu.name, str(gpu.target), triton.__version__, torch.__version__]
    digest = hashlib.sha256("\n".join(said).encode())
    here = Path(__file__).resolve().parent
    for source in [*sorted(here.rglob("*.py")), table_path(gpu.name)]:
        with contextlib.suppress(FileNotFoundError):
            digest.update(source.read_bytes())
    return Path(knobs.cache.dir) / "appliance-kernels" / digest.hexdigest()


def main() -> int:
    """Build for one model; 1 if it cannot be, or if a kernel does not compile."""
    arguments = _arguments()
    try:
        dimensions = arguments.dimensions or read_dimensions(arguments.config, **arguments.served)
        gpu = arguments.chosen or compiling.this_gpu()
        check_gpu(dimensions, gpu.name, gpu.target.arch)
        _check_cache(Path(knobs.cache.dir))
        built = build(dimensions, gpu, arguments.processes)
    except compiling.GpuError as error:
        print(f"{error}; or name one to build for with --gpu and --capability", file=sys.stderr)
        return 1
    except (DimensionsError, TableError, UnwritableError) as error:
        print(error, file=sys.stderr)
        return 1
    except compiling.CompilerError as error:
        asked = f"for capability {gpu.target.arch}, which Triton {triton.__version__} may not know"
        print(f"{error}, {asked}: what they said stands above", file=sys.stderr)
        return 1
    print(f"{built.kernels} kernels for {gpu.name} are in {knobs.cache.dir} ({built.seconds:.1f} s)")
    for failure in built.failures:
        print(f"{failure.name} does not compile: {failure.error}", file=sys.stderr)
    return 1 if built.failures else 0


def _check_cache(folder: Path) -> None:
    """Before anything is compiled. Raises UnwritableError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UnwritableError(
            f"the cache is {folder}, which cannot be written ({error.strerror}): name another folder with "
            "--cache or TRITON_CACHE_DIR"
        ) from None


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, help="a folder with the model's config.json")
    what.add_argument("--dimensions", type=_dimensions, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: the checkpoint's")
    parser.add_argument("--fp8", action="store_true", help="the layers' matrices are e4m3")
    parser.add_argument("--kv-fp8", action="store_true", help="so is the KV cache")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that the model is split over")
    parser.add_argument("--max-num-seqs", type=int, default=1024, help="most sequences at once")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="most tokens of a step")
    parser.add_argument("--cache", type=Path, help="Triton's cache, instead of TRITON_CACHE_DIR")
    parser.add_argument(
        "--processes", type=int, default=compiling.default_processes(), help="that compile (%(default)s)"
    )
    parser.add_argument("--gpu", help="the GPU's name, as in \"NVIDIA H200\"; default: this machine's")
    parser.add_argument("--capability", type=int, help="its compute capability times ten: 90 for an H200")
    arguments = parser.parse_args()
    if (arguments.gpu is None) != (arguments.capability is None):
        parser.error("--gpu and --capability are given together or not at all")
    if arguments.processes < 1:
        parser.error(f"--processes is {arguments.processes}; at least 1 is needed")
    if arguments.capability is not None and arguments.capability < LEAST_CAPABILITY:
        parser.error(
            f"--capability is {arguments.capability}; the compute capability times ten is needed, at least "
            f"{LEAST_CAPABILITY}: 90 for an H200"
        )
    arguments.chosen = None
    if arguments.gpu is not None:
        arguments.chosen = compiling.Gpu.of(arguments.gpu, arguments.capability)
    names = ("fp8", "kv_fp8", "tensor_parallel", "max_num_seqs", "max_num_batched_tokens")
    arguments.served = {name: getattr(arguments, name) for name in names}
    if arguments.dtype is not None:
        arguments.served["dtype"] = arguments.dtype
    if arguments.cache is not None:
        knobs.cache.dir = str(arguments.cache)
    return arguments


def _dimensions(text: str) -> Dimensions:
    values = json.loads(text)
    return Dimensions(**{**values, "windows": tuple(values["windows"])})


if __name__ == "__main__":
    sys.exit(main())
