"""Times how fast weights are loaded, beside what the page cache and the disk give, and writes JSON.

    python scripts/measure_loading.py OUT.json --folder FOLDER [--shape llama-3.1-8b] [--layers 8] [--no-disk]

Writes a checkpoint of random bf16 numbers in four shards into FOLDER, which should be on the disk to measure.
Plain rates: threads that read the files and do nothing else, out of the page cache and past it (O_DIRECT);
and copies of page-locked memory to the GPU. Ours: `engine.model.loader.load` to the end of the last copy, and
`stream`, which is what it does without filling weights: with the files in the page cache, and after they were
dropped from it; and, for comparison, from the disk through the page cache. With `--device cpu` only `stream`,
into memory: there the copying that fills weights, not the reading, is what takes time.

All is measured in turns, since a disk that others use as well is not the same from one second to the next.
Medians; the first run pays for what a process does once. OUT.json is written anew after each measurement, so
that a time limit loses none. The disk takes most of the time: `--no-disk` leaves it out, `--only-disk`
measures nothing else.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine.bench.shapes import SHAPES, write_config
from engine.config import ModelConfig
from engine.device import DeviceError, select_device
from engine.families import read_config
from engine.model.checkpoint import INDEX, read_entries
from engine.model.decoder import Decoder
from engine.model.loader import load
from engine.model.slices import TensorSlice
from engine.model.streaming import stream
from engine.model.weight_file import WeightFile
from engine.parallel import single
from kernels import select_backend
from kernels.writable import UnwritableError, check_writable

SHARDS = 4
NOISE_ELEMENTS = 16 << 20
READS = [(threads, mib) for threads in (4, 8, 16) for mib in (4, 16)]
"""(threads, MiB a read) tried for the page cache's rate."""
DISK_READS = [(4, 16), (12, 16), (16, 4)]
"""Likewise for the disk's."""
Measure = Callable[[], tuple[int, float]]
"""Bytes and seconds."""
Results = dict[str, dict[str, Any]]
"""By what was measured: the rates of the runs, their median, and its share of the lowest limit."""


@dataclass(frozen=True)
class Rank:
    """A place in a group of which only the slices are of interest."""

    size: int
    rank: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--no-disk", action="store_true", help="only what comes out of the page cache")
    where.add_argument("--only-disk", action="store_true", help="nothing that comes out of the page cache")
    arguments = parser.parse_args()

    folder, device = arguments.folder, arguments.device
    try:
        check_writable("OUT", arguments.out)
        select_device(device, 0, 1)
    except (UnwritableError, DeviceError) as error:
        raise SystemExit(str(error)) from None
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as `engine.runner` does for one rank
    config = write_checkpoint(folder, arguments.shape, arguments.layers)
    files = sorted(folder.glob("*.safetensors"))
    nbytes = sum(file.stat().st_size for file in files)
    print(f"{arguments.shape}, {config.layers} layers: {nbytes / 1e9:.1f} GB in {len(files)} files")

    def loaded(ranks: int = 1, fp8: bool = False, cold: bool = False) -> Measure:
        return lambda: load_seconds(folder, config, ranks, fp8, files if cold else [])

    def streamed(cold: bool = False) -> Measure:
        return lambda: stream_seconds(folder, device, files if cold else [])

    gpu = device == "cuda"
    warm: dict[str, Measure] = {
        **{f"page cache, {reads}": partial(plain, files, *reads) for reads in READS},
        "streamed": streamed(),
    }
    cold: dict[str, Measure] = {
        **{f"disk, {reads}": partial(plain, files, *reads, direct=True) for reads in DISK_READS},
        "streamed from disk": streamed(cold=True),
        "streamed from disk through the page cache": through_the_cache(streamed(cold=True)),
    }
    if gpu:
        warm |= {
            "to the GPU": to_gpu,
            "loaded, bf16": loaded(),
            "loaded, quantised to FP8": loaded(fp8=True),
            "loaded, rank 0 of 2": loaded(ranks=2),
            "loaded, rank 0 of 8": loaded(ranks=8),
        }
        cold |= {
            "loaded from disk, bf16": loaded(cold=True),
            "loaded from disk, bf16, through the page cache": through_the_cache(loaded(cold=True)),
            "loaded from disk, rank 0 of 2": loaded(ranks=2, cold=True),
        }
    about = {
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "shape": arguments.shape,
        "layers": config.layers,
        "bytes": nbytes,
    }
    measured: dict[str, Results] = {}

    def measure(place: str, measures: dict[str, Measure], limits: list[str]) -> None:
        def write(results: Results) -> None:
            measured[place] = results
            arguments.out.write_text(json.dumps({**about, "measured": measured}, indent=1) + "\n")

        compare(measures, limits, arguments.runs, write)

    if not arguments.only_disk:
        plain(files, *READS[0])  # brings them into the page cache
        measure("page cache", warm, ["page cache", *(["to the GPU"] if gpu else [])])
    if not arguments.no_disk:
        measure("disk", cold, ["disk"])


def compare(
    measures: dict[str, Measure], limits: list[str], runs: int, write: Callable[[Results], None]
) -> None:
    """Measures in turns, writes after each what is known, and prints all. The best of those whose names begin
    with one of `limits` is that limit; the others are shown as a share of the lowest."""
    rates: dict[str, list[float]] = {}
    for _ in range(runs):
        for name, measure in measures.items():
            nbytes, seconds = measure()
            settle()
            rates.setdefault(name, []).append(nbytes / seconds / 1e9)
            _, results = shares(rates, limits)
            write(results)
    lowest, results = shares(rates, limits)
    for name, each in results.items():
        line = f"{name:48}{each['median']:8.2f} GB/s (first {each['gb_s'][0]:6.2f})"
        print(f"{line}{100 * each['share']:6.0f} % of {lowest}", flush=True)


