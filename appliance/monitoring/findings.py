"""The doctor's findings, one per check."""

from __future__ import annotations

from typing import Literal

import msgspec

from appliance.protocol import FindingLevel

Area = Literal["versions", "devices", "directories", "sockets", "service", "models", "databases", "leftovers"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check. A problem prevents the service from working; a warning may become a problem
    later."""

    area: Area
    subject: str
    """The subject of the check, in one or two words."""
    level: FindingLevel
    text: str
    """The result of the check, with the measured values."""
    remedy: str = ""
    """Remedy for the problem, or empty."""


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of one doctor run."""

    at: float
    """Unix time when the checks ran."""
    host: str
    run_dir: str
    state_dir: str
    problems: int
    warnings: int
    findings: list[Finding]
