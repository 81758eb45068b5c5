"""The structs between the core and a front. Plain data, msgpack on the wire (`engine.wire`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from appliance.protocol import FrontStats
from store.policies import INTERACTIVE

SocketKind = Literal["unix", "tcp"]

# ── core to front ────────────────────────────────────────────────────────────────────────────────


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that apps may name."""

    name: str
    folder: str
    """Where the tokenizer and the chat template are."""
    version: str
    """Names the files behind it: a fingerprint of the folder."""
    created: int
    """Unix seconds."""
    max_model_len: int
    """Prompt and output together, tokens."""
    vocab_size: int


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who a request is billed to, and what it may ask for: a tenant's word, narrowed by its key's.

    What holds is what the core finds under `tenant` and `key_id`; a front's copy is for refusing early.
    """

    tenant: str
    key_id: str = ""
    """Empty for a Unix peer."""
    scopes: tuple[str, ...] = ("inference",)
    """Of `store.policies.SCOPES`."""
    models: tuple[str, ...] | None = None
    """The only models that it may name; None: all."""
    highest_class: int = INTERACTIVE
    """The best class that it gets; 0 is P0."""
    default_class: int = INTERACTIVE
    """Of a request that asks for none."""
    context_tokens: int | None = None
    """Longest request, prompt and output together; None: the model's length."""
    default_max_tokens: int | None = None
    """Output of a request that names no `max_tokens`; None: what the length leaves."""
    log_policy: str = "metadata"
    """Of `store.policies.LOG_POLICIES`."""
    expires_at: float | None = None
    """Unix seconds from which on its key opens nothing."""
    suspended: bool = False
    """Its tenant is: whatever it asks is refused."""


class Identities(msgspec.Struct, tag="identities", frozen=True, kw_only=True):
    """Who may ask: the whole table (`whole`), which replaces the former one at once, or what has changed in
    it since."""

    keys: dict[str, Identity | None] = {}
    """By the SHA-256 (hex) of the bearer key; None: no more."""
    uids: dict[int, Identity] = {}
    """By the uid of a Unix socket's peer. Uids and gids are always all of them."""
    gids: dict[int, Identity] = {}
    """By a group of the peer, where its uid says nothing."""
    any_uid: Identity | None = None
    """For every other uid that the socket's file mode lets in; None: they are refused."""
    whole: bool = True


_Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Connections = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a front takes from a client."""

    max_body_bytes: _Bytes = 2 << 20
    """The longest body; a longer one is refused with 413. 131,072 tokens of text have about 1 MB. Parsing
    blocks the other requests of a front for up to 20 ms for each MB."""
    header_timeout_s: _PositiveSeconds = 10.0
    """A request's header must arrive within this, or is refused with 408."""
    body_timeout_s: _PositiveSeconds = 30.0
    """A request's body must arrive within this after the header, or is refused with 408."""
    idle_timeout_s: _PositiveSeconds = 75.0
    """An idle keep-alive connection is closed after this."""
    max_connections: _Connections = 4096
    """Connections of known clients in each front: local users of the Unix socket, and clients that have sent
    a valid key. Beyond, the one that has been idle longest is closed, or else the new one gets 503."""
    max_unauthenticated_connections: _Connections = 256
    """Connections in each front that have not yet sent a request with a valid key. Beyond, the address with
    the most of them loses the one that has waited longest."""
    unauthenticated_timeout_s: _PositiveSeconds = 10.0
    """Such a connection is closed when it sends no request for this long; it shortens the other timeouts."""
    max_tenant_body_bytes: _Bytes = 32 << 20
    """All request bodies of one tenant that a front holds at a time; one beyond is refused with 503. One body
    of `max_body_bytes` is always possible."""
    max_front_body_bytes: _Bytes = 64 << 20
    """All request bodies that a front holds at a time; one beyond is refused with 503."""
    stream_comment_interval_s: _Seconds = 5.0
    """A stream that has sent nothing for this long gets a comment (a line that clients skip), so that proxies
    keep its connection; its headers are sent after half a second at most. 0: no comments, and the headers are
    sent with the first token."""
    cors_origins: tuple[Annotated[str, msgspec.Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")], ...] = ()
    """Origins (scheme, host and port, without a path) whose web pages may call the API, such as
    "https://chat.example.com", or "*" for all; none by default."""


class RetryRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a front treats requests with an `Idempotency-Key`."""

    keep_s: _Seconds = 600.0
    """For how long the answer of a run that ended is kept."""
    grace_s: _Seconds = 30.0
    """How long a run continues after its last client has left."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 64 << 20
    """The most memory for answers, in each front."""


class KeepRules(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts and answers are kept of tenants whose log policy says so."""

    redact: tuple[Literal["keys", "bearer_tokens", "passwords", "private_keys", "emails", "cards"], ...] = (
        "keys",
        "bearer_tokens",
        "passwords",
        "private_keys",
    )
    """Kinds of secrets that are taken out."""
    secret_prefixes: tuple[Annotated[str, msgspec.Meta(min_length=2)], ...] = ()
    """Words of at least 8 characters that begin so are taken out too, such as the keys of your own services:
    ["acme_"]."""
    max_text_chars: Annotated[int, msgspec.Meta(ge=0, le=1 << 22)] = 65536
    """Of one prompt or answer; of a longer one its beginning."""


class Configure(msgspec.Struct, tag="configure", frozen=True, kw_only=True):
    """First to a front, and again whenever the served models change."""

    front: str
    serial: int = 0
    """Counts up; the front reports the last one that it has taken in."""
    models: list[ServedModel]
    limits: Limits
    ready: bool
    """Whether at least one replica of each model answers that is not drained: what `/health/ready` says."""
    reason: str = ""
    """Why it is not ready, in words."""
    silent: dict[str, str] = {}
    """The models that do not answer, and why: what `/health/ready?model=NAME` says."""
    log_level: str = "info"
    retries: RetryRules = RetryRules()
    keeping: KeepRules = KeepRules()


class AttachReplica(msgspec.Struct, tag="attach_replica", frozen=True):
    """A channel to a replica (one file descriptor travels with it)."""

    replica: str
    model: str


class ClientConnection(msgspec.Struct, tag="connection", frozen=True):
    """A client's connection, accepted by the core (one file descriptor travels with it)."""

    kind: SocketKind
    peer: str
    """The address of a TCP peer; empty for a Unix socket (the front reads SO_PEERCRED)."""
    has_request: bool = False
    """Another front has read a request from it: a second descriptor (a memfd) holds its bytes."""


class Claimed(msgspec.Struct, tag="claimed", frozen=True):
    """The answer to a `Claim`."""

    scope: bytes
    is_elsewhere: bool
    """Another front runs the request or keeps its answer: send it the connection (`HandOver`). Otherwise this
    front runs the request."""
    retry_of: str = ""
    """The request id of an earlier run, whose answer is lost."""


class RateLimits(msgspec.Struct, array_like=True, frozen=True):
    """What is left of the tightest limit of its kind that a request meets; None where there is none."""

    limit_requests: int | None
    remaining_requests: int | None
    reset_requests_s: float | None
    """Until all of it is left again, if nothing is used."""
    limit_tokens: int | None
    remaining_tokens: int | None
    reset_tokens_s: float | None


class Admitted(msgspec.Struct, tag="admitted", frozen=True):
    """The request's turn: submit it to `replica` now."""

    request_id: str
    attempt: int
    replica: str
    cache_salt: str
    priority: int
    urgency: int = 0
    """As `Submit.urgency`."""
    spare_slots: int = 0
    """As `Submit.spare_slots`."""
    most_tokens: int | None = None
    """Each sample may produce so many tokens only; None: as many as it asked for."""
    rate_limits: RateLimits | None = None


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The request will not run (any further). Of a first attempt the core has ended the row, and no `Settle`
    follows; of a later one `Settle` does, since the client may have had a part of the answer."""

    request_id: str
    attempt: int
    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    kind: str = ""
    """OpenAI's `type` of the error, where the status does not say it: "requests" or "tokens"."""
    useless: bool = False
    """To try again, as clients of OpenAI's API do by themselves."""
    rate_limits: RateLimits | None = None


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End this request now (operator, drain that ran out of grace): the client gets an error event."""

    request_id: str
    message: str


class StopFront(msgspec.Struct, tag="stop_front", frozen=True):
    """Take no more, finish what streams within `grace_s`, end."""

    grace_s: float


# ── front to core ────────────────────────────────────────────────────────────────────────────────


class FrontReady(msgspec.Struct, tag="front_ready", frozen=True):
    """The front has loaded its tokenizers and takes connections."""


class Admit(msgspec.Struct, tag="admit", frozen=True, kw_only=True):
    """May this request run? Answered by exactly one `Admitted` or `Refused` (same attempt), when it is its
    turn, unless the front withdraws it with `Settle` first."""

    request_id: str
    attempt: int = 0
    """0 at first; counted up for each resubmission after a replica was lost."""
    identity: Identity
    peer: str
    """For the log: "uid 1000" or an address."""
    endpoint: str
    model: str
    stream: bool
    submissions: int
    """`Submit`s that follow when admitted: one a prompt; when resuming, one an unfinished sample."""
    rows: int
    """Sequences over all submissions."""
    prompt_tokens: int
    """Over all submissions, emitted output included when resuming: the token credit it spends."""
    max_tokens: int
    """The most it may generate, over all samples."""
    may_lower: bool = False
    """Its client did not say how long the answer may be: the core may allow less (`Admitted.most_tokens`)."""
    arrived_at: float
    """Unix seconds at which the request was read."""
    asked_class: str = ""
    """What the client asked for, "" for the default."""
    retry_of: str = ""
    """The request id of an earlier run with the same `Idempotency-Key`, whose answer is lost."""
    user: str = ""
    """The body's `user`, for the log; "" where there is none."""
    deadline_ms: float | None = None
    """After `arrived_at`, when the whole answer must be there; None: no matter when."""


class Claim(msgspec.Struct, tag="claim", frozen=True):
    """A request with an `Idempotency-Key` that this front does not know. The answer, `Claimed`, says which
    front runs it. If it is this front, the claim holds until `Release`."""

    scope: bytes
    """SHA-256 of the caller, the endpoint and the key."""
    request_id: str


class Release(msgspec.Struct, tag="release", frozen=True):
    """The front has no answer for this scope any more: the next request with the key runs."""

    scope: bytes
    request_id: str
    """The request that ran."""
    void: bool
    """The run failed, was given up, or was dropped before its time: the next request is a retry that runs
    anew."""


class HandOver(msgspec.Struct, tag="hand_over", frozen=True):
    """A client's connection for the front that has this scope. Two file descriptors travel with it: the
    connection and a memfd with the request that was read from it."""

    scope: bytes
    kind: SocketKind
    """As `ClientConnection.kind` and `ClientConnection.peer`."""
    peer: str


class Settle(msgspec.Struct, tag="settle", frozen=True, kw_only=True):
    """The last word on a request that was not refused: what the client got. Exactly one each."""

    request_id: str
    submitted: bool
    """Whether the latest attempt that was asked for was submitted to its replica (false: withdrawn)."""
    status: int
    """HTTP status code; 499 for a client that left."""
    finish_reason: str
    """Of the samples, joined by "," where they differ: "stop", "length", "cancelled", "error"."""
    error: str = ""
    delivered_tokens: int
    """Output tokens in the answer: what is billed."""
    ttft_ms: float | None = None
    """Arrival to the first token's bytes handed to the socket."""
    itl_ms: float | None = None
    """Mean time between later tokens."""
    e2e_ms: float
    """Arrival to the end of the answer."""


class Rejected(msgspec.Struct, tag="rejected", frozen=True, kw_only=True):
    """An authenticated request that the front refused by itself (4xx): a row for the log. Where refusing it
    took work, it counts against the sender's rate limits.

    Requests without a valid identity are only counted: a flood of them must not fill the disk.
    """

    request_id: str
    identity: Identity
    peer: str
    endpoint: str
    model: str
    stream: bool
    status: int
    error: str
    prompt_tokens: int
    work_tokens: int = 0
    """What parsing and encoding it cost, in tokens; 0: too little to count."""
    arrived_at: float
    e2e_ms: float
    user: str = ""
    """As `Admit.user`."""


class Worked(msgspec.Struct, tag="worked", frozen=True):
    """A front encoded or decoded tokens that no request pays for, such as those that `truncate_prompt_tokens`
    removed: they count against the sender's token limits."""

    identity: Identity
    tokens: int


class Retried(msgspec.Struct, tag="retried", frozen=True, kw_only=True):
    """A request that was answered from another one's run: a row for the log, nothing else."""

    request_id: str
    identity: Identity
    peer: str
    endpoint: str
    model: str
    stream: bool
    retry: str
    """"joined" (the run had not ended) or "repeated"."""
    retry_of: str
    """The request that ran."""
    request_class: int
    status: int
    finish_reason: str
    error: str
    arrived_at: float
    ttft_ms: float | None
    e2e_ms: float
    user: str = ""
    """As `Admit.user`."""


class Keep(msgspec.Struct, tag="keep", frozen=True, kw_only=True):
    """Prompts and answers of a request that ran, to be kept as its tenant's log policy says. One file
    descriptor travels with it: a memfd with a list of `store.structs.KeptText` in msgpack, so
    that only the process that stores them reads the texts."""

    request_id: str
    identity: Identity
    created_at: float
    """Unix seconds, of the request."""


class FrontReport(FrontStats, tag="front_report", frozen=True, kw_only=True):
    """Every half second, and before `FrontReady`."""

    taken_connections: int = 0
    """Connections that the front has received from the core since its start."""
    template_problems: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    """Models whose chat templates exceeded their limits since the start: how often, and what the latest
    exceeded. Such a model is served nevertheless."""
    configured: int = 0
    """`serial` of the last `Configure` that is in effect."""


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
"""What a front says about a request."""
FrontToCore = FrontReady | AboutRequest | Claim | Release | HandOver | Keep | FrontReport
