"""A file of weights: read out of the page cache where it lies there, past that where it does not.

A disk is read past the page cache (O_DIRECT) at its own rate and for next to no processor time; through it,
the kernel finds a page for every 4 KiB and copies them once more. What other ranks want as well goes through
the cache all the same, so that the disk gives it once; and what was read past it is brought there afterwards
(`keep_cached`), where the next start finds it.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PAGE = mmap.PAGESIZE
"""Bytes. What is read past the page cache begins and ends at multiples of it, on the disk and in memory: more
than any disk asks for."""
_FETCH_BYTES = 16 << 20
_MEMORY_SHARE = 0.5
"""Of the free memory, that files which are kept may take."""


class WeightFile:
    """Open for any number of threads. Raises OSError where the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # What is asked for and no more: what the kernel would guess from the reads of many threads is wrong.
        os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_RANDOM)
        # Of the file that was opened, whatever has its name by now.
        self._direct: int | None = None
        with suppress(OSError):  # file systems may refuse: through the cache, then
            same = f"/proc/self/fd/{self._cached}"
            self._direct = os.open(same, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def close(self) -> None:
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def status(self) -> os.stat_result:
        return os.fstat(self._cached)

    def past_cache(self, first: int, nbytes: int, shared: bool) -> bool:
        """Whether bytes `[first, first + nbytes)` are best read past the page cache. `shared` bytes are read
        by others as well."""
        return self._direct is not None and not shared and self._is_cached(first, nbytes) is False

    def read(self, first: int, nbytes: int, into: memoryview, past_cache: bool) -> None:
        """Reads bytes `[first, first + nbytes)` to where they lie in the pages of the file that begin with
        `into`: from `into[first % PAGE]` on.

        `into` begins at a page of memory, and has at least `room(first, nbytes)`. Raises EOFError where the
        file is shorter, OSError where it cannot be read.
        """
        skipped = first % PAGE
        if past_cache and self._direct is not None:
            with suppress(OSError):
                count = os.preadv(self._direct, [into[: room(first, nbytes)]], first - skipped)
                if count >= skipped + nbytes:
                    return
            # Refused, or cut short: reading through the cache says why, if there is a reason.
        done = 0
        while done < nbytes:
            count = os.preadv(self._cached, [into[skipped + done : skipped + nbytes]], first + done)
            if not count:
                raise EOFError
            done += count

    def _is_cached(self, first: int, nbytes: int) -> bool | None:
        """Whether the range is in the page cache, by a page of each half; None: the file system cannot say.

        To ask for a page that is not there brings it. So pages are chosen at random, or the next start would
        be told that all are there; and two are asked, since the disk may answer before the kernel has looked.
        """
        half = (nbytes + 1) // 2
        one = self._page_is_cached(first + random.randrange(half))
        return one and self._page_is_cached(first + nbytes - 1 - random.randrange(half))

    def _page_is_cached(self, at: int) -> bool | None:
        try:
            os.preadv(self._cached, [bytearray(1)], at, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True


def room(first: int, nbytes: int) -> int:
    """Bytes that reading `[first, first + nbytes)` may need: whole pages."""
    return -(-(first % PAGE + nbytes) // PAGE) * PAGE


def keep_cached(paths: Iterable[Path]) -> threading.Thread:
    """Brings files into the page cache behind the caller's back, unless they would take more than half of the
    free memory; costs disk time, and 0.1 s of a core for each GB that was not there."""
    thread = threading.Thread(target=_fetch, args=(list(paths),), name="page cache", daemon=True)
    thread.start()
    return thread


def _fetch(paths: list[Path]) -> None:
    # A file that is gone, or memory that nobody can tell: a service without them runs on.
    with suppress(OSError):
        if sum(path.stat().st_size for path in paths) > _MEMORY_SHARE * _available_bytes():
            return
        for path in paths:
            with path.open("rb", buffering=0) as file:
                for first in range(0, os.fstat(file.fileno()).st_size, _FETCH_BYTES):
                    os.posix_fadvise(file.fileno(), first, _FETCH_BYTES, os.POSIX_FADV_WILLNEED)


def _available_bytes() -> int:
    """What the kernel can give, its clean caches included."""
    with Path("/proc/meminfo").open() as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
