"""Times of the fused elementwise and sampling kernels on a GPU, beside what the memory allows.

    python scripts/measure_fused.py [--json FILE] [--only fused|sampling]

Each figure is the median of replays of a CUDA graph that holds many launches, which rotate among buffers
larger together than the L2 cache (where one launch's data is small, its inputs would be in the cache in the
model too, and the figure is the launch). The limit is the bytes that must move over 4,355 GB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from kernels import KvPool, Rotation
from kernels import sampling as twin
from kernels.rope import cos_sin_table, default_frequencies
from kernels.triton import fused, sampling

BYTES_PER_US = 4.355e6
HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 128256


def microseconds(launches: list[Callable[[], object]]) -> float:
    """Of one launch: the median of 7 replays of a graph of them all."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(launches))
    return statistics.median(times[1:])


def rotate(moved: int, make: Callable[[], Callable[[], object]]) -> list[Callable[[], object]]:
    """Enough launches over enough buffers."""
    copies = max(1, min(8, -(-240_000_000 // moved))) if moved > 2_000_000 else 2
    launches = [make() for _ in range(copies)]
    return launches * max(1, (64 if moved < 50_000_000 else 8) // copies)


def fused_cases(tokens: int) -> list[tuple[str, int, Callable[[bool], Callable[[], object]]]]:
    """(name, bytes that must move, a launch on its own buffers)."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    weight = random(HIDDEN)
    table = cos_sin_table(default_frequencies(HEAD_DIM, 5e5), 8192).cuda()
    head = random(HEAD_DIM)
    row = tokens * HIDDEN
    qkv = tokens * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    blocks = -(-tokens // 64) + 1
    where = torch.arange(tokens, device="cuda")

    def norm(pdl: bool) -> Callable[[], object]:
        x = random(tokens, HIDDEN)
        return lambda: fused.rms_norm(x, weight, 1e-5, pdl=pdl)

    def norm_fp8(pdl: bool) -> Callable[[], object]:
        x = random(tokens, HIDDEN)
        return lambda: fused.rms_norm_fp8(x, weight, 1e-5, pdl=pdl)

    def silu(pdl: bool) -> Callable[[], object]:
        x = random(tokens, 2 * FFN)
        return lambda: fused.silu_mul(x, pdl=pdl)

    def silu_fp8(pdl: bool) -> Callable[[], object]:
        x = random(tokens, 2 * FFN)
        return lambda: fused.silu_mul_fp8(x, pdl=pdl)

    def rope(fp8: bool, normed: bool) -> Callable[[bool], Callable[[], object]]:
        def make(pdl: bool) -> Callable[[], object]:
            x = random(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
            shape = (blocks, KV_HEADS, 64, HEAD_DIM)
            dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
            pools = [torch.zeros(shape, device="cuda", dtype=dtype) for _ in range(2)]
            scales = [torch.zeros(shape[:3], device="cuda") for _ in range(2)] if fp8 else []
            norms = (head, head) if normed else (None, None)
            rest = (Rotation(table, *norms, 1e-5), KvPool(*pools, *scales), HEADS)
            return lambda: fused.rope_cache_write(x, where, where, *rest, pdl=pdl)

        return make

    kv = 2 * tokens * KV_HEADS * HEAD_DIM
    rotated = 2 * qkv + 2 * (qkv - kv)
    return [
        ("rms_norm", 4 * row, norm),
        ("rms_norm_fp8", 3 * row, norm_fp8),
        ("silu_mul", 6 * tokens * FFN, silu),
        ("silu_mul_fp8", 5 * tokens * FFN, silu_fp8),
        ("rope_cache_write", rotated + 2 * kv, rope(False, False)),
        ("rope_cache_write, QK-norm, FP8", rotated + kv, rope(True, True)),
    ]


def measure_fused() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for tokens in (1, 64, 1024, 8192):
        for name, moved, make in fused_cases(tokens):
            for pdl in (False, True):
                time = microseconds(rotate(moved, lambda make=make, pdl=pdl: make(pdl)))
                found.append(_figure(name, tokens, moved, time, pdl=pdl))
            torch.cuda.empty_cache()
    return found


def _figure(name: str, rows: int, moved: int, time: float, **more: object) -> dict[str, object]:
    limit = moved / BYTES_PER_US
    figure = {"kernel": name, "rows": rows, **more, "us": round(time, 2), "limit_us": round(limit, 2)}
    figure["fraction"] = round(limit / time, 3)
    print(" ".join(f"{key}={value}" for key, value in figure.items()), flush=True)
    return figure


KINDS = {
    "plain": (0.8, 0, 1.0),
    "top_p .95": (0.8, 0, 0.95),
    "top_p .5": (0.8, 0, 0.5),
    "top_k 50": (0.8, 50, 1.0),
    "top_k 20, top_p .95": (0.6, 20, 0.95),
}
"""Temperature, top_k, top_p."""


def _draws(rows: int, kind: tuple[float, int, float]) -> sampling.Draws:
    temperature, top_k, top_p = kind
    floats = torch.tensor([1 / temperature, 1.0, top_p, 0.0, 1.0, 0.0, 0.0]).repeat(rows, 1)
    base = torch.tensor([twin.noise_base(row, 0) for row in range(rows)])
    where = torch.arange(rows)
    parts = (where, 600 + where, base, floats, torch.full((rows,), top_k))
    return sampling.Draws(*(part.cuda() for part in parts))


def measure_sampling() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    hashes = twin.token_hashes(0, VOCABULARY, torch.device("cuda"))
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 64, 256, 1024):
            moved = rows * VOCABULARY * dtype.itemsize
            for width in (0.5, 3.0) if dtype == torch.bfloat16 else (0.5,):
                copies = max(1, min(4, 200_000_000 // moved))
                sets = [
                    (torch.randn(rows, VOCABULARY, device="cuda") * width).to(dtype) for _ in range(copies)
                ]
                wrapped = [sampling.Logits(each, VOCABULARY, hashes=hashes) for each in sets]
                repeat = max(1, (16 if rows < 256 else 4) // copies)
                more = {"logits": str(dtype).removeprefix("torch."), "spread": width}
                if width == 0.5:
                    launches = [lambda each=each: sampling.greedy(each, pdl=True) for each in wrapped]
                    time = microseconds(launches * repeat)
                    found.append(_figure("greedy", rows, moved, time, **more))
                for name, kind in KINDS.items():
                    draws = _draws(rows, kind)
                    call = sampling.plain if name == "plain" else sampling.full
                    if name == "plain" and width != 0.5:
                        continue
                    launches = [
                        lambda each=each, draws=draws, call=call: call(each, draws, pdl=True)
                        for each in wrapped
                    ]
                    found.append(_figure(name, rows, moved, microseconds(launches * repeat), **more))
                del sets, wrapped
                torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("fused", "sampling"))
    options = parser.parse_args()
    found: list[dict[str, object]] = []
    if options.only != "sampling":
        found += measure_fused()
    if options.only != "fused":
        found += measure_sampling()
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "bytes_per_us": BYTES_PER_US,
    }
    if options.json:
        options.json.write_text(json.dumps({"about": about, "figures": found}, indent=1))


if __name__ == "__main__":
    main()
