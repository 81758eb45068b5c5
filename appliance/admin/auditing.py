"""Performs actions and audits them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future

import msgspec

from appliance.actions import Action, action_of
from appliance.actions.parameters import ReloadConfig
from appliance.admin.bodies import AdminRequestError
from appliance.admin.effects import Effect, Handler
from appliance.background import Background
from appliance.core.drains import DrainError
from appliance.core.reload import ReloadError
from appliance.http.sockets import ListenError
from appliance.models.load_errors import LoadError
from appliance.models.manifest import ManifestError
from appliance.settings import SettingsError
from store.audit import Actor
from store.control import ControlStore
from store.errors import ConflictError, StoreError, UnknownRecordError
from store.keys import without_secrets

log = logging.getLogger(__name__)

_MAX_AUDIT_WAIT_S = 3.0
_MAX_DENIALS_PER_MINUTE = 10
"""Maximum number of denied actions audited per caller per minute. Additional denials are only logged, because
each audit row is written to disk."""
_STATUSES: Mapping[type[Exception], int] = {
    ValueError: 400,
    SettingsError: 400,
    ListenError: 400,
    ManifestError: 400,
    LoadError: 409,
    ConflictError: 409,
    DrainError: 409,
    ReloadError: 409,
    UnknownRecordError: 404,
    LookupError: 404,
}
"""The HTTP status code for each error that a handler raises to refuse an action."""


class ActionError(AdminRequestError):
    """Raised if an action was refused or failed."""


class AuditedActions:
    """Performs registered actions. Every action, even a refused one, has two rows in the audit chain: the
    intent, written before anything is done, and the result."""

    def __init__(self, control: ControlStore, handlers: Mapping[type[msgspec.Struct], Handler]) -> None:
        self._control = control
        self._handlers = handlers
        self._background = Background()
        self._denials: Counter[str] = Counter()
        self._minute = 0.0

    async def act(self, actor: Actor, parameters: msgspec.Struct) -> msgspec.Struct:
        """Perform the action with the given parameters. Raises ActionError if the action is refused or
        fails."""
        action, params = action_of(parameters), msgspec.to_builtins(parameters)
        acting, recorded = self._control.trail.intend(actor, action.name, params)
        await _recorded(recorded)
        effect: Effect | None = None
        outcome = "failed: see the service's log for the reason"
        try:
            effect = await self._handlers[action.parameters](acting, parameters)
            outcome = effect.outcome
        except tuple(_STATUSES) as error:
            outcome = f"refused: {error}"
            status = next(code for kind, code in _STATUSES.items() if isinstance(error, kind))
            raise ActionError(status, str(error)) from error
        except StoreError as error:
            outcome = f"failed: {error}"
            raise ActionError(503, str(error)) from error
        finally:
            log.info("%s by %s: %s", action.name, actor.name, without_secrets(outcome))
            before, after = (None, None) if effect is None else (effect.before, effect.after)
            await _recorded(self._control.trail.conclude(acting, action.name, params, outcome, before, after))
        return effect.result

    def reload_on_signal(self) -> None:
        """Reload the settings in response to SIGHUP. The result is logged."""
        actor = Actor("signal:SIGHUP", socket.gethostname())

        async def reload() -> None:
            with contextlib.suppress(ActionError):
                await self.act(actor, ReloadConfig())

        self._background.run(reload())

    def record_denied(self, actor: Actor, action: Action, reason: str) -> None:
        """Record in the audit chain that an authenticated caller lacked the scope for an action. The action's
        parameters are not recorded, because the body of a denied request is never read."""
        minute = time.monotonic() // 60
        if minute != self._minute:
            self._denials.clear()
            self._minute = minute
        self._denials[actor.name] += 1
        if self._denials[actor.name] <= _MAX_DENIALS_PER_MINUTE:
            self._control.trail.conclude(actor, action.name, {}, f"refused: {reason}")


async def _recorded(future: Future[None]) -> None:
    """Wait until an audit row is stored, but only for a few seconds: operators must be able to act even if
    the disk is not responding. A row that is written late keeps its position in the chain."""
    waiting = asyncio.wrap_future(future)
    await asyncio.wait([waiting], timeout=_MAX_AUDIT_WAIT_S)
    if not waiting.done():
        log.error(
            "the audit row was not written within %g s, because the disk is not responding; the action "
            "continues",
            _MAX_AUDIT_WAIT_S,
        )
