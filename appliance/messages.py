"""The structs between the core and a front. Plain data, msgpack on the wire (`engine.wire`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from appliance.protocol import FrontStats, LogLevel
from store.policies import INTERACTIVE, LogPolicy

SocketKind = Literal["unix", "tcp"]
ExceededLimit = Literal["", "requests", "tokens"]
"""What the exceeded limit counts: OpenAI's `type` of the error; "" if the status determines the type."""
SecretKind = Literal["keys", "bearer_tokens", "passwords", "private_keys", "emails", "cards"]

# ── core to front ────────────────────────────────────────────────────────────────────────────────


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that applications can name."""

    name: str
    folder: str
    """The folder with the tokenizer and the chat template."""
    version: str
    """Identifies the model's files: a fingerprint of the folder."""
    created: int
    """When the model's files were created, in unix seconds."""
    max_model_len: int
    """The limit of prompt and output together, in tokens."""
    vocab_size: int


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tenant to which a request is billed, and the request's rights: those of the tenant, restricted by
    its key.

    The core looks the rights up by `tenant` and `key_id`; a front's copy serves to refuse requests early.
    """

    tenant: str
    key_id: str = ""
    """The id of the key; empty for a Unix peer."""
    scopes: tuple[str, ...] = ("inference",)
    """Scopes from `store.policies.SCOPES`."""
    models: tuple[str, ...] | None = None
    """The models that the request may name; None: all."""
    highest_class: int = INTERACTIVE
    """The best class that the request can get; 0 is P0."""
    default_class: int = INTERACTIVE
    """The class of a request that names none."""
    context_tokens: int | None = None
    """The limit of prompt and output together; None: that of the model."""
    default_max_tokens: int | None = None
    """The output limit of a request without `max_tokens`; None: up to the length limit."""
    log_policy: LogPolicy = "metadata"
    expires_at: float | None = None
    """When the key expires, in Unix seconds."""
    suspended: bool = False
    """Whether the tenant is suspended: all its requests are refused."""


class Identities(msgspec.Struct, tag="identities", frozen=True, kw_only=True):
    """The table with which a front authenticates callers: the whole table (`whole`), which replaces the
    former one, or the changes since then."""

    keys: dict[str, Identity | None] = {}
    """Identities by the SHA-256 (hex) of the bearer key; None: the key is no longer valid."""
    uids: dict[int, Identity] = {}
    """Identities by the uid of a Unix socket's peer. Uids and gids are always complete."""
    gids: dict[int, Identity] = {}
    """Identities by a group of the peer, for peers whose uid is not in `uids`."""
    any_uid: Identity | None = None
    """The identity of all other uids that the socket's file mode admits; None: they are refused."""
    whole: bool = True


_Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Connections = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


Origin = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$",
        description='an origin without a path, such as "https://chat.example.com", or "*" for all',
    ),
]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a front for its clients."""

    max_body_bytes: _Bytes = 2 << 20
    """Maximum size of a body; a larger one is refused with 413. 131,072 tokens of text have about 1 MB.
    Parsing blocks the other requests of a front for up to 20 ms for each MB."""
    header_timeout_s: _PositiveSeconds = 10.0
    """A request whose header does not arrive within this time is refused with 408."""
    body_timeout_s: _PositiveSeconds = 30.0
    """A request whose body does not arrive within this time after the header is refused with 408."""
    idle_timeout_s: _PositiveSeconds = 75.0
    """An idle keep-alive connection is closed after this time."""
    max_connections: _Connections = 4096
    """Connections of known clients in each front: local users of the Unix socket, and clients that have sent
    a valid key. At the limit, the connection that has been idle longest is closed; if none is idle, the new
    one gets 503."""
    max_unauthenticated_connections: _Connections = 256
    """Connections in each front that have not yet sent a request with a valid key. At the limit, the oldest
    such connection of the address with the most of them is closed."""
    unauthenticated_timeout_s: _PositiveSeconds = 10.0
    """Such a connection is closed when it sends no request for this long; it shortens the other timeouts."""
    max_tenant_body_bytes: _Bytes = 32 << 20
    """Total size of the request bodies of one tenant that a front holds at a time; a body beyond it is
    refused with 503. One body of `max_body_bytes` is always possible."""
    max_front_body_bytes: _Bytes = 64 << 20
    """Total size of the request bodies that a front holds at a time; a body beyond it is refused with 503."""
    stream_comment_interval_s: _Seconds = 5.0
    """A stream that has sent nothing for this long gets a comment (a line that clients skip), so that proxies
    keep its connection; its headers are sent after half a second at most. 0: no comments, and the headers are
    sent with the first token."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins (scheme, host and port, without a path) whose web pages may call the API, such as
    "https://chat.example.com", or "*" for all; none by default."""


class RetryRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a front treats requests with an `Idempotency-Key`."""

    keep_s: _Seconds = 600.0
    """For how long the answer of a run that ended is kept."""
    grace_s: _Seconds = 30.0
    """How long a run continues after its last client has disconnected."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 64 << 20
    """Maximum memory for answers in each front."""


class KeepRules(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts and answers are stored for tenants whose log policy requires it."""

    redact: tuple[SecretKind, ...] = ("keys", "bearer_tokens", "passwords", "private_keys")
    """Kinds of secrets that are removed."""
    secret_prefixes: tuple[Annotated[str, msgspec.Meta(min_length=2)], ...] = ()
    """Words of at least 8 characters that begin with one of these prefixes are removed too, such as the keys
    of your own services: ["acme_"]."""
    max_text_chars: Annotated[int, msgspec.Meta(ge=0, le=1 << 22)] = 65536
    """Size limit of one stored prompt or answer; of a longer one, the beginning is stored."""


