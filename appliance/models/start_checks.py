"""Checks a model's files before its replicas are started."""

from __future__ import annotations

from collections.abc import Callable

from appliance.models.manifest import find_problem
from appliance.settings import ModelSettings

Preflight = Callable[[str, ModelSettings], str]
"""A function that checks the files of a model with this name and these settings. It returns the problem, or
an empty string if there is none, and is called in a thread."""
FilesCheck = Callable[[str], str]
"""A function that compares the files of a version with its manifest. It returns the difference, or an empty
string if there is none or if the name belongs to a model in the settings. It is called in a thread."""


class StartChecks:
    """Checks the files of models in threads, because a disk may not respond."""

    def __init__(self, preflight: Preflight, files_check: FilesCheck) -> None:
        self._preflight = preflight
        self._files_check = files_check

    async def find_change(self, unit: str, settings: ModelSettings, timeout_s: float) -> str:
        """Return how the version's files differ from its manifest, or an empty string if they match. If the
        check takes longer than `timeout_s`, return a message about the timeout."""
        return await find_problem(lambda: self._files_check(unit), settings.folder, timeout_s)

    async def find_problem(self, unit: str, settings: ModelSettings, timeout_s: float) -> str:
        """Return how the version's files differ from its manifest or, if they match, any other problem with
        the files. If there is no problem, return an empty string."""
        return await find_problem(
            lambda: self._files_check(unit) or self._preflight(unit, settings), settings.folder, timeout_s
        )
