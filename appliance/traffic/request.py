"""A request in flight, and its row in the request log."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from appliance.channel.classes import service_class
from appliance.channel.front_messages import Admit, LoggedFields, Rejected, Retried, Settle, join_reasons
from appliance.protocol import RequestState
from appliance.traffic.credits import CreditAccount
from appliance.traffic.fairness import Ticket
from appliance.traffic.quotas import Reservation
from engine.messages import FinishReason
from engine.rank_messages import Finished
from store.fields import CLASS_NAMES
from store.requests import RequestRow

log = logging.getLogger(__name__)


class OnReplica:
    """A request's submissions that are running on one replica."""

    __slots__ = ("began_each", "charged_each", "level", "seqs", "submissions", "tokens")

    def __init__(self, admit: Admit, charged_each: float, level: int) -> None:
        self.began_each = self.charged_each = charged_each
        """The value of `CreditAccount.generated_each` when the tenant was last charged for this request or,
        before the first charge, when the request started."""
        self.level = level
        """Service level whose credit the request uses."""
        self.submissions = admit.submissions
        self.seqs = admit.num_seqs
        self.tokens = admit.prompt_tokens

    def end(self, seqs: int, tokens: int) -> None:
        """Stop counting a submission that has left the replica."""
        self.submissions -= 1
        self.seqs -= seqs
        self.tokens -= tokens


