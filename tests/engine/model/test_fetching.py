"""Pages of a mapping: there before they are touched, gone when all that lies there was used."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config import CheckpointError
from engine.model import fetching
from engine.model.checkpoint import read_entries
from engine.model.fetching import Block, Pages, opened
from engine.model.slices import Slice, cut
from engine.model.streaming import stream
from engine.model.weight_file import Way, WeightFile

ROW_BYTES = 4096
SPAN_ROWS = 4
Call = tuple[str, int, int]
"""Name, first byte and end."""


@pytest.fixture(autouse=True)
def in_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files were just written. Not every file system can say so."""
    monkeypatch.setattr(WeightFile, "_is_cached", lambda *asked: True)


@pytest.fixture
def slices(tmp_path: Path) -> list[Slice]:
    """20 rows of a matrix, of which two are not asked for, and ten of another."""
    save_file({"a": torch.randn(20, 1024), "b": torch.randn(10, 1024)}, tmp_path / "model.safetensors")
    a, b = (entry for _, entry in sorted(read_entries(tmp_path).items()))
    return [Slice("a", a, 0, 6), Slice("a", a, 8, 12), Slice("b", b, 0, 10)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What was done to a file's pages, in spans of `SPAN_ROWS` rows."""
    seen: list[Call] = []

    def watch(name: str) -> None:
        real = getattr(WeightFile, name)

        def watched(file: WeightFile, first: int, nbytes: int) -> None:
            real(file, first, nbytes)
            seen.append((name, first, first + nbytes))

        monkeypatch.setattr(WeightFile, name, watched)

    watch("bring")
    watch("let_go")
    monkeypatch.setattr(fetching, "_SPAN_BYTES", SPAN_ROWS * ROW_BYTES)
    return seen


def rows_of(calls: list[Call], name: str, slices: list[Slice]) -> list[tuple[int, int]]:
    """First row and end in the file, of each call."""
    start = min(each.entry.offset for each in slices)
    return sorted(
        ((first - start) // ROW_BYTES, (end - start) // ROW_BYTES) for one, first, end in calls if one == name
    )


@pytest.mark.parametrize("row_blocks", [1, 2])
def test_what_lies_side_by_side_is_brought_and_let_go_of_at_once(
    slices: list[Slice], calls: list[Call], row_blocks: int
) -> None:
    for _ in stream(slices, torch.device("cpu"), lambda *_: None, block_bytes=row_blocks * ROW_BYTES):
        pass
    spans = [(0, 4), (4, 6), (8, 12), (12, 16), (16, 20), (20, 24), (24, 28), (28, 30)]
    assert rows_of(calls, "bring", slices) == spans
    assert set(rows_of(calls, "let_go", slices)) <= set(spans)  # the last ones go with the mapping


def test_a_span_is_of_one_file_and_one_way(
    slices: list[Slice], calls: list[Call], blocks: list[Block]
) -> None:
    blocks[1].way = Way.THROUGH_CACHE
    with closing(opened(slices[0].entry.file)) as other:
        blocks[3].file = other
        pages = Pages(blocks[:4], Direct())
        for number in range(4):
            pages.there(number)
    assert rows_of(calls, "bring", slices) == [(0, 1), (2, 3), (3, 4)]


class Direct(ThreadPoolExecutor):
    """Does at once what is submitted."""

    def submit(self, work, /, *arguments, **named):  # type: ignore[no-untyped-def, override]
        done: Future[object] = Future()
        done.set_result(work(*arguments, **named))
        return done


@pytest.fixture
def blocks(slices: list[Slice]) -> Iterator[list[Block]]:
    with closing(opened(slices[0].entry.file)) as file:
        yield [Block(rows, file) for rows in cut(slices, ROW_BYTES)]


def test_pages_come_a_few_spans_ahead_and_go_when_the_last_block_was_used(
    slices: list[Slice], calls: list[Call], blocks: list[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_SPANS_AHEAD", 1)
    pages = Pages(blocks, Direct())
    assert calls == []
    pages.there(0)
    assert rows_of(calls, "bring", slices) == [(0, 4), (4, 6)]
    pages.there(3)
    assert len(calls) == 2
    pages.there(4)
    assert rows_of(calls, "bring", slices) == [(0, 4), (4, 6), (8, 12)]
    for number in range(3):
        pages.used(number)
    assert rows_of(calls, "let_go", slices) == []
    pages.used(3)
    assert rows_of(calls, "let_go", slices) == [(0, 4)]
    for number in range(4, len(blocks)):
        pages.there(number)
        pages.used(number)
    assert rows_of(calls, "let_go", slices)[-1] == (28, 30)


def test_of_a_span_that_cannot_be_had_the_tensor_is_named(
    slices: list[Slice], blocks: list[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bring(file: WeightFile, first: int, nbytes: int) -> None:
        if first + nbytes > slices[2].offset:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    monkeypatch.setattr(WeightFile, "bring", bring)
    with ThreadPoolExecutor(1) as threads:
        pages = Pages(blocks, threads)
        pages.there(0).result()
        # The second span is all that follows the gap.
        with pytest.raises(CheckpointError, match=r"model.safetensors: b cannot be read \(Bad address\)"):
            pages.there(6).result()


def test_what_is_read_is_never_brought(
    slices: list[Slice], calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightFile, "_is_cached", lambda *asked: False)
    for _ in stream(slices, torch.device("cpu"), lambda *_: None):
        pass
    assert calls == []


def test_pages_that_were_used_are_mapped_no_more(tmp_path: Path) -> None:
    """As the kernel counts them; all of them would otherwise be unmapped, and waited for, at the end."""
    nbytes = 16 << 20
    save_file({"matrix": torch.ones(nbytes >> 12, 1024)}, tmp_path / "model.safetensors")
    file = tmp_path / "model.safetensors"
    entry = read_entries(tmp_path)["matrix"]
    done = 0

    def fill(block: Slice, numbers: torch.Tensor) -> None:
        nonlocal done
        assert bool((numbers == 1).all())
        done += 1
        # What comes ahead, what is in use, and what this thread may be about to let go of.
        until = time.monotonic() + 30
        while not 0 < resident_kb(file) <= (fetching._SPANS_AHEAD + 6) << 10:
            assert time.monotonic() < until, (done, resident_kb(file))
            time.sleep(0.001)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "_SPAN_BYTES", 1 << 20)
        patch.setattr(fetching, "_SPANS_AHEAD", 5)
        whole = Slice("matrix", entry, 0, entry.shape[0])
        for _ in stream([whole], torch.device("cpu"), fill, block_bytes=1 << 20):
            pass
    assert done == 16


def resident_kb(file: Path) -> int:
    """Of its mappings by this process."""
    maps = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{re.escape(str(file))}\n(?:.*\n)*?Rss: +(\d+) kB", maps)
    return sum(map(int, found))


def test_a_file_that_was_written_to_is_named_with_the_first_tensor_of_a_span(
    slices: list[Slice], blocks: list[Block]
) -> None:
    stale = replace(slices[0].entry, modified_ns=slices[0].entry.modified_ns - 1)
    blocks[0].rows = replace(blocks[0].rows, entry=stale)
    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(CheckpointError, match="was changed while a was read"),
    ):
        Pages(blocks, threads).there(0).result()
