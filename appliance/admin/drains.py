"""Begins and ends operators' drains."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from appliance.actions import DrainService, ResumeService
from appliance.admin.effects import Effect
from appliance.core.drains import Drain, Drains
from appliance.protocol import Done, DrainStatus
from store.audit import Actor


class DrainControl(Protocol):
    """Begins and ends drains, both of which raise DrainError."""

    drains: Drains

    def drain(self, model: str | None, *, grace_s: float, hold: bool) -> Drain: ...
    def resume(self, model: str | None) -> Drain: ...


class DrainAdmin:
    """Drains of a model or of the whole service."""

    def __init__(self, control: DrainControl, status: Callable[[Drain], DrainStatus]) -> None:
        self._control = control
        self._status = status

    async def drain(self, actor: Actor, asked: DrainService) -> Effect:
        """Begin a drain. Raises DrainError."""
        before = self._state(asked.model)
        drain = self._control.drain(asked.model, grace_s=asked.grace_s, hold=asked.queue)
        return Effect(self._status(drain), before, self._state(asked.model))

    async def resume(self, actor: Actor, asked: ResumeService) -> Effect:
        """Cancel or end a drain. Raises DrainError."""
        before = self._state(asked.model)
        drain = self._control.resume(asked.model)
        return Effect(Done(message=f"{drain.name} accepts requests again"), before, "in service")

    def _state(self, model: str | None) -> str:
        drain = self._control.drains.of(model)
        if drain is None:
            return "in service"
        since = datetime.fromtimestamp(drain.started_at, UTC).isoformat(timespec="seconds")
        return f"{drain.state_word} since {since}"
