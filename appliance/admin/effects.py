"""The result type of action handlers, and helpers for creating it."""

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
"""Time limit for a change to `control.db`. The limit exceeds the sum of the database writer's limit
(`store.trail.WITHIN_S`) and the file lock's limit (SQLite's busy timeout), so only an unresponsive disk can
cause a timeout."""


class Effect(NamedTuple):
    """An action's response and, for the audit trail, the changed values before and after the action."""

    result: msgspec.Struct
    before: object = None
    after: object = None
    outcome: str = "ok"
    """The action's result, as written to the audit row."""


Handler = Callable[[Actor, Any], Awaitable[Effect]]
"""A function that performs an action, given its parameters."""


def done(message: str) -> Effect:
    """Return the effect of an action that responds with only a message."""
    return Effect(Done(message=message))


async def committed(change: Future[T]) -> T:
    """Wait for a change to `control.db` and return its result. Raises the writer's error if the change does
    not start in time, and OutcomeUnknownError if the change starts but does not finish in time."""
    waiting = asyncio.wrap_future(change)
    await asyncio.wait([waiting], timeout=_MAX_CHANGE_S)
    if not waiting.done():
        raise OutcomeUnknownError(
            f"control.db has not responded for {_MAX_CHANGE_S:.0f} s, so it is unknown whether the "
            "change was made",
            "check the disk, then look for the change in: appliance audit list",
        )
    return waiting.result()