class Configure(msgspec.Struct, tag="configure", frozen=True, kw_only=True):
    """What the front serves. This is the first message to a front, and is sent again when something in it
    changes."""

    front: str
    serial: int = 0
    """Increases with each message; the front reports the last one that it has applied."""
    models: list[ServedModel]
    limits: Limits
    ready: bool
    """Whether every model that is not drained answers: the result of `/health/ready`."""
    reason: str = ""
    """Why the service is not ready."""
    silent: dict[str, str] = {}
    """The models that do not answer, and why: the result of `/health/ready?model=NAME`."""
    log_level: LogLevel = "info"
    retries: RetryRules = RetryRules()
    keeping: KeepRules = KeepRules()


class AttachReplica(msgspec.Struct, tag="attach_replica", frozen=True):
    """A channel to a replica. One file descriptor is sent with the message."""

    replica: str
    model: str


class ClientConnection(msgspec.Struct, tag="connection", frozen=True):
    """A client's connection, accepted by the core. One file descriptor is sent with the message."""

    kind: SocketKind
    peer: str
    """The address of a TCP peer; empty for a Unix socket (the front reads SO_PEERCRED)."""
    has_request: bool = False
    """Whether another front has read a request from the connection: a second descriptor (a memfd) then holds
    its bytes."""


class Claimed(msgspec.Struct, tag="claimed", frozen=True):
    """The answer to a `Claim`."""

    scope: bytes
    is_elsewhere: bool
    """Another front runs the request or keeps its answer: send it the connection (`HandOver`). Otherwise this
    front runs the request."""
    retry_of: str = ""
    """The request id of an earlier run, whose answer is lost."""


class RateLimits(msgspec.Struct, array_like=True, frozen=True):
    """The levels of the tightest limits that apply to a request; None where there is no limit."""

    limit_requests: int | None
    remaining_requests: int | None
    reset_requests_s: float | None
    """Seconds until the limit is full again, if nothing is used."""
    limit_tokens: int | None
    remaining_tokens: int | None
    reset_tokens_s: float | None


class Admitted(msgspec.Struct, tag="admitted", frozen=True):
    """It is the request's turn: submit it to `replica` now."""

    request_id: str
    attempt: int
    replica: str
    cache_salt: str
    priority: int
    urgency: int = 0
    """The same as `Submit.urgency`."""
    spare_slots: int = 0
    """The same as `Submit.spare_slots`."""
    most_tokens: int | None = None
    """The output limit of each sample; None: as requested."""
    rate_limits: RateLimits | None = None


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The request will not run, or not continue. After the refusal of a first attempt the core has ended the
    row, and no `Settle` follows. After that of a later attempt `Settle` follows, because the client may have
    received a part of the answer."""

    request_id: str
    attempt: int
    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    kind: ExceededLimit = ""
    useless: bool = False
    """Whether an automatic retry, as OpenAI's clients make it, would be useless."""
    rate_limits: RateLimits | None = None


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End this request now, for an operator or after a drain's grace period: the client gets an error."""

    request_id: str
    message: str


class StopFront(msgspec.Struct, tag="stop_front", frozen=True):
    """Take no more connections, finish the running answers within `grace_s`, and end."""

    grace_s: float


# ── front to core ────────────────────────────────────────────────────────────────────────────────


class FrontReady(msgspec.Struct, tag="front_ready", frozen=True):
    """The front has loaded its tokenizers and takes connections."""


class LoggedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that all messages about its row in the log have."""

    request_id: str
    identity: Identity
    peer: str
    """The client as shown in the log: "uid 1000" or an address."""
    endpoint: str
    model: str
    stream: bool
    arrived_at: float
    """Unix seconds at which the request was read."""
    user: str = ""
    """The field `user` of the body; "" if there is none."""


class Admit(LoggedFields, tag="admit", frozen=True, kw_only=True):
    """Asks to run a request. Answered by exactly one `Admitted`, when it is the request's turn, or `Refused`
    with the same attempt, unless the front withdraws the request with `Settle` first."""

    attempt: int = 0
    """0 at first; increased with each resubmission after a replica was lost."""
    submissions: int
    """Number of `Submit` messages that follow the admission: one for each prompt; when resuming, one for each
    unfinished sample."""
    num_seqs: int
    """Number of sequences of all submissions."""
    prompt_tokens: int
    """Prompt tokens of all submissions, when resuming with the output so far: the token credit that it
    uses."""
    max_tokens: int
    """The limit of generated tokens over all samples."""
    may_lower: bool = False
    """Whether the core may lower the limit (`Admitted.most_tokens`), because the client gave none."""
    asked_class: str = ""
    """The class that the client asked for; "" for the default."""
    retry_of: str = ""
    """The request id of an earlier run with the same `Idempotency-Key`, whose answer is lost."""
    deadline_ms: float | None = None
    """The time after `arrived_at` within which the whole answer is needed; None: no deadline."""


class Claim(msgspec.Struct, tag="claim", frozen=True):
    """Asks which front runs a request with an `Idempotency-Key`. Answered by `Claimed`. If this front runs
    it, the claim lasts until `Release`."""

    scope: bytes
    """SHA-256 of the caller, the endpoint and the key."""
    request_id: str


class Release(msgspec.Struct, tag="release", frozen=True):
    """The front no longer has an answer for this scope: the next request runs."""

    scope: bytes
    request_id: str
    """The request id of the run."""
    void: bool
    """Whether the run failed, was given up, or was dropped early: the next request is a retry that runs
    anew."""


class HandOver(msgspec.Struct, tag="hand_over", frozen=True):
    """Passes a client's connection to the front that has claimed this scope. Two file descriptors are sent
    with the message: the connection, and a memfd with the request that was read from it."""

    scope: bytes
    kind: SocketKind
    """The same as `ClientConnection.kind` and `ClientConnection.peer`."""
    peer: str


class Settle(msgspec.Struct, tag="settle", frozen=True, kw_only=True):
    """The end of a request that was not refused, and what the client received. Sent exactly once."""

    request_id: str
    submitted: bool
    """Whether the latest attempt was submitted to its replica (false: withdrawn)."""
    status: int
    """HTTP status code; 499 if the client disconnected."""
    finish_reason: str
    """The finish reasons of the samples, joined by "," if they differ: "stop", "length", "cancelled",
    "error"."""
    error: str = ""
    delivered_tokens: int
    """Output tokens in the answer: what is billed."""
    ttft_ms: float | None = None
    """Time from arrival until the first token's bytes are handed to the socket."""
    itl_ms: float | None = None
    """Mean time between tokens after the first."""
    e2e_ms: float
    """Time from arrival to the end of the answer."""


class Rejected(LoggedFields, tag="rejected", frozen=True, kw_only=True):
    """A request of a known caller that the front refused (4xx), for the log. If the refusal took much work,
    it counts against the caller's rate limits.

    Requests of unknown callers are only counted, so that a flood of them cannot fill the disk.
    """

    status: int
    error: str
    prompt_tokens: int
    work_tokens: int = 0
    """The cost of parsing and encoding the request, in tokens; 0: negligible."""
    e2e_ms: float


class Worked(msgspec.Struct, tag="worked", frozen=True):
    """Tokens that a front encoded or decoded and that are part of no request, such as those that
    `truncate_prompt_tokens` removed. They count against the caller's token limits."""

    identity: Identity
    tokens: int


class Retried(LoggedFields, tag="retried", frozen=True, kw_only=True):
    """A retry that was answered with the result of an earlier request, for the log."""

    retry: Literal["joined", "repeated"]
    """"joined": the run had not ended."""
    retry_of: str
    """The id of the earlier request."""
    request_class: int
    status: int
    finish_reason: str
    error: str
    ttft_ms: float | None
    e2e_ms: float


class Keep(msgspec.Struct, tag="keep", frozen=True, kw_only=True):
    """Prompts and answers of a request, to be stored as the tenant's log policy says. One file descriptor is
    sent with the message: a memfd with a list of `store.structs.KeptText` in msgpack, which the core's event
    loop does not read."""

    request_id: str
    identity: Identity
    created_at: float
    """When the request arrived, in Unix seconds."""


class FrontReport(FrontStats, tag="front_report", frozen=True, kw_only=True):
    """The state of a front, sent every half second and before `FrontReady`."""

    taken_connections: int = 0
    """Connections that the front has received from the core since its start."""
    template_problems: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    """Models whose chat templates exceeded their limits since the start: how often, and the latest limit that
    was exceeded. Such a model is still served."""
    configured: int = 0
    """`serial` of the last `Configure` that was applied."""


CoreToFront = (
    Configure
    | Identities
    | AttachReplica
    | ClientConnection
    | Admitted
    | Refused
    | Claimed
    | Abort
    | StopFront
)
AboutRequest = Admit | Settle | Rejected | Worked | Retried
"""Messages of a front about a request."""
FrontToCore = FrontReady | AboutRequest | Claim | Release | HandOver | Keep | FrontReport
