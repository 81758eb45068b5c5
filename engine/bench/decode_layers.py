"""A decoder's layers as decode runs them, attention included, with kernels that can be exchanged.

A few layers of a public shape with random weights, more than the L2 holds, run by the decoder's own code.
`scripts/tune_layer.py` times them with different plans.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from engine.bench.limits import CEILINGS
from engine.bench.shapes import SHAPES
from engine.families import read_config
from engine.forward import ForwardInput
from engine.messages import BLOCK_TOKENS
from engine.model.decoder import Decoder
from engine.model.loader import load_dummy
from engine.parallel import single
from kernels import AttentionInput, KvPool, Weight, compiling
from kernels.cuda import CudaOps
from kernels.dimensions import read_dimensions
from kernels.triton import attention_decode
from kernels.triton.attention_decode import DecodeConfig
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import PlanEntry, Product, Table
from kernels.tune.layers import LAYER_PRODUCTS

LAYERS = 4
"""Layers with weights of their own."""
TURNS = 6
"""How often a graph goes through them, unless told: its start, some 10 µs, is then a small part."""
META = torch.device("meta")

_BYTES_PER_US = CEILINGS["NVIDIA H200"].bytes_per_s / 1e6
"""Read bandwidth."""


@dataclass(frozen=True)
class Way:
    """What differs from the tables: text, as a person writes it."""

    text: str
    plans: dict[str, str]
    """By product."""
    attention: dict[str, int]
    """Fields of `DecodeConfig`."""
    apart: frozenset[str] = frozenset()
    """Of `rope` (with the cache write) and `norms`, those that have launches of their own."""

    @classmethod
    def parse(cls, text: str) -> Way:
        """Raises ArgumentTypeError for what is no way."""
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

    def plans_for(self, rows: int, item: int) -> dict[str, GemmPlan | None]:
        """Of products of `rows` tokens with weights of `item` bytes; None: the library."""
        return {name: _plan(text, rows, item) for name, text in self.plans.items()}


def _plan(text: str, rows: int, item: int) -> GemmPlan | None:
    form, *numbers = text.split(",")
    if form == "library":
        return None
    tokens, block_n, columns, warps, stages, split = [*numbers, "1", "1"][:6]
    padded = max(8, 1 << (rows - 1).bit_length()) if tokens == "r" else int(tokens)
    block_k = int(columns[:-1]) // item if columns.endswith("b") else int(columns)
    bytes_of_stage = (int(block_n) + padded) * block_k * item
    count = int(stages[:-1]) * 1024 // bytes_of_stage if stages.endswith("k") else int(stages)
    return GemmPlan(form, padded, int(block_n), block_k, int(warps), count, int(split))  # type: ignore[arg-type]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which layers, and the ways that they go."""
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=640, help="tokens of each sequence (%(default)s)")
    parser.add_argument("--fp8", action="store_true", help="FP8 weights and cache instead of bf16")
    parser.add_argument("--both", action="store_true", help="bf16, then FP8")
    parser.add_argument(
        "--way", type=Way.parse, action="append", default=[], help="a way to go; may be repeated"
    )


def chosen_dtypes(arguments: argparse.Namespace) -> list[bool]:
    """Of `add_options`, in turn: whether weights and cache are FP8."""
    return [False, True] if arguments.both else [arguments.fp8]


