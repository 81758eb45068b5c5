"""Settings that the core passes on to front processes: limits, retry rules, and rules for storing texts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

SecretKind = Literal["keys", "bearer_tokens", "passwords", "private_keys", "emails", "cards"]

_Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Connections = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]

Origin = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$",
        description='an origin without a path, such as "https://chat.example.com", or "*" for all origins',
    ),
]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on a front process's connections and requests."""

    max_body_bytes: _Bytes = 2 << 20
    """Maximum size of a request body, in bytes. Larger bodies are refused with 413. 131,072 tokens of text
    are about 1 MB. Parsing a body delays the front process's other requests by up to 20 ms per MB."""
    header_timeout_s: _PositiveSeconds = 10.0
    """Maximum time, in seconds, for a request's headers to arrive. Slower requests are refused with 408."""
    body_timeout_s: _PositiveSeconds = 30.0
    """Maximum time, in seconds, for a request's body to arrive after the headers. Slower requests are refused
    with 408."""
    idle_timeout_s: _PositiveSeconds = 75.0
    """Time, in seconds, after which an idle keep-alive connection is closed."""
    max_connections: _Connections = 4096
    """Maximum number of authenticated connections per front process. These are connections from local users
    on the Unix socket and from clients that have sent a valid key. Once the limit is reached, each new
    connection replaces the one that has been idle longest. If none is idle, the new connection is refused
    with 503."""
    max_unauthenticated_connections: _Connections = 256
    """Maximum number of unauthenticated connections per front process. These are connections on which no
    request with a valid key has arrived yet. Once the limit is reached, each new connection replaces the
    oldest one from the address with the most unauthenticated connections."""
    unauthenticated_timeout_s: _PositiveSeconds = 10.0
    """Time, in seconds, after which an unauthenticated connection that has sent no request is closed. Longer
    timeouts are shortened to this value for unauthenticated connections."""
    max_tenant_body_bytes: _Bytes = 32 << 20
    """Maximum total size, in bytes, of one tenant's unfinished request bodies per front process. A body that
    would exceed this total is refused with 503, but a single body of up to `max_body_bytes` is always
    accepted."""
    max_front_body_bytes: _Bytes = 64 << 20
    """Maximum total size, in bytes, of all unfinished request bodies per front process. A body that would
    exceed this total is refused with 503."""
    stream_comment_interval_s: _Seconds = 5.0
    """A stream that has sent nothing for this many seconds sends a comment, so that proxies do not close the
    connection. Clients ignore comments. Response headers are then also sent early, within half a second,
    instead of with the first token. 0 turns off both."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins whose web pages may call the API, such as "https://chat.example.com", or "*" for all. An origin
    has a scheme, a host and optionally a port, but no path. By default, no origin is allowed."""


class RetryRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for requests with an `Idempotency-Key`."""

    keep_s: _Seconds = 600.0
    """How long, in seconds, a finished request's answer is kept for retries."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 64 << 20
    """Maximum memory, in bytes, for kept answers per front process."""


class KeepRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for storing the prompts and answers of tenants whose log policy requires it."""

    redact: tuple[SecretKind, ...] = ("keys", "bearer_tokens", "passwords", "private_keys")
    """Kinds of secrets to remove from stored prompts and answers."""
    secret_prefixes: tuple[Annotated[str, msgspec.Meta(min_length=2)], ...] = ()
    """Prefixes of additional secrets, such as ["acme_"] for your own services' keys. Words of at least 8
    characters with such a prefix are removed too."""
    max_text_chars: Annotated[int, msgspec.Meta(ge=0, le=1 << 22)] = 65536
    """Maximum number of characters stored per prompt or answer. Longer texts are truncated."""
