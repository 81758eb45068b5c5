"""A front process that measures how long its event loop is blocked, and writes the maximum to
`$BLOCKED_FILE`.

The file contains two doubles, each the maximum over all intervals between two heartbeats of the loop. The
first is the CPU time of the loop's thread. The second is the CPU time of the whole process, or the elapsed
time if that is shorter; it includes time during which other threads hold the GIL. CPU time of other processes
counts in neither. The test resets both to zero.
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

MEASUREMENTS = struct.Struct("dd")
_BEAT_S = 0.001


async def _beat(measurements: mmap.mmap) -> None:
    while True:
        wall, cpu, process = time.monotonic(), time.thread_time(), time.process_time()
        await asyncio.sleep(_BEAT_S)
        blocked_cpu = time.thread_time() - cpu
        blocked = min(time.monotonic() - wall - _BEAT_S, time.process_time() - process)
        most_cpu, most = MEASUREMENTS.unpack_from(measurements)
        MEASUREMENTS.pack_into(measurements, 0, max(most_cpu, blocked_cpu), max(most, blocked))


def main() -> int:
    """Run `python -m appliance.front` with the measurement."""
    run_front = appliance.front.process.run_front

    async def watched(sock: socket.socket) -> None:
        with open(os.environ["BLOCKED_FILE"], "r+b") as file:
            measurements = mmap.mmap(file.fileno(), MEASUREMENTS.size)
        beat = asyncio.create_task(_beat(measurements))
        await run_front(sock)
        beat.cancel()

    appliance.front.process.run_front = watched
    return appliance.front.__main__.main()


if __name__ == "__main__":
    sys.exit(main())
