"""Begins, cancels and ends drains for operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from appliance.actions.parameters import DrainService, ResumeService
from appliance.admin.effects import Effect
from appliance.core.drains import Drain, Drains
from appliance.protocol import Done, DrainStatus
from store.audit import Actor


@dataclass
class DrainAdmin:
    """Begins, cancels and ends drains of one model or of the whole service."""

    drains: Drains
    status: Callable[[Drain], DrainStatus]
    unit_of: Callable[[str], str]
    """Returns the model or version that answers requests for a name, or an empty string."""

    async def drain(self, actor: Actor, asked: DrainService) -> Effect:
        """Begin a drain. Raises DrainError if the drain cannot begin."""
        model = self._unit(asked.model)
        before = self._state(model)
        drain = self.drains.begin(model, grace_s=asked.grace_s, hold=asked.queue)
        return Effect(self.status(drain), before, self._state(model))

    async def resume(self, actor: Actor, asked: ResumeService) -> Effect:
        """End a drain, whether still in progress or complete. Raises DrainError if there is no drain."""
        model = self._unit(asked.model)
        before = self._state(model)
        drain = self.drains.resume(model)
        return Effect(Done(message=f"{drain.name} is accepting requests again"), before, "in service")

    def _unit(self, model: str | None) -> str | None:
        return model if model is None else self.unit_of(model) or model

    def _state(self, model: str | None) -> str:
        drain = self.drains.of(model)
        if drain is None:
            return "in service"
        since = datetime.fromtimestamp(drain.started_at, UTC).isoformat(timespec="seconds")
        return f"{drain.public_state} since {since}"
