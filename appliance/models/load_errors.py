"""Errors in loading, unloading and swapping model versions."""

from __future__ import annotations

import asyncio


class LoadError(Exception):
    """Raised if a model version cannot be loaded, unloaded or swapped. The message gives the reason and the
    remedy."""


class MemoryShortageError(LoadError):
    """Raised if a model version does not fit into memory alongside the loaded models."""


def not_loaded(unit: str) -> LoadError:
    """Return the error for an operation that requires a loaded model."""
    return LoadError(f"{unit} is not loaded; load it first with: appliance models load {unit}")


async def outcome(task: asyncio.Task[None], unit: str) -> None:
    """Wait for a task to finish. Raises the task's exception, or LoadError if the task is cancelled."""
    await asyncio.wait([task])
    if task.cancelled():
        raise LoadError(f"the operation on {unit} was cancelled")
    if (error := task.exception()) is not None:
        raise error
