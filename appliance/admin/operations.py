"""What the admin API shows and does: the registry's actions, each with its effect and its audit row."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from appliance.actions import (
    Action,
    BeginBackup,
    CancelRequest,
    EndBackup,
    ReloadConfig,
    ShowContents,
    action_named,
)
from appliance.admin.app import ActionError
from appliance.admin.decisions import Decisions
from appliance.admin.status import audit_status, database_status, in_flight, status_of
from appliance.admin.steering import Steering
from appliance.background import Background
from appliance.clock import ClockGuard
from appliance.contents import ContentKeeper
from appliance.protocol import (
    AuditHead,
    Configuration,
    Done,
    InFlight,
    Key,
    Peer,
    SocketStatus,
    Status,
    Tenant,
)
from appliance.reload import Reloader
from appliance.switchboard import Switchboard
from store.audit import Actor
from store.control import ControlStore
from store.errors import ConflictError, StoreError, UnknownRecordError
from store.keys import without_secrets
from store.writer import Writer

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3.0
_MOST_TURNED_AWAY = 10
"""Audit rows a minute of one caller without the scope, for each is a write to the disk; the log has all."""


class Effect(NamedTuple):
    """What an action answers, with what it found and left, for the audit."""

    result: msgspec.Struct
    before: object = None
    after: object = None
    said: str = "ok"
    """The audit's result."""


class Operations:
    """The backend of the admin API. Every action is in the audit chain, those that were refused too: its
    intent before anything is done, its result afterwards."""

    def __init__(
        self,
        switchboard: Switchboard,
        control: ControlStore,
        writers: Sequence[Writer],
        contents: ContentKeeper,
        reloader: Reloader,
        sockets: Callable[[], list[SocketStatus]],
        scrape: Callable[[], bytes],
        started_at: float,
        clock: ClockGuard,
    ) -> None:
        """`writers` are those of the databases beside the control database."""
        self._switchboard = switchboard
        self._control = control
        self._databases: list[ControlStore | Writer] = [control, *writers]
        self._contents = contents
        self._reloader = reloader
        self._sockets = sockets
        self._scrape = scrape
        self._started_at = started_at
        self._clock = clock
        self._decisions = Decisions(control, switchboard)
        self._steering = Steering(switchboard, reloader)
        self._background = Background()
        self._turned_away: Counter[str] = Counter()
        self._minute = 0.0

    # ── showing ──

    def status(self) -> Status:
        """Everything that `appliance status` shows."""
        return status_of(
            self._switchboard,
            sockets=self._sockets(),
            databases=[database_status(database) for database in self._databases],
            audit=audit_status(self._control.trail.state()),
            started_at=self._started_at,
            clock_jump_s=self._clock.jump_s,
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

    def configuration(self) -> Configuration:
        """The settings that hold, and where each was said."""
        return self._reloader.configuration()

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
        return self._scrape()

    # ── doing ──

    def hang_up(self) -> None:
        """SIGHUP: have the settings read again, as an action whose result is in the log."""

        actor = Actor("signal:SIGHUP", socket.gethostname())

        async def reload() -> None:
            with contextlib.suppress(ActionError):
                await self.act(actor, action_named("config.reload"), ReloadConfig())

        self._background.run(reload())

    def turned_away(self, actor: Actor, action: Action, why: str) -> None:
        """Record that somebody who is known tried an action that is not for them. What they sent with it was
        not read."""
        minute = time.monotonic() // 60
        if minute != self._minute:
            self._turned_away.clear()
            self._minute = minute
        self._turned_away[actor.name] += 1
        if self._turned_away[actor.name] <= _MOST_TURNED_AWAY:
            self._control.trail.conclude(actor, action.name, {}, f"refused: {why}")

    async def act(self, actor: Actor, action: Action, parameters: msgspec.Struct) -> msgspec.Struct:
        """Do it. Raises ActionError."""
        params = msgspec.to_builtins(parameters)
        acting, recorded = self._control.trail.intend(actor, action.name, params)
        await _recorded(recorded)
        what: Effect | None = None
        said = "failed: the service's log says why"
        try:
            done = await self._perform(acting, action, parameters)
            what = done if isinstance(done, Effect) else Effect(done)
            said = what.said
        except (ValueError, ConflictError, UnknownRecordError, LookupError) as error:
            said = f"refused: {error}"
            raise ActionError(_status_of(error), str(error)) from error
        except StoreError as error:
            said = f"failed: {error}"
            raise ActionError(503, str(error)) from error
        finally:
            log.info("%s by %s: %s", action.name, actor.name, without_secrets(said))
            before, after = (None, None) if what is None else (what.before, what.after)
            await _recorded(self._control.trail.conclude(acting, action.name, params, said, before, after))
        return what.result

    async def _perform(
        self, actor: Actor, action: Action, parameters: msgspec.Struct
    ) -> Effect | msgspec.Struct:
        decided = await self._decisions.perform(actor, parameters)
        if decided is not None:
            return decided
        steered = await self._steering.perform(parameters)
        if steered is not None:
            return Effect(*steered)
        match parameters:
            case CancelRequest(request_id=request_id):
                before = next((one for one in self.in_flight() if one.request_id == request_id), None)
                if not self._switchboard.cancel(request_id, "an operator cancelled the request"):
                    raise LookupError(f"no request {request_id!r} is running or waiting")
                return Effect(
                    Done(message=f"request {request_id} is being ended"),
                    before={"state": before.state, "tenant": before.tenant} if before else None,
                    after={"state": "ending"},
                )
            case ShowContents(request_id=request_id):
                return await self._contents.show(request_id)
            case BeginBackup():
                self._control.trail.record_head()
                head = self._control.trail.state().head
                return AuditHead(seq=head.seq, hash=head.hash)
            case EndBackup(path=path, rows=rows, sha256=sha256, error=error):
                if error is not None and rows is None and sha256 is None:
                    return Effect(Done(message=f"backup {path} failed"), said=f"failed: {error}")
                if error is not None or rows is None or sha256 is None:
                    raise ValueError("backup.end: give rows and sha256 of a complete backup, or an error")
                return Done(message=f"backup {path} is complete")
        raise LookupError(f"{action.name} is in the registry and nobody does it")


def _status_of(error: Exception) -> int:
    if isinstance(error, ValueError):
        return 400
    return 409 if isinstance(error, ConflictError) else 404


async def _recorded(future: Future[None]) -> None:
    """Wait until an audit row is where it lasts; but a disk that does not even fail must not keep an operator
    from steering: its row is on its way then, in its place among the others."""
    waiting = asyncio.wrap_future(future)
    await asyncio.wait([waiting], timeout=_LONGEST_WAIT_S)
    if not waiting.done():
        log.error("the audit row is not written after %g s: the disk does not answer", _LONGEST_WAIT_S)
