"""Times a decoder's layer as decode runs it, attention included, for some ways to run its kernels.

    python scripts/measure_layer.py --rows 8 64
    python scripts/measure_layer.py --rows 8 --fp8 --alone --way "" \\
        --way "o=tiles,r,64,256b,4,110k,2" --way "down=library attention.items=24"

A few layers of a public shape with random weights, more than the L2 holds, run one after another in a CUDA
graph by the decoder's own code; medians of replays. A way is what differs from the shipped tables: a
product's plan (form, rows, block_n, block_k, warps, stages, split; or "library"), fields of attention's
`DecodeConfig`, rope=apart: RoPE and cache write in a launch of their own, and norms=apart: so is every norm.
r stands for the rows, padded; 256b for the columns of so many bytes; 110k for the stages that fit into so
many KiB. Beside the time of a layer stand the limit (bytes of weights and cache, at the device's read
bandwidth) and by how much the hidden states differ from the first way's. With --alone, each product too, in a
chain of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine.bench.shapes import SHAPES
from engine.families import read_config
from engine.forward import ForwardInput
from engine.messages import BLOCK_TOKENS
from engine.model.decoder import Decoder
from engine.model.loader import load_dummy
from engine.parallel import single
from kernels import AttentionInput, KvPool, Stream, Weight, compiling
from kernels.cuda import CudaOps
from kernels.dimensions import read_dimensions
from kernels.triton import attention_decode
from kernels.triton.attention_decode import DecodeConfig
from kernels.triton.linear_plans import Plan
from kernels.triton.linear_table import Entry, Product, Table, load_table
from kernels.tune.layers import LAYER_PRODUCTS, graph_microseconds

LAYERS, TURNS = 4, 6
"""Layers with weights of their own, and how often a graph goes through them: its start, some 10 µs, is then a
small part."""
BYTES_PER_US = 4355e3
"""Read bandwidth of an H200, measured."""
META = torch.device("meta")


@dataclass(frozen=True)
class Way:
    """What differs from the shipped tables."""

    text: str
    plans: dict[str, str]
    """By product."""
    attention: dict[str, int]
    """Fields of `DecodeConfig`."""
    apart: frozenset[str] = frozenset()
    """Of `rope` (with the cache write) and `norms`, those that have launches of their own."""

    @classmethod
    def parse(cls, text: str) -> Way:
        plans, attention, apart = {}, {}, set[str]()
        for part in text.split():
            name, _, value = part.partition("=")
            if name.startswith("attention."):
                attention[name.removeprefix("attention.")] = int(value)
            elif name in LAYER_PRODUCTS:
                plans[name] = value
            elif part in ("rope=apart", "norms=apart"):
                apart.add(name)
            else:
                raise argparse.ArgumentTypeError(
                    f"{part!r} is neither rope=apart, norms=apart, attention.FIELD=… "
                    f"nor of {', '.join(LAYER_PRODUCTS)}"
                )
        return cls(text or "as shipped", plans, attention, frozenset(apart))

    def plan(self, name: str, rows: int, item: int) -> Plan | None:
        """Of a product of `rows` tokens with weights of `item` bytes; None: the library."""
        form, *numbers = self.plans[name].split(",")
        if form == "library":
            return None
        tokens, block_n, columns, warps, stages, split = [*numbers, "1", "1"][:6]
        padded = max(8, 1 << (rows - 1).bit_length()) if tokens == "r" else int(tokens)
        block_k = int(columns[:-1]) // item if columns.endswith("b") else int(columns)
        bytes_of_stage = (int(block_n) + padded) * block_k * item
        count = int(stages[:-1]) * 1024 // bytes_of_stage if stages.endswith("k") else int(stages)
        return Plan(form, padded, int(block_n), block_k, int(warps), count, int(split))  # type: ignore[arg-type]


class Ops(CudaOps):
    """Operations whose table can be exchanged, and which can launch alone what they share."""

    def use(self, table: Table, way: Way) -> None:
        self._table, self._apart = table, way.apart
        self._decode_workspaces = {}  # the last was perhaps for fewer sequences

    def _only_decodes(self, inputs: AttentionInput) -> bool:
        return "rope" not in self._apart and super()._only_decodes(inputs)

    def _sharing_plan(self, rows: int, weight: Weight) -> Plan | None:
        return None if "norms" in self._apart else super()._sharing_plan(rows, weight)


class Layers:
    """Decoders of one kind on a device, and what a pass of some rows reads."""

    def __init__(self, folder: Path, fp8: bool, context: int, device: torch.device, table: Table) -> None:
        config = read_config(folder)
        self.ops, self.device, self.context, self.shipped = Ops(0, table), device, context, table
        dimensions = read_dimensions(folder, fp8=fp8)
        self.dtype = torch.float8_e4m3fn if fp8 else dimensions.torch_dtype
        self.shapes = {name: dimensions.products[name] for name in LAYER_PRODUCTS}
        self.decoder = Decoder(
            config,
            single(),
            self.ops,
            dimensions.torch_dtype,
            device,
            max_model_len=context,
            fp8=fp8,
            kv_fp8=fp8,
        )
        if device == META:
            self.decoder.layers = self.decoder.layers[:2]  # the first, and one of many
        else:
            load_dummy(self.decoder, seed=1)
            self.decoder.layers = self.decoder.layers * TURNS
        scales = 4 / self.decoder.config.head_dim if fp8 else 0
        self._kv_bytes = 2 * config.kv_heads * config.head_dim * (self.dtype.itemsize + scales)

    def set_rows(self, rows: int) -> None:
        """Make the cache and the input of `rows` sequences of `context` tokens."""
        blocks = -(-self.context // BLOCK_TOKENS)
        self.kv: list[KvPool] = []  # before it is made anew
        self.kv = self.decoder.allocate_kv(rows * blocks)
        for pool in self.kv:
            for numbers in (pool.keys, pool.values, pool.k_scales, pool.v_scales):
                if numbers is not None:
                    numbers.copy_(torch.rand(numbers.shape, device=self.device))
        table = torch.randperm(rows * blocks).view(rows, blocks).to(self.device)
        places = torch.full((rows,), self.context - 1, device=self.device)
        every = torch.arange(rows, device=self.device)
        slots = table[:, -1] * BLOCK_TOKENS + places % BLOCK_TOKENS
        attention = AttentionInput(table, every, places + 1, blocks, [])
        self.inputs = ForwardInput(every, places, slots, attention)
        self.rows = rows

    def limit_us(self) -> float:
        weights = sum(n * k for n, k in self.shapes.values()) * self.dtype.itemsize
        return (weights + self.rows * self.context * self._kv_bytes) / BYTES_PER_US

    @contextlib.contextmanager
    def going(self, way: Way) -> Iterator[None]:
        table = self.shipped
        for name in way.plans:
            entry = Entry(way.plan(name, self.rows, self.dtype.itemsize), 0, 0)
            table = table.with_entry(Product(self.dtype, *self.shapes[name]), self.rows, entry)
        chosen = attention_decode.config_for

        def config_for(sequences: int, kv_heads: int, *others: int) -> DecodeConfig:
            changed = replace(chosen(sequences, kv_heads, *others), **way.attention)
            most = attention_decode._most_items(sequences, kv_heads, others[-1])
            return replace(changed, items=max(sequences, min(changed.items, most)))

        self.ops.use(table, way)
        with mock.patch.object(attention_decode, "config_for", config_for):
            yield

    def run(self) -> torch.Tensor:
        return self.decoder.forward(self.inputs, self.kv)

    def alone(self) -> dict[str, Callable[[], object]]:
        """The products in chains of their own, with the norm and the quantisation that go with them."""
        decoder, eps = self.decoder, self.decoder.config.rms_norm_eps
        layers, ranks = decoder.layers, decoder.ranks
        x = torch.randn((self.rows, decoder.config.hidden_size), device=self.device).to(decoder.dtype)
        attended = torch.randn((self.rows, self.shapes["o"][1]), device=self.device).to(decoder.dtype)
        gain = layers[0].post_norm
        stream = layers[0].attention.o.add_to(Stream(x), attended, gain, ranks)
        activated = layers[0].mlp.activate(stream, gain, eps)
        return {
            "qkv": lambda: [one.attention.qkv.after_norm(stream, gain, eps) for one in layers],
            "o": lambda: [one.attention.o.add_to(stream, attended, gain, ranks) for one in layers],
            "gate_up": lambda: [one.mlp.activate(stream, gain, eps) for one in layers],
            "down": lambda: [one.mlp.down.add_to(stream, activated, gain, ranks) for one in layers],
        }


def compile_all(folder: Path, arguments: Any) -> Table:
    """Compile what will be measured, in many processes, before CUDA is used; returns the GPU's table."""
    began = time.perf_counter()
    gpu = compiling.this_gpu()
    table = load_table(gpu.name)

    def launch() -> None:
        for fp8 in arguments.fp8:
            layers = Layers(folder, fp8, arguments.context, META, table)
            for rows in arguments.rows:
                layers.set_rows(rows)
                for way in arguments.way:
                    with layers.going(way):
                        layers.run()

    with torch.inference_mode():
        jobs = compiling.record(gpu.target, launch)
    failures = compiling.compile_jobs(gpu.target, jobs, compiling.default_processes())
    for failure in failures:
        print(f"{failure.name} does not compile: {failure.error[-500:]}")
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    return table


