"""Reading the settings again while the service runs: what changed is applied, and nothing else is touched.

Everything that can fail comes first: files that cannot be used, a model's folder that cannot be read or an
address that is taken refuse the whole reload, and nothing has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from appliance.listeners import Doors
from appliance.messages import ServedModel
from appliance.models.registry import describe
from appliance.protocol import Configuration, Reloaded
from appliance.settings import Fault, Loaded, Place, Settings, SettingsError, dotted
from appliance.settings.table import as_table, differences
from appliance.switchboard import Switchboard

log = logging.getLogger(__name__)

Applier = Callable[[Settings], None]
"""Makes a part of the running service do what the settings say now. Must not fail."""

AT_RESTART = frozenset({"run_dir", "state_dir"})
"""Top-level settings that a running service cannot change."""
BY_THEMSELVES = frozenset({"models", "listen"})
"""Those that have their own way, below; every other has an applier."""


class Reloader:
    """Holds what the service runs with, and replaces it."""

    def __init__(
        self,
        loaded: Loaded,
        reread: Callable[[], Loaded],
        switchboard: Switchboard,
        doors: Doors,
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
        """Do it. Raises SettingsError or ListenError, and then nothing has changed."""
        async with self._one_at_a_time:
            loaded = await asyncio.to_thread(self._reread)
            present, wanted = self._loaded.settings, loaded.settings
            changes = list(differences(present, wanted))
            for name in AT_RESTART:
                setattr(wanted, name, getattr(present, name))
            served = await asyncio.to_thread(describe_models, wanted, present)
            opened = self._doors.prepare(wanted)
            waiting = [change for change in changes if change.path[0] in AT_RESTART]
            applied = [change for change in changes if change not in waiting]
            said = self._apply(wanted, {change.path[0] for change in applied}, served)
            self._doors.change(wanted, opened)
            self._loaded = loaded
            for line in (*map(str, applied), *said):
                log.info("reload: %s", line)
            return Reloaded(changed=list(map(str, applied)), models=said, at_restart=list(map(str, waiting)))

    def _apply(self, wanted: Settings, names: set[str], served: list[ServedModel]) -> list[str]:
        switchboard = self._switchboard
        switchboard.settings = switchboard.fleet.settings = wanted
        for name in sorted(names - BY_THEMSELVES):
            self._appliers[name](wanted)
        said = switchboard.fleet.change(wanted.models, served) if "models" in names else []
        switchboard.tell_configuration()
        return said


def describe_models(settings: Settings, present: Settings | None = None) -> list[ServedModel]:
    """The models that `present` does not have, or has in another folder, as fronts need to know them.

    Raises SettingsError for a folder that cannot be read."""
    served = []
    for name, model in settings.models.items():
        known = present.models.get(name) if present is not None else None
        if known is not None and known.folder == model.folder:
            continue
        try:
            served.append(describe(name, model))
        except OSError as error:
            raise SettingsError(
                Fault(
                    place=Place(settings.config_file or "the defaults"),
                    field=dotted(("models", name, "folder")),
                    what=f"models.{name}.folder = {model.folder!r} cannot be used: {error.filename}: "
                    f"{error.strerror}",
                    remedy="name the folder of a Hugging Face checkpoint (config.json, tokenizer.json, "
                    "*.safetensors)",
                )
            ) from error
        log.info("model %s: %s (version %s)", name, model.folder, served[-1].version)
    return served
