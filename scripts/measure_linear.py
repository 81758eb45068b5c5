"""Times the matrix products of an 8B decoder's layer as decode runs them, and writes JSON.

    python scripts/measure_linear.py OUT.json

A chain of whole layers (norm + qkv, o + residual, norm + gate and up + SwiGLU, down + residual) with weights
of their own, so that none is in cache, and each product in a chain of its own, in CUDA graphs; medians of
replays. Ours with PDL on and off, and torch (cuBLAS products with our norm and SwiGLU kernels).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

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


class Products:
    """The products of some layers, by one implementation."""

    def __init__(self, fp8: bool, way: str, device: torch.device) -> None:
        self.fp8, self.way = fp8, way
        self.workspace = linear.allocate_workspace(device)
        self.table = load_table(torch.cuda.get_device_name(device))
        self.norm = torch.rand(HIDDEN, device=device).add(0.5).bfloat16()

    def __call__(
        self,
        x: torch.Tensor,
        weight: tuple[torch.Tensor, torch.Tensor],
        norm: bool = False,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        if self.way == "torch":
            return self._torch(x, weight, norm, residual, silu)
        options = {
            "norm_weight": self.norm if norm else None,
            "eps": EPS,
            "residual": residual,
            "silu_mul": silu,
            "workspace": self.workspace,
            "table": self.table,
            "pdl": self.way == "pdl",
        }
        if self.fp8:
            return linear.linear_fp8(x, *weight, **options)
        return linear.linear(x, weight[0], **options)

    def _torch(
        self,
        x: torch.Tensor,
        weight: tuple[torch.Tensor, torch.Tensor],
        norm: bool,
        residual: torch.Tensor | None,
        silu: bool,
    ) -> torch.Tensor:
        x = x.contiguous()
        if self.fp8:
            quantised, scales = fused.rms_norm_fp8(x, self.norm, EPS) if norm else linear.quantise(x)
            scaling = {"scale_a": scales, "scale_b": weight[1].view(1, -1), "out_dtype": torch.bfloat16}
            product = torch._scaled_mm(quantised, weight[0].t(), use_fast_accum=True, **scaling)
        else:
            product = F.linear(fused.rms_norm(x, self.norm, EPS) if norm else x, weight[0])
        if silu:
            product = fused.silu_mul(product)
        return product if residual is None else residual + product


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


def weight_of(shape: tuple[int, int], fp8: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(shape, device=device, dtype=torch.bfloat16) * shape[1] ** -0.5
    scales = torch.full(shape[:1], shape[1] ** -0.5 / 100, device=device)
    return ((weight.float() / scales[:, None]).to(torch.float8_e4m3fn) if fp8 else weight), scales


def measure(fp8: bool, device: torch.device, rows_list: list[int]) -> list[dict[str, object]]:
    layers = [{name: weight_of(shape, fp8, device) for name, shape in WEIGHTS.items()} for _ in range(LAYERS)]
    head = None if fp8 else weight_of((VOCAB, HIDDEN), False, device)
    item = 1 if fp8 else 2
    found: list[dict[str, object]] = []

    def add(product: str, rows: int, way: str, us: float, weight_bytes: int) -> None:
        gb_s = weight_bytes / us / 1e3
        row = {"dtype": "fp8" if fp8 else "bf16", "product": product, "rows": rows, "way": way}
        found.append(
            {**row, "us": round(us, 2), "gb_s": round(gb_s), "of_limit": round(gb_s / CEILING_GB_S, 3)}
        )

    for rows in rows_list:
        x = torch.randn(rows, HIDDEN, device=device).bfloat16()
        wide = torch.randn(rows, INTERMEDIATE, device=device).bfloat16()
        for way in ("pdl", "no pdl", "torch"):
            product = Products(fp8, way, device)

            def chain(product: Products = product, x: torch.Tensor = x) -> torch.Tensor:
                hidden = x
                for layer in layers * TURNS:
                    qkv = product(hidden, layer["qkv"], norm=True)
                    hidden = product(qkv[:, :HIDDEN], layer["o"], residual=hidden)
                    up = product(hidden, layer["gate_up"], norm=True, silu=True)
                    hidden = product(up, layer["down"], residual=hidden)
                return hidden

            each: dict[str, Callable[[tuple[torch.Tensor, torch.Tensor]], object]] = {
                "qkv": lambda weight: product(x, weight, norm=True),  # noqa: B023
                "o": lambda weight: product(x, weight, residual=x),  # noqa: B023
                "gate_up": lambda weight: product(x, weight, norm=True, silu=True),  # noqa: B023
                "down": lambda weight: product(wide, weight, residual=x),  # noqa: B023
            }
            total = sum(n * k for n, k in WEIGHTS.values()) * item
            add("layer", rows, way, microseconds(chain) / len(layers * TURNS), total)
            for name, (n, k) in WEIGHTS.items():
                own = [layer[name] for layer in layers] * TURNS
                us = microseconds(lambda own=own, name=name: [each[name](weight) for weight in own])  # noqa: B023
                add(name, rows, way, us / len(own), n * k * item)
            if head is not None:
                us = microseconds(lambda: [product(x, head, norm=True) for _ in range(TURNS)])  # noqa: B023
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
