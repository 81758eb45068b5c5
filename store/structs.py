"""Plain data of the store that fronts and the admin API use directly, without loading SQLite."""

from __future__ import annotations

from typing import Literal

import msgspec


class KeptText(msgspec.Struct, frozen=True):
    """One stored prompt or answer of a request."""

    part: Literal["prompt", "answer"]
    number: int
    """Index among the prompts, or the answers, of the request."""
    sha256: str
    """SHA-256 (hex) of `text`. If only hashes are kept: of the whole original text, which is JSON without
    spaces for a conversation, and the decoded text for token ids."""
    bytes: int
    """Size of the whole original text."""
    text: str | None = None
    """The text without its secrets; None if only hashes are kept."""
    truncated: bool = False
    """Whether `text` is only the beginning of the original."""
    redactions: int = 0
    """Number of secrets that were removed from `text`."""


class WriterState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a database's writer."""

    lag_rows: int
    """Operations that wait to be committed."""
    lag_ms: float
    """Age of the oldest waiting operation; up to the commit interval is normal."""
    last_error: str | None
    """Why the latest attempt failed; None once the database accepts writes again."""
    failing_s: float
    """For how long the database has refused writes; 0 if it accepts them."""
    committed_rows: int
    dropped_rows: int
    """Operations that were dropped because the spool was full, or because they still waited when the writer
    closed."""
    rejected_rows: int
    """Operations that were dropped because the database cannot store them (a defect, logged each time)."""
    restored: str = ""
    """If the open file was deleted or replaced: a description of the event and of the reaction."""