def measure(layers: Layers, ways: list[Way], alone: bool) -> list[dict[str, object]]:
    """One row a way; prints it."""
    found, first = [], None
    kind = "fp8" if layers.dtype.itemsize == 1 else "bf16"
    for way in ways:
        with layers.going(way):
            try:
                hidden = layers.run().float()
                us = graph_microseconds(layers.run) / len(layers.decoder.layers)
            except Exception as error:
                print(f"{kind} {layers.rows:3}  fails: {way.text}: {str(error)[:200]}")
                continue
            first = hidden if first is None else first
            row: dict[str, object] = {"dtype": kind, "rows": layers.rows, "way": way.text}
            row |= {"us": round(us, 2), "of_limit": round(layers.limit_us() / us, 3)}
            row["differs"] = float(f"{float((hidden - first).norm() / first.norm()):.1e}")
            for name, chain in (layers.alone() if alone else {}).items():
                row[name] = round(graph_microseconds(chain) / len(layers.decoder.layers), 2)
        found.append(row)
        products = " ".join(f"{name} {row[name]:5}" for name in LAYER_PRODUCTS if name in row)
        print(
            f"{kind} {layers.rows:3} {us:7.2f} {row['of_limit']} {products} ±{row['differs']}  {way.text}",
            flush=True,
        )
    return found


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The vocabulary is no part of a layer.
        changes = {"num_hidden_layers": LAYERS, "vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2}
        (folder / "config.json").write_text(json.dumps(SHAPES[arguments.shape] | changes))
        try:
            table = compile_all(folder, arguments)
        except compiling.GpuError as error:
            raise SystemExit(str(error)) from None
        found = []
        print("dtype rows µs a layer, of the limit, [products alone,] ± against the first way, way")
        for fp8 in arguments.fp8:
            with torch.inference_mode():
                layers = Layers(folder, fp8, arguments.context, torch.device("cuda"), table)
                for rows in arguments.rows:
                    layers.set_rows(rows)
                    found += measure(layers, arguments.way, arguments.alone)
            del layers
    if arguments.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": arguments.shape}
        arguments.json.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--context", type=int, default=640, help="tokens of each sequence")
    parser.add_argument("--fp8", action="store_true", help="FP8 weights and cache instead of bf16")
    parser.add_argument("--both", action="store_true", help="bf16, then FP8")
    parser.add_argument("--way", type=Way.parse, action="append", help="see above; may be repeated")
    parser.add_argument("--alone", action="store_true", help="each product too")
    parser.add_argument("--json", type=Path, help="raw figures into this file")
    arguments = parser.parse_args()
    arguments.fp8 = [False, True] if arguments.both else [arguments.fp8]
    arguments.way = arguments.way or [Way.parse("")]
    return arguments


if __name__ == "__main__":
    main()
