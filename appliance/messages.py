"""The messages between the core and a front process: plain structs, sent as msgpack (`engine.wire`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from appliance.channel.front_stats import FrontStats
from appliance.channel.sampling import SamplingDefaults
from appliance.protocol import LogLevel
from store.policies import BACKGROUND, INTERACTIVE, LogPolicy

SocketKind = Literal["unix", "tcp"]
ExceededLimit = Literal["", "requests", "tokens"]
"""The kind of limit that was exceeded. It is sent in the `type` field of OpenAI's error format. If it is "",
the status determines the type."""
SecretKind = Literal["keys", "bearer_tokens", "passwords", "private_keys", "emails", "cards"]

# ── core to front ────────────────────────────────────────────────────────────────────────────────


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or a version of a model, that is loaded or being loaded."""

    name: str
    """The unit of loading: the name of a model in the settings, or NAME@VERSION for a version in the
    registry."""
    folder: str
    """Folder with the tokenizer and the chat template."""
    version: str
    """Fingerprint of the folder, which identifies the version of the model's files."""
    created: int
    """When the model's files were created, in unix seconds."""
    max_model_len: int
    """Maximum total length of prompt and output, in tokens."""
    vocab_size: int
    required: bool = True
    """Whether the service counts as ready only while this model is ready."""
    chat_template: str | None = None
    """File with a chat template that replaces the templates in the folder."""
    sampling: SamplingDefaults = SamplingDefaults()
    """Default sampling parameters, for requests that do not set them."""


class Arm(msgspec.Struct, frozen=True, array_like=True):
    """One of the units over which the requests for a split name are distributed."""

    unit: str
    weight: float
    """Share of the requests, relative to the weights of the other arms."""
    target: str
    """The target in the operator's notation. Callers are assigned to targets by this name, so they stay with
    a target even if its default version changes."""


class Shadow(msgspec.Struct, frozen=True, array_like=True):
    """A unit to which a share of a name's requests is copied."""

    unit: str
    share: float
    """Fraction of the requests, from 0 to 1."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A name that applications can use."""

    name: str
    unit: str
    """`ServedModel.name` of the model that answers requests for the name. If empty, requests wait until a
    model is loaded for the name."""
    created: int = 0
    """When the model's files were created, in unix seconds."""
    max_model_len: int = 0
    listed: bool = True
    """Whether `GET /v1/models` lists the name, because the model can answer now or on demand."""
    fallback: str = ""
    """Name of the model that answers requests if this one cannot, provided that the key allows it."""
    shadow: Shadow | None = None
    arms: tuple[Arm, ...] = ()
    """If the name is split, the units that can answer. `unit` is then the arm with the largest weight."""
    on_demand: bool = False
    """Whether a request loads or wakes the model (`FrontReport.wanted`). Set only if `unit` is empty."""
    problem: str = ""
    """Reason why the latest load on demand failed. If set, requests are refused instead of waiting."""


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identifies the tenant that is billed for a request, and contains the request's rights: the tenant's
    rights, restricted by the key. The core looks up the rights by `tenant` and `key_id`. A front process uses
    its copy only to refuse requests early.
    """

    tenant: str
    key_id: str = ""
    """Id of the key, or empty for a Unix peer."""
    scopes: tuple[str, ...] = ("inference",)
    """Scopes from `store.policies.SCOPES`."""
    models: tuple[str, ...] | None = None
    """Models that the request may name, or None for all."""
    highest_class: int = INTERACTIVE
    """Class with the highest priority that the request can get. 0 is P0."""
    default_class: int = INTERACTIVE
    """Class of a request that does not name one."""
    context_tokens: int | None = None
    """Maximum total length of prompt and output, or None for the model's limit."""
    default_max_tokens: int | None = None
    """Output limit of a request without `max_tokens`, or None for the remaining context length."""
    log_policy: LogPolicy = "metadata"
    may_fall_back: bool = False
    """Whether a model's fallback may answer the key's requests."""
    expires_at: float | None = None
    """When the key expires, in unix seconds."""
    suspended: bool = False
    """Whether the tenant is suspended, in which case all its requests are refused."""


SHADOW_IDENTITY = Identity(tenant="(shadow)", highest_class=BACKGROUND, default_class=BACKGROUND)
"""The identity of requests copied for shadow traffic. No tenant can have this name, so no tenant is billed
for them."""


