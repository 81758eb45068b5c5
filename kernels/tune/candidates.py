"""Generates the candidate plans that the tuner times for a GEMM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kernels.triton.linear_plans import HOPPER_SHARED, MULTIPROCESSORS, GemmPlan, tile_bytes
from kernels.triton.linear_table import Product, problem

BUCKETS = (1, 8, 16, 32, 64, 128, 256)
"""Row counts measured by the tuner. Each result is also used for the row counts between the previous entry
and this one."""

_MANY = 16384
"""Minimum number of outputs for which a GEMM is assumed to need many waves of programs."""

HALF_SHARED = 112 << 10
"""Maximum shared memory per program, in bytes, at which two programs of the `tiles` kernel still fit on a
multiprocessor. Programs of the next GEMM can then load weights while those of the current one finish."""

WHOLE_SHARED = 216 << 10
"""Maximum shared memory, in bytes, for the pipeline stages of a `tiles` program that has a multiprocessor to
itself. The rest is for the exchange of sums between warps."""


def candidates(product: Product, rows: int, hopper: bool) -> list[GemmPlan]:
    """Return the candidate plans that the kernels support for a row count from `BUCKETS`.

    hopper: whether the GPU is a Hopper GPU. On other GPUs, `tiles` kernels crash the compiler.

    A candidate may need more shared memory than the GPU has. The tuner skips candidates that fail to launch.
    """
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
    """Return a program's approximate shared memory use in bytes, accurate to one or two kilobytes. The
    `tiles` and `dot` kernels use shared memory for pipeline stages, and the `stream` kernel for the input row
    in float16. `gemv` uses almost no shared memory."""
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
        return  # a multiprocessor cannot hold both the float16 row and the loads in flight
    for step, warps, ahead in ((256, 4, 2), (256, 4, 3), (128, 4, 3), (128, 4, 4), (256, 8, 2), (128, 8, 2)):
        yield GemmPlan("stream", 1, 16, step, warps, stages=ahead)


def _dots(product: Product, tile: int) -> Iterable[GemmPlan]:
    """Yield plans for the `dot` kernel, with weight tiles that are 128, 256 or 512 bytes wide. For GEMMs with
    few outputs, some plans also split K."""
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
    """Yield plans for the `tiles` kernel, with weight tiles of 64 rows by 128 to 512 bytes, or of 128 rows by
    128 or 256 bytes. Each plan has the largest number of stages at which two programs still fit on a
    multiprocessor. If every program can have its own multiprocessor, there is also a plan with more
    stages."""
    shapes = [(64, 128, 4), (64, 256, 4), (128, 128, 8), (128, 256, 4) if tile >= 32 else (64, 512, 4)]
    for block_n, columns, warps in shapes:
        plan = GemmPlan("tiles", tile, block_n, columns // product.dtype.itemsize, warps)
        for split in (1,) if product.n >= _MANY else (1, 2, 4, 8):
            alone = -(-product.n // block_n) * split <= MULTIPROCESSORS
            for most in (HALF_SHARED, WHOLE_SHARED) if alone else (HALF_SHARED,):
                yield replace(plan, stages=most // shared_bytes(plan, product), split=split)
