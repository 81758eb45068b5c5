"""What a handler of an action returns, and the errors that mean that the action was refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import msgspec

from appliance.protocol import Done
from store.audit import Actor
from store.errors import OutcomeUnknownError

T = TypeVar("T")

_MAX_CHANGE_S = 15.0
"""Longer than a change waits for its turn and for a lock of the file (`store.trail.WITHIN_S` and SQLite's
busy timeout). Only a disk that does not answer takes longer."""


class Effect(NamedTuple):
    """The answer to an action, and the values before and after it for the audit."""

    result: msgspec.Struct
    before: object = None
    after: object = None
    outcome: str = "ok"
    """The result in the audit row."""


Handler = Callable[[Actor, Any], Awaitable[Effect]]
"""Performs an action with its parameters."""


def done(message: str) -> Effect:
    """Return the effect of an action whose answer is a sentence."""
    return Effect(Done(message=message))


async def committed(change: Future[T]) -> T:
    """Return the result of a change of `control.db`. A change that does not start in time fails by itself.
    Raises OutcomeUnknownError if the disk does not finish it."""
    waiting = asyncio.wrap_future(change)
    await asyncio.wait([waiting], timeout=_MAX_CHANGE_S)
    if not waiting.done():
        raise OutcomeUnknownError(
            f"control.db has not answered for {_MAX_CHANGE_S:.0f} s: the outcome of the change is "
            "unknown; check the disk, then see: appliance audit list"
        )
    return waiting.result()
