"""Message sizes at which ranks change from one all-reduce to another. `engine.bench.collectives` measures
them."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = 1 << 62
"""A number of bytes that no message reaches."""


@dataclass(frozen=True, slots=True)
class AllReduceLimits:
    """The all-reduce of a message: one-shot through peer memory, then two-shot, then the group's (NCCL)."""

    two_shot_bytes: int
    """Message size from which the two-shot all-reduce is used."""
    group_bytes: int = 64 << 20
    """Message size from which the group's all-reduce is used. Smaller messages that do not fit into the arena
    are sent in pieces."""
    quantised_rows: range = range(2, 65)
    """Numbers of rows for which a one-shot all-reduce also computes the quantised norm, with one program per
    row. For other numbers of rows, two kernels are faster."""


_LIMITS = {
    2: AllReduceLimits(two_shot_bytes=4 << 20),
    4: AllReduceLimits(two_shot_bytes=3 << 19, quantised_rows=range(5, 9)),
    8: AllReduceLimits(two_shot_bytes=128 << 10),
}
"""The limits by number of ranks.

`two_shot_bytes` was measured for two ranks on 2 × H200, and both values for four ranks on 4 × H100
(docs/parallel.md). `two_shot_bytes` for eight ranks is computed: the second exchange costs 2.5 µs, and for n
ranks the two-shot all-reduce saves (n - 1)(1 - 2 / n) × size / bandwidth on an NVLink with 373 GB/s.
`quantised_rows` has not been measured for two and eight ranks. `group_bytes` is the same for all numbers of
ranks: on 4 × H100, pieces of 4,096 rows of 8,192 numbers take 365 µs, and NCCL 324 µs. With half as many
rows, these are 182 and 171 µs, but launching NCCL takes the host another 0.1 ms.
"""


def limits_of(size: int) -> AllReduceLimits:
    """Return the limits for `size` ranks, which are those of the largest known number of ranks up to
    `size`."""
    return _LIMITS[max((known for known in _LIMITS if known <= size), default=2)]
