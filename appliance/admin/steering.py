"""What operators do with the service as a whole: drain it, resume it, have its settings read again."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from appliance.actions import DrainService, ReloadConfig, ResumeService
from appliance.admin.status import drain_status
from appliance.drain import DrainError
from appliance.listeners import ListenError
from appliance.protocol import Done
from appliance.reload import Reloader, ReloadError
from appliance.settings import SettingsError
from appliance.switchboard import Switchboard
from store.errors import ConflictError


class Steering:
    """Does it, and leaves the record to its caller."""

    def __init__(self, switchboard: Switchboard, reloader: Reloader) -> None:
        self._switchboard = switchboard
        self._reloader = reloader

    async def perform(self, parameters: msgspec.Struct) -> tuple[msgspec.Struct, object, object] | None:
        """The answer, with what was found and left; None for an action about something else.

        Raises ConflictError for a drain that cannot begin or end, ValueError for settings that cannot be
        used.
        """
        switchboard = self._switchboard
        try:
            match parameters:
                case DrainService():
                    before = self._drained(parameters.model)
                    drain = switchboard.drain(
                        parameters.model, grace_s=parameters.grace_s, hold=parameters.queue
                    )
                    return drain_status(switchboard, drain), before, self._drained(parameters.model)
                case ResumeService():
                    before = self._drained(parameters.model)
                    drain = switchboard.resume(parameters.model)
                    return Done(message=f"{drain.name} takes requests again"), before, "in service"
                case ReloadConfig():
                    reloaded = await self._reloader.reload()
                    return reloaded, None, msgspec.to_builtins(reloaded)
        except (DrainError, ReloadError) as error:
            raise ConflictError(str(error)) from error
        except (SettingsError, ListenError) as error:
            raise ValueError(str(error)) from error
        return None

    def _drained(self, model: str | None) -> str:
        drain = self._switchboard.drains.of(model)
        if drain is None:
            return "in service"
        since = datetime.fromtimestamp(drain.started_at, UTC).isoformat(timespec="seconds")
        return f"{drain.state_word} since {since}"
