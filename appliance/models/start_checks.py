"""Checks a model's files before its replicas are started."""

from __future__ import annotations

from collections.abc import Callable

from appliance.models.manifest import find_problem
from appliance.settings import ModelSettings

Preflight = Callable[[str, ModelSettings], str]
"""Checks a model's files, given its name and settings. Returns the problem, or an empty string if there is
none. Called in a thread."""
FilesCheck = Callable[[str], str]
"""Returns how a version's files differ from its manifest, or an empty string if they match. Models in the
settings have no manifest, so the result is empty for them. Called in a thread."""


class StartChecks:
    """Checks model files in threads, because a disk may not respond."""

    def __init__(self, preflight: Preflight, files_check: FilesCheck) -> None:
        self._preflight = preflight
        self._files_check = files_check

    async def find_change(self, unit: str, settings: ModelSettings, timeout_s: float) -> str:
        """Return how the version's files differ from its manifest, or an empty string if they match. If the
        check takes longer than `timeout_s`, return a timeout message."""
        return await find_problem(lambda: self._files_check(unit), settings.folder, timeout_s)

    async def find_problem(self, unit: str, settings: ModelSettings, timeout_s: float) -> str:
        """Return how the version's files differ from its manifest or, if they match, any other problem with
        them. Empty if there is no problem."""
        return await find_problem(
            lambda: self._files_check(unit) or self._preflight(unit, settings), settings.folder, timeout_s
        )
