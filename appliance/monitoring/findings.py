"""What the doctor says: one finding a thing that was looked at."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. A problem keeps the service from working; a warning may, later."""

    area: str
    """"versions", "devices", "directories", "sockets", "service", "models", "databases" or "leftovers"."""
    subject: str
    """What in the area, in a word or two."""
    level: Level
    text: str
    """What was found, with the values."""
    remedy: str = ""
    """What to do; empty for what is well."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one visit."""

    at: float
    """Unix seconds."""
    host: str
    run_dir: str
    state_dir: str
    problems: int
    warnings: int
    findings: list[Finding]