class Request:
    """One request in flight. Modified only by the request manager and `ModelTraffic`. All times except
    `Admit.arrived_at` are on the request manager's clock."""

    def __init__(
        self, front: str, admit: Admit, key_id: str, version: str, deadline_at: float | None = None
    ) -> None:
        self.front = front
        self.first = admit
        self.admit = admit
        """The latest attempt's `Admit` message."""
        self.asked_max_tokens = admit.max_tokens
        """Maximum number of output tokens over all samples, before any quota lowered it."""
        self.unit = admit.unit or admit.model
        """The request manager's name for the model that answers the request. The requested name,
        `first.model`, may be an alias or the name of a model with several versions."""
        self.version = version
        self.tenant = admit.identity.tenant
        self.key_id = key_id
        """Id of the key whose limits restrict the request: the request's own key, or the key that replaced
        it. Empty for a request without a key."""
        self.request_class = service_class(admit.asked_class, admit.identity)
        self.deadline_at = deadline_at
        self.reservation: Reservation | None = None
        """The request's reservation in the tenant's and key's quotas, from the request's acceptance to its
        end."""
        self.most_tokens: int | None = None
        """The limit on generated tokens, sent to the front as `Admitted.most_tokens`."""
        self.is_logged = False
        """Whether the request has an open row in the request log."""
        self.falls_back = False
        """Whether the request is being moved to the fallback model and is waiting for its front to send the
        new attempt."""
        self.front_died = False
        """Whether the request's front has died, in which case the number of delivered tokens is unknown."""

        self.queued_at: float | None = None
        """When the request was queued, or None if it is not waiting."""
        self.queue_ms: float | None = None
        self.ticket: Ticket[Request] | None = None
        """The request's entry in its model's queue."""
        self.due = 0.0
        """Sort key among the tenant's requests; same as `Ticket.due`."""
        self.begin_by: float | None = None
        """Latest start time that still meets the request's deadline, as promised on admission."""
        self.promised_s = 0.0
        """The delay, in seconds, that this request causes for other requests with a promised start."""

        self.dispatched: dict[CreditAccount, OnReplica] = {}
        self.tried: set[CreditAccount] = set()
        self.latest: CreditAccount | None = None
        self.began_at: float | None = None
        self.ends_at = 0.0
        """Expected end time."""
        self.keeps_place = False
        """Whether the request has lost its replica but still counts against its tenant's and key's limits."""
        self.running_seqs = 0
        self.kv_tokens = 0
        """Maximum number of cache tokens that the request may occupy. While the request runs, this number and
        `running_seqs` count toward the tenant's usage."""
        self.expected_tokens = 0.0
        """Expected number of output tokens over all samples."""
        self.charged = 0.0
        """Service charged to the tenant for this request so far."""

        self.settled: Settle | None = None
        self.counts_unknown = False
        """Whether a replica was lost before it reported how many tokens it generated for the request."""
        self.counted = False
        """Whether a replica has reported the request's generated tokens."""
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.batch_size_at_start: int | None = None

    def use_fallback(self, admit: Admit, version: str) -> None:
        """Restart the request on the fallback model, because the original model could not serve it."""
        self.falls_back = False
        self.first = self.admit = admit
        self.unit, self.version = admit.unit or admit.model, version
        self.request_class = service_class(admit.asked_class, admit.identity)

    def hold(self, reservation: Reservation) -> None:
        """Store the request's reservation and limit the request to the output tokens reserved."""
        self.reservation = reservation
        if reservation.max_tokens < self.first.max_tokens:
            self.most_tokens = reservation.max_tokens // max(1, self.first.num_seqs)
            self.first = self.admit = msgspec.structs.replace(self.first, max_tokens=reservation.max_tokens)

    def count_against(self, key_id: str) -> None:
        """Count the request against this key's limits, because this key has replaced the request's own
        key."""
        self.key_id = key_id
        if self.ticket is not None:
            self.ticket.key_id = key_id

    def count(self, finished: Finished) -> None:
        """Add the token counts that a replica reported for one of the request's submissions."""
        self.counted = True
        self.generated_tokens += finished.generated_tokens
        self.cached_tokens += finished.cached_tokens
        self.preemptions += finished.preemptions
        if self.batch_size_at_start is None:
            self.batch_size_at_start = finished.batch_size

    @property
    def taken_tokens(self) -> int:
        """Number of tokens charged to the quotas when the request ends: the prompt and the delivered tokens,
        or 0 if the request never ran. If the front died, the generated tokens are charged instead of the
        delivered ones. If the number of generated tokens is also unknown, the whole reservation is charged.
        """
        if self.reservation is None or self.settled is None:
            return 0
        reserved = self.reservation.tokens
        submitted = self.settled.submitted or self.admit.attempt > 0 or self.front_died
        if not self.counted and not (self.counts_unknown and submitted):
            return 0
        if self.front_died and self.counts_unknown:
            return reserved
        output = self.generated_tokens if self.front_died else self.settled.delivered_tokens
        if self.first.prompt_tokens + output > reserved:
            log.error("request %s used more tokens than its reservation of %d", self.request_id, reserved)
        return min(reserved, self.first.prompt_tokens + output)

    @property
    def generated_each(self) -> float:
        """Estimated number of tokens generated per sample since the request started; 0 if unknown."""
        return max(
            (account.generated_each - left.began_each for account, left in self.dispatched.items()),
            default=0.0,
        )

    @property
    def most_each(self) -> float:
        """Output token limit per sample."""
        return self.first.max_tokens / max(1, self.first.num_seqs)

    @property
    def tokens_to_prefill(self) -> int:
        """Number of tokens that a replica must compute before it can generate the request's next output
        tokens: the prompts and, if the request was resumed, the earlier output of its unfinished samples. A
        resumed request has a separate submission for each sample, but its samples share their prompt in the
        prefix cache."""
        if not self.admit.attempt:
            return self.admit.prompt_tokens
        emitted = max(0.0, self.most_each * self.admit.num_seqs - self.admit.max_tokens)
        return min(self.admit.prompt_tokens, self.first.prompt_tokens + round(emitted))

    def service(self, output_weight: float) -> float:
        """Return how much service this request is known to have received, in tokens weighted by cost."""
        if not (self.counted or self.counts_unknown):
            return 0.0
        prompt_tokens = max(0, self.first.prompt_tokens - self.cached_tokens)
        return prompt_tokens + output_weight * self.known_tokens

    @property
    def known_tokens(self) -> int:
        """Number of output tokens known to have been generated. If a replica was lost, this is at least the
        number of delivered tokens."""
        delivered = self.settled.delivered_tokens if self.settled is not None else 0
        return max(self.generated_tokens, delivered) if self.counts_unknown else self.generated_tokens

    @property
    def request_id(self) -> str:
        """The request's id, assigned by the front."""
        return self.first.request_id

    @property
    def is_shadow(self) -> bool:
        """Whether the request is a copy sent to a shadow model. Copies are not logged, and their answers are
        discarded."""
        return bool(self.first.shadow_of)

    @property
    def state(self) -> RequestState:
        """The request's state, as in `appliance.protocol.InFlight.state`."""
        if self.settled is not None:
            return "ending"
        if self.queued_at is not None:
            return "queued"
        return "running" if self.dispatched else "interrupted" if self.counts_unknown else "ending"


