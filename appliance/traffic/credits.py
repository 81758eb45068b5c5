"""What a replica can take now: running totals granted by it, and what was spent on it."""

from __future__ import annotations


class CreditAccount:
    """The credits of one life of a replica; a replica that comes back has a new account.

    Both sides only ever count up what was granted and dispatched, so no message can be counted twice.
    Available may go below zero: a request is dispatched while something is left, whatever its size.
    """

    def __init__(self, replica: str, model: str, devices: str = "", version: str = "") -> None:
        self.replica = replica
        self.model = model
        self.devices = devices
        self.version = version
        """Of the files that the replica has read; empty while nobody knows."""
        self.granted_rows = 0
        self.granted_tokens = 0
        self.spent_rows = 0
        self.spent_tokens = 0
        self.lost_fronts: set[str] = set()
        """Fronts whose channel to this replica is closed: what is dispatched for them cannot arrive."""

    @property
    def available_rows(self) -> int:
        """Sequences that the replica can start."""
        return self.granted_rows - self.spent_rows

    @property
    def available_tokens(self) -> int:
        """Prompt tokens that the replica takes before it has too much ahead of it."""
        return self.granted_tokens - self.spent_tokens

    @property
    def open(self) -> bool:
        """Whether it takes another request."""
        return self.available_rows > 0 and self.available_tokens > 0

    def grant(self, rows: int, tokens: int) -> None:
        """Set the totals that the replica has granted since its start."""
        self.granted_rows = rows
        self.granted_tokens = tokens

    def spend(self, rows: int, tokens: int) -> None:
        """Something is sent to the replica."""
        self.spent_rows += rows
        self.spent_tokens += tokens

    def refund(self, rows: int, tokens: int) -> None:
        """Something that was spent for never reached the replica, so the replica will not grant it again."""
        self.spent_rows -= rows
        self.spent_tokens -= tokens
