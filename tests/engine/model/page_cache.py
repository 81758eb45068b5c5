"""What the page cache holds of a file, and files that it does not hold."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)


def drop(path: Path) -> None:
    """Leaves a file on the disk alone. Skips the test where there is no disk, or it is never read past the
    cache."""
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
    """How many of a file's pages can be read without asking the disk."""
    size = path.stat().st_size
    found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    # Private, so that Python may take its address; nothing is written.
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages:
        first = ctypes.c_char.from_buffer(pages)
        failed = _LIBC.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found)
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(each & 1 for each in found)
