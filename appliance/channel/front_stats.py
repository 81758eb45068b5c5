"""The counters and measurements sent by a front process to the core."""

from __future__ import annotations

import msgspec


class FrontStats(msgspec.Struct, frozen=True, kw_only=True):
    """A front process's counters and measurements. Totals count from the start of the process."""

    connections: int = 0
    busy_connections: int = 0
    """Number of connections of authenticated clients on which a request is being answered. Local users and
    clients with a valid key count as authenticated."""
    max_connections: int = 0
    """Maximum number of connections of authenticated clients. This is the configured limit, or less if file
    descriptors are scarce."""
    unauthenticated_connections: int = 0
    """Number of connections on which no request with a valid key has arrived yet."""
    refused_connections: int = 0
    """Number of connections that were closed, or answered with 503, because the limit was reached."""
    evicted_connections: int = 0
    """Number of connections without a valid key that were closed to make room for new connections."""
    cut_off_connections: int = 0
    """Number of connections that were closed because their clients did not read the answers."""
    unreceived_connections: int = 0
    """Number of connections that were returned to the core because the process had too many open files to
    receive them."""
    refused_bodies: int = 0
    """Number of requests refused because too many bytes of request bodies were being received."""
    refused_heads: int = 0
    """Number of requests refused because too many bytes of request headers were being received."""
    refused_prompts: int = 0
    """Number of requests refused because their tenant had too many prompts or conversations in progress."""
    streams: int = 0
    requests: int = 0
    tokens: int = 0
    """Number of tokens sent in streams."""
    unauthenticated: int = 0
    """Number of requests that were denied because they had no valid key and did not come from a permitted
    user."""
    cpu_seconds: float = 0.0
    kept_answers: int = 0
    """Number of requests with an `Idempotency-Key` that are running, or whose answers are kept for
    retries."""
    kept_bytes: int = 0
    """Memory in bytes occupied by answers to requests with an `Idempotency-Key`."""
    dropped_texts: int = 0
    """Number of requests for which prompts and answers were not stored, because too many were waiting to be
    stored."""
    log_dropped_lines: int = 0
    """Number of log lines dropped because standard error was not being read."""
    problems: dict[str, str] = {}
    """Models that the front process cannot serve, with the reason for each model, such as an unreadable
    tokenizer."""
