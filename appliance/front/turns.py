"""Runs long computations on the event loop in steps, so that other tasks can run in between."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")


async def in_turns(steps: Generator[None, None, Result]) -> Result:
    """Run a generator step by step, so that other tasks can run in between, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        await asyncio.sleep(0)
