"""Tests that both read methods return the file's bytes, and that the right method is chosen."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from engine.model.weight_file import PAGE, WeightFile, buffer_bytes, keep_cached
from tests.engine.model.page_cache import cached_pages, drop
from tests.examples import examples

SIZE = 100 * PAGE + 123
CONTENT = random.Random(7).randbytes(SIZE)
UNTOUCHED = 0xA5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for each successful read whether it bypassed the page cache."""
    past: list[bool] = []

    def preadv(file: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        count = real(file, buffers, offset, flags)
        if not flags:
            past.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        return count

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    return past


def _read(path: Path, first: int, nbytes: int, shared: bool = False) -> bytes:
    """Return the bytes read, after checking that no byte was written outside the buffer."""
    needed = buffer_bytes(first, nbytes)
    buffer = memoryview(mmap.mmap(-1, needed + PAGE))
    buffer[:] = bytes([UNTOUCHED]) * len(buffer)
    with closing(WeightFile(path)) as file:
        file.read(first, nbytes, buffer[:needed], file.past_cache(first, nbytes, shared))
    assert set(buffer[needed:]) == {UNTOUCHED}
    return bytes(buffer[first % PAGE :][:nbytes])


ranges = st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).map(
    lambda pair: (pair[0], min(pair[1], SIZE - pair[0]))
)


@pytest.mark.parametrize("on_disk", [False, True], ids=["cached", "on disk"])
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=ranges)
def test_any_range_is_read_bitwise_equal(path: Path, on_disk: bool, asked: tuple[int, int]) -> None:
    if on_disk:
        drop(path)
    first, nbytes = asked
    assert _read(path, first, nbytes) == CONTENT[first : first + nbytes]


@pytest.mark.parametrize(
    "asked",
    [(0, PAGE), (0, SIZE), (PAGE - 1, 2), (SIZE - 1, 1), (100 * PAGE, 123), (1, PAGE), (PAGE, 2 * PAGE)],
    ids=str,
)
def test_uncached_ranges_are_read_past_the_page_cache(
    path: Path, reads: list[bool], asked: tuple[int, int]
) -> None:
    first, nbytes = asked
    # Sometimes the pages appear to be cached, because the disk delivers them before the kernel checks.
    for _ in range(20):
        drop(path)
        reads.clear()
        assert _read(path, first, nbytes) == CONTENT[first : first + nbytes]
        if reads == [True]:
            break
    assert reads == [True] or (nbytes <= PAGE and reads == [False])
    assert cached_pages(path) <= 2  # the probe loaded at most these pages


def test_cached_ranges_are_read_from_the_page_cache(path: Path, reads: list[bool]) -> None:
    assert _read(path, 5, SIZE - 5) == CONTENT[5:]
    assert reads == [False]


def test_shared_rows_are_read_through_the_page_cache(path: Path, reads: list[bool]) -> None:
    drop(path)
    assert _read(path, 5, SIZE - 5, shared=True) == CONTENT[5:]
    assert reads
    assert not any(reads)
    assert cached_pages(path) == 101


def test_probing_the_page_cache_does_not_make_a_file_look_cached(path: Path, reads: list[bool]) -> None:
    """Simulates repeated startups that do not load the file into the cache."""
    drop(path)
    random.seed(1)  # makes the choice of the probed pages reproducible
    for _ in range(5):
        _read(path, 0, SIZE)
    assert reads == [True] * 5


