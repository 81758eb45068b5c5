"""Tracks a replica's credits at each service level: those it has granted, minus those spent on dispatched
requests."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from appliance.traffic.prefixes import ComputedPrefixes
from appliance.traffic.rates import ReplicaRates
from engine.levels import FIRST_VICTIMS, LEVELS, TIERS, kept_free
from engine.messages import BLOCK_TOKENS
from engine.rank_messages import Report

REAL_TIME = 0

_FEW_SLOTS = 8
"""Replicas with fewer slots than this reserve none for urgent requests."""
_MANY_SLOTS = 64
"""Replicas with at least this many slots always reserve at least one for urgent requests, so that a tenant
returning after an idle period can start immediately."""
_LONG_RUN_S = 120.0
"""Half-life of a replica's long-run rates, in seconds of busy time."""
_SLICE_ENDS = {*FIRST_VICTIMS, LEVELS}


class Levels(NamedTuple):
    """Sets of service levels as bit masks. Bit `l` stands for level `l`."""

    open: int
    """The levels at which a replica accepts requests."""
    slots: int
    """The levels that have a free slot or could get one by preempting lower-priority sequences."""
    free: int
    """The levels that have a free slot."""


class CreditAccount:
    """The credits of one incarnation of a replica. A restarted replica gets a new account.

    The core and the replica both keep running totals of granted and dispatched amounts, so no message is
    counted twice. As long as any credit is left, a request of any size can be dispatched. A request uses
    credit from its own level and all lower-priority levels, because the engine serves those later.
    """

    def __init__(self, replica: str, model: str, devices: str = "") -> None:
        self.replica = replica
        self.model = model
        self.devices = devices
        self.version = ""
        """Version of the model files loaded by the replica; empty while unknown."""
        self.prefixes = ComputedPrefixes()
        self.slots = 0
        """Number of slots: the maximum number of sequences that the replica can run concurrently."""
        self.tokens = 0
        """Maximum number of prompt tokens in flight: enough for two mixed steps or one full step, whichever
        is more."""
        self._spent_seqs = [0] * LEVELS
        self._spent_tokens = [0] * LEVELS
        self._returned_seqs = [0] * LEVELS
        self._returned_tokens = [0] * LEVELS
        self._waiting_seqs = [0] * LEVELS
        """Number of sequences waiting for a slot at each level, as of the replica's last report."""
        self._available: dict[float, tuple[list[int], Levels]] = {}
        """Cached results of `free_slots` (one per level) and `levels`, keyed by the reserved fraction of
        slots. Cleared when the account changes."""
        self.kv_tokens = 0
        """KV cache capacity in tokens."""
        self.generated_each = 0.0
        """Average number of output tokens per slot since the replica started. Used to estimate the output of
        running sequences, because exact counts arrive only when sequences finish."""
        self._generated = 0
        self.rates = ReplicaRates()
        self.long_run_rates = ReplicaRates(_LONG_RUN_S)
        """Rates over the last few minutes, used when these minutes are replayed. The period is long enough to
        include times with few and with many sequences, which shows how the step time depends on their
        number."""

    @property
    def available_slots(self) -> int:
        """Number of slots not occupied by sequences that were dispatched and have not finished."""
        return self.slots - sum(self._spent_seqs) + sum(self._returned_seqs)

    @property
    def available_tokens(self) -> int:
        """Token credit of the lowest-priority level."""
        return self.tokens_left(LEVELS - 1)

    def tokens_left(self, level: int) -> int:
        """Return a level's token credit. Tokens accepted at lower-priority levels do not reduce it."""
        end = level + 1
        return self.tokens - sum(self._spent_tokens[:end]) + sum(self._returned_tokens[:end])

    def reserved_slots(self, share: float) -> int:
        """Return how many slots are reserved for urgent requests if `share` is the reserved fraction."""
        if share <= 0:
            return int(self.slots >= _MANY_SLOTS)
        return max(1, int(share * self.slots)) if self.slots >= _FEW_SLOTS else 0

    def free_slots(self, level: int, share: float) -> int:
        """Return how many slots are free for a level's requests if the fraction `share` of all slots is
        reserved. The result is zero or negative if such a request can start only by preempting sequences."""
        return self._availability(share)[0][level]

    def levels(self, share: float) -> Levels:
        """Return the replica's `Levels`, assuming that the fraction `share` of all slots is reserved for
        urgent requests."""
        return self._availability(share)[1]

    def _availability(self, share: float) -> tuple[list[int], Levels]:
        known = self._available.get(share)
        if known is None:
            free, slot_levels = self._slots(self.reserved_slots(share))
            token_levels, tokens = 0, self.tokens
            for level in range(LEVELS):
                tokens -= self._spent_tokens[level] - self._returned_tokens[level]
                token_levels |= (tokens > 0) << level
            free_levels = sum((slots > 0) << level for level, slots in enumerate(free))
            known = free, Levels(slot_levels & token_levels, slot_levels, free_levels)
            self._available[share] = known
        return known

    def _slots(self, reserved: int) -> tuple[list[int], int]:
        """Compute `free_slots` for each level, and `Levels.slots`. Lower-priority sequences waiting in the
        engine occupy no slots; the replica's last report gives their number. Sequences dispatched since that
        report occupy at most as many slots as the engine allows for their tier (a group of levels).
        """
        running = [
            spent - returned for spent, returned in zip(self._spent_seqs, self._returned_seqs, strict=True)
        ]
        spare = [kept_free(tier, reserved) for tier in range(3)]
        before = [0, *accumulate(running)]
        waiting_before = [0, *accumulate(self._waiting_seqs)]
        occupied_at_most = {end: self._occupied_at_most(running[:end], spare) for end in _SLICE_ENDS}

        def free(level: int, end: int) -> int:
            """Return how many slots would be free for a level after preempting all sequences at level `end`
            and at lower-priority levels."""
            occupied = before[end] - (waiting_before[end] - waiting_before[min(level + 1, end)])
            tier = TIERS[level]
            return self.slots - spare[tier] - min(occupied, occupied_at_most[end][tier])

        levels = 0
        for level, victim in enumerate(FIRST_VICTIMS):
            levels |= (free(level, victim) > 0) << level
        return [free(level, LEVELS) for level in range(LEVELS)], levels

    def _occupied_at_most(self, running: list[int], spare: list[int]) -> tuple[int, int, int]:
        """For each tier (a group of levels), return an upper bound on the number of slots that running
        sequences occupy ahead of a new sequence in that tier. `running` counts the running sequences by
        level."""
        in_tiers = [0, 0, 0]
        for tier, count in zip(TIERS, running, strict=False):
            in_tiers[tier] += count
        lower = min(in_tiers[2], self.slots - spare[2])
        middle = min(lower + in_tiers[1], self.slots - spare[1])
        return middle + in_tiers[0], lower + in_tiers[0] + in_tiers[1], sum(in_tiers)

    def predict(self, step_s: float, prompt_token_s: float) -> None:
        """Set the speed that is assumed until enough steps have been measured (see
        `ReplicaRates.predict`)."""
        self.rates.predict(step_s, prompt_token_s)
        self.long_run_rates.predict(step_s, prompt_token_s)

    def learn(self, report: Report) -> None:
        """Update the account from the replica's report, which contains the replica's rates and the total
        credit granted since it started."""
        busy = self.slots - self.available_slots
        self.generated_each += (report.generated_tokens - self._generated) / max(1, busy)
        self._generated = report.generated_tokens
        self.slots = report.credit_seqs - sum(report.returned_seqs)
        self.tokens = report.credit_tokens - sum(report.returned_tokens)
        self._returned_seqs = list(report.returned_seqs)
        self._returned_tokens = list(report.returned_tokens)
        self._waiting_seqs = list(report.waiting_seqs)
        self._available.clear()
        self.kv_tokens = report.blocks_total * BLOCK_TOKENS
        self.rates.learn(report)
        self.long_run_rates.learn(report)

    def spend(self, level: int, seqs: int, tokens: int) -> None:
        """Deduct the credit for a submission sent to the replica."""
        self._spent_seqs[level] += seqs
        self._spent_tokens[level] += tokens
        self._available.clear()

    def refund(self, level: int, seqs: int, tokens: int) -> None:
        """Refund the credit for a submission that never reached the replica. The replica cannot return this
        credit itself."""
        self.spend(level, -seqs, -tokens)