class Identities(msgspec.Struct, tag="identities", frozen=True, kw_only=True):
    """The table that a front process uses to authenticate callers. If `whole` is set, the table replaces the
    previous one. Otherwise, it contains the changes since the previous message."""

    keys: dict[str, Identity | None] = {}
    """Identities by SHA-256 (hex) of the bearer key. None means that the key is no longer valid."""
    uids: dict[int, Identity] = {}
    """Identities by the uid of the peer on a Unix socket. `uids` and `gids` are always complete."""
    gids: dict[int, Identity] = {}
    """Identities by the peer's groups, for peers whose uid is not in `uids`."""
    any_uid: Identity | None = None
    """Identity of all other uids that the socket's file mode admits. None means that other uids are
    refused."""
    whole: bool = True


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
    """Limits on the connections and requests that a front process accepts."""

    max_body_bytes: _Bytes = 2 << 20
    """Maximum size of a request body in bytes. A larger body is refused with 413. 131,072 tokens of text are
    about 1 MB. Parsing a body blocks the other requests of the front process for up to 20 ms per MB."""
    header_timeout_s: _PositiveSeconds = 10.0
    """Time in seconds within which a request's header must arrive. Otherwise, the request is refused with
    408."""
    body_timeout_s: _PositiveSeconds = 30.0
    """Time in seconds after the header within which a request's body must arrive. Otherwise, the request is
    refused with 408."""
    idle_timeout_s: _PositiveSeconds = 75.0
    """Time in seconds after which an idle keep-alive connection is closed."""
    max_connections: _Connections = 4096
    """Maximum number of authenticated connections per front process. These are the connections of local users
    on the Unix socket and of clients that have sent a valid key. When a connection exceeds the limit, the
    connection that has been idle longest is closed. If no connection is idle, the new one is refused with
    503."""
    max_unauthenticated_connections: _Connections = 256
    """Maximum number of unauthenticated connections per front process. These are connections on which no
    request with a valid key has arrived yet. When a connection exceeds the limit, the address with the most
    unauthenticated connections loses its oldest one."""
    unauthenticated_timeout_s: _PositiveSeconds = 10.0
    """Time in seconds after which an unauthenticated connection that has sent no request is closed. It is
    also an upper bound for all other timeouts of unauthenticated connections."""
    max_tenant_body_bytes: _Bytes = 32 << 20
    """Maximum total size in bytes of one tenant's unfinished request bodies per front process. A body that
    would exceed it is refused with 503. A single body of up to `max_body_bytes` is always accepted."""
    max_front_body_bytes: _Bytes = 64 << 20
    """Maximum total size in bytes of all unfinished request bodies per front process. A body that would
    exceed it is refused with 503."""
    stream_comment_interval_s: _Seconds = 5.0
    """Time in seconds after which a stream that has sent nothing sends a comment. Clients ignore comments,
    but proxies keep the connection open because of them. Response headers are sent within half a second. With
    0, no comments are sent, and the headers are sent with the first token."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may call the API, such as "https://chat.example.com", or "*" for all. An
    origin has a scheme, a host and optionally a port, but no path. By default, no origin is allowed."""


class RetryRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for requests with an `Idempotency-Key`."""

    keep_s: _Seconds = 600.0
    """Time in seconds for which a finished request's answer is kept for retries."""
    grace_s: _Seconds = 30.0
    """Time in seconds for which a request continues after its last client has disconnected."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 64 << 20
    """Maximum memory in bytes for kept answers per front process."""


class KeepRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for storing prompts and answers, for tenants whose log policy requires that they be stored."""

    redact: tuple[SecretKind, ...] = ("keys", "bearer_tokens", "passwords", "private_keys")
    """Kinds of secrets that are removed from stored prompts and answers."""
    secret_prefixes: tuple[Annotated[str, msgspec.Meta(min_length=2)], ...] = ()
    """Prefixes of additional secrets, such as ["acme_"] for the keys of your own services. Words of at least
    8 characters that begin with one of these prefixes are also removed."""
    max_text_chars: Annotated[int, msgspec.Meta(ge=0, le=1 << 22)] = 65536
    """Maximum number of characters stored per prompt or answer. Longer texts are cut off at this length."""


