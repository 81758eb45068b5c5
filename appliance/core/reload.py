"""Reloads the settings at run time. Only changed settings are applied. The steps that can fail come first: if
the settings are invalid, a model's folder cannot be read or an address is already in use, the whole reload is
refused and no setting changes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from appliance.channel.served_models import ServedModel
from appliance.core.drains import STOPPING, Drains
from appliance.http.sockets import ListenError
from appliance.models.manager import ModelManager
from appliance.models.preflight_process import Check
from appliance.models.references import fallback_faults, unknown_targets
from appliance.models.registry import describe_models, model_faults
from appliance.protocol import Configuration, Reloaded
from appliance.settings import Fault, Loaded, Place, Settings, SettingsError
from appliance.settings.files import DROP_INS
from appliance.settings.table import as_table, differences
from store.models import Registry

log = logging.getLogger(__name__)


ReloadHook = Callable[[Settings], None]
"""A function that applies a changed setting to the running service and must not fail."""


class ConfiguredListener(Protocol):
    """A listener on an address from the settings."""

    def prepare(self, settings: Settings) -> socket.socket | None:
        """Open the address in `settings` unless the service is already listening on it. Raises ListenError if
        the address cannot be opened."""

    def change(self, settings: Settings, opened: socket.socket | None) -> None:
        """Switch to the address opened by `prepare`. Must not fail."""


AT_RESTART = frozenset({"run_dir", "state_dir"})
"""Top-level settings that cannot change while the service is running."""
APPLIED_HERE = frozenset({"models", "listen"})
"""Top-level settings that `Reloader` applies itself. Every other setting has a reload hook."""


class ReloadError(Exception):
    """Raised if the service cannot currently reload its settings. The message gives the reason."""


class LiveSettings:
    """Returns the current settings, which each reload replaces."""

    def __init__(self, current: Settings) -> None:
        self.current = current

    def __call__(self) -> Settings:
        return self.current


@dataclass(kw_only=True)
class Reloader:
    """Rereads the settings and applies the changes."""

    loaded: Loaded
    reread: Callable[[], Loaded]
    """Reads the settings in the same way as at startup."""
    live: LiveSettings
    models: ModelManager
    check_models: Check
    """Checks changed models before any setting is applied."""
    registry: Callable[[], Registry]
    """Returns the model registry."""
    drains: Drains
    publish: Callable[[], None]
    """Sends changed settings to the fronts."""
    listeners: Sequence[ConfiguredListener]
    hooks: Mapping[str, ReloadHook]
    """The reload hook for each top-level setting."""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def declared_in(self, model: str) -> str:
        """Return where the settings declare a model, or an empty string if the model is not in the
        settings."""
        if model not in self.loaded.settings.models:
            return ""
        path = ("models", model)
        place = self.loaded.places.get((*path, "folder")) or self.loaded.places.get(path)
        return "the defaults" if place is None else str(place)

    def configuration(self) -> Configuration:
        """Return the current settings and their sources."""
        return as_table(self.loaded)

    async def reload(self) -> Reloaded:
        """Reload the settings. If this raises SettingsError, ListenError or ReloadError, no setting has
        changed."""
        async with self._one_at_a_time:
            former = self.loaded
            loaded = await asyncio.to_thread(self.reread)
            check_still_there(former, loaded)
            check_names(former, loaded, self.registry())
            if faults := fallback_faults(loaded, self.registry()):
                raise SettingsError(*faults)
            changes = list(differences(former.settings, loaded.settings))
            waiting = [change for change in changes if change.path[0] in AT_RESTART]
            applied = [change for change in changes if change not in waiting]
            loaded = _until_restart(loaded, former)
            await self._check_changed_models(former, loaded)
            served = await asyncio.to_thread(describe_models, loaded, former.settings)
            if self.drains.stopping is not None:
                raise ReloadError(f"{STOPPING}, so its settings cannot be reloaded")
            opened = self._open(loaded.settings)
            try:
                models = self._apply(loaded.settings, {change.path[0] for change in applied}, served)
            except BaseException:
                _close(opened)
                raise
            for listener, sock in zip(self.listeners, opened, strict=True):
                listener.change(loaded.settings, sock)
            self.loaded = loaded
            for line in (*map(str, applied), *models):
                log.info("reload: %s", line)
            for record, description in unknown_targets(self.registry(), loaded.settings.models):
                log.warning("%s: %s", record, description)
            return Reloaded(
                changed=list(map(str, applied)), models=models, at_restart=list(map(str, waiting))
            )

    async def _check_changed_models(self, former: Loaded, loaded: Loaded) -> None:
        """Check new models, models whose replicas would be replaced, and models whose chat template changes.
        Raises SettingsError if any of them cannot be served."""
        known = former.settings.models
        changed = {
            name: model
            for name, model in loaded.settings.models.items()
            if name not in known
            or known[name].spec("") != model.spec("")
            or known[name].chat_template != model.chat_template
        }
        findings = await asyncio.to_thread(self.check_models, changed)
        for warning in model_faults(loaded, findings, "warning"):
            log.warning("%s", warning)
        if faults := model_faults(loaded, findings):
            raise SettingsError(*faults)

    def _open(self, wanted: Settings) -> list[socket.socket | None]:
        opened: list[socket.socket | None] = []
        try:
            for listener in self.listeners:
                opened.append(listener.prepare(wanted))
        except ListenError:
            _close(opened)
            raise
        return opened

    def _apply(self, wanted: Settings, names: set[str], served: list[ServedModel]) -> list[str]:
        self.live.current = wanted
        for name in sorted(names - APPLIED_HERE):
            self.hooks[name](wanted)
        changes = self.models.change(wanted.models, served)
        self.publish()
        return changes


def _close(opened: Sequence[socket.socket | None]) -> None:
    for sock in filter(None, opened):
        sock.close()


def check_still_there(former: Loaded, loaded: Loaded) -> None:
    """Raise SettingsError if the settings file no longer exists. Without this check, a reload after the file
    was deleted would unload every model."""
    if not former.files or (missing := former.files[0]) in loaded.files:
        return
    if missing.parent.name == DROP_INS and loaded.files:
        return
    raise SettingsError(
        Fault(
            place=Place(str(missing)),
            description="the service was started with this settings file, but the file no longer exists",
            remedy="restore the file, or restart the service to run without it",
        )
    )


def check_names(former: Loaded, loaded: Loaded, registry: Registry) -> None:
    """Raise SettingsError if a model added to the settings has the name of a model or alias in the
    registry."""
    faults = []
    for name in loaded.settings.models.keys() - former.settings.models.keys():
        if name in registry.models or name in registry.aliases:
            kind = "a model" if name in registry.models else "an alias"
            faults.append(
                loaded.fault(
                    ("models", name),
                    f"the registry already has {kind} named {name!r}",
                    "choose another name, or unload and remove the entry in the registry with: "
                    "appliance models",
                )
            )
    if faults:
        raise SettingsError(*faults)


def _until_restart(loaded: Loaded, former: Loaded) -> Loaded:
    """Return the new settings, but keep the previous values of settings that require a restart."""
    for name in AT_RESTART:
        setattr(loaded.settings, name, getattr(former.settings, name))
    places = {path: place for path, place in loaded.places.items() if path[0] not in AT_RESTART}
    places |= {path: place for path, place in former.places.items() if path[0] in AT_RESTART}
    return loaded._replace(places=places)
