"""The findings of the doctor, one for each check."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. A problem prevents the service from working; a warning may do so later."""

    area: str
    """"versions", "devices", "directories", "sockets", "service", "models", "databases" or "leftovers"."""
    subject: str
    """What was checked, in a word or two."""
    level: Level
    text: str
    """What was found, with the values."""
    remedy: str = ""
    """What to do; empty if nothing is wrong."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """All findings of one run."""

    at: float
    """Unix seconds."""
    host: str
    run_dir: str
    state_dir: str
    problems: int
    warnings: int
    findings: list[Finding]
