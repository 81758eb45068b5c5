"""Reads the state of a replica's KV blocks. The replica computes this state only on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine.client import ReplicaGroup
from engine.rank_messages import BlockUse

_EVERY_S = 1.0
"""The replica is queried only if its latest answer is older than this."""
_WAIT_S = 0.5
"""How long to wait for a replica's answer. If a step takes longer, the previous answer is reused."""


class BlockUseReader:
    """Queries one replica for the state of its KV blocks, at most once per second. All waiting callers
    receive the same answer. All methods must be called on the event loop thread."""

    def __init__(self, awake_group: Callable[[], ReplicaGroup | None]) -> None:
        """`awake_group` returns the replica's processes if the replica is ready and awake, and otherwise
        None."""
        self._awake_group = awake_group
        self._latest: BlockUse | None = None
        self._at = 0.0
        self._pending: asyncio.Future[BlockUse | None] | None = None

    async def read(self) -> BlockUse | None:
        """Return the state of the KV blocks, or None if the replica is not ready, is asleep, or has never
        answered."""
        if (group := self._awake_group()) is None:
            return None
        if self._latest is not None and time.monotonic() - self._at < _EVERY_S:
            return self._latest
        try:
            async with asyncio.timeout(_WAIT_S):
                return await asyncio.shield(self._ask(group))
        except TimeoutError:
            return self._latest

    def recent(self, every_s: float) -> BlockUse | None:
        """Return the latest known state of the KV blocks without waiting, or None if the replica is not
        ready, is asleep, or has never answered. If the state is older than `every_s`, request a new one,
        which a later call returns."""
        if (group := self._awake_group()) is None:
            return None
        if self._latest is None or time.monotonic() - self._at >= every_s:
            self._ask(group)
        return self._latest

    def received(self, message: BlockUse) -> None:
        """Store the replica's answer and pass it to the waiting callers."""
        self._latest, self._at = message, time.monotonic()
        self._end(message)

    def reset(self) -> None:
        """Forget the answers of a replica whose processes have exited."""
        self._latest = None
        self._end(None)

    def _ask(self, group: ReplicaGroup) -> asyncio.Future[BlockUse | None]:
        """Query the replica for the state of its KV blocks, unless an earlier query is still unanswered."""
        if self._pending is None:
            self._pending = asyncio.get_running_loop().create_future()
            group.ask_blocks()
        return self._pending

    def _end(self, result: BlockUse | None) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done():
            pending.set_result(result)
