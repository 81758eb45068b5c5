"""The messages from a front process to the core: plain structs, sent as msgpack (`engine.wire`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from appliance.channel.core_messages import SocketKind
from appliance.channel.front_stats import FrontStats
from appliance.channel.identity import Identity


class FrontReady(msgspec.Struct, tag="front_ready", frozen=True):
    """The front process has loaded its tokenizers and accepts connections."""


class LoggedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The request fields in all messages about its row in the request log."""

    request_id: str
    identity: Identity
    peer: str
    """The client as shown in the log: "uid 1000" or an address."""
    endpoint: str
    model: str
    stream: bool
    arrived_at: float
    """Time at which the request was read, in unix seconds."""
    user: str = ""
    """The `user` field of the body, or "" if there is none."""
    fallback_of: str = ""
    """The requested model, if `model` is its fallback."""


class Admit(LoggedFields, tag="admit", frozen=True, kw_only=True):
    """Asks for permission to run a request. The reply, which has the same attempt number, is either one
    `Admitted`, sent when it is the request's turn, or one `Refused`. There is no reply if the front process
    first withdraws the request with `Settle`."""

    unit: str = ""
    """`ServedModel.name` of the model that the front process has chosen for the requested name. Empty if this
    is the requested name itself."""
    attempt: int = 0
    """Number of the attempt: 0 for the first attempt, and one more for each resubmission after a replica was
    lost."""
    submissions: int
    """Number of `Submit` messages that follow the admission: one per prompt or, after a replica was lost, one
    per unfinished sample."""
    num_seqs: int
    """Total number of sequences in all submissions."""
    prompt_tokens: int
    """Total number of prompt tokens in all submissions, including the output so far if a replica was lost.
    The core subtracts it from the token credit."""
    max_tokens: int
    """Maximum total number of tokens to generate for all samples."""
    prefixes: tuple[bytes, ...] = ()
    """Prefix hashes of the first prompt (`appliance.channel.prefixes`). Empty if the core has only one
    replica to choose from."""
    may_fall_back: bool = False
    """Whether the front process can send the request to another model if this model cannot answer it
    (`Refused.falls_back`)."""
    may_lower: bool = False
    """Whether the core may lower the limit (`Admitted.most_tokens`), because the client has set no limit."""
    asked_class: str = ""
    """Class requested by the client, or "" for the default."""
    retry_of: str = ""
    """Request id of an earlier run with the same `Idempotency-Key` whose answer is no longer kept, or an
    empty string."""
    deadline_ms: float | None = None
    """Time limit for the whole answer, measured from `arrived_at`, or None for no deadline."""
    shadow_of: str = ""
    """The tenant of the original request, if this request is a copy of a finished request. The copy may use
    the cached prefixes of this tenant. The core refuses a copy that cannot start at once, and does not log
    copies."""
    keep_alive_s: float | None = None
    """Time in seconds for which the model stays loaded for the tenant without further requests. A negative
    value means without a limit. None means that the model's setting `idle_unload_s` applies."""


class Claim(msgspec.Struct, tag="claim", frozen=True):
    """Asks the core to assign a request with an `Idempotency-Key` to this front process. The reply is
    `Claimed`, which states whether this or another front process runs the request. If this process runs it,
    the assignment lasts until `Release`."""

    scope: bytes
    """SHA-256 of the caller, the endpoint and the idempotency key."""
    request_id: str


class Release(msgspec.Struct, tag="release", frozen=True):
    """The front process no longer keeps an answer for this scope, so the next request with the same key will
    be run."""

    scope: bytes


class HandOver(msgspec.Struct, tag="hand_over", frozen=True):
    """Passes a client's connection on to the front process that has claimed this scope. The message carries
    two file descriptors: the connection, and a memfd with the request that was read from the connection."""

    scope: bytes
    kind: SocketKind
    """The values of `ClientConnection.kind` and `ClientConnection.peer`."""
    peer: str


class Taken(msgspec.Struct, tag="taken", frozen=True):
    """The front process is about to read from a connection. If the process exits before it sends this
    message, no byte of the connection is lost, and the core passes the connection on to another front
    process."""

    number: int
    """Same as `ClientConnection.number`."""


class NotTaken(msgspec.Struct, tag="not_taken", frozen=True):
    """The front process could not receive a connection's descriptors, because it has too many open files. No
    byte of the connection is lost. The core passes the connection on to another front process, or sends it
    again after this process's next report."""

    number: int
    """Same as `ClientConnection.number`."""


