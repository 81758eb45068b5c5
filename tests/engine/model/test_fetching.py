"""Tests of reading blocks in pieces with several threads."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.config import CheckpointError
from engine.model import fetching
from engine.model.checkpoint import TensorEntry, read_entries
from engine.model.fetching import FileBlock, ReaderPool, open_weights
from engine.model.slices import TensorSlice
from engine.model.staging import StagingBuffer, StagingRing
from engine.model.weight_file import PAGE, WeightFile
from tests.examples import examples

ROWS = 10 * PAGE // 4
"""Number of rows of four bytes each."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PIECE_BYTES", 2 * PAGE)


@pytest.fixture
def entry(tmp_path: Path) -> TensorEntry:
    save_file(
        {"rows": torch.arange(ROWS, dtype=torch.int32).view(-1, 1).view(torch.float32)},
        tmp_path / "model.safetensors",
    )
    return read_entries(tmp_path)["rows"]


@pytest.fixture
def file(entry: TensorEntry) -> Iterator[WeightFile]:
    with closing(open_weights(entry.file)) as file:
        yield file


@pytest.fixture
def buffer() -> Iterator[StagingBuffer]:
    with closing(StagingRing(1, 12 * PAGE, torch.device("cpu"))) as ring:
        yield ring.buffers[0]


def _block(entry: TensorEntry, file: WeightFile, first: int = 0, rows: int = ROWS) -> FileBlock:
    return FileBlock(TensorSlice("rows", entry, first, rows), file)


ranges = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS)).map(
    lambda pair: (pair[0], min(pair[1], ROWS - pair[0]))
)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "on disk"])
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=ranges)
def test_the_pieces_of_a_block_cover_it_exactly(
    entry: TensorEntry, file: WeightFile, buffer: StagingBuffer, asked: tuple[int, int], cached: bool
) -> None:
    block = _block(entry, file, *asked)
    block.past_cache = not cached
    end_positions = [block.rows.offset, *(end for _, end in block.pieces())]
    assert [first for first, _ in block.pieces()] == end_positions[:-1]
    assert end_positions[-1] == block.rows.offset + block.rows.nbytes
    assert not any(end % PAGE for end in end_positions[1:-1])
    assert max(last - first for first, last in block.pieces()) <= 2 * PAGE
    with closing(ReaderPool(3)) as readers:
        readers.read([block], buffer).wait()
    first, rows = asked
    assert block.numbers(buffer).view(torch.int32).tolist() == list(range(first, first + rows))


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "on disk"])
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=st.lists(ranges, min_size=1, max_size=4))
def test_blocks_of_a_batch_are_in_different_pages_of_a_buffer(
    entry: TensorEntry, file: WeightFile, asked: list[tuple[int, int]], cached: bool
) -> None:
    blocks: list[FileBlock] = []
    for first, rows in asked:
        block = FileBlock(
            TensorSlice("rows", entry, first, rows), file, None, blocks[-1].end if blocks else 0
        )
        block.past_cache = not cached
        blocks.append(block)
    with (
        closing(StagingRing(1, blocks[-1].end, torch.device("cpu"))) as ring,
        closing(ReaderPool(3)) as readers,
    ):
        (buffer,) = ring.buffers
        readers.read(blocks, buffer).wait()
        for block, (first, rows) in zip(blocks, asked, strict=True):
            assert block.numbers(buffer).view(torch.int32).tolist() == list(range(first, first + rows))


def test_the_pieces_of_a_block_are_read_concurrently(
    entry: TensorEntry, file: WeightFile, buffer: StagingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = _block(entry, file)
    together = threading.Barrier(len(block.pieces()))

    def read(file: WeightFile, *asked: Any) -> None:
        together.wait(timeout=600)

    monkeypatch.setattr(WeightFile, "read", read)
    with closing(ReaderPool(together.parties)) as readers:
        readers.read([block], buffer).wait()
    assert together.parties > 4


@pytest.mark.parametrize(
    ("error", "said", "raised"),
    [
        (
            OSError(errno.EIO, os.strerror(errno.EIO)),
            r"rows cannot be read \(Input/output error\)",
            CheckpointError,
        ),
        (EOFError(), "is truncated: rows needs", CheckpointError),
        (ValueError("a defect"), "a defect", ValueError),
    ],
    ids=["disk", "end", "defect"],
)
def test_a_read_error_is_raised_after_all_other_pieces_are_done(
    entry: TensorEntry,
    file: WeightFile,
    buffer: StagingBuffer,
    error: Exception,
    said: str,
    raised: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = _block(entry, file)
    _, _, (failing, _), *_, (last, _) = block.pieces()
    failed = threading.Event()
    done: list[int] = []

    def read(file: WeightFile, first: int, *asked: Any) -> None:
        if first == failing:
            failed.set()
            raise error
        # read after the failure, but before the waiting thread has been notified of the failure
        if first == last:
            assert failed.wait(60)
            time.sleep(0.05)
        done.append(first)

    monkeypatch.setattr(WeightFile, "read", read)
    with closing(ReaderPool(2)) as readers:
        reading = readers.read([block], buffer)
        with pytest.raises(raised, match=said):
            reading.wait()
        assert sorted([failing, *done]) == [first for first, _ in block.pieces()]


def test_a_read_error_is_raised_even_if_the_size_of_the_file_is_unknown(
    entry: TensorEntry, file: WeightFile, buffer: StagingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a file server on which a file is truncated and which then becomes unreachable."""

    def status(file: WeightFile) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(WeightFile, "status", status)
    os.truncate(entry.file, entry.offset)
    with closing(ReaderPool(2)) as readers, pytest.raises(OSError, match="Stale file handle"):
        readers.read([_block(entry, file)], buffer).wait()


def test_a_failed_read_releases_its_staging_buffer(entry: TensorEntry, file: WeightFile) -> None:
    """The memory of a failed load must be freed immediately, not only at the next garbage collection."""
    ring = StagingRing(1, 12 * PAGE, torch.device("cpu"))
    kept = weakref.ref(ring.buffers[0])
    os.truncate(entry.file, entry.offset)
    gc.disable()
    try:
        with closing(ReaderPool(2)) as readers:
            reading = readers.read([_block(entry, file)], ring.buffers[0])
            with suppress(CheckpointError):
                reading.wait()
                raise AssertionError
        ring.close()
        del ring, reading, readers
        assert kept() is None
    finally:
        gc.enable()


def test_started_threads_are_stopped_if_one_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == 4:
            raise RuntimeError("can't start new thread")
        real(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        ReaderPool(6)
    assert not any(thread.is_alive() for thread in started)


def test_close_waits_for_begun_pieces_and_drops_the_others(
    entry: TensorEntry, file: WeightFile, buffer: StagingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    read: list[int] = []

    def slowly(file: WeightFile, first: int, *asked: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        read.append(first)

    monkeypatch.setattr(WeightFile, "read", slowly)
    readers = ReaderPool(1)
    readers.read([_block(entry, file)], buffer)
    assert begun.wait(60)
    closes = threading.Thread(target=readers.close)
    closes.start()
    limit = time.monotonic() + 60
    while not readers._stopped:
        assert time.monotonic() < limit
        time.sleep(0.001)
    assert closes.is_alive()
    goes_on.set()
    closes.join(60)
    assert not closes.is_alive()
    assert read == [entry.offset]
