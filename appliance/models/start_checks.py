"""Checks a model's files before its replicas are started."""

from __future__ import annotations

from collections.abc import Callable

from appliance.models.manifest import find_problem
from appliance.settings import ModelSettings

Preflight = Callable[[str, ModelSettings], str]
"""Checks the files of a model with this name and these settings, and returns the problem; empty if there is
none. Called in a thread."""
FilesCheck = Callable[[str], str]
"""Compares the files of a unit with the manifest of its version, and returns the difference; empty if there
is none, or if the unit is a model in the settings. Called in a thread."""


class StartChecks:
    """Checks the files of models in threads, because a disk may not respond."""

    def __init__(self, preflight: Preflight, files_check: FilesCheck) -> None:
        self._preflight = preflight
        self._files_check = files_check

    async def find_change(self, unit: str, settings: ModelSettings, timeout_s: float) -> str:
        """Return how the unit's files differ from the manifest of its version, or an empty string if they
        match. If the check takes longer than `timeout_s`, the result says so."""
        return await find_problem(lambda: self._files_check(unit), settings.folder, timeout_s)

    async def find_problem(self, unit: str, settings: ModelSettings, timeout_s: float) -> str:
        """Do the same as `find_change`. If the files match, also return any other problem with them."""
        return await find_problem(
            lambda: self._files_check(unit) or self._preflight(unit, settings), settings.folder, timeout_s
        )
