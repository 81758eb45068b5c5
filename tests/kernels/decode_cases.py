"""Batches for the tests of paged decode attention, with and without new tokens, and their reference
results."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kernels import PAGE_TOKENS, KvPool, Rotation, reference
from kernels.reference_attention import paged_attention_decode
from kernels.rope import cos_sin_table, default_frequencies

triton = pytest.importorskip("triton")
from kernels.triton import attention_decode as kernel  # noqa: E402

ON_CPU = not torch.cuda.is_available()
needs_cpu = pytest.mark.skipif(not ON_CPU, reason="the interpreter runs only on machines without a GPU")
needs_gpu = pytest.mark.skipif(ON_CPU, reason="no NVIDIA GPU: torch.cuda.is_available() is false")
SCALE = 0.3


@dataclass
class Case:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    window: int | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    scale: float = SCALE

    def run(self, **options: object) -> torch.Tensor:
        options.setdefault("pdl", not ON_CPU)
        if "workspace" not in options:
            _, heads, head_dim = self.q.shape
            kv_heads = self.keys.shape[1]
            options["workspace"] = kernel.allocate_workspace(
                len(self.lens), heads, kv_heads, head_dim, self.q.device
            )
        return kernel.decode(
            self.q,
            self.keys,
            self.values,
            self.table,
            self.rows,
            self.lens,
            self.scale,
            window=self.window,
            k_scales=self.k_scales,
            v_scales=self.v_scales,
            **options,  # type: ignore[arg-type]
        )

    def expected(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return the reference result in `dtype`, with zeros for padding."""
        there = self.lens > 0
        keys, values = self.keys.to(dtype), self.values.to(dtype)
        if self.k_scales is not None and self.v_scales is not None:
            keys, values = keys * self.k_scales.unsqueeze(-1), values * self.v_scales.unsqueeze(-1)
        out = torch.zeros(self.q.shape, dtype=dtype, device=self.q.device)
        if not there.any():
            return out
        tables = self.table.long().clamp(max=len(keys) - 1).index_select(0, self.rows[there])
        out[there] = paged_attention_decode(
            self.q[there].to(dtype),
            keys.to(dtype),
            values.to(dtype),
            tables,
            self.lens[there].long(),
            self.scale,
            self.window,
        )
        return out


