"""Messages from a front process to the core: plain structs, sent as msgpack (`engine.wire`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NewType

import msgspec

from appliance.channel.front_stats import FrontStats
from appliance.channel.identity import Identity
from engine.messages import FinishReason

FinishReasons = NewType("FinishReasons", str)
"""The finish reasons of a request's samples, as returned by `join_reasons`."""


def join_reasons(reasons: Iterable[FinishReason]) -> FinishReasons:
    """Return the samples' finish reason. If samples finished for different reasons, each reason appears once,
    separated by commas."""
    return FinishReasons(",".join(dict.fromkeys(reasons)))


class FrontReady(msgspec.Struct, tag="front_ready", frozen=True):
    """The front process has loaded its tokenizers and accepts connections."""


class LoggedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields included in every message about a request's row in the request log."""

    request_id: str
    identity: Identity
    peer: str
    """The client, as shown in the log: "uid 1000" or an address."""
    endpoint: str
    model: str
    stream: bool
    arrived_at: float
    """When the request was read, in unix seconds."""
    user: str = ""
    """The body's `user` field, or "" if it has none."""
    fallback_of: str = ""
    """The model that was requested, if `model` is its fallback."""


class Admit(LoggedFields, tag="admit", frozen=True, kw_only=True):
    """Asks for permission to run a request. The reply, which has the same attempt number, is either
    `Admitted`, sent when it is the request's turn, or `Refused`. There is no reply if the front process
    withdraws the request first, by sending `Settle`."""

    unit: str = ""
    """`ServedModel.name` of the model that the front process has chosen for the requested name. Empty if both
    names are the same."""
    attempt: int = 0
    """Attempt number: 0 for the first attempt, increasing by one with each resubmission after the loss of a
    replica."""
    submissions: int
    """Number of `Submit` messages to be sent after admission: one per prompt or, after the loss of a replica,
    one per unfinished sample."""
    num_seqs: int
    """Total number of sequences in all submissions."""
    prompt_tokens: int
    """Total number of prompt tokens in all submissions. After the loss of a replica, this includes the output
    that had already been generated. The core subtracts the total from the replica's token credit."""
    max_tokens: int
    """Maximum number of tokens to generate, summed over all samples."""
    prefixes: tuple[bytes, ...] = ()
    """The first prompt's prefix hashes (`appliance.channel.prefixes`). Empty if the core has only one replica
    to choose from."""
    may_fall_back: bool = False
    """Whether the front process can send the request to another model if this model cannot answer it
    (`Refused.falls_back`)."""
    may_lower: bool = False
    """Whether the core may lower `max_tokens` (see `Admitted.most_tokens`). True if the client has not set a
    limit."""
    asked_class: str = ""
    """Service class requested by the client, or "" for the default."""
    retry_of: str = ""
    """Request id of an earlier run with the same `Idempotency-Key` whose answer is no longer kept, or an
    empty string."""
    deadline_ms: float | None = None
    """Time limit, in milliseconds, for the complete answer, measured from `arrived_at`. None means no
    limit."""
    shadow_of: str = ""
    """The original request's tenant, if this request is a copy of a finished request. The copy may use this
    tenant's cached prefixes. The core does not log copies, and refuses a copy that cannot start
    immediately."""
    keep_alive_s: float | None = None
    """How long, in seconds, the model stays loaded after the tenant's last request. A negative value means no
    limit. If None, the model's `idle_unload_s` setting is used."""


class Claim(msgspec.Struct, tag="claim", frozen=True):
    """Asks the core to assign a request with an `Idempotency-Key` to this front process. The reply is
    `Claimed`. If this process must run the request, the assignment lasts until `Release`."""

    scope: bytes
    """SHA-256 of the caller, the endpoint and the idempotency key."""
    request_id: str


class Release(msgspec.Struct, tag="release", frozen=True):
    """The front process no longer keeps an answer for this scope, so the next request with the same key will
    be run."""

    scope: bytes


class HandOver(msgspec.Struct, tag="hand_over", frozen=True):
    """Hands a client's connection over to the front process that has claimed this scope. The message carries
    two file descriptors: the connection, and a memfd with the request read from it."""

    scope: bytes
    peer: str
    """As in `ClientConnection`."""


class Taken(msgspec.Struct, tag="taken", frozen=True):
    """The front process is about to read from a connection. If the process exits before sending this message,
    none of the connection's bytes are lost, and the core gives the connection to another front process."""

    number: int
    """The connection's number, from `ClientConnection.number`."""


class NotTaken(msgspec.Struct, tag="not_taken", frozen=True):
    """The front process could not receive a connection's descriptors, because it had too many open files.
    None of the connection's bytes are lost. The core gives the connection to another front process, or sends
    it again after this process's next report."""

    number: int
    """The connection's number, from `ClientConnection.number`."""


