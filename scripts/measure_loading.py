"""Measures how fast `engine.model.loader` loads weights, as a fraction of the hardware's limit.

    python scripts/measure_loading.py FOLDER --shape llama-3.1-8b [--layers 8] [--ranks 8] [--fp8] [--cold]

Writes a checkpoint of random bfloat16 numbers into FOLDER, which should be on the disk whose speed is to be
measured. The first limit is the rate at which threads can read the files, from the page cache or, with
--cold, from disk with O_DIRECT. On a GPU, the second limit is the rate of copies from page-locked memory. The
speed is reported as a fraction of the lower limit. The measurements are interleaved, because the speed of a
shared disk varies. The table shows medians. The first run is not counted, because it includes initialisation.

With --ranks N, N processes load their parts of the model at the same time, each on a separate GPU. They then
measure the copy rate at the same time, and the table shows the sum of all processes' rates.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors.torch import save_file

from engine.bench.shapes import SHAPES, write_config
from engine.config import ModelConfig
from engine.families import read_config
from engine.launch import RANK_ENVIRONMENT
from engine.model.checkpoint import INDEX
from engine.model.decoder import Decoder
from engine.model.loader import load
from engine.parallel import Ranks, join, single
from engine.progress import no_progress
from kernels import select_backend

MAX_SHARD_BYTES = 4 << 30
READ_BYTES, READ_THREADS = 16 << 20, 12


def main() -> None:
    """Write the checkpoint, run the measurements, and print a table."""
    arguments = _arguments()
    config = write_checkpoint(arguments.folder, arguments.shape, arguments.layers)
    files = sorted(arguments.folder.glob("*.safetensors"))
    if arguments.ranks > 1:
        measure_ranks(arguments, files)
        return

    def loading() -> tuple[int, float]:
        decoder = make_decoder(config, arguments.device, single(), arguments.fp8)
        return load_once(decoder, arguments, files)

    measures: dict[str, Callable[[], tuple[int, float]]] = {
        "limit: disk" if arguments.cold else "limit: page cache": lambda: read(files, arguments.cold)
    }
    if arguments.device == "cuda":
        measures["limit: to the GPU"] = copy_to_gpu
    measures["loaded"] = loading
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(arguments.runs + 1):
        for name, measure in measures.items():
            size, seconds = measure()
            rates[name].append(size / seconds / 1e9)
            wait_for_page_cache()
    show(arguments, rates)


def show(arguments: argparse.Namespace, rates: dict[str, list[float]]) -> None:
    """Print the median rates and write them to the --json file."""
    medians = {name: statistics.median(each[1:]) for name, each in rates.items()}
    lowest = min((rate for name, rate in medians.items() if name.startswith("limit")), default=None)
    for name, rate in medians.items():
        fraction = "" if lowest is None else f"{rate / lowest:8.0%} of the lowest limit"
        print(f"{name:24}{rate:8.2f} GB/s{fraction}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "gb_s": rates}, default=str))


def load_once(decoder: Decoder, arguments: argparse.Namespace, files: list[Path]) -> tuple[int, float]:
    """Load the weights. Returns the number of bytes and the time taken in seconds."""
    if arguments.cold:
        drop_cache(files)
    several = decoder.ranks.size > 1
    began = time.perf_counter()
    loaded = load(decoder, arguments.folder, no_progress, exchange=several)
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    return loaded, time.perf_counter() - began


def measure_ranks(arguments: argparse.Namespace, files: list[Path]) -> None:
    """Run the measurements on several ranks concurrently, one process per rank, and print a table."""
    rates: dict[str, list[float]] = {}
    os.environ |= {**RANK_ENVIRONMENT, **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        results = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(
            run_rank, (arguments, files, f"{folder}/rendezvous", results), nprocs=arguments.ranks
        )
        while not results.empty():
            name, size, seconds = results.get()
            rates.setdefault(name, []).append(size / seconds / 1e9)
    show(arguments, rates)


def run_rank(
    rank: int, arguments: argparse.Namespace, files: list[Path], rendezvous: str, results: Any
) -> None:
    """Run one rank's measurements. Rank 0 reports the total bytes over all ranks and the slowest rank's
    time."""
    device = f"cuda:{rank}" if arguments.device == "cuda" else "cpu"
    if arguments.device == "cuda":
        torch.cuda.set_device(rank)
    ranks = join(arguments.ranks, rank, rendezvous, "nccl" if arguments.device == "cuda" else "gloo")
    config = read_config(arguments.folder)

    def together(name: str, measure: Callable[[], tuple[int, float]]) -> None:
        ranks.all_gather_stack(torch.zeros(1, device=device)).tolist()  # a barrier
        size, seconds = measure()
        mine = torch.tensor([size, seconds], dtype=torch.float64, device=device)
        every = ranks.all_gather_stack(mine)
        if rank == 0:
            results.put((name, float(every[:, 0].sum()), float(every[:, 1].max())))

    for _ in range(arguments.runs + 1):
        if arguments.device == "cuda":
            together("limit: to the GPUs", copy_to_gpu)
        decoder = make_decoder(config, device, ranks, arguments.fp8)
        together(f"loaded, {arguments.ranks} ranks", partial(load_once, decoder, arguments, files))
        del decoder
        wait_for_page_cache()
    if arguments.device == "cpu":
        ranks.close()


def write_checkpoint(folder: Path, shape: str, layers: int | None) -> ModelConfig:
    """Write config.json, shards of random numbers and their index."""
    write_config(shape, folder)
    if layers is not None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": layers}))
    config = read_config(folder)
    noise = torch.randn(16 << 20).bfloat16()
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for shard in make_decoder(config, "meta", single(), False).weight_shards():
        elements = torch.Size(shard.shape).numel()
        if size + 2 * elements > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        size += 2 * elements
        shards[-1][shard.name] = noise.repeat(-(-elements // len(noise)))[:elements].reshape(shard.shape)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name)
    index = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    os.sync()
    return config


def make_decoder(config: ModelConfig, device: str, ranks: Ranks, fp8: bool) -> Decoder:
    ops = select_backend("cuda" if device.startswith("cuda") else "cpu", torch.bfloat16)
    return Decoder(config, ranks, ops, torch.bfloat16, torch.device(device), max_model_len=4096, fp8=fp8)


def drop_cache(files: list[Path]) -> None:
    """Evict the files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wait_for_page_cache() -> None:
    """Wait for the loader's background thread to read the files into the page cache."""
    for thread in threading.enumerate():
        if thread.name == "page cache":
            thread.join()


