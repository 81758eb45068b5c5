"""Scheduling levels, and the rule that protects higher levels from lower ones when slots are scarce. The
core's credits and the scheduler both use this module, so they agree on the slots that each level may take.

A level combines a priority class, from 0 (real-time) to 3 (background), and an urgency within the class.
"""

from __future__ import annotations

CLASSES = 4
"""Number of priority classes: `Submit.priority` is 0 to 3."""
URGENCIES = 3
"""Number of urgencies within a priority class: `Submit.urgency` is 0 to 2."""
LEVELS = CLASSES * URGENCIES
"""Number of scheduling levels, one for each pair of class and urgency: `Submit.level` is 0 to 11."""


def level_of(priority: int, urgency: int) -> int:
    """Return the scheduling level of a priority class and an urgency, from 0 (served first) to LEVELS - 1."""
    return URGENCIES * priority + URGENCIES - 1 - urgency


ORDINARY = level_of(1, 0)
"""Level of class 1 submissions that are not urgent."""


def _tier(level: int) -> int:
    return 2 if level > ORDINARY else int(level in (level_of(0, 0), ORDINARY))


TIERS = [_tier(level) for level in range(LEVELS)]
"""The tier of each level: 0 for urgent levels, which may use reserved slots; 1 for the other levels of
classes 0 and 1; 2 for classes 2 and 3."""


FIRST_VICTIMS = [max(level_of(level // URGENCIES + 1, URGENCIES - 1), ORDINARY) for level in range(LEVELS)]
"""For each level, the highest-priority level whose sequences are preempted if a sequence of this level lacks
a slot, or LEVELS if there is none. The victims belong to lower-priority classes and are not urgent."""


def kept_free(tier: int, reserved: int) -> int:
    """Return the number of slots that a sequence of this tier must leave free. `reserved` slots are reserved
    for urgent sequences. Sequences of classes 2 and 3 leave one more slot free, for class 1."""
    return (0, reserved, reserved + min(1, reserved))[tier]


def reclaimable(level: int, reserved: int, running: list[int]) -> int:
    """Return the number of slots that an urgent level may take from all lower levels that are not urgent,
    because fewer urgent sequences run than slots are reserved. This matters after the number of reserved
    slots has grown. `running` is the number of running sequences of each level."""
    if TIERS[level]:
        return 0
    urgent = sum(count for tier, count in zip(TIERS, running, strict=True) if tier == 0)
    return max(0, reserved - urgent)
