"""Defines the scheduling levels, and the rule that protects higher levels from lower ones when slots are
scarce. The core, which counts credits, and the scheduler both use this module, so they agree on which slots
each level may take.

A level combines a priority class, from 0 (real-time) to 3 (background), with an urgency. Only classes 0 and 1
have urgencies. Urgent submissions with short prompts have higher urgencies than those with long prompts.
"""

from __future__ import annotations

CLASSES = 4
"""Number of priority classes: `Submit.priority` is 0 to 3."""
_URGENT_CLASSES = 2
"""Number of priority classes with urgencies: classes 0 and 1."""
URGENCIES = 9
"""Number of urgency values: `Submit.urgency` is 0 to 8."""
LEVELS = _URGENT_CLASSES * URGENCIES + CLASSES - _URGENT_CLASSES
"""Number of scheduling levels: `Submit.level` is 0 to 19."""
FITS_STEP = 2
"""Lowest urgency of a request whose prompts together fit into one step."""


def urgency_of(prompt_tokens: int, max_num_batched_tokens: int) -> int:
    """Return the urgency of an urgent request: 1 if its prompts do not fit into one step, 2 if they fill more
    than half of a step, 3 if they fill more than a quarter, and so on."""
    return min(1 + (max_num_batched_tokens // max(1, prompt_tokens)).bit_length(), URGENCIES - 1)


def level_of(priority: int, urgency: int) -> int:
    """Return the scheduling level of a priority class and an urgency, from 0 (served first) to LEVELS - 1. In
    classes 2 and 3, the urgency has no effect."""
    if priority < _URGENT_CLASSES:
        return URGENCIES * (priority + 1) - 1 - urgency
    return _URGENT_CLASSES * (URGENCIES - 1) + priority


def split_level(level: int) -> tuple[int, int]:
    """Return the priority class and the urgency of a scheduling level."""
    if level < _URGENT_CLASSES * URGENCIES:
        return level // URGENCIES, URGENCIES - 1 - level % URGENCIES
    return level - _URGENT_CLASSES * (URGENCIES - 1), 0


ORDINARY = level_of(1, 0)
"""Level of non-urgent submissions in class 1."""


def _tier(level: int) -> int:
    return 2 if level > ORDINARY else int(split_level(level)[1] == 0)


TIERS = [_tier(level) for level in range(LEVELS)]
"""Each level's tier. Tier 0 contains the urgent levels, which may use reserved slots. Tier 1 contains the
other levels of classes 0 and 1, and tier 2 the levels of classes 2 and 3."""


def _first_victim(level: int) -> int:
    priority, _ = split_level(level)
    return max(level_of(priority + 1, URGENCIES - 1), ORDINARY) if TIERS[level] else level_of(priority, 0)


FIRST_VICTIMS = [_first_victim(level) for level in range(LEVELS)]
"""For each level, the highest-priority level whose sequences may be preempted when a sequence of this level
needs a slot, or LEVELS if there is none. Urgent sequences preempt the non-urgent sequences of their own class
and all sequences of lower-priority classes. Other sequences preempt only non-urgent sequences of
lower-priority classes."""


def kept_free(tier: int, reserved: int) -> int:
    """Return the number of slots that a sequence of this tier must leave free. `reserved` is the number of
    slots reserved for urgent sequences. Classes 2 and 3 must leave one more slot free, for class 1."""
    return (0, reserved, reserved + min(1, reserved))[tier]
