"""Lets other work on the event loop have its turn between the steps of long work."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")


async def in_turns(steps: Generator[None, None, Result]) -> Result:
    """Exhaust a generator that yields after each step; what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        await asyncio.sleep(0)
