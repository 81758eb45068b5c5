"""Bytes for another process, in memory that has a descriptor (memfd): it travels beside a message."""

from __future__ import annotations

import os


def new_memory(name: str, data: bytes) -> int:
    """A descriptor of memory with these bytes, which the caller closes. `name` is for /proc alone. Raises
    OSError."""
    descriptor = os.memfd_create(name)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_memory(descriptor: int, most_bytes: int = -1) -> bytes:
    """What is in it, at most so many bytes (-1: all); the descriptor is closed."""
    with open(descriptor, "rb", buffering=0) as memory:
        memory.seek(0)
        return memory.read(most_bytes) or b""
