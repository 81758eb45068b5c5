"""Lowers a front's connection limits if its process has too few file descriptors for them."""

from __future__ import annotations

import errno
import os
import resource

import msgspec

from appliance.channel.front_settings import Limits

RESERVED_DESCRIPTORS = 32
"""File descriptors reserved for channels to replicas, tokenizer files, and connections arriving from the
core."""


def limits_within(limits: Limits, descriptors: int) -> Limits:
    """Return `limits`, lowered if they allow more than `descriptors` connections in total. The returned
    limits always allow at least one authenticated and one unauthenticated connection."""
    wanted = limits.max_connections + limits.max_unauthenticated_connections
    if wanted <= descriptors:
        return limits
    unauthenticated = min(limits.max_unauthenticated_connections, max(descriptors // 8, 1))
    return msgspec.structs.replace(
        limits,
        max_connections=min(limits.max_connections, max(descriptors - unauthenticated, 1)),
        max_unauthenticated_connections=unauthenticated,
    )


def descriptors_for_connections(limits: Limits, connections: int) -> int:
    """Return how many file descriptors this process can use for connections. `connections` is the number of
    connections already open; their descriptors are included."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + limits.max_unauthenticated_connections
    if allowed == resource.RLIM_INFINITY or allowed >= 2 * (wanted + RESERVED_DESCRIPTORS):
        return wanted
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        # Listing /proc/self/fd requires a descriptor, but none is free.
        used = allowed
    return allowed - (used - connections) - RESERVED_DESCRIPTORS
