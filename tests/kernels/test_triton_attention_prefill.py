"""Tests that paged prefill attention in Triton equals its reference implementation.

The interpreter (CPU, float32) verifies indexing and masking: chunks, contexts, tiles, windows and scales.
Only the tests marked `gpu` verify the numerics of bfloat16 and FP8, the pipelined loads of pages, and PDL.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kernels import PAGE_TOKENS
from kernels.reference_attention import paged_attention_prefill

triton = pytest.importorskip("triton")
from kernels.triton import attention_prefill as kernel  # noqa: E402
from tests.kernels.closeness import check_as_torch, error, worst_error  # noqa: E402
from tests.kernels.decode_cases import (  # noqa: E402
    LLAMA,
    ON_CPU,
    OTHERS,
    close,
    fp8_cache,
    needs_cpu,
    needs_gpu,
)


@dataclass
class Case:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    chunks: list[kernel.ChunkSpan]
    scale: float
    window: int | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    def run(self, **options: object) -> torch.Tensor:
        heads, kv_heads = self.q.shape[1], self.keys.shape[1]
        tiles = options.pop("tiles", None)
        if tiles is None:
            tiles = torch.from_numpy(kernel.plan_tiles(self.chunks, heads, kv_heads, self.window))
            tiles = tiles.to(self.q.device)
        options.setdefault("pdl", not ON_CPU)
        return kernel.prefill(
            self.q,
            self.keys,
            self.values,
            self.table,
            tiles,  # type: ignore[arg-type]
            self.scale,
            window=self.window,
            k_scales=self.k_scales,
            v_scales=self.v_scales,
            **options,  # type: ignore[arg-type]
        )

    def run_expanded(
        self, scratch_blocks: int, pdl: bool = not ON_CPU
    ) -> tuple[torch.Tensor, kernel.Expansion]:
        assert self.k_scales is not None
        assert self.v_scales is not None
        heads, (_, kv_heads, _, head_dim) = self.q.shape[1], self.keys.shape
        plan = kernel.plan_expansion(self.chunks, heads, kv_heads, self.window, scratch_blocks)
        scratch = torch.full(
            (2, scratch_blocks, kv_heads, PAGE_TOKENS, head_dim),
            float("nan"),
            dtype=self.q.dtype,
            device=self.q.device,
        )
        pages, expanded, direct = (
            torch.from_numpy(each).to(self.q.device) for each in (plan.pages, plan.expanded, plan.direct)
        )
        pool = (self.keys, self.values, self.k_scales, self.v_scales)
        out = torch.zeros_like(self.q)
        if len(pages):
            kernel.expand(*pool, self.table, pages, scratch[0], scratch[1], pdl=pdl)
            options = {"out": out, "window": self.window, "pdl": pdl}
            kernel.prefill(self.q, scratch[0], scratch[1], None, expanded, self.scale, **options)  # type: ignore[arg-type]
        if len(direct):
            self.run(out=out, tiles=direct, pdl=pdl)
        return out, plan

    def expected(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return the reference result in `dtype`, computed chunk by chunk."""
        keys, values = self.keys.to(dtype), self.values.to(dtype)
        if self.k_scales is not None and self.v_scales is not None:
            keys = (keys * self.k_scales.unsqueeze(-1)).to(dtype)
            values = (values * self.v_scales.unsqueeze(-1)).to(dtype)
        out = torch.zeros(self.q.shape, dtype=dtype, device=self.q.device)
        for chunk in self.chunks:
            span = slice(chunk.first, chunk.first + chunk.count)
            pages = -(-(chunk.context + chunk.count) // PAGE_TOKENS)
            out[span] = paged_attention_prefill(
                self.q[span].to(dtype),
                keys,
                values,
                self.table[chunk.slot, :pages].long(),
                chunk.context,
                self.scale,
                self.window,
            )
        return out


def make(
    chunks: list[tuple[int, int]],
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
    """Make chunks, given as (context, count), over shared random blocks. The three tokens before the chunks
    belong to no chunk."""
    random_ = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_)

    order = random.Random(seed)
    rows = order.sample(range(len(chunks) + 3), len(chunks))
    longest = max(context + count for context, count in chunks)
    table = torch.full((len(chunks) + 3, -(-longest // PAGE_TOKENS) + 1), 1 << 28)
    spans, first = [], 3
    for row, (context, count) in zip(rows, chunks, strict=True):
        for column in range(-(-(context + count) // PAGE_TOKENS)):
            table[row, column] = order.randrange(blocks)
        spans.append(kernel.ChunkSpan(first, count, context, row))
        first += count
    shape = (blocks, kv_heads, PAGE_TOKENS, head_dim)
    case = Case(
        q=draw(first, heads, head_dim).to(dtype),
        keys=draw(*shape).to(dtype),
        values=draw(*shape).to(dtype),
        table=table,
        chunks=spans,
        scale=0.3 if ON_CPU else head_dim**-0.5,
        window=window,
    )
    if scaled:
        case.k_scales = torch.rand(shape[:3], generator=random_) + 0.1
        case.v_scales = torch.rand(shape[:3], generator=random_) + 0.1
    names = ("q", "keys", "values", "table", "k_scales", "v_scales")
    moved = {name: getattr(case, name) for name in names}
    return replace(case, **{name: each.to(device) for name, each in moved.items() if each is not None})


CHUNKS = {
    "one token": [(0, 1)],
    "a page": [(0, 64)],
    "over a border": [(63, 2)],
    "past a border": [(64, 64)],
    "several tiles": [(0, 200)],
    "a cached prefix": [(130, 77)],
    "several chunks": [(0, 65), (200, 33), (0, 1), (127, 130)],
}


@needs_cpu
@pytest.mark.parametrize("window", [None, 1, 50, 64, 100])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_chunks_attend_to_their_context_and_themselves(
    chunks: list[tuple[int, int]], window: int | None
) -> None:
    case = make(chunks, window=window)
    out = torch.zeros_like(case.q)
    close(case.run(out=out), case.expected(), 1e-5)


@needs_cpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (20, 1), (8, 1)])
def test_any_group_of_query_heads_fills_tiles(heads: int, kv_heads: int) -> None:
    case = make([(70, 90), (0, 20)], heads=heads, kv_heads=kv_heads)
    close(case.run(out=torch.zeros_like(case.q)), case.expected(), 1e-5)


@needs_cpu
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_scales_belong_to_tokens_and_heads(head_dim: int) -> None:
    case = make([(70, 90), (0, 20)], head_dim=head_dim, scaled=True, window=100)
    close(case.run(out=torch.zeros_like(case.q)), case.expected(), 1e-4)


@needs_cpu
def test_chunks_may_share_blocks() -> None:
    case = make([(130, 70), (64, 90), (0, 64)])
    first, second, third = (chunk.slot for chunk in case.chunks)
    case.table[second, :2] = case.table[first, :2]
    case.table[third, 0] = case.table[first, 0]
    close(case.run(out=torch.zeros_like(case.q)), case.expected(), 1e-5)


@needs_cpu
def test_indices_may_be_narrow_and_queries_strided() -> None:
    case = make([(70, 90)])
    expected = case.expected()
    wide = torch.zeros(len(case.q), 9, 16)
    wide[:, :4] = case.q
    case = replace(case, table=case.table.int(), q=wide[:, :4])
    close(case.run(out=torch.zeros(case.q.shape)), expected, 1e-5)


def test_tiles_cover_every_token_once_the_longest_first() -> None:
    chunks = [kernel.ChunkSpan(0, 70, 500, 2), kernel.ChunkSpan(70, 1, 0, 0), kernel.ChunkSpan(71, 200, 0, 1)]
    tiles = kernel.plan_tiles(chunks, heads=8, kv_heads=2)
    tokens = np.concatenate([np.arange(first, first + count) for first, count, _, _ in tiles])
    assert sorted(tokens.tolist()) == list(range(271))
    assert (np.diff(tiles[:, 1] + tiles[:, 2]) <= 0).all()
    assert {tuple(each) for each in tiles[:3].tolist()} == {
        (0, 32, 500, 2),
        (32, 32, 532, 2),
        (64, 6, 564, 2),
    }


@needs_cpu
@pytest.mark.parametrize("window", [None, 100])
def test_an_expanded_cache_gives_the_same_result(window: int | None) -> None:
    case = make([(0, 90), (200, 33), (300, 70), (127, 130), (5, 200)], scaled=True, window=window)
    found, plan = case.run_expanded(scratch_blocks=12)
    assert len(plan.pages) <= 12
    assert len(plan.direct) > 0
    assert len(plan.expanded) > 0
    close(found, case.expected(), 1e-4)


def test_a_scratch_that_is_too_small_is_refused() -> None:
    pool, scales = torch.zeros(4, 1, 64, 16), torch.zeros(4, 1, 64)
    pages, table = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="pages has 3 pages, but the scratch pool has only 2 blocks"):
        kernel.expand(pool, pool, scales, scales, table, pages, pool[:2], pool[:2])


@needs_cpu
def test_one_wrong_head_of_one_token_is_detected() -> None:
    """Uses float16, because the interpreter rounds float16 in the same way as a GPU."""
    case = make([(0, 70), (200, 33)], 8, 2, 32, dtype=torch.float16)
    case.scale = 32**-0.5
    found, torchs, exact = (
        case.run(out=torch.zeros_like(case.q)),
        case.expected(torch.float16),
        case.expected(),
    )
    check_as_torch(found, torchs, exact)
    found[-7, 5] = found[-7, 6]
    with pytest.raises(AssertionError):
        check_as_torch(found, torchs, exact)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────


GPU_CHUNKS = {
    **CHUNKS,
    "long": [(0, 2000)],
    "long context": [(5000, 300)],
    "mixed": [(0, 512), (1000, 1), (63, 700), (0, 3), (2048, 130)],
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)],
    ids=["bf16", "f16", "fp8"],
)
@pytest.mark.parametrize(
    ("shape", "chunks", "window"),
    [(LLAMA, chunks, None) for chunks in GPU_CHUNKS]
    + [(LLAMA, "mixed", 300)]
    + [(shape, "mixed", window) for shape in OTHERS for window in (None, 100)],
)
def test_the_error_is_at_most_twice_that_of_torch(
    shape: tuple[int, int, int], chunks: str, window: int | None, dtype: torch.dtype, fp8: bool
) -> None:
    """The error must be at most twice the error of torch's attention in the same dtype (float16 for FP8
    caches), plus half a rounding error of the result. The bound applies to the whole tensor and to the worst
    token and head.

    With some windows, there are tiles in which a row attends to no key of a page. Several head sizes are
    tested, because the rounding of the product with the scale depends on the head size.
    """
    case = make(GPU_CHUNKS[chunks], *shape, window, dtype=dtype, device="cuda", blocks=90)
    case = fp8_cache(case) if fp8 else case
    exact = case.expected()
    found = case.run(out=torch.zeros_like(case.q))
    torchs = case.expected(torch.float16 if fp8 else dtype).to(dtype)
    check_as_torch(found, torchs, exact)
    if fp8:
        check_as_torch(case.run_expanded(scratch_blocks=150)[0], case.expected(dtype), exact)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_all_bits_are_the_same_in_every_run_and_without_pdl(fp8: bool) -> None:
    case = make(GPU_CHUNKS["mixed"], *LLAMA, dtype=torch.bfloat16, device="cuda")
    case = fp8_cache(case) if fp8 else case
    first = case.run(out=torch.zeros_like(case.q))
    expanded = case.run_expanded(scratch_blocks=150)[0] if fp8 else None
    for pdl in (True, False) * 5:
        assert torch.equal(case.run(out=torch.zeros_like(case.q), pdl=pdl), first)
        if expanded is not None:
            assert torch.equal(case.run_expanded(scratch_blocks=150, pdl=pdl)[0], expanded)


@pytest.mark.gpu
@needs_gpu
def test_a_chunk_of_a_64k_sequence_in_fp8_stays_near_float32() -> None:
    """The test compares with exact attention over the values in the FP8 cache. Flat weights test the sum of
    65,536 small weights. Peaked weights are tested too. The rounding error of a result is at most half of its
    dtype's eps, or 1.7e-3 by norm. Expanding pages also rounds the keys, and peaked weights magnify that
    error, as in torch."""
    for sharpness in (0.0, 1.0, 30.0):
        case = make([(65_000, 536)], *LLAMA, dtype=torch.bfloat16, device="cuda", blocks=1024)
        case = fp8_cache(replace(case, q=case.q * sharpness))
        exact = case.expected(torch.float32).double()
        found = case.run(out=torch.zeros_like(case.q))
        assert error(found, exact) < 3e-3 and worst_error(found, exact) < 5e-3
        found, _ = case.run_expanded(scratch_blocks=1024)
        check_as_torch(found, case.expected(torch.bfloat16), exact)
