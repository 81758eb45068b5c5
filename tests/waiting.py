"""Functions that wait until a condition is true, for tests of threads, processes and coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_until(true: Callable[[], bool], timeout_s: float = 60.0, description: str = "the condition") -> None:
    """Check the condition after ever longer pauses of up to 0.1 seconds, until it is true."""
    began = time.monotonic()
    while not true():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"timed out after {timeout_s} s waiting for {description}"
        time.sleep(min(0.1, max(0.01, waited_s / 20)))


async def until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until a condition is true, without blocking the event loop."""
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.01)
