"""Helpers that inspect a file's pages in the page cache and evict them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)


def drop(path: Path) -> None:
    """Evict a file from the page cache. Skips the test if there is no disk or direct reads are not
    supported."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip(f"{path.parent} refuses O_DIRECT")
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if path.stat().st_size and cached_pages(path):
        pytest.skip(f"{path.parent} is kept in memory")


def cached_pages(path: Path) -> int:
    """Return the number of a file's pages that are in the page cache."""
    size = path.stat().st_size
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    # The mapping is private because ctypes takes the address only of writable memory. Nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages:
        first = ctypes.c_char.from_buffer(pages)
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found)
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(each & 1 for each in found)
