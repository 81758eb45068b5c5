"""Lists, acknowledges and silences alerts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.actions.parameters import AcknowledgeAlert, SilenceAlerts, UnsilenceAlerts
from appliance.admin.bodies import ERRORS
from appliance.admin.effects import Effect, done
from appliance.http.openapi import Operation
from appliance.monitoring.alerts.manager import AlertManager
from appliance.scopes import ScopedRoute
from appliance.snapshot import Alert
from store.audit import Actor
from store.structs import Silence


class AlertAdmin:
    """Performs operators' actions on alerts."""

    def __init__(self, manager: AlertManager) -> None:
        self._manager = manager

    async def acknowledge(self, actor: Actor, asked: AcknowledgeAlert) -> Effect:
        """Acknowledge an alert. Raises LookupError for an unknown alert, and ValueError if it is already
        acknowledged."""
        alert = self._manager.acknowledge(asked.id, actor.name)
        return Effect(alert, after={"rule": alert.rule, "where": alert.where, "state": alert.state})

    async def silence(self, actor: Actor, asked: SilenceAlerts) -> Effect:
        """Silence the alerts of matching rules for a limited time. Raises LookupError if no rule matches, and
        ValueError if too many silences are active."""
        silence = self._manager.silence(asked.rule, asked.where, asked.for_s, asked.reason, actor.name)
        return Effect(silence, after=msgspec.to_builtins(silence))

    async def unsilence(self, actor: Actor, asked: UnsilenceAlerts) -> Effect:
        """End a silence. Raises LookupError for an unknown silence."""
        silence = self._manager.unsilence(asked.id)
        return Effect(
            done(f"ended the silence of {silence.rule} on {silence.subject}").result,
            before=msgspec.to_builtins(silence),
        )


def alert_routes(manager: AlertManager) -> list[ScopedRoute]:
    """Return the routes for alerts and silences."""
    return [
        _route(
            "/alerts", manager.list, list[Alert], "List active alerts and those that ended in the last hour"
        ),
        _route("/silences", manager.silences, list[Silence], "List active silences"),
    ]


def _route(path: str, read: Callable[[], Any], answer: Any, summary: str) -> ScopedRoute:
    async def show(request: Request) -> Response:
        return Response(msgspec.json.encode(read()), media_type="application/json")

    operation = Operation(summary, answer=answer, errors=ERRORS)
    return ScopedRoute("GET", path, show, wanted="read", operation=operation)
