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
    """Asks for permission to run a request. The reply, which has the same attempt number, is either one
    `Admitted`, sent when it is the request's turn, or one `Refused`. There is no reply if the front process
    first withdraws the request with `Settle`."""

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


class NotTaken(msgspec.Struct, tag="not_taken", frozen=True):
    """The front process could not receive a connection's descriptors, because it has too many open files. No
    byte of the connection is lost. The core passes the connection on to another front process, or sends it
    again after this process's next report."""

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
    """Tokens that a front process encoded or decoded but that belong to no request, such as tokens removed by
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
    """Model or version to which the request was copied."""
    outcome: Literal["compared", "dropped", "failed"]
    """"dropped": the copy could not start at once. "failed": the copy was refused, or ended with an error."""
    original: ShadowMeasure | None = None
    """Measurements of the original answer. Like `copy`, set only if the answers were compared."""
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
    have taken effect, and when requests begin to wait for a name that no loaded model answers."""

    template_problems: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    """Models whose chat templates have exceeded a limit since startup. Each has the number of times that this
    happened, and the limit that was exceeded last. These models are still served."""
    configured: int = 0
    """`serial` of the last `Configure` message that was applied."""
    routed: int = 0
    """`serial` of the `Configure` message that set the routes in effect."""
    preparing: tuple[str, ...] = ()
    """Models and versions for which the front process is preparing requests that it has not yet sent to the
    core."""
    wanted: tuple[str, ...] = ()
    """Names for which requests wait in the front process until their models are loaded or woken
    (`Route.on_demand`). Every report repeats them, so the core may ignore a name while an operation on its
    model is in progress."""


AboutRequest = Admit | Settle | Rejected | Worked | Retried | ShadowDone
"""Messages from a front process about requests."""

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
