"""A front whose event loop is watched: writes how long it was blocked at most into `$BLOCKED_FILE`.

The file holds two doubles: CPU seconds of the loop's thread and seconds of the clock between two beats. The
test sets them back to zero.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import sys
import time

import appliance.front.__main__
import appliance.front.process

FIGURES = struct.Struct("dd")
_BEAT_S = 0.001


async def _beat(figures: mmap.mmap) -> None:
    while True:
        wall, cpu = time.monotonic(), time.thread_time()
        await asyncio.sleep(_BEAT_S)
        blocked_cpu, blocked = time.thread_time() - cpu, time.monotonic() - wall - _BEAT_S
        most_cpu, most = FIGURES.unpack_from(figures)
        FIGURES.pack_into(figures, 0, max(most_cpu, blocked_cpu), max(most, blocked))


def main() -> int:
    """As `python -m appliance.front`, watched."""
    run_front = appliance.front.process.run_front

    async def watched(sock: socket.socket) -> None:
        with open(os.environ["BLOCKED_FILE"], "r+b") as file:
            figures = mmap.mmap(file.fileno(), FIGURES.size)
        beat = asyncio.create_task(_beat(figures))
        await run_front(sock)
        beat.cancel()

    appliance.front.process.run_front = watched
    return appliance.front.__main__.main()


if __name__ == "__main__":
    sys.exit(main())
