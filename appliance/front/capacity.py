"""How many connections a front can hold: the settings' limits, or fewer where file descriptors are scarce."""

from __future__ import annotations

import os
import resource

import msgspec

from appliance.messages import Limits

RESERVED_DESCRIPTORS = 32
"""Kept free for channels to replicas, files of tokenizers and connections on their way from the core."""


def limits_within(limits: Limits, descriptors: int) -> Limits:
    """Return `limits` with as many connections as so many descriptors allow, at least one of each kind."""
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
    """Return how many descriptors this process can use for connections, `connections` of which are open."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + limits.max_unauthenticated_connections
    if allowed == resource.RLIM_INFINITY or allowed >= 2 * (wanted + RESERVED_DESCRIPTORS):
        return wanted
    others = len(os.listdir("/proc/self/fd")) - connections
    return allowed - others - RESERVED_DESCRIPTORS