def read(files: list[Path], direct: bool) -> tuple[int, float]:
    """Read the files with several threads. Returns the number of bytes and the time taken in seconds."""
    if direct:
        drop_cache(files)
    opened = [os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for file in files]
    pieces = [(fd, at) for fd in opened for at in range(0, os.fstat(fd).st_size, READ_BYTES)]
    buffers: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(READ_THREADS):
        # Use large pages: a disk read can take twice as long if its data is scattered over small pages.
        pages = mmap.mmap(-1, READ_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        pages.write(bytes(READ_BYTES))
        buffers.put(pages)

    def read_piece(piece: tuple[int, int]) -> int:
        pages = buffers.get()
        size = os.preadv(piece[0], [pages], piece[1])
        buffers.put(pages)
        return size

    began = time.perf_counter()
    with ThreadPoolExecutor(READ_THREADS) as pool:
        size = sum(pool.map(read_piece, pieces))
    seconds = time.perf_counter() - began
    for fd in opened:
        os.close(fd)
    return size, seconds


def copy_to_gpu() -> tuple[int, float]:
    """Copy page-locked memory to the GPU. Returns the number of bytes and the time taken in seconds."""
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * len(host), time.perf_counter() - began


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="number of layers (default: all layers of the shape)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks that load concurrently")
    parser.add_argument("--fp8", action="store_true", help="quantise the weights while loading")
    parser.add_argument("--cold", action="store_true", help="read from the disk instead of the page cache")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rates of all runs to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
