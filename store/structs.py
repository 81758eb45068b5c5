"""Plain data of the store that fronts and the admin API use as it is, without loading SQLite."""

from __future__ import annotations

from typing import Literal

import msgspec


class KeptText(msgspec.Struct, frozen=True):
    """One stored prompt or answer of a request."""

    part: Literal["prompt", "answer"]
    number: int
    """Index among the request's prompts, or answers."""
    sha256: str
    """SHA-256 (hex) of `text`; where only hashes are kept, of the whole original text: a conversation as JSON
    without spaces, token ids as their text."""
    bytes: int
    """Size of the whole original text."""
    text: str | None = None
    """The text without its secrets; None where only hashes are kept."""
    truncated: bool = False
    """Whether `text` is only the beginning."""
    redactions: int = 0
    """Number of secrets that were removed from `text`."""


class WriterState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a database's writer."""

    lag_rows: int
    """Operations that wait for their commit."""
    lag_ms: float
    """Age of the oldest of them; up to the commit interval is normal."""
    last_error: str | None
    """Why the latest attempt failed; None once the database accepts writes again."""
    failing_s: float
    """For how long the database has refused writes; 0 if it accepts them."""
    committed_rows: int
    dropped_rows: int
    """Number of rows lost because the spool was full, or because they still waited when the writer closed."""
    rejected_rows: int
    """Number of rows lost because the database cannot store them (a programming error, logged each time)."""
    restored: str = ""
    """If the open file was deleted or replaced: what happened and what was done."""
