"""Times the matrix products of an 8B decoder's layer as decode runs them, and writes JSON.

    python scripts/measure_linear.py OUT.json

A chain of whole layers (norm + qkv, o + residual, norm + gate and up + SwiGLU, down + residual) with weights
of their own, so that none is in cache, and each product in a chain of its own, in CUDA graphs; medians of
replays. Ours with PDL on and off, and torch (cuBLAS products with our norm and SwiGLU kernels). In the chain
of layers, products share norms as they do when they serve; in a chain of its own, a product norms x.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels import Fp8Weight, Stream, Weight
from kernels.cuda import CudaOps
from kernels.triton import fused, linear
from kernels.triton.linear_table import load_table

HIDDEN, INTERMEDIATE, QKV, VOCAB = 4096, 14336, 6144, 128256
LAYERS = 6
TURNS = 4
"""Times that a graph goes through the layers: its start, some 10 µs, is then a small part."""
EPS = 1e-5
CEILING_GB_S = 4355
"""Read bandwidth of device memory, measured on an H200."""
WEIGHTS = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}


class Library:
    """As much of `kernels.Ops` as a layer's products need, by torch and our kernels for what is between."""

    def norm_linear(
        self, x: Stream, gain: torch.Tensor, eps: float, weight: Weight, bias: None
    ) -> torch.Tensor:
        if not isinstance(weight, Fp8Weight):
            return F.linear(fused.rms_norm(x.values, gain, eps), weight, bias)
        return _scaled(*fused.rms_norm_fp8(x.values, gain, eps), weight)

    def norm_gate_up(
        self, x: Stream, gain: torch.Tensor, eps: float, weight: Weight, bias: None
    ) -> torch.Tensor:
        return fused.silu_mul(self.norm_linear(x, gain, eps, weight, bias))

    def linear_add(
        self, x: torch.Tensor, weight: Weight, bias: None, residual: Stream, next_gain: torch.Tensor
    ) -> Stream:
        if isinstance(weight, Fp8Weight):
            return Stream(residual.values + _scaled(*linear.quantise(x.contiguous()), weight))
        return Stream(residual.values + F.linear(x, weight, bias))


def _scaled(x: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    scaling = {"scale_a": scales, "scale_b": weight.scales.view(1, -1), "out_dtype": torch.bfloat16}
    return torch._scaled_mm(x, weight.values.t(), use_fast_accum=True, **scaling)


def microseconds(run: Callable[[], object]) -> float:
    """Of one replay of `run` in a graph."""
    run()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
        times = []
        for _ in range(15):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[2:])[len(times[2:]) // 2]


def weight_of(shape: tuple[int, int], fp8: bool, device: torch.device) -> Weight:
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[1] ** -0.5
    if not fp8:
        return weight
    scales = torch.full(shape[:1], shape[1] ** -0.5 / 100, device=device)
    return Fp8Weight((weight.float() / scales[:, None]).to(torch.float8_e4m3fn), scales)


def measure(fp8: bool, device: torch.device, rows_list: list[int]) -> list[dict[str, object]]:
    layers = [{name: weight_of(shape, fp8, device) for name, shape in WEIGHTS.items()} for _ in range(LAYERS)]
    head = None if fp8 else weight_of((VOCAB, HIDDEN), False, device)
    gain = torch.rand(HIDDEN, device=device).add(0.5).bfloat16()
    table = load_table(torch.cuda.get_device_name(device))
    ways: dict[str, Any] = {
        "pdl": CudaOps(table=table, pdl=True),
        "no pdl": CudaOps(table=table, pdl=False),
        "torch": Library(),
    }
    item = 1 if fp8 else 2
    found: list[dict[str, object]] = []

    def add(product: str, rows: int, way: str, us: float, weight_bytes: int) -> None:
        gb_s = weight_bytes / us / 1e3
        row = {"dtype": "fp8" if fp8 else "bf16", "product": product, "rows": rows, "way": way}
        found.append(
            {**row, "us": round(us, 2), "gb_s": round(gb_s), "of_limit": round(gb_s / CEILING_GB_S, 3)}
        )

    for rows, (way, ops) in product(rows_list, ways.items()):
        x = torch.randn(rows, HIDDEN, device=device).bfloat16()
        wide = torch.randn(rows, INTERMEDIATE, device=device).bfloat16()

        def chain(ops: Any = ops, x: torch.Tensor = x) -> torch.Tensor:
            hidden = Stream(x.clone())
            for layer in layers * TURNS:
                qkv = ops.norm_linear(hidden, gain, EPS, layer["qkv"], None)
                hidden = ops.linear_add(qkv[:, :HIDDEN], layer["o"], None, hidden, gain)
                up = ops.norm_gate_up(hidden, gain, EPS, layer["gate_up"], None)
                hidden = ops.linear_add(up, layer["down"], None, hidden, gain)
            return hidden.values

        each: dict[str, Callable[[Weight], object]] = {
            "qkv": lambda weight: ops.norm_linear(Stream(x), gain, EPS, weight, None),  # noqa: B023
            "o": lambda weight: ops.linear_add(wide[:, :HIDDEN], weight, None, Stream(x), gain),  # noqa: B023
            "gate_up": lambda weight: ops.norm_gate_up(Stream(x), gain, EPS, weight, None),  # noqa: B023
            "down": lambda weight: ops.linear_add(wide, weight, None, Stream(x), gain),  # noqa: B023
        }
        total = sum(n * k for n, k in WEIGHTS.values()) * item
        add("layer", rows, way, microseconds(chain) / len(layers * TURNS), total)
        for name, (n, k) in WEIGHTS.items():
            own = [layer[name] for layer in layers] * TURNS
            us = microseconds(lambda own=own, name=name: [each[name](weight) for weight in own])  # noqa: B023
            add(name, rows, way, us / len(own), n * k * item)
        if head is not None:
            us = microseconds(lambda: [each["qkv"](head) for _ in range(TURNS)])  # noqa: B023
            add("lm_head", rows, way, us / TURNS, VOCAB * HIDDEN * 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    arguments = parser.parse_args()
    device = torch.device("cuda")
    found = [row for fp8 in (False, True) for row in measure(fp8, device, arguments.rows)]
    ways = ("pdl", "no pdl", "torch")
    table: dict[tuple[object, ...], dict[object, object]] = {}
    for row in found:
        key = (row["dtype"], row["rows"], row["product"])
        table.setdefault(key, {})[row["way"]] = f"{row['us']:8} ({row['gb_s']:4})"
    print("dtype rows product: µs (GB/s of weights) " + ", ".join(ways))
    for (dtype, rows, name), cells in table.items():
        print(f"{dtype} {rows:3} {name:8}", *(cells[way] for way in ways))
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": LAYERS}
    arguments.out.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