@pytest.mark.parametrize(
    ("pages", "past_cache"),
    [
        ([True, True], False),
        ([True, False], True),  # the disk delivered the first page before the kernel checked
        ([False], True),
        ([None], False),
    ],
)
def test_one_page_of_each_half_is_probed(
    path: Path, pages: list[bool | None], past_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def answer(file: WeightFile, at: int) -> bool | None:
        asked.append(at)
        return pages[len(asked) - 1]

    monkeypatch.setattr(WeightFile, "_page_is_cached", answer)
    with closing(WeightFile(path)) as file:
        assert file.past_cache(PAGE, 10 * PAGE, shared=False) is past_cache
    halves = [range(PAGE, 6 * PAGE), range(6 * PAGE, 11 * PAGE)]
    assert len(asked) == len(pages)
    assert all(at in half for at, half in zip(asked, halves, strict=False))


def test_freshly_written_data_is_read(path: Path) -> None:
    """Simulates a file that is on the disk except for its newly written end, which is only in the
    page cache."""
    drop(path)
    with path.open("ab") as file:
        file.write(CONTENT[:5000])
    assert _read(path, SIZE - 10_000, 15_000) == CONTENT[-10_000:] + CONTENT[:5000]


def _open_refused(real: Callable[..., int], *arguments: Any) -> int:
    if arguments[1] & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return real(*arguments)


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _read_refused(real: Callable[..., int], file: int, *arguments: Any) -> int:
    if _is_direct(file):
        raise OSError(errno.EINVAL, "Invalid argument")
    return real(file, *arguments)


def _cut_short(real: Callable[..., int], file: int, buffers: list[Any], *arguments: Any) -> int:
    return real(file, [buffers[0][:PAGE]] if _is_direct(file) else buffers, *arguments)


def _cannot_say(real: Callable[..., int], file: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
    if flags:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")
    return real(file, buffers, offset)


@pytest.mark.parametrize(
    ("call", "instead"),
    [("open", _open_refused), ("preadv", _read_refused), ("preadv", _cut_short), ("preadv", _cannot_say)],
    ids=["opening refused", "reading refused", "cut short", "cannot say what is cached"],
)
def test_file_systems_without_direct_io_are_read_through_the_cache(
    path: Path, call: str, instead: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(path)
    real = getattr(os, call)
    monkeypatch.setattr(os, call, lambda *arguments: instead(real, *arguments))
    assert _read(path, 77, SIZE - 77) == CONTENT[77:]
    assert cached_pages(path) == 101


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Return a file on an in-memory file system."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm")
    path = folder / f"appliance-weights-{os.getpid()}"
    path.write_bytes(CONTENT)
    yield path
    path.unlink()


def test_a_file_in_memory_is_read(in_memory: Path) -> None:
    assert _read(in_memory, 77, SIZE - 77) == CONTENT[77:]


@pytest.mark.parametrize("on_disk", [False, True], ids=["cached", "on disk"])
@pytest.mark.parametrize("missing", [1, PAGE, 10 * PAGE])
def test_reading_past_the_end_of_a_file_is_an_error(path: Path, missing: int, on_disk: bool) -> None:
    if on_disk:
        drop(path)
    with pytest.raises(EOFError):
        _read(path, SIZE - 100, 100 + missing)


def test_a_file_replaced_while_it_is_opened_is_read_consistently(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a download that replaces the file between two open calls. Both descriptors must refer to the
    same file."""

    def replaced(*arguments: Any) -> int:
        opened = real(*arguments)
        monkeypatch.setattr(os, "open", real)
        other = path.with_name("other")
        other.write_bytes(bytes(SIZE))
        other.rename(path)
        return opened

    real = os.open
    drop(path)
    monkeypatch.setattr(os, "open", replaced)
    buffer = memoryview(mmap.mmap(-1, buffer_bytes(0, SIZE)))
    with closing(WeightFile(path)) as file:
        assert path.read_bytes() == bytes(SIZE)
        for past_cache in (True, False):
            buffer[:] = bytes(len(buffer))
            file.read(0, SIZE, buffer, past_cache)
            assert bytes(buffer[:SIZE]) == CONTENT


def test_no_file_stays_open(path: Path) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    WeightFile(path).close()
    assert len(os.listdir("/proc/self/fd")) <= opened


def test_keep_cached_loads_files_into_the_page_cache(path: Path) -> None:
    drop(path)
    limit = time.monotonic() + 60
    # Nothing reports that the requested disk reads are complete, and the kernel may ignore the requests under
    # memory pressure.
    while cached_pages(path) < 101:
        assert time.monotonic() < limit
        keep_cached([path]).join()
        time.sleep(0.01)


@pytest.mark.parametrize(("available", "kept"), [(2 * SIZE - 1, False), (2 * SIZE, True)])
def test_files_are_not_cached_if_memory_is_short(
    path: Path, available: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("engine.model.weight_file._available_bytes", lambda: available)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, first, nbytes, advice: asked.append(advice))
    keep_cached([path]).join()
    assert asked == ([os.POSIX_FADV_WILLNEED] if kept else [])


def test_missing_files_are_ignored_by_keep_cached(tmp_path: Path) -> None:
    keep_cached([tmp_path / "gone"]).join()
