"""The counters and measurements that a front process sends to the core."""

from __future__ import annotations

import msgspec


class FrontStats(msgspec.Struct, frozen=True, kw_only=True):
    """A front process's counters and measurements. Totals cover the time since the process started."""

    connections: int = 0
    busy_connections: int = 0
    """Connections from authenticated clients on which a request is being answered. Local users and clients
    with a valid key count as authenticated."""
    max_connections: int = 0
    """Maximum number of connections from authenticated clients: the configured limit, or less if file
    descriptors are scarce."""
    unauthenticated_connections: int = 0
    """Connections on which no request with a valid key has arrived yet."""
    refused_connections: int = 0
    """Connections closed or answered with 503 because the limit was reached."""
    evicted_connections: int = 0
    """Connections without a valid key that were closed to make room for new connections."""
    cut_off_connections: int = 0
    """Connections closed because their clients did not read the responses."""
    unreceived_connections: int = 0
    """Connections returned to the core because the process had too many open files to receive them."""
    refused_bodies: int = 0
    """Requests refused because unfinished request bodies used too much memory."""
    refused_heads: int = 0
    """Requests refused because unfinished request headers used too much memory."""
    refused_prompts: int = 0
    """Requests refused because their tenant had too many prompts or conversations in progress."""
    streams: int = 0
    requests: int = 0
    tokens: int = 0
    """Tokens sent in streaming responses."""
    unauthenticated: int = 0
    """Requests denied because they had no valid key and did not come from a permitted user."""
    cpu_seconds: float = 0.0
    kept_answers: int = 0
    """Requests with an `Idempotency-Key` that are running or whose answers are kept for retries."""
    kept_bytes: int = 0
    """Memory, in bytes, taken up by answers to requests with an `Idempotency-Key`."""
    dropped_texts: int = 0
    """Requests whose prompts and answers were not stored because too many texts were waiting to be stored."""
    log_dropped_lines: int = 0
    """Log lines dropped because standard error was not being read."""
    problems: dict[str, str] = {}
    """Models that the front process cannot serve, each with the reason, such as an unreadable tokenizer."""