@contextlib.contextmanager
def shape_folder(shape: str) -> Iterator[Path]:
    """A folder with the `config.json` of a few layers; the vocabulary is no part of them."""
    changes = {"num_hidden_layers": LAYERS, "vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPES[shape] | changes))
        yield folder


class _Ops(CudaOps):
    """Operations whose table and attention can be exchanged, and which can launch alone what they share."""

    def use(self, table: Table, attention: Mapping[str, int], apart: frozenset[str]) -> None:
        self._table, self._attention, self._apart = table, attention, apart

    def forget_workspaces(self) -> None:
        """Before more sequences than there were."""
        self._decode_workspaces = {}

    def _decode_config(self, sequences: int, keys: torch.Tensor) -> DecodeConfig:
        changed = replace(super()._decode_config(sequences, keys), **self._attention)
        multiprocessors = attention_decode.multiprocessors_of(keys.device)
        most = attention_decode.max_items(sequences, keys.shape[1], multiprocessors)
        return replace(changed, items=max(sequences, min(changed.items, most)))

    def _only_decodes(self, inputs: AttentionInput) -> bool:
        return "rope" not in self._apart and super()._only_decodes(inputs)

    def _sharing_plan(self, rows: int, weight: Weight) -> GemmPlan | None:
        return None if "norms" in self._apart else super()._sharing_plan(rows, weight)


class DecodeLayers:
    """Layers of one kind on a device, and what a pass of some rows reads. folder: of `shape_folder`. pdl: see
    `CudaOps`."""

    def __init__(
        self, folder: Path, fp8: bool, context: int, device: torch.device, table: Table, *, pdl: bool
    ) -> None:
        config = read_config(folder)
        self._ops, self.device, self._context, self.shipped = _Ops(0, table, pdl=pdl), device, context, table
        self._ops.use(table, {}, frozenset())
        self.dimensions = read_dimensions(folder, fp8=fp8)
        self.dtype = torch.float8_e4m3fn if fp8 else self.dimensions.torch_dtype
        self._shapes = {name: self.dimensions.products[name] for name in LAYER_PRODUCTS}
        self._decoder = Decoder(
            config,
            single(),
            self._ops,
            self.dimensions.torch_dtype,
            device,
            max_model_len=context,
            fp8=fp8,
            kv_fp8=fp8,
        )
        if device == META:
            self._layers = self._decoder.layers[:2]  # the first, and one of many
        else:
            load_dummy(self._decoder, seed=1)
            self._layers = self._decoder.layers * TURNS
        self._decoder.layers = self._layers
        scales = 4 / self._decoder.config.head_dim if fp8 else 0
        self._kv_bytes = 2 * config.kv_heads * config.head_dim * (self.dtype.itemsize + scales)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def kind(self) -> str:
        """As tables of figures name the dtype."""
        return "fp8" if self.dtype.itemsize == 1 else "bf16"

    def products(self) -> dict[str, Product]:
        return {name: Product(self.dtype, n, k) for name, (n, k) in self._shapes.items()}

    def set_rows(self, rows: int) -> None:
        """Make the cache and the input of `rows` sequences of `context` tokens."""
        blocks = -(-self._context // BLOCK_TOKENS)
        self._ops.forget_workspaces()
        self._kv: list[KvPool] = []  # before it is made anew
        self._kv = self._decoder.allocate_kv(rows * blocks)
        for pool in self._kv:
            for numbers in (pool.keys, pool.values, pool.k_scales, pool.v_scales):
                if numbers is not None:
                    numbers.copy_(torch.rand(numbers.shape, device=self.device))
        table = torch.randperm(rows * blocks).view(rows, blocks).to(self.device)
        places = torch.full((rows,), self._context - 1, device=self.device)
        every = torch.arange(rows, device=self.device)
        slots = table[:, -1] * BLOCK_TOKENS + places % BLOCK_TOKENS
        attention = AttentionInput(table, every, places + 1, blocks, [])
        self._inputs = ForwardInput(every, places, slots, attention)
        self.rows = rows

    def limit_us(self) -> float:
        """Of a layer: its weights and cache at the device's read bandwidth."""
        weights = sum(n * k for n, k in self._shapes.values()) * self.dtype.itemsize
        return (weights + self.rows * self._context * self._kv_bytes) / _BYTES_PER_US

    def shipped_plans(self) -> dict[str, GemmPlan | None]:
        """What the table says for these rows."""
        return {
            name: self.shipped.choose(self.rows, n, k, self.dtype) for name, (n, k) in self._shapes.items()
        }

    def attention_config(self) -> DecodeConfig:
        """What attention chooses for these rows."""
        return attention_decode.config_on(self._kv[0].keys, self.rows)

    def go(
        self,
        plans: Mapping[str, GemmPlan | None],
        attention: Mapping[str, int] | None = None,
        apart: frozenset[str] = frozenset(),
    ) -> None:
        """From now on `run` launches these plans in place of the table's, attention with these fields of its
        `DecodeConfig`, and apart what `Way.apart` has."""
        table = self.shipped
        for name, plan in plans.items():
            table = table.with_entry(self.products()[name], self.rows, PlanEntry(plan, 0, 0))
        self._ops.use(table, attention or {}, apart)

    def run(self, count: int | None = None) -> torch.Tensor:
        """Through the first `count` layers; two have every kernel that all have. Returns hidden states."""
        self._decoder.layers = self._layers[:count]
        try:
            return self._decoder.forward(self._inputs, self._kv[:count])
        finally:
            self._decoder.layers = self._layers


def compile_launched(target: GPUTarget, launch: Callable[[], object]) -> None:
    """Compile what `launch` launches on META, in many processes; says how many. Forks: no CUDA before."""
    began = time.perf_counter()
    with torch.inference_mode():
        jobs = compiling.record(target, launch)
    for failure in compiling.compile_jobs(target, jobs, compiling.default_processes()):
        print(f"{failure.name} does not compile: {failure.error[-500:]}")
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
