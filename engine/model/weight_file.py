"""A file of weights: mapped where it lies in the page cache, read past that where it does not.

A disk is read past the page cache (O_DIRECT) at its own rate and for next to no processor time; through it,
the kernel finds a page for every 4 KiB and copies them once more. What other ranks want as well goes through
the cache all the same, so that the disk gives it once; and what was read past it is brought there afterwards
(`keep_cached`), where the next start finds it.

Out of the cache, a mapping is copied by threads that know no interpreter; threads that each call the kernel,
and wait for the interpreter before and after, reach half of that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import threading
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path

PAGE = mmap.PAGESIZE
"""Bytes. What is read past the page cache begins and ends at multiples of it, on the disk and in memory: more
than any disk asks for."""
_POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ."""
_FETCH_BYTES = 16 << 20
_MEMORY_SHARE = 0.5
"""Of the free memory, that files which are kept may take."""


class Way(Enum):
    """How bytes of a file are had."""

    MAPPED = auto()
    """From `pages`."""
    THROUGH_CACHE = auto()
    """By `read`, as is the next."""
    PAST_CACHE = auto()


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
        self.pages: mmap.mmap | None = None
        """The whole file; nothing is to be written there, nor touched before `bring`: a page that cannot be
        had, since the file was cut off or the disk fails, ends the process (SIGBUS). None: it cannot be
        mapped."""
        # A file system may refuse, or this process's limits; an empty file has no pages.
        with suppress(OSError, ValueError):
            # Written to, they would be pages of our own; torch takes no others.
            self.pages = mmap.mmap(self._cached, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        # Python's own `madvise` holds up all threads of the interpreter meanwhile.
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def close(self) -> None:
        """The pages go with the last tensor of them."""
        self.pages = None
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def status(self) -> os.stat_result:
        return os.fstat(self._cached)

    def way(self, first: int, nbytes: int, shared: bool) -> Way:
        """How to get bytes `[first, first + nbytes)`. `shared` bytes are read by others as well."""
        cached = self._is_cached(first, nbytes)
        if cached and self.pages is not None:
            return Way.MAPPED
        past_cache = cached is False and self._direct is not None and not shared
        return Way.PAST_CACHE if past_cache else Way.THROUGH_CACHE

    def bring(self, first: int, nbytes: int) -> None:
        """Have bytes `[first, first + nbytes)` of `pages` there, before anybody touches them. For a cached
        GiB this takes 1 ms, or 90 where the file system caches pages of 4 KiB one by one. Raises OSError
        where they cannot be had: to touch them would end the process."""
        skipped = first % PAGE
        error = self._advise(first - skipped, skipped + nbytes, _POPULATE_READ)
        if error and error != errno.EINVAL:  # of kernels before 5.14, which do not know it
            raise OSError(error, os.strerror(error))

    def let_go(self, first: int, nbytes: int) -> None:
        """Nobody will touch bytes `[first, first + nbytes)` of `pages` any more. A GiB of small pages takes
        40 ms to unmap, which would all be waited for at the end."""
        begin, end = -(-first // PAGE) * PAGE, (first + nbytes) // PAGE * PAGE  # others may need the rest
        self._advise(begin, end - begin, mmap.MADV_DONTNEED)

    def _advise(self, first: int, nbytes: int, advice: int) -> int:
        """Returns the error's number, or 0."""
        pages = self.pages  # are not unmapped before this is done with them
        assert pages is not None
        assert first >= 0 and first + nbytes <= len(pages)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        failed = nbytes > 0 and self._madvise(address + first, nbytes, advice)
        return ctypes.get_errno() if failed else 0

    def read(self, first: int, nbytes: int, into: memoryview, past_cache: bool) -> int:
        """Reads bytes `[first, first + nbytes)` and returns where in `into` they begin.

        `into` begins at a page, and has at least `room(first, nbytes)`. Raises EOFError where the file is
        shorter, OSError where it cannot be read.
        """
        if past_cache and self._direct is not None:
            skipped = first % PAGE
            with suppress(OSError):
                count = os.preadv(self._direct, [into[: room(first, nbytes)]], first - skipped)
                if count >= skipped + nbytes:
                    return skipped
            # Refused, or cut short: reading through the cache says why, if there is a reason.
        done = 0
        while done < nbytes:
            count = os.preadv(self._cached, [into[done:nbytes]], first + done)
            if not count:
                raise EOFError
            done += count
        return 0

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
