"""Begins and ends operators' drains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from appliance.actions import DrainService, ResumeService
from appliance.admin.effects import Effect
from appliance.core.drains import Drain, Drains
from appliance.protocol import Done, DrainStatus
from store.audit import Actor


@dataclass
class DrainAdmin:
    """Begins and ends drains of a model or of the whole service on behalf of operators."""

    drains: Drains
    status: Callable[[Drain], DrainStatus]

    async def drain(self, actor: Actor, asked: DrainService) -> Effect:
        """Begin a drain. Raises DrainError."""
        before = self._state(asked.model)
        drain = self.drains.begin(asked.model, grace_s=asked.grace_s, hold=asked.queue)
        return Effect(self.status(drain), before, self._state(asked.model))

    async def resume(self, actor: Actor, asked: ResumeService) -> Effect:
        """Cancel or end a drain. Raises DrainError."""
        before = self._state(asked.model)
        drain = self.drains.resume(asked.model)
        return Effect(Done(message=f"{drain.name} is accepting requests again"), before, "in service")

    def _state(self, model: str | None) -> str:
        drain = self.drains.of(model)
        if drain is None:
            return "in service"
        since = datetime.fromtimestamp(drain.started_at, UTC).isoformat(timespec="seconds")
        return f"{drain.public_state} since {since}"
