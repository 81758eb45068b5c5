"""The candidate plans for a linear."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kernels.triton.linear_plans import HOPPER_SHARED, GemmPlan, tile_bytes
from kernels.triton.linear_table import Product, problem

BUCKETS = (1, 8, 16, 32, 64, 128, 256)
"""Numbers of rows that are measured. Each entry covers the numbers of rows up to its own."""

_MANY = 16384
"""Number of outputs from which one wave of programs is a small part of the whole GEMM."""

HALF_SHARED = 112 << 10
"""Shared memory of a `tiles` program such that two programs fit on a multiprocessor: programs of the next
GEMM then fill their stages while those of the current one run."""


def candidates(product: Product, rows: int, hopper: bool) -> list[GemmPlan]:
    """Return our plans for a bucket that the kernels accept. hopper: whether the GPU is a Hopper; on other
    GPUs `tiles` kernels abort the compiler. Plans that need more shared memory than the GPU has are skipped
    when they fail to launch."""
    if rows == 1:
        plans = [*_gemvs(product), *_streams(product)]
    else:
        tiles = (8, 16) if rows <= 8 else (rows,)
        plans = [
            plan
            for tile in tiles
            for plan in _dots(product, tile)
            if shared_bytes(plan, product) <= HOPPER_SHARED
        ]
        plans += [plan for tile in tiles if hopper and tile <= 64 for plan in _tiles(product, tile)]
    return [plan for plan in dict.fromkeys(plans) if problem(plan, rows, product) is None]


def shared_bytes(plan: GemmPlan, product: Product) -> int:
    """Return the shared memory of a program in bytes, accurate to one or two kilobytes: for tiles and dot the
    pipeline stages, for stream the row in float16, and for gemv nothing but the sums of the warps."""
    if plan.form == "gemv":
        return 0
    if plan.form == "stream":
        return 2 * product.k
    return tile_bytes(plan, product.dtype.itemsize)


def _gemvs(product: Product) -> Iterable[GemmPlan]:
    most = 1 << (product.k - 1).bit_length()
    if product.dtype.itemsize == 2:
        shapes = [(2, 1024, 4), (2, 2048, 4), (4, 1024, 4), (4, 2048, 4), (4, 4096, 4), (4, 2048, 8)]
        shapes += [(1, 2048, 4), (8, 1024, 4), (2, 4096, 8)]
    else:
        shapes = [(4, 2048, 4), (8, 1024, 4), (8, 2048, 4), (8, 4096, 8), (16, 1024, 4), (4, 4096, 4)]
    for block_n, block_k, warps in shapes:
        yield GemmPlan("gemv", 1, block_n, min(block_k, most), warps)


def _streams(product: Product) -> Iterable[GemmPlan]:
    if product.k > 8192:
        return  # the row in float16 and the loads in flight would not fit together
    for step, warps, ahead in ((256, 4, 2), (256, 4, 3), (128, 4, 3), (128, 4, 4), (256, 8, 2), (128, 8, 2)):
        yield GemmPlan("stream", 1, 16, step, warps, stages=ahead)


def _dots(product: Product, tile: int) -> Iterable[GemmPlan]:
    """Tiles with columns of 128, 256 and 512 bytes; GEMMs with few outputs also with K split."""
    bytes_256 = 256 // product.dtype.itemsize
    if product.n >= _MANY:
        for stages in (3, 4, 5):
            yield GemmPlan("dot", tile, 64, bytes_256, 4, stages)
            yield GemmPlan("dot", tile, 128, bytes_256, 8, stages)
        yield GemmPlan("dot", tile, 128, bytes_256, 4, 3)
        for stages in (4, 5):
            yield GemmPlan("dot", tile, 128, bytes_256 // 2, 8, stages)
        yield GemmPlan("dot", tile, 128, bytes_256 // 2, 4, 5)
        yield GemmPlan("dot", tile, 64, bytes_256 // 2, 4, 6)
        return
    for split in (1, 2, 4):
        for stages in (4, 6):
            yield GemmPlan("dot", tile, 64, bytes_256, 4, stages, split)
        yield GemmPlan("dot", tile, 64, 2 * bytes_256, 4, 3, split)
    for split in (1, 2, 4, 8):
        yield GemmPlan("dot", tile, 128, bytes_256, 8, 4, split)
        if tile >= 128:
            yield GemmPlan("dot", tile, 128, bytes_256 // 2, 8, 4, split)
            yield GemmPlan("dot", tile, 64, bytes_256 // 2, 4, 5, split)
    yield GemmPlan("dot", tile, 64, bytes_256 // 2, 4, 8, 2)
    yield GemmPlan("dot", tile, 64, bytes_256, 4, 4, 8)


def _tiles(product: Product, tile: int) -> Iterable[GemmPlan]:
    """Tiles of 64 weight rows by 128 or 256 bytes, and of 128 rows by 128 bytes, with as many stages as let
    two programs share a multiprocessor."""
    for block_n, columns in ((64, 128), (64, 256), (128, 128)):
        plan = GemmPlan("tiles", tile, block_n, columns // product.dtype.itemsize, block_n // 16)
        plan = replace(plan, stages=HALF_SHARED // shared_bytes(plan, product))
        for split in (1,) if product.n >= _MANY else (1, 2, 4, 8):
            yield replace(plan, split=split)
