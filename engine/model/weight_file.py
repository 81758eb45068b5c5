"""Reads weight files through the page cache if they are cached, otherwise directly from disk.

Direct reads (O_DIRECT) reach the disk's full rate and use almost no CPU time. For reads through the page
cache, the kernel must allocate a page for every 4 KiB and copy the data once more. Rows that several ranks or
replicas need at the same time always go through the page cache, so that they are read from disk only once.
After loading, `keep_cached` reads the files into the page cache for the next start.
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
"""Alignment, in bytes, of the file offset and memory address of a direct read. This alignment is sufficient
for any disk."""
_FETCH_BYTES = 16 << 20
_MEMORY_SHARE = 0.5
"""Maximum size of the files kept in the page cache, as a fraction of free memory."""


class WeightFile:
    """An open weight file. Thread-safe. The constructor raises OSError if the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # Disable read-ahead: the kernel cannot predict the interleaved reads of many threads.
        os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_RANDOM)
        self._direct: int | None = None
        # Some file systems do not support O_DIRECT. Reopen the file through its descriptor, because the path
        # may now refer to a different file.
        with suppress(OSError):
            same_file = f"/proc/self/fd/{self._cached}"
            self._direct = os.open(same_file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def close(self) -> None:
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def status(self) -> os.stat_result:
        return os.fstat(self._cached)

    def past_cache(self, first: int, nbytes: int, shared: bool) -> bool:
        """Return whether bytes `[first, first + nbytes)` should be read directly from disk. `shared` is true
        if other ranks or replicas also read them.
        """
        return self._direct is not None and not shared and self._is_cached(first, nbytes) is False

    def read(self, first: int, nbytes: int, into: memoryview, past_cache: bool) -> None:
        """Read bytes `[first, first + nbytes)` into `into[first % PAGE:]`.

        `into` must begin at a page boundary and be at least `buffer_bytes(first, nbytes)` bytes long. Raises
        EOFError if the file is too short, and OSError if it cannot be read.
        """
        skipped = first % PAGE
        if past_cache and self._direct is not None:
            with suppress(OSError):
                count = os.preadv(self._direct, [into[: buffer_bytes(first, nbytes)]], first - skipped)
                if count >= skipped + nbytes:
                    return
            # The direct read failed or was incomplete. Retrying through the page cache either succeeds or
            # raises the actual error.
        done = 0
        while done < nbytes:
            count = os.preadv(self._cached, [into[skipped + done : skipped + nbytes]], first + done)
            if not count:
                raise EOFError
            done += count

    def _is_cached(self, first: int, nbytes: int) -> bool | None:
        """Return whether the range is in the page cache, or None if unknown. Probes one page in each half of
        the range. Probing an uncached page loads it into the cache. The pages are therefore chosen at random,
        so that loading the file again probes different pages. Two pages are probed, because a fast disk may
        load the first page while it is being probed.
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


def buffer_bytes(first: int, nbytes: int) -> int:
    """Return the buffer size in bytes, a multiple of the page size, for reading bytes `[first, first +
    nbytes)`."""
    return -(-(first % PAGE + nbytes) // PAGE) * PAGE


def fits_page_cache(paths: Iterable[Path]) -> bool:
    """Return whether the files together would take up at most half of the free memory. Returns False if a
    file cannot be read."""
    try:
        return sum(path.stat().st_size for path in paths) <= _MEMORY_SHARE * _available_bytes()
    except OSError:
        return False


def keep_cached(paths: Iterable[Path]) -> threading.Thread:
    """Load files into the page cache in a background thread, unless they would take up more than half of the
    free memory. Loading keeps the disk busy and takes 0.1 s of CPU time per GB that was not cached.
    """
    thread = threading.Thread(target=_fetch, args=(list(paths),), name="page cache", daemon=True)
    thread.start()
    return thread


def _fetch(paths: list[Path]) -> None:
    # Caching is optional: a deleted file or an unreadable /proc/meminfo must not affect the service.
    if not fits_page_cache(paths):
        return
    with suppress(OSError):
        for path in paths:
            with path.open("rb", buffering=0) as file:
                for first in range(0, os.fstat(file.fileno()).st_size, _FETCH_BYTES):
                    os.posix_fadvise(file.fileno(), first, _FETCH_BYTES, os.POSIX_FADV_WILLNEED)


def _available_bytes() -> int:
    """Return the available memory in bytes, including caches that can be dropped without writing them to
    disk."""
    with Path("/proc/meminfo").open() as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