class Settle(msgspec.Struct, tag="settle", frozen=True, kw_only=True):
    """Reports the end of a request that was not refused, with data about the answer the client received. Sent
    exactly once per request."""

    request_id: str
    submitted: bool
    """Whether the latest attempt was submitted to its replica. If not, the request was withdrawn before."""
    status: int
    """HTTP status code of the response, or 499 if the client disconnected."""
    finish_reason: str
    """The samples' finish reason: "stop", "length", "cancelled" or "error". Different reasons are joined by
    ","."""
    error: str = ""
    delivered_tokens: int
    """Number of output tokens in the answer, which are billed."""
    ttft_ms: float | None = None
    """Time from the request's arrival until the first token's bytes were passed to the socket."""
    itl_ms: float | None = None
    """Mean time between tokens after the first token."""
    e2e_ms: float
    """Time from the arrival of the request to the end of the answer."""


class Rejected(LoggedFields, tag="rejected", frozen=True, kw_only=True):
    """Data for the request log about an authenticated caller's request that the front process rejected (4xx).

    If parsing the request was expensive, the cost counts against the caller's rate limits. Unauthenticated
    callers' requests are only counted; otherwise, a flood of them could fill the disk.
    """

    status: int
    error: str
    prompt_tokens: int
    work_tokens: int = 0
    """Cost of parsing and encoding the request, in tokens. 0 means that the cost is negligible."""
    e2e_ms: float


class Worked(msgspec.Struct, tag="worked", frozen=True):
    """Tokens that a front process encoded or decoded but that belong to no request, such as tokens removed by
    `truncate_prompt_tokens`. They are charged against the caller's token limits."""

    identity: Identity
    tokens: int


class ShadowMeasure(msgspec.Struct, array_like=True, frozen=True):
    """An answer's timings and length. Times are in seconds from when the request was sent to the replica."""

    ttft_s: float
    e2e_s: float
    tokens: int


class ShadowDone(msgspec.Struct, tag="shadow_done", frozen=True, kw_only=True):
    """The result of a request that was copied to a shadow model."""

    name: str
    """Model name in the original request."""
    unit: str
    """Model or version to which the request was copied."""
    outcome: Literal["compared", "dropped", "failed"]
    """"dropped": the copy could not start at once. "failed": the copy was refused, or it ended with an
    error."""
    original: ShadowMeasure | None = None
    """Measurements of the original answer. This field and `copy` are set only if the answers were
    compared."""
    copy: ShadowMeasure | None = None
    equal_tokens: int | None = None
    """Number of tokens before the first difference between the answers, summed over all samples. None unless
    the request uses greedy sampling and both prompts have the same tokens."""


class Retried(LoggedFields, tag="retried", frozen=True, kw_only=True):
    """Data for the request log about a retry that was answered with the result of an earlier request."""

    retry: Literal["joined", "repeated"]
    """"joined" means that the earlier request was still running when the retry arrived."""
    retry_of: str
    """Request id of the earlier request."""
    request_class: int
    status: int
    finish_reason: str
    e2e_ms: float


class RequestProgress(msgspec.Struct, array_like=True, frozen=True):
    """A request's progress."""

    request_id: str
    generated_tokens: int
    """Number of output tokens received so far by the front process, summed over all samples."""
    cached_tokens: int
    """Number of prompt tokens found in the prefix cache, summed over the prompts for which output has
    arrived."""
    ttft_s: float | None
    """Time from the request's arrival to the first token; None before the first token."""


class FrontProgress(msgspec.Struct, tag="front_progress", frozen=True):
    """The reply to `AskProgress`."""

    number: int
    requests: list[RequestProgress]


class Keep(msgspec.Struct, tag="keep", frozen=True, kw_only=True):
    """A request's prompts and answers, which are stored according to the tenant's log policy.

    The message carries one file descriptor: a memfd with a list of `store.structs.KeptText` in msgpack
    format. The core does not read the list on its event loop.
    """

    request_id: str
    identity: Identity
    created_at: float
    """Time at which the request arrived, in unix seconds."""


class FrontReport(FrontStats, tag="front_report", frozen=True, kw_only=True):
    """A front process's state. The report is sent every half second. It is also sent before `FrontReady`,
    when routes have taken effect, and when requests begin to wait for a name that no loaded model answers."""

    template_problems: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    """Models whose chat templates have exceeded a limit since startup, with the number of times and the limit
    that was exceeded last. These models are still served."""
    configured: int = 0
    """`serial` of the latest `Configure` message that was applied."""
    routed: int = 0
    """`serial` of the `Configure` message whose routes are in effect."""
    preparing: tuple[str, ...] = ()
    """Models and versions for which the front process is preparing requests that it has not sent to the core
    yet."""
    wanted: tuple[str, ...] = ()
    """Names for which requests wait in the front process until a model is loaded or woken
    (`Route.on_demand`). Every report repeats these names, so the core may ignore a name while an operation on
    its model is in progress."""


AboutRequest = Admit | Settle | Rejected | Worked | Retried | ShadowDone
"""The messages from a front process that concern requests."""

FrontToCore = (
    FrontReady
    | AboutRequest
    | Claim
    | Release
    | HandOver
    | Keep
    | Taken
    | NotTaken
    | FrontReport
    | FrontProgress
)