class Configure(msgspec.Struct, tag="configure", frozen=True, kw_only=True):
    """The configuration of a front process. This is the first message to a front process, and it is sent
    again whenever its content changes."""

    front: str
    serial: int = 0
    """Serial number, which increases with each message. The front process reports the latest serial number
    that it has applied."""
    models: list[ServedModel]
    routes: list[Route] | None = None
    """The names that applications can use. They take effect when the message arrives, before new models are
    loaded. If None, each model can be used by its own name only."""
    max_held: int = 1000
    """Maximum number of requests per front process that may wait for names that have no model."""
    hold_timeout_s: float = 60.0
    """Maximum time in seconds for which a request waits for a name that has no model."""
    limits: Limits
    ready: bool
    """Whether every model that is not drained can answer requests. `/health/ready` returns this value."""
    reason: str = ""
    """Reason why the service is not ready."""
    silent: dict[str, str] = {}
    """Names whose models cannot answer requests, each with the reason. `/health/ready?model=NAME` returns
    this reason."""
    log_level: LogLevel = "info"
    retries: RetryRules = RetryRules()
    keeping: KeepRules = KeepRules()


class AttachReplica(msgspec.Struct, tag="attach_replica", frozen=True):
    """A channel to a replica. The message carries one file descriptor."""

    replica: str
    model: str


class ClientConnection(msgspec.Struct, tag="connection", frozen=True):
    """A client connection that the core has accepted. The message carries one file descriptor."""

    kind: SocketKind
    peer: str
    """Address of a TCP peer; empty for a Unix socket, for which the front process reads SO_PEERCRED."""
    has_request: bool = False
    """Whether another front process has already read a request from the connection. In that case, the message
    carries a second descriptor: a memfd with the request's bytes."""
    number: int = 0
    """Number of the connection, unique per front process. `Taken` repeats it."""


class Claimed(msgspec.Struct, tag="claimed", frozen=True):
    """The reply to a `Claim`."""

    scope: bytes
    is_elsewhere: bool
    """Whether another front process runs the request or keeps its answer. If so, the receiver of this message
    must pass the connection on to that front process (`HandOver`). If not, the receiver must run the
    request."""
    retry_of: str = ""
    """Request id of an earlier run, if its answer is no longer kept."""


class RateLimits(msgspec.Struct, array_like=True, frozen=True):
    """State of the tightest limits that apply to a request. None means that there is no limit."""

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
    """Output limit of each sample, or None for the requested limit."""
    rate_limits: RateLimits | None = None


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The request is refused, either before it runs or before it continues. If the first attempt is refused,
    the core has already closed the request's row in the log, and no `Settle` follows. If a later attempt is
    refused, `Settle` follows, because the client may have received part of the answer."""

    request_id: str
    attempt: int
    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    kind: ExceededLimit = ""
    useless: bool = False
    """Whether a retry would be useless. If so, OpenAI's clients are told not to retry automatically."""
    rate_limits: RateLimits | None = None
    falls_back: bool = False
    """Whether the request is still open, because `Admit.may_fall_back` is set and another model may be able
    to answer it. The front process then sends either another first attempt, for the fallback, or `Settle`."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End this request immediately, because an operator has cancelled it or a drain's grace period is over.
    The client gets an error."""

    request_id: str
    message: str


class Preempted(msgspec.Struct, tag="preempted", frozen=True):
    """The request's replica is about to be stopped to make room for another model. The request continues on
    the next replica, and this does not count as a lost replica."""

    request_id: str


class AskProgress(msgspec.Struct, tag="ask_progress", frozen=True):
    """Asks a front process for the progress of its requests. The reply is `FrontProgress`."""

    number: int
    """Number of the query, which the reply repeats."""


class StopFront(msgspec.Struct, tag="stop_front", frozen=True):
    """Accept no more connections, finish the running answers within `grace_s` seconds, and exit."""

    grace_s: float


# ── front to core ────────────────────────────────────────────────────────────────────────────────


class FrontReady(msgspec.Struct, tag="front_ready", frozen=True):
    """The front process has loaded its tokenizers and accepts connections."""


class LoggedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Request fields that are common to all messages about the request's row in the log."""

    request_id: str
    identity: Identity
    peer: str
    """The client as shown in the log: "uid 1000" or an address."""
    endpoint: str
    model: str
    stream: bool
    arrived_at: float
    """When the request was read, in unix seconds."""
    user: str = ""
    """The `user` field of the body, or "" if there is none."""
    fallback_of: str = ""
    """The requested model, if `model` is that model's fallback."""


class Admit(LoggedFields, tag="admit", frozen=True, kw_only=True):
    """Asks for permission to run a request. The reply has the same attempt number. It is one `Admitted`, sent
    when it is the request's turn, or one `Refused`. There is no reply if the front process first withdraws
    the request with `Settle`."""

    unit: str = ""
    """`ServedModel.name` of the model that the front process has chosen for the requested name. Empty if both
    names are the same."""
    attempt: int = 0
    """0 for the first attempt, and one more for each resubmission after a replica was lost."""
    submissions: int
    """Number of `Submit` messages that follow the admission: one for each prompt, or one for each unfinished
    sample when resuming."""
    num_seqs: int
    """Total number of sequences in all submissions."""
    prompt_tokens: int
    """Number of prompt tokens in all submissions, including the output so far when resuming. The core
    subtracts it from the token credit."""
    max_tokens: int
    """Maximum number of tokens to generate, over all samples."""
    prefixes: tuple[bytes, ...] = ()
    """Hashes of the first prompt's prefixes (`appliance.channel.prefixes`). Empty if there is only one
    replica to choose from."""
    may_fall_back: bool = False
    """Whether the front process can send the request to another model if this one cannot answer it
    (`Refused.falls_back`)."""
    may_lower: bool = False
    """Whether the core may lower the limit (`Admitted.most_tokens`) because the client set none."""
    asked_class: str = ""
    """Class that the client requested, or "" for the default."""
    retry_of: str = ""
    """Request id of an earlier run with the same `Idempotency-Key`, if its answer is no longer kept."""
    deadline_ms: float | None = None
    """Time limit for the whole answer, measured from `arrived_at`, or None for no deadline."""
    shadow_of: str = ""
    """For a copy of a finished request, the original's tenant. The copy may use this tenant's cached
    prefixes. The core refuses the copy unless it can start at once, and does not log it."""
    keep_alive_s: float | None = None
    """Time in seconds for which the model stays loaded for the tenant without further requests. Negative
    values mean indefinitely; None means that the model's setting `idle_unload_s` applies."""


class Claim(msgspec.Struct, tag="claim", frozen=True):
    """Claims a request with an `Idempotency-Key` for the front process that sends this message. The reply is
    `Claimed`, which states whether this or another front process runs the request. In the first case, the
    claim lasts until `Release`."""

    scope: bytes
    """SHA-256 of the caller, the endpoint and the key."""
    request_id: str


class Release(msgspec.Struct, tag="release", frozen=True):
    """The front process no longer keeps an answer for this scope, so the next request with the same key will
    run."""

    scope: bytes


class HandOver(msgspec.Struct, tag="hand_over", frozen=True):
    """Passes a client's connection on to the front process that has claimed this scope. The message carries
    two file descriptors: the connection, and a memfd with the request that was read from it."""

    scope: bytes
    kind: SocketKind
    """Same as `ClientConnection.kind` and `ClientConnection.peer`."""
    peer: str


class Taken(msgspec.Struct, tag="taken", frozen=True):
    """The front process is about to read from a connection. If it exits before it sends this message, no byte
    of the connection is lost, and the core passes the connection on to another front process."""

    number: int
    """Same as `ClientConnection.number`."""


class Settle(msgspec.Struct, tag="settle", frozen=True, kw_only=True):
    """Reports the end of a request that was not refused, with data about the answer that the client received.
    Sent exactly once per request."""

    request_id: str
    submitted: bool
    """Whether the latest attempt was submitted to its replica. Otherwise, the request was withdrawn."""
    status: int
    """HTTP status code, or 499 if the client disconnected."""
    finish_reason: str
    """Finish reasons of the samples, joined by "," if they differ: "stop", "length", "cancelled", "error"."""
    error: str = ""
    delivered_tokens: int
    """Number of output tokens in the answer. This number is billed."""
    ttft_ms: float | None = None
    """Time from arrival until the bytes of the first token were passed to the socket."""
    itl_ms: float | None = None
    """Mean time between tokens after the first token."""
    e2e_ms: float
    """Time from arrival to the end of the answer."""


