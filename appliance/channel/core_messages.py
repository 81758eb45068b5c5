"""The messages from the core to a front process: plain structs, sent as msgpack (`engine.wire`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from appliance.channel.front_settings import KeepRules, Limits, RetryRules
from appliance.channel.identity import Identity
from appliance.channel.served_models import Route, ServedModel
from appliance.protocol import LogLevel

SocketKind = Literal["unix", "tcp"]

RefusalCode = Literal[
    "deadline_unreachable",
    "draining",
    "duplicate_request",
    "model_failed",
    "model_not_found",
    "overloaded",
    "queue_full",
    "queue_timeout",
    "rate_limit_exceeded",
    "shadow_dropped",
    "tenant_queue_full",
    "tenant_suspended",
]
ExceededLimit = Literal["", "requests", "tokens"]
"""The kind of limit exceeded, sent in the `type` field of OpenAI's error format. If it is "", the status
determines the type."""


class Identities(msgspec.Struct, tag="identities", frozen=True, kw_only=True):
    """A front process's table for authenticating callers. If `whole` is set, it replaces the previous table;
    otherwise, it contains the changes since the previous message."""

    keys: dict[str, Identity | None] = {}
    """Identities by the SHA-256 (hex) of the bearer key. None means that the key is no longer valid."""
    uids: dict[int, Identity] = {}
    """Identities by the uid of the peer on a Unix socket. `uids` and `gids` are always complete."""
    gids: dict[int, Identity] = {}
    """Identities by the peer's groups, for peers whose uid is not in `uids`."""
    any_uid: Identity | None = None
    """Identity of callers with any other uid that the socket's file mode admits. None means that callers with
    other uids are refused."""
    whole: bool = True


class Configure(msgspec.Struct, tag="configure", frozen=True, kw_only=True):
    """A front process's configuration. This is the first message to a front process, and is sent again
    whenever its content changes."""

    front: str
    serial: int = 0
    """Serial number, which increases with each message. The front process reports that of the latest
    configuration it has applied."""
    models: list[ServedModel]
    routes: list[Route] | None = None
    """The names that applications can use. They take effect when the message arrives, before new models are
    loaded. If the value is None, each model can be used only by its own name."""
    max_held: int = 1000
    """Maximum number of requests per front process that may wait for models to be loaded."""
    hold_timeout_s: float = 60.0
    """Maximum time in seconds for which a request waits for a model to be loaded."""
    limits: Limits
    ready: bool
    """Whether every model that is not drained can answer requests. `/health/ready` returns this value."""
    reason: str = ""
    """Reason why the service is not ready."""
    silent: dict[str, str] = {}
    """Names whose models cannot answer requests, with the reasons, as returned by
    `/health/ready?model=NAME`."""
    log_level: LogLevel = "info"
    retries: RetryRules = RetryRules()
    keeping: KeepRules = KeepRules()


class AttachReplica(msgspec.Struct, tag="attach_replica", frozen=True):
    """A channel to a replica. The message carries one file descriptor."""

    replica: str
    model: str


class ClientConnection(msgspec.Struct, tag="connection", frozen=True):
    """A client connection accepted by the core. The message carries one file descriptor."""

    kind: SocketKind
    peer: str
    """Address of a TCP peer; empty for a Unix socket, for which the front process reads SO_PEERCRED."""
    has_request: bool = False
    """Whether another front process has already read a request from the connection. In this case, the message
    carries a second descriptor: a memfd with the bytes of the request."""
    number: int = 0
    """Number of the connection, which is unique for this front process. `Taken` and `NotTaken` refer to the
    connection by this number."""


class Claimed(msgspec.Struct, tag="claimed", frozen=True):
    """The reply to a `Claim`."""

    scope: bytes
    is_elsewhere: bool
    """Whether another front process runs the request or keeps its answer. If so, the front process that
    receives this message must pass the connection on to that process (`HandOver`). If not, it must run the
    request itself."""
    retry_of: str = ""
    """Request id of an earlier run of the request whose answer is no longer kept, or an empty string."""


class RateLimits(msgspec.Struct, array_like=True, frozen=True):
    """State of a request's limits that are closest to exhaustion. None means no limit."""

    limit_requests: int | None
    remaining_requests: int | None
    reset_requests_s: float | None
    """Seconds until the full limit is available again if nothing more is used."""
    limit_tokens: int | None
    remaining_tokens: int | None
    reset_tokens_s: float | None


class Admitted(msgspec.Struct, tag="admitted", frozen=True):
    """The request has been admitted and must be submitted to `replica` immediately."""

    request_id: str
    attempt: int
    replica: str
    cache_salt: str
    priority: int
    urgency: int = 0
    """Same as `Submit.urgency`."""
    reserved_slots: int = 0
    """Same as `Submit.reserved_slots`."""
    most_tokens: int | None = None
    """Limit on each sample's output tokens, or None if the requested limit applies."""
    rate_limits: RateLimits | None = None


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The request is refused, either before it runs or before it continues. If the first attempt is refused,
    the core has already closed the request's row in the log, and no `Settle` follows. If a later attempt is
    refused, `Settle` follows, because the client may have received part of the answer."""

    request_id: str
    attempt: int
    status: int
    code: RefusalCode
    message: str
    retry_after_s: float | None = None
    kind: ExceededLimit = ""
    useless: bool = False
    """Whether a retry would fail as well. If so, OpenAI's clients are told not to retry automatically."""
    rate_limits: RateLimits | None = None
    falls_back: bool = False
    """True if the request stays open because `Admit.may_fall_back` is set and another model may be able to
    answer it. The front process then sends either a new first attempt for the fallback model, or `Settle`."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End this request immediately, because an operator has cancelled it or because the grace period of a
    drain has ended. The client gets an error."""

    request_id: str
    message: str


class Preempted(msgspec.Struct, tag="preempted", frozen=True):
    """The request's replica is about to be stopped to make room for another model. The request continues on
    the next replica. This does not count as a lost replica."""

    request_id: str


class AskProgress(msgspec.Struct, tag="ask_progress", frozen=True):
    """Asks a front process for the progress of its requests. The reply is `FrontProgress`."""

    number: int
    """Query number, repeated in the reply."""


class StopFront(msgspec.Struct, tag="stop_front", frozen=True):
    """Accept no more connections, finish the running answers within `grace_s` seconds, and exit."""

    grace_s: float


CoreToFront = (
    Configure
    | Identities
    | AttachReplica
    | ClientConnection
    | Admitted
    | Refused
    | Claimed
    | Abort
    | Preempted
    | AskProgress
    | StopFront
)
