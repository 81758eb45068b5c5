"""Anonymous memory files (memfd). Large byte strings are passed to another process by sending the descriptor
of such a file."""

from __future__ import annotations

import os


def new_memory(name: str, data: bytes) -> int:
    """Create a memory file that contains the given bytes and return its descriptor, which the caller must
    close. `name` is shown only in /proc. Raises OSError if the file cannot be created."""
    descriptor = os.memfd_create(name)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_memory(descriptor: int, max_bytes: int = -1) -> bytes:
    """Read up to `max_bytes` bytes (-1 for no limit) from a memory file and close its descriptor."""
    with open(descriptor, "rb", buffering=0) as memory:
        memory.seek(0)
        return memory.read(max_bytes) or b""