class Rejected(LoggedFields, tag="rejected", frozen=True, kw_only=True):
    """Log record of an authenticated caller's request that the front process rejected (4xx). If rejecting it
    was expensive, the cost counts against the caller's rate limits.

    Requests from unauthenticated callers are only counted. Otherwise, a flood of them could fill the disk.
    """

    status: int
    error: str
    prompt_tokens: int
    work_tokens: int = 0
    """Cost of parsing and encoding the request, in tokens. 0 means negligible."""
    e2e_ms: float


class Worked(msgspec.Struct, tag="worked", frozen=True):
    """Tokens that a front process encoded or decoded but that are in no request, such as tokens removed by
    `truncate_prompt_tokens`. They are charged against the caller's token limits."""

    identity: Identity
    tokens: int


class ShadowMeasure(msgspec.Struct, array_like=True, frozen=True):
    """Timings and length of an answer. Times are in seconds, measured from the time when the request was sent
    to the replica."""

    ttft_s: float
    e2e_s: float
    tokens: int


class ShadowDone(msgspec.Struct, tag="shadow_done", frozen=True, kw_only=True):
    """The result of a request that was copied to a shadow model."""

    name: str
    """Name that the original request used."""
    unit: str
    """Unit to which the request was copied."""
    outcome: Literal["compared", "dropped", "failed"]
    """"dropped": the copy could not start at once. "failed": the copy was refused, or ended with an error."""
    original: ShadowMeasure | None = None
    """Measurements of the original answer. Set only if the answers were compared, like `copy`."""
    copy: ShadowMeasure | None = None
    equal_tokens: int | None = None
    """Number of tokens before the first difference between the answers, over all samples. None unless the
    request was greedy and both prompts have the same tokens."""


class Retried(LoggedFields, tag="retried", frozen=True, kw_only=True):
    """Log record of a retry that was answered with the result of an earlier request."""

    retry: Literal["joined", "repeated"]
    """"joined" means that the earlier request was still running when the retry arrived."""
    retry_of: str
    """Request id of the earlier request."""
    request_class: int
    status: int
    finish_reason: str
    e2e_ms: float


class RequestProgress(msgspec.Struct, array_like=True, frozen=True):
    """The progress of a request."""

    request_id: str
    generated_tokens: int
    """Number of output tokens that the front process has received so far, over all samples."""
    cached_tokens: int
    """Number of prompt tokens found in the prefix cache, over the prompts for which output has arrived."""
    ttft_s: float | None
    """Time from arrival to the first token; None before the first token."""


class FrontProgress(msgspec.Struct, tag="front_progress", frozen=True):
    """The reply to `AskProgress`."""

    number: int
    requests: list[RequestProgress]


class Keep(msgspec.Struct, tag="keep", frozen=True, kw_only=True):
    """A request's prompts and answers, to be stored according to the tenant's log policy. The message carries
    one file descriptor: a memfd with a list of `store.structs.KeptText` in msgpack, which is not read on the
    core's event loop."""

    request_id: str
    identity: Identity
    created_at: float
    """When the request arrived, in unix seconds."""


class FrontReport(FrontStats, tag="front_report", frozen=True, kw_only=True):
    """The state of a front process. It is sent every half second, and also before `FrontReady`, when routes
    have taken effect, and when requests begin to wait for a name without a unit."""

    template_problems: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    """Models with chat templates that have exceeded a limit since startup, each with the number of times and
    the limit that was exceeded last. These models are still served."""
    configured: int = 0
    """`serial` of the last `Configure` message that was applied."""
    routed: int = 0
    """`serial` of the `Configure` message that set the routes in effect."""
    preparing: tuple[str, ...] = ()
    """Units for which the front process is preparing requests that it has not yet sent to the core."""
    wanted: tuple[str, ...] = ()
    """Names for which requests wait in the front process until their models are loaded or woken
    (`Route.on_demand`). Every report repeats them, so the core may ignore a name while an operation on its
    model is in progress."""


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
AboutRequest = Admit | Settle | Rejected | Worked | Retried | ShadowDone
"""Messages from a front process about requests."""
FrontToCore = (
    FrontReady | AboutRequest | Claim | Release | HandOver | Keep | Taken | FrontReport | FrontProgress
)