def shares(rates: dict[str, list[float]], limits: list[str]) -> tuple[str, Results]:
    """The lowest of the limits that are known, and the results."""
    medians = {name: statistics.median(each) for name, each in rates.items()}
    known = {
        limit: max(reached)
        for limit in limits
        if (reached := [median for name, median in medians.items() if name.startswith(limit)])
    }
    lowest = min(known, key=lambda limit: known[limit])
    results = {
        name: {
            "gb_s": [round(rate, 3) for rate in each],
            "median": medians[name],
            "share": medians[name] / known[lowest],
        }
        for name, each in rates.items()
    }
    return lowest, results


def settle() -> None:
    """Waits until nothing is brought into the page cache any more."""
    for thread in threading.enumerate():
        if thread.name == "page cache":
            thread.join()


def write_checkpoint(folder: Path, shape: str, layers: int | None) -> ModelConfig:
    """Shards, index and config.json of random numbers."""
    write_config(shape, folder)
    if layers is not None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": layers}))
    config = read_config(folder)
    shapes = {shard.name: shard.shape for shard in decoder_of(config, 1, False, "meta").weight_shards()}
    total = sum(2 * torch.Size(each).numel() for each in shapes.values())
    shards: list[dict[str, Any]] = [{} for _ in range(SHARDS)]
    before, weight_map = 0, {}
    for name, each in shapes.items():
        number = before * SHARDS // total
        size, start = 2 * torch.Size(each).numel(), sum(one["size"] for one in shards[number].values())
        shards[number][name] = {"size": size, "start": start, "shape": each}
        weight_map[name] = shard_name(number)
        before += size
    noise = torch.randn(NOISE_ELEMENTS).bfloat16().view(torch.uint8).numpy().data
    writers = [
        threading.Thread(target=write_shard, args=(folder / shard_name(number), shard, noise))
        for number, shard in enumerate(shards)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return config


def shard_name(number: int) -> str:
    return f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"


def write_shard(file: Path, tensors: dict[str, Any], noise: memoryview) -> None:
    header = {
        name: {
            "dtype": "BF16",
            "shape": list(each["shape"]),
            "data_offsets": [each["start"], each["start"] + each["size"]],
        }
        for name, each in tensors.items()
    }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    left = sum(each["size"] for each in tensors.values())
    with file.open("wb", buffering=0) as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        while left:
            left -= stream.write(noise[: min(left, len(noise))])
        os.fsync(stream.fileno())


def drop(files: list[Path]) -> None:
    """From the page cache."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain(files: list[Path], threads: int, mib: int, direct: bool = False) -> tuple[int, float]:
    """Bytes and seconds of `threads` that read the files, and do nothing with what they read."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    if direct:
        drop(files)
    size = mib << 20
    descriptors = [os.open(file, flags) for file in files]
    jobs: Iterator[tuple[int, int]] = iter(
        [(one, at) for one in descriptors for at in range(0, os.fstat(one).st_size, size)]
    )
    lock = threading.Lock()
    buffers = [large_pages(size) for _ in range(threads)]
    done = [0] * threads

    def work(number: int) -> None:
        while True:
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            done[number] += os.preadv(job[0], [buffers[number]], job[1])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    for one in descriptors:
        os.close(one)
    return sum(done), seconds


def large_pages(size: int) -> memoryview:
    """Touched. A disk that scatters what it reads over small ones may take twice as long."""
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    pages.write(bytes(size))
    return memoryview(pages)


def to_gpu() -> tuple[int, float]:
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 8 * len(host), time.perf_counter() - began


def decoder_of(config: ModelConfig, ranks: int, fp8: bool, device: str) -> Decoder:
    group: Any = Rank(ranks) if ranks > 1 else single()
    ops = select_backend("cpu" if device == "meta" else device, torch.bfloat16)
    return Decoder(config, group, ops, torch.bfloat16, torch.device(device), max_model_len=4096, fp8=fp8)


def load_seconds(
    folder: Path, config: ModelConfig, ranks: int, fp8: bool, cold: list[Path]
) -> tuple[int, float]:
    decoder = decoder_of(config, ranks, fp8, "cuda")
    drop(cold)
    torch.cuda.synchronize()
    began = time.perf_counter()
    read = load(decoder, folder, lambda stage, fraction: None)
    torch.cuda.synchronize()
    return read, time.perf_counter() - began


def stream_seconds(folder: Path, device: str, cold: list[Path]) -> tuple[int, float]:
    """Of every tensor, whole."""
    slices = [
        TensorSlice(name, entry, 0, entry.shape[0] if entry.shape else 1)
        for name, entry in read_entries(folder).items()
    ]
    slices.sort(key=lambda each: (each.entry.file, each.entry.offset))
    scratch = torch.empty(max(each.nbytes for each in slices), dtype=torch.uint8, device=device)

    def find_target(whole: TensorSlice) -> torch.Tensor:
        return scratch[: whole.nbytes]

    drop(cold)
    began = time.perf_counter()
    read = sum(
        part.nbytes for part in stream(slices, scratch.device, lambda part, numbers: None, find_target)
    )
    if device == "cuda":
        torch.cuda.synchronize()
    return read, time.perf_counter() - began


def through_the_cache(measure: Measure) -> Measure:
    """As if a file system could not say what is cached."""

    def measured() -> tuple[int, float]:
        with mock.patch.object(WeightFile, "_is_cached", lambda *asked: None):
            return measure()

    return measured


if __name__ == "__main__":
    main()