def own_settle(request: Request, status: int, finish_reason: FinishReason, error: str, now: float) -> Settle:
    """Return the settlement made by the core on the front's behalf at unix time `now`. Nothing is billed,
    because the number of delivered tokens is unknown."""
    return Settle(
        request_id=request.request_id,
        submitted=False,
        status=status,
        finish_reason=join_reasons([finish_reason]),
        error=error,
        delivered_tokens=0,
        e2e_ms=(now - request.first.arrived_at) * 1000,
    )


def row_of(request: Request, now: float) -> RequestRow:
    """Return the request's row in the request log as of unix time `now`."""
    first, end = request.first, request.settled
    delivered = end.delivered_tokens if end else 0
    generated = request.known_tokens
    if delivered > generated and end is not None and not request.dispatched:
        log.error(
            "request %s: %d tokens were delivered, but only %d were generated",
            first.request_id,
            delivered,
            generated,
        )
    return RequestRow(
        request_id=first.request_id,
        created_at=first.arrived_at,
        finished_at=now if end else None,
        tenant=first.identity.tenant,
        key_id=first.identity.key_id or None,
        peer=first.peer,
        endpoint=first.endpoint,
        model=first.model,
        version=(request.latest.version if request.latest else "") or request.version or None,
        request_class=CLASS_NAMES[request.request_class],
        stream=first.stream,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=min(request.cached_tokens, first.prompt_tokens),
        generated_tokens=generated,
        billed_tokens=delivered,
        queue_ms=request.queue_ms,
        ttft_ms=end.ttft_ms if end else None,
        itl_ms=end.itl_ms if end else None,
        e2e_ms=end.e2e_ms if end else None,
        finish_reason=end.finish_reason if end else None,
        status=end.status if end else None,
        error=(end.error or None) if end else None,
        batch_size_at_start=request.batch_size_at_start,
        replica=request.latest.replica if request.latest else None,
        devices=(request.latest.devices or None) if request.latest else None,
        preemptions=request.preemptions,
        resubmissions=request.admit.attempt,
        quota_tokens=0 if request.reservation is None else request.reservation.tokens,
        retry="anew" if first.retry_of else None,
        retry_of=first.retry_of or None,
        user=first.user or None,
        unit=request.unit if request.version else None,
        fallback_of=first.fallback_of or None,
    )


def retried_row(retried: Retried, version: str | None, now: float) -> RequestRow:
    """Return the request-log row for a retry that was answered with an earlier request's result."""
    return RequestRow(
        **_head(retried),
        finished_at=now,
        version=version,
        request_class=CLASS_NAMES[retried.request_class],
        ttft_ms=retried.e2e_ms,
        e2e_ms=retried.e2e_ms,
        finish_reason=retried.finish_reason,
        status=retried.status,
        retry=retried.retry,
        retry_of=retried.retry_of,
    )


def rejected_row(rejected: Rejected, version: str | None, now: float) -> RequestRow:
    """Return the request-log row for a request refused by its front. `version` is the version of the model's
    files."""
    return RequestRow(
        **_head(rejected),
        finished_at=now,
        version=version,
        prompt_tokens=rejected.prompt_tokens,
        e2e_ms=rejected.e2e_ms,
        finish_reason="error",
        status=rejected.status,
        error=rejected.error,
    )


def _head(message: LoggedFields) -> dict[str, Any]:
    return {
        "request_id": message.request_id,
        "created_at": message.arrived_at,
        "tenant": message.identity.tenant,
        "key_id": message.identity.key_id or None,
        "peer": message.peer,
        "endpoint": message.endpoint,
        "model": message.model or None,
        "stream": message.stream,
        "user": message.user or None,
        "fallback_of": message.fallback_of or None,
    }
