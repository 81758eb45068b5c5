"""Anonymous memory files (memfd). They are used to transfer large byte strings to another process, by passing
the file's descriptor."""

from __future__ import annotations

import os


def new_memory(name: str, data: bytes) -> int:
    """Create a memory file with these bytes, and return its descriptor, which the caller must close. `name`
    is shown only in /proc. Raises OSError."""
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
    """Return the contents of a memory file, but at most `max_bytes` bytes (-1 for no limit). The descriptor
    is then closed."""
    with open(descriptor, "rb", buffering=0) as memory:
        memory.seek(0)
        return memory.read(max_bytes) or b""
