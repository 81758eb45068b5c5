"""What a replica can take now: running totals granted by it, and what was spent on it."""

from __future__ import annotations

import enum

from appliance.traffic.rates import ReplicaRates
from engine.messages import BLOCK_TOKENS, Report

_FEW_ROWS = 8
"""Replicas with fewer rows keep none."""
_MANY_ROWS = 64
"""Those with so many always keep one: who asks for the first time in a while shall not wait for it."""


class Room(enum.IntEnum):
    """Whom a replica takes now. Each takes whom those before it take."""

    NONE = 0
    REAL_TIME = 1
    """P0: a background sequence makes room for it."""
    LIGHT = 2
    """Also P1 of tenants with little running: rows are kept for them, and they may go ahead of prompts."""
    ANY = 3


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
        self.background_rows = 0
        """P3 sequences on it, which P0 may push aside."""
        self.rows = 0
        """Sequences that it runs at once: what it granted first, as `tokens` ahead."""
        self.tokens = 0
        self.kv_tokens = 0
        """That its cache holds."""
        self.generated_each = 0.0
        """Output tokens of each of its rows, on average, since its start: what a row's sequence was given
        meanwhile, as long as only its end tells exactly."""
        self._generated = 0
        self.rates = ReplicaRates()

    @property
    def available_rows(self) -> int:
        """Sequences that the replica can start."""
        return self.granted_rows - self.spent_rows

    @property
    def available_tokens(self) -> int:
        """Prompt tokens that the replica takes before it has too much ahead of it."""
        return self.granted_tokens - self.spent_tokens

    def kept_rows(self, share: float) -> int:
        """Rows that are left to tenants with little running, where they are this part of all."""
        if share <= 0:
            return int(self.rows >= _MANY_ROWS)
        return max(1, int(share * self.rows)) if self.rows >= _FEW_ROWS else 0

    def room(self, kept_rows: int) -> Room:
        """Whom it takes, with so many rows kept."""
        rows, tokens = self.available_rows, self.available_tokens
        if tokens > 0 and rows > kept_rows:
            return Room.ANY
        if tokens <= -self.tokens:
            return Room.NONE
        if rows > 0:
            return Room.LIGHT
        return Room.REAL_TIME if rows + self.background_rows > 0 else Room.NONE

    def learn(self, report: Report) -> None:
        """Take in the replica's report: the totals that it has granted since its start, and its rates."""
        busy = self.rows - self.available_rows
        self.generated_each += (report.generated_tokens - self._generated) / max(1, busy)
        self._generated = report.generated_tokens
        self.granted_rows = report.credit_seqs
        self.granted_tokens = report.credit_tokens
        if not self.rows:
            self.rows, self.tokens = report.credit_seqs, report.credit_tokens
        self.kv_tokens = report.blocks_total * BLOCK_TOKENS
        self.rates.learn(report)

    def spend(self, rows: int, tokens: int, *, background: bool = False) -> None:
        """Something is sent to the replica."""
        self.spent_rows += rows
        self.spent_tokens += tokens
        if background:
            self.background_rows += rows

    def refund(self, rows: int, tokens: int, *, background: bool = False) -> None:
        """Something that was spent for never reached the replica, so the replica will not grant it again."""
        self.spent_rows -= rows
        self.spent_tokens -= tokens
        if background:
            self.background_rows -= rows
