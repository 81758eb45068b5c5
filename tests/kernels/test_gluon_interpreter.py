"""Tests that the interpreter of Gluon kernels computes correct results and detects errors that would occur on
a GPU."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.kernels.gluon_interpreter import Interpreted
from tests.kernels.gluon_machine import Deadlock, Fault

SEEDS = range(5)


@gluon.jit
def _bring(tiles, steps, ring, full, empty, WRONG: gl.constexpr):
    for step in range(steps):
        stage = step % 2
        if WRONG != "overwrites":
            mbarrier.wait(empty.index(stage), (step // 2 & 1) ^ (WRONG != "wrong parity"))
        if WRONG != "expects nothing":
            mbarrier.expect(full.index(stage), 64 * 64 * 2)
        tma.async_copy_global_to_shared(tiles, [step * 64, 0], full.index(stage), ring.index(stage))
    if WRONG == "a copy too many":
        mbarrier.wait(empty.index(steps % 2), (steps // 2 & 1) ^ 1)
        mbarrier.expect(full.index(steps % 2), 64 * 64 * 2)
        tma.async_copy_global_to_shared(tiles, [0, 0], full.index(steps % 2), ring.index(steps % 2))


@gluon.jit
def _square(out, steps, ring, full, empty, WRONG: gl.constexpr):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout=mma)
    for step in range(steps):
        stage = step % 2
        if WRONG != "reads early":
            mbarrier.wait(full.index(stage), step // 2 & 1)
        tile = ring.index(stage)
        token = warpgroup_mma(tile, tile.permute([1, 0]), acc, is_async=True)
        if WRONG == "releases early":
            mbarrier.arrive(empty.index(stage), count=1)
        if WRONG == "takes early":
            acc = warpgroup_mma_wait(1, deps=[token])
        elif WRONG == "uses no wait":
            acc = token * 1.0
        else:
            acc = warpgroup_mma_wait(0, deps=[token])
        if WRONG != "warps apart":
            tl.debug_barrier()
        if WRONG == "two arrivals":
            mbarrier.arrive(empty.index(stage), count=2)
        elif WRONG == "arrives again":
            mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.arrive(empty.index(stage), count=1)
        elif WRONG != "releases early" and WRONG != "never arrives":
            mbarrier.arrive(empty.index(stage), count=1)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, mma))
    if WRONG == "stores outside":
        row = row + 1
    place = out + row[:, None] * 64 + column[None, :]
    gl.store(place, acc)
    if WRONG == "stores again":
        gl.store(place, acc, mask=row[:, None] == 63)


@gluon.jit
def _squares(tiles, out, steps, WRONG: gl.constexpr):
    """Multiply each tile by its own transpose and add up the products. The tiles pass through a ring buffer
    of two tiles."""
    ring = gl.allocate_shared_memory(out.dtype.element_ty, [2, 64, 64], tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        if WRONG != "not initialised":
            mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2 if WRONG == "half arrives" else 1)
    if WRONG == "half arrives":
        mbarrier.arrive(empty.index(0), count=1)
    gl.warp_specialize(
        [
            (_square, (out, steps, ring, full, empty, WRONG)),
            (_bring, (tiles, steps, ring, full, empty, WRONG)),
        ],
        [1],
        [24],
    )


def descriptor(x: torch.Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(x, list(x.shape), [64, 1], [64, 64], layout)


def launch(wrong: str, seed: int, rows: int = 7 * 64 - 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on seven tiles, and return the actual and the expected result. The last tile extends
    past the end of the tensor."""
    x = torch.randn((rows, 64), generator=torch.Generator().manual_seed(1)).to(torch.float16)
    out = torch.zeros(64, 64, dtype=torch.float16)
    Interpreted(_squares, seed)[(1,)](descriptor(x), out, 7, WRONG=wrong, num_warps=4)
    tiles = torch.cat([x, torch.zeros(7 * 64 - rows, 64, dtype=x.dtype)]).view(7, 64, 64).float()
    return out, (tiles @ tiles.transpose(1, 2)).sum(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_outside_a_tensor_are_read_as_zeros(seed: int) -> None:
    found, expected = launch("", seed)
    assert torch.allclose(found.float(), expected, rtol=1e-3, atol=0.1)


FAULTS = {
    "reads early": r"reads ring before waiting for the copy into it|overwrites ring, which",
    "overwrites": r"partition 1 \(_bring\) overwrites ring|1 arrivals exceed the count of full\[0\]",
    "releases early": r"partition 1 \(_bring\) overwrites ring, which a product may still read",
    "warps apart": r"partition 1 \(_bring\) overwrites ring, which a product may still read",
    "expects nothing": r"copies more bytes to ring than full\[0\]",
    "a copy too many": r"ends without waiting for a copy",
    "two arrivals": r"2 arrivals exceed the count of empty\[\d\], whose phase \d lacks 1 of 1 arrivals",
    "takes early": r"partition 0 \(_square\) uses a product before waiting for it",
    "not initialised": r"full\[\d\], whose phase 0 lacks 0 of 0 arrivals",
    "stores outside": r"element 4096 is outside a tensor of shape \[64, 64\]",
    "stores again": r"element 4032 is stored twice",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wrong", FAULTS)
def test_a_fault_is_found_in_any_order_of_the_partitions(wrong: str, seed: int) -> None:
    before = threading.active_count()
    with pytest.raises(Fault, match=FAULTS[wrong]):
        launch(wrong, seed)
    assert threading.active_count() <= before


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("wrong", "stage", "missing"),
    [("wrong parity", 0, "1 of 1"), ("never arrives", 0, "1 of 1"), ("half arrives", 1, "1 of 2")],
)
def test_a_deadlock_names_each_partition_and_its_barrier(
    wrong: str, stage: int, missing: str, seed: int
) -> None:
    bringing = rf"partition 1 \(_bring\) waits for parity \d of empty\[{stage}\], whose phase 0"
    with pytest.raises(Deadlock, match=rf"partition 0 \(_square\) waits for .*; {bringing} lacks {missing}"):
        launch(wrong, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_arrival_that_ends_an_extra_phase_is_found(seed: int) -> None:
    with pytest.raises(Fault):
        launch("arrives again", seed)


def test_a_product_is_not_usable_before_its_wait() -> None:
    with pytest.raises(TypeError, match="UnfinishedProduct"):
        launch("uses no wait", 0)


@gluon.jit
def _alone(tiles, out, WRONG: gl.constexpr):
    """Multiply a tile by itself, without warp specialisation."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    pair = gl.allocate_shared_memory(out.dtype.element_ty, [2, 64, 64], tiles.layout)
    here = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if WRONG != "waits uninitialised":
        mbarrier.init(here, count=1)
    if WRONG == "initialised twice":
        mbarrier.init(here, count=1)
    if WRONG != "waits uninitialised":
        mbarrier.expect(here, 64 * 64 * 2 * (2 if WRONG == "copies onto a copy" else 1))
        tile = pair.index(2 if WRONG == "a stage too far" else 0)
        to = tile.reshape([32, 128]) if WRONG == "another block" else tile
        tma.async_copy_global_to_shared(tiles, [0, 0], here, to)
    if WRONG == "copies onto a copy":
        tma.async_copy_global_to_shared(tiles, [0, 0], here, pair.index(0))
    mbarrier.wait(here, 0, pred=WRONG != "reads before the wait")
    token = warpgroup_mma(
        pair.index(0), pair.index(0), gl.zeros([64, 64], gl.float32, layout=mma), is_async=WRONG != "at once"
    )
    if WRONG == "leaves an expectation":
        mbarrier.expect(here, 2)
    if WRONG != "leaves a product":
        square = warpgroup_mma_wait(0, deps=[token])
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
        gl.store(out + row, gl.sum(square, axis=1))


ALONE = {
    "waits uninitialised": r"whose phase 0 lacks 0 of 0 arrivals and 0 bytes before its initialisation",
    "initialised twice": r"is initialised twice",
    "a stage too far": r"index 2 is out of range of 2",
    "another block": r"a block of \[64, 64\] cannot be copied to \[32, 128\]",
    "copies onto a copy": r"the kernel overwrites .*, to which a copy may still be in flight",
    "reads before the wait": r"the kernel reads .* before waiting for the copy into it",
    "leaves an expectation": r"unfinished phase of .* whose phase 1 lacks 0 of 1 arrivals and 2 bytes",
    "leaves a product": r"the kernel ends before one of its products",
}


def alone(wrong: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `_alone`. Returns the actual result and the expected result, which contains the row sums of the
    tile's square."""
    x = torch.randn((64, 64), generator=torch.Generator().manual_seed(1)).to(torch.float16)
    out = torch.zeros(64, dtype=torch.float16)
    Interpreted(_alone, seed)[(1,)](descriptor(x), out, WRONG=wrong, num_warps=4)
    return out, (x.float() @ x.float()).sum(1)


@pytest.mark.parametrize("variant", ["", "at once"])
def test_a_kernel_without_warp_specialisation_runs(variant: str) -> None:
    found, expected = alone(variant, 0)
    assert torch.allclose(found.float(), expected, rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wrong", ALONE)
def test_a_fault_of_the_only_partition_is_found(wrong: str, seed: int) -> None:
    with pytest.raises(Fault, match=ALONE[wrong]):
        alone(wrong, seed)


@gluon.jit
def _unwritten(out, tiles):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tile = gl.allocate_shared_memory(out.dtype.element_ty, [64, 64], tiles.layout)
    token = warpgroup_mma(tile, tile, gl.zeros([64, 64], gl.float32, layout=mma), is_async=True)
    square = warpgroup_mma_wait(0, deps=[token])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    gl.store(out + row, gl.max(square, axis=1), mask=row < 60)


def test_unwritten_memory_is_nan_and_masked_elements_are_unchanged() -> None:
    out = torch.zeros(64, dtype=torch.float16)
    tiles = descriptor(torch.zeros(64, 64, dtype=torch.float16))
    Interpreted(_unwritten, 0)[(1,)](out, tiles, num_warps=4)
    assert out[:60].isnan().all() and not out[60:].any()


def test_gaps_between_the_rows_of_a_tensor_do_not_belong_to_it() -> None:
    out = torch.zeros(64, 2, dtype=torch.float16)[:, 0]
    tiles = descriptor(torch.zeros(64, 64, dtype=torch.float16))
    with pytest.raises(Fault, match=r"element 1 is outside a tensor of shape \[64\]"):
        Interpreted(_unwritten, 0)[(1,)](out, tiles, num_warps=4)


@gluon.jit
def _unknown(out):
    gl.atomic_max(out, 1)


def test_an_unsupported_feature_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="atomic_max"):
        Interpreted(_unknown, 0)[(1,)](torch.zeros(1), num_warps=4)
