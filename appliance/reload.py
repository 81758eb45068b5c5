"""Reading the settings again while the service runs: what changed is applied, and nothing else is touched.

Everything that can fail comes first: files that cannot be used, a model's folder that cannot be read or an
address that is taken refuse the whole reload, and nothing has changed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from appliance.drain import STOPPING
from appliance.listeners import ListenError
from appliance.messages import ServedModel
from appliance.models.registry import describe_models
from appliance.protocol import Configuration, Reloaded
from appliance.settings import Fault, Loaded, Place, Settings, SettingsError
from appliance.settings.files import DROP_INS
from appliance.settings.table import as_table, differences
from appliance.switchboard import Switchboard

log = logging.getLogger(__name__)


Applier = Callable[[Settings], None]
"""Makes a part of the running service do what the settings say now. Must not fail."""


class Door(Protocol):
    """Whoever listens where the settings say."""

    def prepare(self, settings: Settings) -> socket.socket | None:
        """Open what `settings` name anew. Raises ListenError."""

    def change(self, settings: Settings, opened: socket.socket | None) -> None:
        """Listen there, and no more where it did. Must not fail."""


AT_RESTART = frozenset({"run_dir", "state_dir"})
"""Top-level settings that a running service cannot change."""
BY_THEMSELVES = frozenset({"models", "listen"})
"""Those that have their own way, below; every other has an applier."""


class ReloadError(Exception):
    """The service is in no state to reload; the message says why."""


class Reloader:
    """Holds what the service runs with, and replaces it."""

    def __init__(
        self,
        loaded: Loaded,
        reread: Callable[[], Loaded],
        switchboard: Switchboard,
        doors: Sequence[Door],
        appliers: Mapping[str, Applier],
    ) -> None:
        """`reread` reads the settings as they were read at the start; `appliers` are by top-level setting."""
        self._loaded = loaded
        self._reread = reread
        self._switchboard = switchboard
        self._doors = doors
        self._appliers = appliers
        self._one_at_a_time = asyncio.Lock()

    def configuration(self) -> Configuration:
        """What the service runs with, and where each setting was said."""
        return as_table(self._loaded)

    async def reload(self) -> Reloaded:
        """Do it. Raises SettingsError, ListenError or ReloadError, and then nothing has changed."""
        async with self._one_at_a_time:
            former = self._loaded
            loaded = await asyncio.to_thread(self._reread)
            check_still_there(former, loaded)
            changes = list(differences(former.settings, loaded.settings))
            waiting = [change for change in changes if change.path[0] in AT_RESTART]
            applied = [change for change in changes if change not in waiting]
            loaded = _until_restart(loaded, former)
            served = await asyncio.to_thread(describe_models, loaded, former.settings)
            if self._switchboard.stopping is not None:
                raise ReloadError(f"{STOPPING}: its settings are not read again")
            opened = self._open(loaded.settings)
            try:
                said = self._apply(loaded.settings, {change.path[0] for change in applied}, served)
            except BaseException:
                _close(opened)
                raise
            for door, sock in zip(self._doors, opened, strict=True):
                door.change(loaded.settings, sock)
            self._loaded = loaded
            for line in (*map(str, applied), *said):
                log.info("reload: %s", line)
            return Reloaded(changed=list(map(str, applied)), models=said, at_restart=list(map(str, waiting)))

    def _open(self, wanted: Settings) -> list[socket.socket | None]:
        opened: list[socket.socket | None] = []
        try:
            for door in self._doors:
                opened.append(door.prepare(wanted))
        except ListenError:
            _close(opened)
            raise
        return opened

    def _apply(self, wanted: Settings, names: set[str], served: list[ServedModel]) -> list[str]:
        switchboard = self._switchboard
        switchboard.settings = switchboard.fleet.settings = wanted
        for name in sorted(names - BY_THEMSELVES):
            self._appliers[name](wanted)
        said = switchboard.change_models(wanted.models, served)
        switchboard.tell_configuration()
        return said


def _close(opened: Sequence[socket.socket | None]) -> None:
    for sock in filter(None, opened):
        sock.close()


def check_still_there(former: Loaded, loaded: Loaded) -> None:
    """A settings file that went away must not turn every model off. Raises SettingsError."""
    if not former.files or (gone := former.files[0]) in loaded.files:
        return
    if gone.parent.name == DROP_INS and loaded.files:
        return
    raise SettingsError(
        Fault(
            place=Place(str(gone)),
            what="the service runs with this file, and it is gone",
            remedy="put it back, or restart the service to do without it",
        )
    )


def _until_restart(loaded: Loaded, former: Loaded) -> Loaded:
    """`loaded`, but what only a restart changes is as it was."""
    for name in AT_RESTART:
        setattr(loaded.settings, name, getattr(former.settings, name))
    places = {path: place for path, place in loaded.places.items() if path[0] not in AT_RESTART}
    places |= {path: place for path, place in former.places.items() if path[0] in AT_RESTART}
    return loaded._replace(places=places)
