"""`python -m engine.build`: compile all of a model's kernels in advance, so that no kernels are compiled when
a replica starts.

    python -m engine.build --config FOLDER
    python -m engine.build --config FOLDER --fp8 --kv-fp8 --max-num-seqs 256

FOLDER contains the model's config.json, either from a checkpoint or written for a public model shape (see
docs/kernels.md). The compiled kernels are stored in Triton's cache (TRITON_CACHE_DIR, or --cache). By
default, they are compiled for this machine's GPU; --gpu and --capability select a different one. A replica
whose kernels are not in the cache compiles them in the same way while its weights load.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec
import triton
from triton import knobs

from engine.config import CheckpointError, UnsupportedError
from engine.families import read_config
from engine.kernel_build import build
from engine.messages import ModelDType, Quantization
from engine.parent_death import die_with_parent
from engine.replica_model import DTYPES, ReplicaModel
from engine.sizing import FP8_BLOCKS, weights_dtype
from kernels import compiling
from kernels.limits import MIN_CAPABILITY
from kernels.triton.linear_table import TableError
from kernels.writable import UnwritableError


def main() -> int:
    """Compile a model's kernels. Returns 1 if the model or the GPU is not supported, or a kernel fails to
    compile."""
    arguments = _arguments()
    if arguments.replica_pid is not None:
        die_with_parent(arguments.replica_pid)
    try:
        served = arguments.served or read_served(
            arguments.config,
            arguments.dtype,
            fp8=arguments.fp8,
            kv_fp8=arguments.kv_fp8,
            tensor_parallel_size=arguments.tensor_parallel,
            expert_parallel=arguments.expert_parallel,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
        )
        gpu = arguments.chosen or compiling.this_gpu()
        served.check_gpu(gpu)
        _check_cache(Path(knobs.cache.dir))
        built = build(served, gpu, arguments.processes)
    except compiling.GpuError as error:
        print(f"{error}, or specify the target GPU with --gpu and --capability", file=sys.stderr)
        return 1
    except (CheckpointError, UnsupportedError, TableError, UnwritableError) as error:
        print(error, file=sys.stderr)
        return 1
    except compiling.CompilerError as error:
        target = f"for capability {gpu.target.arch}, which Triton {triton.__version__} may not support"
        print(f"{error}, {target}: see the compiler messages above", file=sys.stderr)
        return 1
    print(f"{built.kernels} kernels for {gpu.name} are in {knobs.cache.dir} ({built.seconds:.1f} s)")
    for failure in built.failures:
        print(f"{failure.name} failed to compile: {failure.error}", file=sys.stderr)
    return 1 if built.failures else 0


def read_served(
    folder: Path,
    dtype: ModelDType | None = None,
    *,
    fp8: bool = False,
    kv_fp8: bool = False,
    tensor_parallel_size: int = 1,
    expert_parallel: bool = False,
    max_num_seqs: int = 1024,
    max_num_batched_tokens: int = 8192,
) -> ReplicaModel:
    """Read the configuration of the model in `folder` and combine it with the serving options. Together, they
    determine the kernels to compile.

    `dtype` is the model's dtype, or None for the checkpoint's dtype. If `fp8` is true, matrices that are not
    already quantised in the checkpoint are quantised to FP8, and block scales are converted to one scale per
    output. Raises CheckpointError if the files cannot be used, and UnsupportedError if the GPU kernels do not
    support the model with these options.
    """
    config = read_config(folder)
    if expert_parallel:
        config = config.with_whole_experts()
    file = folder / "config.json"
    if (chosen := dtype or config.dtype) not in DTYPES:
        raise UnsupportedError(
            f"{file}: dtype is {chosen}; GPU kernels support {', '.join(DTYPES)}", "choose one with --dtype"
        )
    quantization: Quantization = "fp8" if fp8 else "auto"
    try:
        weights = weights_dtype(
            config, quantization, chosen, on_gpu=True, tensor_parallel_size=tensor_parallel_size
        )
        served = ReplicaModel(
            config=config,
            dtype=chosen,
            fp8=weights != chosen,
            fp8_blocks=weights == FP8_BLOCKS,
            kv_fp8=kv_fp8,
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        served.check_shapes()
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: {error.cause}", error.remedy) from None
    return served


def _check_cache(folder: Path) -> None:
    """Raise UnwritableError if the cache folder is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UnwritableError(
            f"the cache folder {folder} is not writable ({error.strerror}): choose another folder with "
            "--cache or TRITON_CACHE_DIR"
        ) from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="folder that contains the model's config.json")
    source.add_argument("--served", type=_served, help=argparse.SUPPRESS)
    parser.add_argument("--replica-pid", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=DTYPES, help="model dtype; default: the checkpoint's dtype")
    parser.add_argument("--fp8", action="store_true", help="quantise the layers' matrices to e4m3")
    parser.add_argument("--kv-fp8", action="store_true", help="store the KV cache in e4m3")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="number of ranks to split the model over"
    )
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="give each rank a subset of whole experts instead of a slice of every expert",
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=1024, help="maximum number of running sequences (%(default)s)"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="token budget of a step (%(default)s)"
    )
    parser.add_argument("--cache", type=Path, help="Triton cache folder; default: TRITON_CACHE_DIR")
    parser.add_argument(
        "--processes",
        type=int,
        default=compiling.default_processes(),
        help="number of compiler processes (%(default)s)",
    )
    parser.add_argument("--gpu", help='GPU name, e.g. "NVIDIA H200"; default: this machine\'s GPU')
    parser.add_argument("--capability", type=int, help="compute capability times ten, e.g. 90 for an H200")
    arguments = parser.parse_args()
    if (arguments.gpu is None) != (arguments.capability is None):
        parser.error("--gpu and --capability must be given together")
    for option in ("max_num_seqs", "max_num_batched_tokens", "processes"):
        if (value := getattr(arguments, option)) < 1:
            parser.error(f"--{option.replace('_', '-')} is {value}; it must be at least 1")
    if arguments.capability is not None and arguments.capability < MIN_CAPABILITY:
        parser.error(
            f"--capability is {arguments.capability}; give the compute capability times ten, at least "
            f"{MIN_CAPABILITY} (90 for an H200)"
        )
    arguments.chosen = None
    if arguments.gpu is not None:
        arguments.chosen = compiling.GpuModel.of(arguments.gpu, arguments.capability)
    if arguments.cache is not None:
        knobs.cache.dir = str(arguments.cache)
    return arguments


def _served(text: str) -> ReplicaModel:
    return msgspec.json.decode(text, type=ReplicaModel)


if __name__ == "__main__":
    sys.exit(main())
