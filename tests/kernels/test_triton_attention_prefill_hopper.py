"""Prefill attention of Hopper equals its twin, as `test_triton_attention_prefill` holds the other kernel to
that. It is Gluon, which a GPU alone runs: a Hopper, marked `gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels import PAGE_TOKENS, ChunkSpan
from tests.kernels.closeness import check_as_torch

cases = pytest.importorskip("tests.kernels.test_triton_attention_prefill", exc_type=ImportError)
Case, plan_tiles = cases.Case, cases.kernel.plan_tiles

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")

CHUNKS = {
    **cases.GPU_CHUNKS,
    "across blocks of keys": [(100, 300), (1000, 200), (37, 91)],
    "two blocks of keys": [(0, 128), (0, 129), (1, 127), (127, 1), (128, 1), (64, 64)],
    "many of one token": [(300 + 7 * i, 1) for i in range(40)],
    "more than there are multiprocessors": [(50 * i, 70 + i) for i in range(60)],
}
GROUPS = [(8, 8), (16, 8), (32, 8), (8, 1), (16, 1), (32, 1), (64, 1)]
BF16, F16 = torch.bfloat16, torch.float16


def make(chunks: str, heads: int = 32, kv_heads: int = 8, dtype: torch.dtype = BF16) -> Case:
    """NaN in every block that no chunk reads, of which one follows each row's own in the block table."""
    case = cases.make(CHUNKS[chunks], heads, kv_heads, 128, dtype=dtype, device="cuda", blocks=90)
    last = len(case.keys)
    unread = torch.ones(last + 1, dtype=torch.bool, device="cuda")
    for chunk in case.chunks:
        pages = -(-chunk.end // PAGE_TOKENS)
        unread[case.table[chunk.row, :pages]] = False
        case.table[chunk.row, pages:] = last
    case.keys, case.values = (torch.cat((pool, pool[:1])) for pool in (case.keys, case.values))
    case.keys[unread] = case.values[unread] = float("nan")
    return case


def paged(case: Case, pdl: bool = True, table: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens that no chunk has stay as they are: zero, as `Case.expected` has them."""
    return _prefill(case, case.keys, case.values, case.table if table is None else table, case.chunks, pdl)


def expanded(case: Case, pdl: bool = True) -> torch.Tensor:
    """From a scratch that has the blocks of every chunk one after another, then NaN."""
    rows, chunks, used = [], [], 0
    for chunk in case.chunks:
        pages = -(-chunk.end // PAGE_TOKENS)
        rows.append(case.table[chunk.row, :pages])
        chunks.append(ChunkSpan(chunk.first, chunk.count, chunk.context, used))
        used += pages
    keys, values = (
        torch.full((used + 3, *pool.shape[1:]), float("nan"), dtype=pool.dtype, device="cuda")
        for pool in (case.keys, case.values)
    )
    keys[:used], values[:used] = case.keys[torch.cat(rows)], case.values[torch.cat(rows)]
    return _prefill(case, keys, values, None, chunks, pdl)


def _prefill(
    case: Case,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor | None,
    chunks: list[ChunkSpan],
    pdl: bool,
) -> torch.Tensor:
    from kernels.triton import attention_prefill_hopper

    tiles = torch.from_numpy(plan_tiles(chunks, case.q.shape[1], keys.shape[1])).to("cuda")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    read, out = (keys, values, table, tiles), torch.zeros_like(case.q)
    return attention_prefill_hopper.prefill(case.q, *read, case.scale, out, multiprocessors, pdl)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    ("chunks", "heads", "kv_heads"),
    [(chunks, 32, 8) for chunks in CHUNKS] + [("mixed", *group) for group in GROUPS],
)
def test_the_error_is_that_of_torch(chunks: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """As that of the other kernel: at most twice that of torch's attention in the same dtype, plus half a
    rounding of the result, over all and of the worst token and head."""
    case = make(chunks, heads, kv_heads, dtype)
    exact, torchs = case.expected(), case.expected(dtype)
    check_as_torch(paged(case), torchs, exact)
    check_as_torch(expanded(case), torchs, exact)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("chunks", ["mixed", "more than there are multiprocessors"])
@pytest.mark.parametrize("way", [paged, expanded])
def test_the_bits_are_the_same_every_time_and_without_pdl(
    way: Callable[..., torch.Tensor], chunks: str
) -> None:
    case = make(chunks)
    first = way(case)
    for pdl in (True, False) * 5:
        assert torch.equal(way(case, pdl), first)


@on_hopper
@pytest.mark.gpu
def test_a_block_table_may_be_narrow_and_queries_strided() -> None:
    case = make("mixed")
    first = paged(case)
    assert torch.equal(paged(case, table=case.table.int()), first)
    wide = torch.full((len(case.q), 40, 128), float("nan"), dtype=BF16, device="cuda")
    wide[:, :32] = case.q
    assert torch.equal(paged(replace(case, q=wide[:, :32])), first)


@on_hopper
@pytest.mark.gpu
def test_chunks_may_share_blocks() -> None:
    case = make("several chunks")
    _, second, _, fourth = (chunk.row for chunk in case.chunks)
    case.table[fourth, :3] = case.table[second, :3]
    check_as_torch(paged(case), case.expected(BF16), case.expected())
