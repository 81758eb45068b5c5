"""What the admin API shows and does: the registry's actions, each with its effect and its audit row."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from appliance.actions import Action, CancelRequest
from appliance.admin.app import ActionError
from appliance.admin.decisions import Decisions
from appliance.admin.status import database_status, in_flight, status_of
from appliance.protocol import Done, InFlight, Key, Peer, SocketStatus, Status, Tenant
from appliance.settings import Settings
from appliance.switchboard import Switchboard
from store.audit import Actor
from store.control import ControlStore
from store.errors import ConflictError, StoreError, UnknownRecordError
from store.writer import Writer

log = logging.getLogger(__name__)


class HasStatus(Protocol):
    """A listening socket."""

    def status(self) -> SocketStatus: ...


class Operations:
    """The backend of the admin API. Every action is in the audit chain, those that were refused too."""

    def __init__(
        self,
        settings: Settings,
        switchboard: Switchboard,
        control: ControlStore,
        history: Writer,
        sockets: Sequence[HasStatus],
        started_at: float,
    ) -> None:
        self._settings = settings
        self._switchboard = switchboard
        self._control = control
        self._history = history
        self._sockets = sockets
        self._started_at = started_at
        self._decisions = Decisions(control, switchboard, settings.unix)

    # ── showing ──

    def status(self) -> Status:
        """Everything that `appliance status` shows."""
        return status_of(
            self._settings,
            self._switchboard,
            sockets=[sock.status() for sock in self._sockets],
            databases=[
                database_status(self._control.path, self._control.state()),
                database_status(self._history.path, self._history.state()),
            ],
            started_at=self._started_at,
        )

    def in_flight(self) -> list[InFlight]:
        """Requests that have not ended."""
        return in_flight(self._switchboard)

    def keys(self) -> list[Key]:
        """All keys, oldest first."""
        return self._decisions.keys()

    def tenants(self) -> list[Tenant]:
        """All tenants, oldest first."""
        return self._decisions.tenants()

    def peers(self) -> list[Peer]:
        """Users and groups that need no key."""
        return self._decisions.peers()

    # ── doing ──

    async def act(self, actor: Actor, action: Action, parameters: msgspec.Struct) -> msgspec.Struct:
        """Do it. Raises ActionError."""
        try:
            result = await self._perform(actor, action, parameters)
        except (ValueError, ConflictError, UnknownRecordError, LookupError) as error:
            await self._record_refusal(actor, action, parameters, str(error))
            status = (
                400 if isinstance(error, ValueError) else 409 if isinstance(error, ConflictError) else 404
            )
            raise ActionError(status, str(error)) from error
        except StoreError as error:
            raise ActionError(503, str(error)) from error
        log.info("%s by %s", action.name, actor.name)
        return result

    async def _perform(self, actor: Actor, action: Action, parameters: msgspec.Struct) -> msgspec.Struct:
        decided = await self._decisions.perform(actor, parameters)
        if decided is not None:
            return decided
        match parameters:
            case CancelRequest():
                if not self._switchboard.cancel(parameters.request_id, "an operator cancelled the request"):
                    raise LookupError(f"no request {parameters.request_id!r} is running or waiting")
                await self._record(actor, action, parameters, "ok")
                return Done(message=f"request {parameters.request_id} is being ended")
        raise LookupError(f"{action.name} is in the registry and nobody does it")

    async def _record(self, actor: Actor, action: Action, parameters: msgspec.Struct, result: str) -> None:
        await asyncio.wrap_future(
            self._control.record(
                actor=actor, action=action.name, params=msgspec.to_builtins(parameters), result=result
            )
        )

    async def _record_refusal(
        self, actor: Actor, action: Action, parameters: msgspec.Struct, why: str
    ) -> None:
        # The refusal stands whether or not the disk takes its record.
        with contextlib.suppress(StoreError):
            await self._record(actor, action, parameters, f"refused: {why}")