def make(
    lens: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    window: int | None = None,
    scaled: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    blocks: int = 24,
    seed: int = 0,
) -> Case:
    """Make sequences with random blocks, some of them shared. Block-table entries past the end of a sequence
    are invalid, so reading such an entry is an error."""
    random_ = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_)

    order = random.Random(seed)
    max_num_seqs = len(lens) + 3
    rows = torch.tensor(order.sample(range(max_num_seqs), len(lens)))
    table = torch.full((max_num_seqs, -(-max(lens) // PAGE_TOKENS) + 1), 1 << 28)
    for row, length in zip(rows.tolist(), lens, strict=True):
        for column in range(-(-length // PAGE_TOKENS)):
            table[row, column] = order.randrange(blocks)
    shape = (blocks, kv_heads, PAGE_TOKENS, head_dim)
    case = Case(
        q=draw(len(lens), heads, head_dim).to(dtype),
        keys=draw(*shape).to(dtype),
        values=draw(*shape).to(dtype),
        table=table,
        rows=rows,
        lens=torch.tensor(lens),
        window=window,
        scale=SCALE if ON_CPU else head_dim**-0.5,
    )
    if scaled:
        case.k_scales = torch.rand(shape[:3], generator=random_) + 0.1
        case.v_scales = torch.rand(shape[:3], generator=random_) + 0.1
    names = ("q", "keys", "values", "table", "rows", "lens", "k_scales", "v_scales")
    moved = {name: getattr(case, name) for name in names}
    return replace(case, **{name: each.to(device) for name, each in moved.items() if each is not None})


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected.double()).abs().max() < tolerance


LENS = {
    "one": [1],
    "one page": [64],
    "three pages": [129],
    "ragged": [5, 63, 127, 128, 129],
    "one is much longer": [1, 2, 700, 4, 5, 6],
    "padding at the end": [70, 65, 0, 0],
    "padding inside": [0, 70, 0, 130, 0],
    "padding only": [0, 0],
}
WINDOWED = {"one page", "three pages", "ragged", "one is much longer"}
"""Names of the batches that are tested with every window. Other batches are tested with at most one window,
which ends inside a sequence."""
BATCHES = [
    *((name, None) for name in LENS),
    *((name, window) for name in LENS if name in WINDOWED for window in (1, 50, 64, 100)),
    *(("one", 1), ("padding at the end", 50), ("padding inside", 64)),
]


@dataclass
class New:
    """A batch with new tokens that are not in the cache yet. No two sequences share a last block."""

    case: Case
    qkv: torch.Tensor
    rotation: Rotation

    def run(self, **options: object) -> torch.Tensor:
        """Run the kernel, which also writes the new keys and values to the case's cache."""
        heads, head_dim = self.case.q.shape[1:]
        case, kv_heads = self.case, self.case.keys.shape[1]
        workspace = kernel.allocate_workspace(len(case.lens), heads, kv_heads, head_dim, self.qkv.device)
        options = {"workspace": workspace, "pdl": not ON_CPU, "rotation": self.rotation} | options
        return replace(case, q=self.qkv).run(**options)

    def expected_case(self, dtype: torch.dtype | None = None) -> Case:
        """Return the case after the reference implementation has run in `dtype`, or in the case's own dtypes
        if `dtype` is None."""
        case = self.case
        there = case.lens > 0
        dtype = dtype or case.keys.dtype
        numbers = [each.to(dtype, copy=True) for each in (case.keys, case.values)]
        scales = [None if each is None else each.clone() for each in (case.k_scales, case.v_scales)]
        pool = KvPool(*numbers, *scales)
        position = (case.lens - 1).clamp(min=0).long()
        block = case.table.long()[case.rows.long(), position // PAGE_TOKENS]
        queries = torch.zeros_like(case.q)
        queries[there] = reference.rope_cache_write(
            self.qkv[there],
            position[there],
            (block * PAGE_TOKENS + position % PAGE_TOKENS)[there],
            self.rotation,
            pool,
            case.q.shape[1],
        )
        cache = {name: getattr(pool, name) for name in ("keys", "values", "k_scales", "v_scales")}
        return replace(case, q=queries, **cache)


def new(case: Case, norm: bool, seed: int = 9) -> New:
    random_ = torch.Generator().manual_seed(seed)
    (_, heads, size), kv_heads, device = case.q.shape, case.keys.shape[1], case.q.device

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_).to(case.q.dtype).to(device)

    blocks = len(case.keys)
    again = torch.arange(blocks + len(case.lens), device=device) % blocks
    keys, values = case.keys[again], case.values[again]
    for index, (row, length) in enumerate(zip(case.rows.tolist(), case.lens.tolist(), strict=True)):
        if length:
            case.table[row, (length - 1) // PAGE_TOKENS] = blocks + index
    table = cos_sin_table(default_frequencies(size, 10000.0), int(case.lens.max()) + 1).to(device)
    norms = (draw(size), draw(size)) if norm else (None, None)
    qkv = draw(len(case.lens), (heads + 2 * kv_heads) * size)
    return New(replace(case, keys=keys, values=values), qkv, Rotation(table, *norms, 1e-5))


def quantise(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = pool.float().abs().amax(-1) / 448
    return (pool.float() / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def fp8_cache(case: Any) -> Any:
    """Return a copy of a decode or prefill attention case whose cache is in FP8."""
    keys, k_scales = quantise(case.keys)
    values, v_scales = quantise(case.values)
    return replace(case, keys=keys, values=values, k_scales=k_scales, v_scales=v_scales)


GPU_LENS = {
    **LENS,
    "long": [8192],
    "longer": [40_000],
    "few": [700, 1, 3000, 64],
    "many": [640] * 64,
    "mixed": [1, 9000, 64, 65, 0, 128, 3000, 17] * 5,
    "very many": [random.Random(5).randrange(0, 900) for _ in range(1024)],
}


KINDS = {"bf16": (torch.bfloat16, False), "f16": (torch.float16, False), "fp8": (torch.bfloat16, True)}
"""The model's dtype, and whether the KV cache is FP8."""


LLAMA = (32, 8, 128)
OTHERS = [(8, 4, 64), (28, 4, 128), (8, 8, 256)]
