"""Errors in settings, each with its location, the problem and a remedy."""

from __future__ import annotations

import json
import re

import msgspec

Path = tuple[str, ...]
"""Location of a setting in the tables, such as ("models", "chat", "max_num_seqs")."""


class Place(msgspec.Struct, frozen=True):
    """The place where a setting was given."""

    source: str
    """A file, "--listen" (a flag), or "default"."""
    line: int | None = None
    """Line number in the file, starting at 1."""

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in the settings."""

    place: Place
    field: str = ""
    """Setting, such as "models.chat.max_num_seqs"; empty for the whole file."""
    description: str
    """Description of the fault, including the value."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.place}: {self.description}: {self.remedy}"


class SettingsError(Exception):
    """Raised if the settings cannot be used. Each fault states its location, the problem and a remedy."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def dotted(path: Path) -> str:
    """Format a path as a dotted TOML key: names that contain anything but letters, digits, _ and - are
    quoted."""
    return ".".join(
        name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
        for name in path
    )
