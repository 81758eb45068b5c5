"""Plain data structures that fronts and the admin API use directly, without loading SQLite."""

from __future__ import annotations

from typing import Literal

import msgspec


class KeptText(msgspec.Struct, frozen=True):
    """One stored prompt or answer of a request."""

    part: Literal["prompt", "answer"]
    number: int
    """Index of this text among the request's prompts or answers."""
    sha256: str
    """SHA-256 (hex) of `text`. If only hashes are kept, it is computed over the whole original text: JSON
    without spaces for a conversation, the decoded text for token ids."""
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
    """Number of operations that wait to be committed."""
    lag_ms: float
    """Age of the oldest waiting operation; an age up to the commit interval is normal."""
    last_error: str | None
    """The reason why the latest attempt failed; None once the database accepts writes again."""
    failing_s: float
    """How long the database has refused writes, in seconds; 0 if it accepts them."""
    committed_rows: int
    dropped_rows: int
    """Operations dropped because the spool was full, or because they were still waiting when the writer
    closed."""
    rejected_rows: int
    """Operations dropped because the database cannot store them (a defect, logged each time)."""
    restored: str = ""
    """If the open file was deleted or replaced: what happened, and how the writer reacted."""
