"""Errors that occur when a version of a model is loaded, unloaded or swapped."""

from __future__ import annotations

import asyncio


class LoadError(Exception):
    """Raised if a version cannot be loaded, unloaded or swapped. The message gives the reason and the
    remedy."""


class NoRoomError(LoadError):
    """Raised if a version does not fit into memory together with the models that are loaded."""


def not_loaded(unit: str) -> LoadError:
    """Return the error of an operation that needs a loaded unit."""
    return LoadError(f"{unit} is not loaded: load it first with: appliance models load {unit}")


async def outcome(task: asyncio.Task[None], unit: str) -> None:
    """Wait for a task. Raise its exception, or LoadError if it is cancelled."""
    await asyncio.wait([task])
    if task.cancelled():
        raise LoadError(f"the operation on {unit} was cancelled")
    if (error := task.exception()) is not None:
        raise error
