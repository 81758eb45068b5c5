"""Settings errors, each with a location, a description and a remedy."""

from __future__ import annotations

import json
import re

import msgspec

Path = tuple[str, ...]
"""Path to a setting, such as ("models", "chat", "max_num_seqs")."""


class Place(msgspec.Struct, frozen=True):
    """Where a setting was specified."""

    source: str
    """A file path, the name of a flag such as "--listen", or "default"."""
    line: int | None = None
    """Line number in the file, starting at 1."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in the settings."""

    place: Place
    field: str = ""
    """Name of the setting, such as "models.chat.max_num_seqs"; empty if the whole file is at fault."""
    description: str
    """Description of the fault, including the value."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.place}: {self.description}: {self.remedy}"


class SettingsError(Exception):
    """Raised if the settings are invalid. The message lists each fault with its location and remedy."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def dotted(path: Path) -> str:
    """Return a path as a dotted TOML key. Names that contain characters other than letters, digits, _ and -
    are quoted."""
    return ".".join(
        name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
        for name in path
    )
