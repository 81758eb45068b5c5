"""Message sizes at which ranks switch between all-reduce implementations, as measured by
`engine.bench.collectives`."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = 1 << 62
"""A size, in bytes, larger than any message."""


@dataclass(frozen=True, slots=True)
class AllReduceLimits:
    """The all-reduce implementation for each message size: a one-shot all-reduce through peer memory for the
    smallest messages, a two-shot all-reduce for larger ones, and the group's all-reduce (NCCL) for the
    largest."""

    two_shot_bytes: int
    """Minimum message size, in bytes, for the two-shot all-reduce."""
    group_bytes: int = 64 << 20
    """Minimum message size, in bytes, for the group's all-reduce. Smaller messages that do not fit into the
    arena are sent in pieces."""
    quantised_rows: range = range(2, 65)
    """Row counts at which a one-shot all-reduce also computes the quantised norm, with one program per row.
    At other counts, two separate kernels are faster."""


_LIMITS = {
    2: AllReduceLimits(two_shot_bytes=4 << 20),
    4: AllReduceLimits(two_shot_bytes=128 << 10, quantised_rows=range(5, 8)),
    8: AllReduceLimits(two_shot_bytes=128 << 10),
}
"""The limits, keyed by the number of ranks.

`two_shot_bytes` was measured for two ranks on 2 × H200. For four ranks, `two_shot_bytes` and `quantised_rows`
were measured on 4 × H200 (docs/parallel.md). For eight ranks, `two_shot_bytes` is an estimate: with n ranks,
a two-shot all-reduce moves (n - 1)(1 - 2 / n) × size fewer bytes through each GPU's NVLink (373 GB/s), but
its second exchange takes 2.5 µs. `quantised_rows` has not been measured for two or eight ranks. `group_bytes`
is the same for any number of ranks. On 4 × H100, a message of 4,096 rows of 8,192 numbers takes 365 µs if it
is sent in pieces, and 324 µs with NCCL. With half as many rows, the times are 182 µs and 171 µs, but the host
needs an additional 0.1 ms to launch NCCL.
"""


def limits_of(size: int) -> AllReduceLimits:
    """Return the limits for `size` ranks, or for the next smaller number of ranks that has limits."""
    return _LIMITS[max((known for known in _LIMITS if known <= size), default=2)]
