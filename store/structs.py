"""Plain data structures that front processes and the admin API use without loading SQLite."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["info", "warning", "critical"]
"""Severity of an alert, in ascending order."""
KeptPart = Literal["prompt", "answer"]


class KeptText(msgspec.Struct, frozen=True):
    """One stored prompt or answer of a request."""

    part: KeptPart
    number: int
    """Index of this text among the request's prompts or answers."""
    sha256: str
    """SHA-256 (hex) of `text` or, if only hashes are kept, of the whole original text. For a conversation,
    the original text is its JSON without spaces; for token ids, it is the decoded text."""
    bytes: int
    """Size of the whole original text, in bytes."""
    text: str | None = None
    """Text with secrets removed; None if only hashes are kept."""
    truncated: bool = False
    """Whether `text` is only the beginning of the original."""
    redactions: int = 0
    """Number of secrets removed from `text`."""


class WriterState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a database writer."""

    lag_rows: int
    """Number of operations waiting to be committed."""
    lag_ms: float
    """Age of the oldest waiting operation. An age below the commit interval is normal."""
    last_error: str | None
    """Why the latest write failed; None if it succeeded."""
    failing_s: float
    """How long the database has refused writes, in seconds; 0 if it accepts them."""
    committed_rows: int
    dropped_rows: int
    """Number of operations dropped because too many were waiting in memory, or because they were still
    waiting when the writer closed."""
    rejected_rows: int
    """Number of operations dropped because the database cannot store them. Each of these indicates a bug and
    is logged."""
    restored: str = ""
    """How the open file was deleted or replaced and how the writer restored it. Empty if this has not
    happened."""


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Mutes notifications for alerts with matching rules and subjects until a given time. Set by an
    operator."""

    id: str
    rule: str
    """Pattern for the rule's name; `*` stands for any characters."""
    subject: str
    """Pattern for the alerts' subject; `*` stands for any characters."""
    until: float
    """End of the silence, in unix seconds."""
    reason: str = ""
    created_by: str = ""
    created_at: float = 0.0