class Settle(msgspec.Struct, tag="settle", frozen=True, kw_only=True):
    """Reports the end of a request that was not refused and describes the answer that the client received.
    Sent exactly once per request."""

    request_id: str
    submitted: bool
    """Whether the latest attempt was submitted to its replica. If not, the request was withdrawn before
    submission."""
    status: int
    """HTTP status code of the response, or 499 if the client disconnected."""
    finish_reason: FinishReasons
    error: str = ""
    delivered_tokens: int
    """Number of output tokens in the answer, all of which are billed."""
    ttft_ms: float | None = None
    """Time, in milliseconds, from the request's arrival until the first token was written to the socket."""
    itl_ms: float | None = None
    """Mean time, in milliseconds, between tokens after the first one."""
    e2e_ms: float
    """Time, in milliseconds, from the request's arrival to the end of the answer."""


class Rejected(LoggedFields, tag="rejected", frozen=True, kw_only=True):
    """Request log data for a request that the front process rejected (4xx). If parsing the request was
    expensive, the cost counts against the caller's rate limits. Sent only for authenticated callers; other
    requests are merely counted, because a flood of them could otherwise fill the disk.
    """

    status: int
    error: str
    prompt_tokens: int
    work_tokens: int = 0
    """Cost of parsing and encoding the request, in tokens. 0 if negligible."""
    e2e_ms: float


class Worked(msgspec.Struct, tag="worked", frozen=True):
    """Counts additional tokens against a caller's token limits: tokens that a front process encoded or
    decoded but did not use in a request, such as those removed by `truncate_prompt_tokens`."""

    identity: Identity
    tokens: int


class ShadowMeasure(msgspec.Struct, array_like=True, frozen=True):
    """An answer's timings and length. Times are in seconds since the request was sent to the replica."""

    ttft_s: float
    e2e_s: float
    tokens: int


class ShadowDone(msgspec.Struct, tag="shadow_done", frozen=True, kw_only=True):
    """The result of copying a request to a shadow model."""

    name: str
    """The model name in the original request."""
    unit: str
    """The model or version that the copy was sent to."""
    outcome: Literal["compared", "dropped", "failed"]
    """"dropped": the copy could not start immediately. "failed": the copy was refused, or ended with an
    error."""
    original: ShadowMeasure | None = None
    """Measurements of the original answer. This field and `copy` are set only if the answers were
    compared."""
    copy: ShadowMeasure | None = None
    equal_tokens: int | None = None
    """Number of tokens before the answers first differ, summed over all samples. None unless the request uses
    greedy sampling and both prompts have the same tokens."""


class Retried(LoggedFields, tag="retried", frozen=True, kw_only=True):
    """Request log data for a retry that received an earlier request's answer."""

    retry: Literal["joined", "repeated"]
    """"joined" if the earlier request was still running when the retry arrived."""
    retry_of: str
    """Id of the request whose answer the retry received."""
    request_class: int
    status: int
    finish_reason: FinishReasons
    e2e_ms: float


class RequestProgress(msgspec.Struct, array_like=True, frozen=True):
    """The progress of an unfinished request."""

    request_id: str
    generated_tokens: int
    """Number of output tokens that the front process has received, summed over all samples."""
    cached_tokens: int
    """Number of prompt tokens found in the prefix cache, summed over the prompts for which output has
    arrived."""
    ttft_s: float | None
    """Time, in seconds, from the request's arrival to the first token, or None before the first token."""


class FrontProgress(msgspec.Struct, tag="front_progress", frozen=True):
    """The progress of a front process's requests, sent in reply to `AskProgress`."""

    number: int
    requests: list[RequestProgress]


class Keep(msgspec.Struct, tag="keep", frozen=True, kw_only=True):
    """A request's prompts and answers, to be stored because the tenant's log policy requires it. The message
    carries one file descriptor: a memfd with a list of `store.structs.KeptText` in msgpack format. The core
    does not read the list on its event loop.
    """

    request_id: str
    identity: Identity
    created_at: float
    """When the request arrived, in unix seconds."""


class FrontReport(FrontStats, tag="front_report", frozen=True, kw_only=True):
    """A front process's report of its state, sent every half second. Additional reports are sent before
    `FrontReady`, when routes have taken effect, and when requests begin to wait for a name whose model is not
    loaded."""

    template_problems: dict[str, tuple[int, str]] = msgspec.field(default_factory=dict)
    """For each model with a chat template that has exceeded a limit since startup: how often that has
    happened, and which limit was exceeded last. These models are still served."""
    configured: int = 0
    """`serial` of the latest `Configure` message applied."""
    routed: int = 0
    """`serial` of the `Configure` message whose routes are in effect."""
    preparing: tuple[str, ...] = ()
    """Models and versions for which the front process is preparing requests that it has not yet sent to the
    core."""
    wanted: tuple[str, ...] = ()
    """Names whose requests are waiting in the front process for a model to be loaded or woken
    (`Route.on_demand`). Every report repeats these names, so the core may ignore a name while an operation on
    its model is in progress."""


AboutRequest = Admit | Settle | Rejected | Worked | Retried | ShadowDone | Claim | Release
"""Messages from a front process about requests."""

FrontToCore = FrontReady | AboutRequest | HandOver | Keep | Taken | NotTaken | FrontReport | FrontProgress
