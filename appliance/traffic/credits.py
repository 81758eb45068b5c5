"""Tracks a replica's credits at each service level: the credits that the replica has granted, minus the
credits spent on dispatched requests."""

from __future__ import annotations

from appliance.traffic.rates import ReplicaRates
from engine.messages import BLOCK_TOKENS, LEVELS, Report, level_of
from store.policies import CLASSES, INTERACTIVE

REAL_TIME, BACKGROUND = 0, CLASSES - 1

_FEW_SLOTS = 8
"""Replicas with fewer slots than this reserve none."""
_MANY_SLOTS = 64
"""Replicas with at least this many slots always reserve at least one, so that a tenant that has sent no
requests for a while can start immediately."""
_ORDINARY_REAL_TIME, _FIRST_BACKGROUND = level_of(REAL_TIME, 0), level_of(BACKGROUND, 2)
_ORDINARY = level_of(INTERACTIVE, 0)


def _tier(level: int) -> int:
    """Return the tier of a level: 0 for urgent levels, which may use reserved slots; 1 for the other levels
    of P0 and P1; 2 for P2 and P3."""
    return 2 if level > _ORDINARY else int(level in (_ORDINARY_REAL_TIME, _ORDINARY))


TIERS = [_tier(level) for level in range(LEVELS)]
"""The tier of each level."""


def spare_slots(level: int, reserved: int) -> int:
    """Return the number of slots that a sequence of this level must leave free. `reserved` slots are reserved
    for urgent requests. P2 and P3 sequences leave one more slot free, for P1 requests."""
    return (0, reserved, reserved + min(1, reserved))[TIERS[level]]


class CreditAccount:
    """The credits of one incarnation of a replica. A restarted replica gets a new account.

    Core and replica both keep running totals of the granted and dispatched amounts, so that no message is
    counted twice. A request of any size is dispatched while some credit is left. It uses the credit of its
    own level and of all lower-priority levels, because the engine serves those levels later.
    """

    def __init__(self, replica: str, model: str, devices: str = "", version: str = "") -> None:
        self.replica = replica
        self.model = model
        self.devices = devices
        self.version = version
        """Version of the model files that the replica has loaded. Empty if not known yet."""
        self.slots = 0
        """Number of slots: the maximum number of sequences that the replica can run at the same time."""
        self.tokens = 0
        """The greater of two numbers: the prompt tokens in two mixed steps, and the prompt tokens in one full
        step."""
        self._spent_seqs = [0] * LEVELS
        self._spent_tokens = [0] * LEVELS
        self._returned_seqs = [0] * LEVELS
        self._returned_tokens = [0] * LEVELS
        self._waiting_seqs = [0] * LEVELS
        """Number of sequences waiting for a slot at the last report."""
        self._available: dict[float, tuple[list[int], int]] = {}
        """Cache of the free slots of each level and the open levels. The key is the fraction of slots that is
        reserved. Cleared when the account changes."""
        self.kv_tokens = 0
        """Capacity of the KV cache in tokens."""
        self.generated_each = 0.0
        """Average number of output tokens per slot since the replica started. Used to estimate the output of
        running sequences, because exact counts arrive only after sequences have finished."""
        self._generated = 0
        self.rates = ReplicaRates()

    @property
    def available_slots(self) -> int:
        """Number of slots that are not occupied by dispatched, unfinished sequences."""
        return self.slots - sum(self._spent_seqs) + sum(self._returned_seqs)

    @property
    def available_tokens(self) -> int:
        """The token credit of the lowest-priority class."""
        return self.tokens_left(LEVELS - 1)

    def tokens_left(self, level: int) -> int:
        """Return the token credit of a level. Tokens that were accepted at lower-priority levels do not
        reduce it."""
        end = level + 1
        return self.tokens - sum(self._spent_tokens[:end]) + sum(self._returned_tokens[:end])

    def reserved_slots(self, share: float) -> int:
        """Return the number of slots that are reserved for urgent requests if the fraction `share` is
        reserved."""
        if share <= 0:
            return int(self.slots >= _MANY_SLOTS)
        return max(1, int(share * self.slots)) if self.slots >= _FEW_SLOTS else 0

    def free_slots(self, level: int, share: float) -> int:
        """Return the number of slots that are free for a level if the fraction `share` is reserved."""
        return self._availability(share)[0][level]

    def open_levels(self, share: float) -> int:
        """Return the levels at which the replica accepts a request if the fraction `share` of all slots is
        reserved. Bit `l` is set for level `l`."""
        return self._availability(share)[1]

    def _availability(self, share: float) -> tuple[list[int], int]:
        """Return `free_slots` for each level, and `open_levels`."""
        known = self._available.get(share)
        if known is None:
            free, levels, tokens = self._free_slots(self.reserved_slots(share)), 0, self.tokens
            for level in range(LEVELS):
                tokens -= self._spent_tokens[level] - self._returned_tokens[level]
                if tokens > 0 and free[level] > 0:
                    levels |= 1 << level
            known = self._available[share] = free, levels
        return known

    def _free_slots(self, reserved: int) -> list[int]:
        """Compute `free_slots` for each level.

        Samples of lower-priority levels that are waiting in the engine occupy no slot. The last report
        contains their number. Of the samples that were dispatched after that report, the engine lets only as
        many occupy slots as their tier allows.
        """
        running = [
            spent - returned for spent, returned in zip(self._spent_seqs, self._returned_seqs, strict=True)
        ]
        in_tiers = [0, 0, 0]
        for tier, count in zip(TIERS, running, strict=True):
            in_tiers[tier] += count
        spare = (0, reserved, reserved + min(1, reserved))
        lower = min(in_tiers[2], self.slots - spare[2])
        in_worse_tiers = (min(lower + in_tiers[1], self.slots - spare[1]), lower, 0)
        in_other_tiers = (in_tiers[0], in_tiers[0] + in_tiers[1], sum(in_tiers))
        free: list[int] = []
        occupied = sum(running) - sum(self._waiting_seqs)
        for level, waiting in enumerate(self._waiting_seqs):
            tier = TIERS[level]
            occupied += waiting
            at_most = min(occupied, in_worse_tiers[tier] + in_other_tiers[tier])
            free.append(self.slots - at_most - spare[tier])
        # A P0 request can take the slots of background sequences. If it fits into one step, it can also take
        # the slots of all other sequences that are not urgent.
        for level in range(_ORDINARY_REAL_TIME + 1):
            if free[level] <= 0:
                free[level] += sum(running[_FIRST_BACKGROUND if level else _ORDINARY :])
        return free

    def learn(self, report: Report) -> None:
        """Update the account from the replica's report: the totals granted since the replica started, and its
        rates."""
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

    def spend(self, level: int, seqs: int, tokens: int) -> None:
        """Spend credit for a submission that is sent to the replica."""
        self._spent_seqs[level] += seqs
        self._spent_tokens[level] += tokens
        self._available.clear()

    def refund(self, level: int, seqs: int, tokens: int) -> None:
        """Refund the credit of a submission that never reached the replica. The replica cannot return it."""
        self.spend(level, -seqs, -tokens)
