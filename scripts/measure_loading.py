"""Times how fast weights are loaded, beside what the page cache and the disk give, and writes JSON.

    python scripts/measure_loading.py OUT.json --folder FOLDER [--shape llama-3.1-8b] [--layers 8]

Writes a checkpoint of random bf16 numbers in four shards into FOLDER, which should be on the disk to measure.
Plain rates: threads that read the files into page-locked memory, and nothing else, out of the page cache and
past it (O_DIRECT); and copies of page-locked memory to the GPU. Ours: `engine.model.loader.load` to the end
of the last copy, with the files in the page cache, and after they were dropped from it. Best of the runs, and
the first, in which a process pays for what it does once.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.bench.shapes import SHAPES, write_config
from engine.config import ModelConfig
from engine.families import read_config
from engine.model.checkpoint import INDEX
from engine.model.decoder import Decoder
from engine.model.loader import load
from engine.parallel import single
from kernels import select_backend

SHARDS = 4
NOISE_ELEMENTS = 16 << 20
READS = [(threads, mib) for threads in (4, 8, 16) for mib in (4, 16)]
"""(threads, MiB a read) tried for the page cache's rate."""
DISK_READ = (4, 16)
"""Likewise for the disk: the best of some that were tried."""


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
    arguments = parser.parse_args()

    config = write_checkpoint(arguments.folder, arguments.shape, arguments.layers)
    files = sorted(arguments.folder.glob("*.safetensors"))
    nbytes = sum(file.stat().st_size for file in files)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": arguments.shape,
        "layers": config.layers,
        "bytes": nbytes,
    }
    print(f"{arguments.shape}, {config.layers} layers: {nbytes / 1e9:.1f} GB in {len(files)} files")

    def best(name: str, measure: Callable[[], tuple[int, float]], runs: int, limits: str = "") -> None:
        found = [measure() for _ in range(runs)]
        rates = [read / seconds / 1e9 for read, seconds in found]
        results[name] = {"gb_s": rates, "seconds": [seconds for _, seconds in found], "bytes": found[0][0]}
        line = (
            f"{name:30}{max(rates):8.2f} GB/s (first {rates[0]:6.2f}){found[0][0] / max(rates) / 1e9:8.3f} s"
        )
        if limits:
            slowest = min(limits.split(" + "), key=lambda limit: max(results[limit]["gb_s"]))
            results[name]["share"] = max(rates) / max(results[slowest]["gb_s"])
            line += f"{100 * results[name]['share']:6.0f} % of {slowest}"
        print(line, flush=True)

    def ours(ranks: int = 1, fp8: bool = False, cold: bool = False) -> Callable[[], tuple[int, float]]:
        return lambda: load_seconds(arguments.folder, config, ranks, fp8, files if cold else [])

    best("page cache", lambda: max((plain(files, *read) for read in READS), key=rate), 1)
    best("to the GPU", to_gpu, 3)
    warm = "page cache + to the GPU"
    best("loaded, bf16", ours(), arguments.runs, warm)
    best("loaded, quantised to FP8", ours(fp8=True), arguments.runs, warm)
    best("loaded, rank 0 of 2", ours(ranks=2), arguments.runs, warm)
    best("loaded, rank 0 of 8", ours(ranks=8), arguments.runs, warm)
    best("disk", lambda: plain(files, *DISK_READ, direct=True), 2)
    best("loaded from disk, bf16", ours(cold=True), 2, "disk")
    best("loaded from disk, rank 0 of 2", ours(ranks=2, cold=True), 1, "disk")
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def rate(measured: tuple[int, float]) -> float:
    return measured[0] / measured[1]


def write_checkpoint(folder: Path, shape: str, layers: int | None) -> ModelConfig:
    """Shards, index and config.json of random numbers."""
    write_config(shape, folder)
    if layers is not None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "num_hidden_layers": layers}))
    config = read_config(folder)
    shapes = {piece.name: piece.shape for piece in decoder_of(config, 1, False, "meta").pieces()}
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
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data for _ in range(threads)]
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


if __name__ == "__main__":
    main()
