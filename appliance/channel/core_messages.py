"""Messages from the core to a front process: plain structs, sent as msgpack (`engine.wire`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from appliance.channel.front_settings import KeepRules, Limits, RetryRules
from appliance.channel.identity import Identity
from appliance.channel.served_models import Route, ServedModel
from appliance.protocol import LogLevel

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
"""The kind of limit that was exceeded, sent as `type` in OpenAI's error format. If empty, the HTTP status
determines the type."""


class Identities(msgspec.Struct, tag="identities", frozen=True, kw_only=True):
    """A front process's table for authenticating callers. If `whole` is set, this message replaces the
    previous table; otherwise, it contains the changes since the previous message."""

    keys: dict[str, Identity | None] = {}
    """Identities, keyed by the SHA-256 (hex) of the bearer key. None means that the key is no longer
    valid."""
    uids: dict[int, Identity] = {}
    """Identities, keyed by the uid of a Unix socket's peer. Unlike `keys`, `uids` and `gids` always contain
    all identities, not only changes."""
    gids: dict[int, Identity] = {}
    """Identities, keyed by group id, for peers whose uid is not in `uids`."""
    any_uid: Identity | None = None
    """The identity of callers that can open the socket but are in neither `uids` nor `gids`. If None, such
    callers are refused."""
    whole: bool = True


class Configure(msgspec.Struct, tag="configure", frozen=True, kw_only=True):
    """A front process's configuration. Sent as the first message to the process, and again after every
    change."""

    front: str
    serial: int = 0
    """Serial number, which increases with each message. The front process reports the serial number of the
    latest configuration it has applied."""
    models: list[ServedModel]
    routes: list[Route] = []
    """The names that applications can use for models. The names take effect when the message arrives, before
    new models are loaded. Requests for a new model wait until the front process has loaded it."""
    max_held: int = 1000
    """Maximum number of requests per front process that may be waiting for a model to be loaded."""
    hold_timeout_s: float = 60.0
    """Maximum time, in seconds, that a request waits for a model to be loaded."""
    limits: Limits
    ready: bool
    """Whether every model that is not drained can answer requests, as returned by `/health/ready`."""
    reason: str = ""
    """Why the service is not ready."""
    silent: dict[str, str] = {}
    """Names whose models cannot answer requests, each with the reason that `/health/ready?model=NAME`
    returns."""
    log_level: LogLevel = "info"
    retries: RetryRules = RetryRules()
    keeping: KeepRules = KeepRules()


class AttachReplica(msgspec.Struct, tag="attach_replica", frozen=True):
    """Gives a front process a channel to a replica. The message carries one file descriptor."""

    replica: str


class ClientConnection(msgspec.Struct, tag="connection", frozen=True):
    """Gives a front process a client connection that the core has accepted. The message carries one file
    descriptor."""

    peer: str
    """Address of a TCP peer. Empty for a Unix socket, whose peer the front process identifies with
    SO_PEERCRED."""
    has_request: bool = False
    """Whether another front process has already read a request from the connection. If so, the message
    carries a second descriptor: a memfd with the request's bytes."""
    number: int = 0
    """The connection's number, unique within this front process. `Taken` and `NotTaken` identify the
    connection by this number."""


class Claimed(msgspec.Struct, tag="claimed", frozen=True):
    """The core's reply to a front process's `Claim`."""

    scope: bytes
    hand_over: bool = False
    """Whether another front process has this request's run or answer and must be handed the connection
    (`HandOver`). If not, this process must run the request."""
    retry_of: str = ""
    """Request id of an earlier run whose answer is no longer kept, or an empty string."""


class RateLimits(msgspec.Struct, array_like=True, frozen=True):
    """The request limit and the token limit that are closest to exhaustion, and what remains of them. None
    means that there is no such limit."""

    limit_requests: int | None
    remaining_requests: int | None
    reset_requests_s: float | None
    """Seconds until the full limit is available again, assuming that no more requests arrive."""
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
    """The request's urgency, which the front sends to the replica as `Submit.urgency`."""
    reserved_slots: int = 0
    """Number of the replica's slots reserved for urgent requests, sent on as `Submit.reserved_slots`."""
    most_tokens: int | None = None
    """Maximum number of output tokens per sample, or None to use the requested limit."""
    rate_limits: RateLimits | None = None


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The request is refused, either on its first attempt or when it is resubmitted. No `Settle` follows the
    refusal of a first attempt, because the core has already closed the request's row in the request log.
    `Settle` does follow the refusal of a later attempt, because the client may have received part of the
    answer."""

    request_id: str
    attempt: int
    status: int
    code: RefusalCode
    message: str
    retry_after_s: float | None = None
    kind: ExceededLimit = ""
    useless: bool = False
    """Whether a retry would also fail. If so, OpenAI's clients are told not to retry automatically."""
    rate_limits: RateLimits | None = None
    falls_back: bool = False
    """Whether the request stays open because another model may be able to answer it (`Admit.may_fall_back`).
    If so, the front process sends either a new first attempt, for the fallback model, or `Settle`."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Ends a request immediately, because an operator has cancelled it or a drain's grace period has ended.
    The client gets an error."""

    request_id: str
    message: str


class Preempted(msgspec.Struct, tag="preempted", frozen=True):
    """The request's replica is about to be stopped to make room for another model. The request continues on
    another replica. The stopped replica does not count as lost."""

    request_id: str


class AskProgress(msgspec.Struct, tag="ask_progress", frozen=True):
    """Asks a front process for the progress of its requests. The reply is `FrontProgress`."""

    number: int
    """The query's number, which the reply repeats."""


class StopFront(msgspec.Struct, tag="stop_front", frozen=True):
    """Tells a front process to stop accepting connections, finish the answers in progress within `grace_s`
    seconds, and exit."""

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
