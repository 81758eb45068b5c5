"""Decides whether a new request may wait in the queue. Once admitted, a request is refused only if it waits
too long or can no longer meet its deadline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from appliance.channel.core_messages import ExceededLimit, RateLimits, RefusalCode, Refused
from appliance.traffic.admission_pauses import AdmissionPause
from appliance.traffic.model import ModelTraffic
from appliance.traffic.outputs import most_tokens
from appliance.traffic.quotas import Quotas, Shortage
from appliance.traffic.request import Request
from appliance.traffic.tenants import Tenants, TenantTraffic, Use
from engine.levels import LEVELS

_MAX_FREE_MULTIPLE = 4.0
"""Maximum ratio of a tenant's waiting requests to the queue's remaining capacity, to prevent a single tenant
from filling the queue (Choudhury and Hahne's dynamic threshold, 1998)."""
_MAX_RETRY_S = 120.0
"""Longest retry delay, in seconds, that OpenAI's clients honour."""
_DRAIN_RETRY_S = 5.0
_FAILED_RETRY_S = 30.0
_DRAINED_PART = 0.1
"""The retry delay sent to a refused client is the expected time to serve this fraction of the queue."""
_RUN_MARGIN = 1.2
"""Safety factor for predicted run times, because the replica may slow down while it generates the answer."""
_PREDICTION_MARGIN = 1.5
"""Additional safety factor for times predicted before any rates have been measured. Such predictions are
lower bounds."""
_HOPELESS = 0.85
"""A request is refused if the time left before its deadline is less than this fraction of its predicted run
time."""
_MIN_MARGIN_S = 0.02
_SEARCH_EVERY_S = 0.25
"""Maximum interval, in seconds, between searches for dispatchable requests."""


FALLBACK_CODES: frozenset[RefusalCode] = frozenset(
    {"queue_full", "overloaded", "queue_timeout", "deadline_unreachable", "model_failed", "draining"}
)
"""Refusal codes for problems with the model rather than the caller. A different model may accept the
request."""


class Refusal(NamedTuple):
    """The reason for refusing a request, as sent to the client."""

    status: int
    code: RefusalCode
    message: str
    retry_after_s: float | None = None
    useless: bool = False
    """Whether a retry would also fail."""
    kind: ExceededLimit = ""

    def to_message(self, request: Request, limits: RateLimits | None) -> Refused:
        """Return the refusal as a message to the front, including the caller's remaining limits."""
        return Refused(
            request.request_id,
            request.admit.attempt,
            self.status,
            self.code,
            self.message,
            self.retry_after_s,
            kind=self.kind,
            useless=self.useless,
            rate_limits=limits,
        )


class Waiting(NamedTuple):
    """Totals of the requests waiting in the queue or held by an admission pause."""

    requests: int
    tokens: int


def refusal(
    request: Request, model: ModelTraffic, tenants: Tenants, waiting: Waiting, now: float, *, held: bool
) -> Refusal | None:
    """Return a refusal, or None if the request may wait. `held` means that an admission pause will hold the
    request for an indefinite time. If the request must wait but can meet its deadline, its `begin_by` and
    `promised_s` are set.
    """
    tenant = tenants.of(request.tenant)
    if tenant.suspended:
        return suspended(tenant)
    wait_s: float | None = 0.0
    waits = held or not model.starts_at_once(request, tenant, now)
    if waits:
        wait_s = model.wait_s(request, tenant, now) if model.predictable and not held else None
        reason = _no_place(request, model, tenants, waiting, wait_s, now) or _too_late(request, model, wait_s)
        if reason is not None:
            return reason
    if (
        request.deadline_at is not None
        and (reason := _deadline(request, model, tenants, wait_s, now, waits=waits)) is not None
    ):
        return reason
    model.expect_load(request)
    return None


def hopeless(request: Request, model: ModelTraffic, now: float) -> Refusal | None:
    """Return a refusal if a waiting request cannot meet its deadline even if it starts immediately; None
    otherwise. The estimate assumes that the replica's steps stay as short as they are now: a predicted
    slowdown is no reason to give up a promised deadline."""
    if request.deadline_at is None:
        return None
    run_s = 0.0
    # If a replica is lost mid-answer, the remaining length is unknown, and the client has already received
    # part of the answer.
    if model.predictable and not request.admit.attempt:
        tokens_each = request.expected_tokens / max(1, request.admit.num_seqs)
        run_s = _HOPELESS * model.forecast.running_s(request.admit.prompt_tokens, tokens_each, more_slots=0.0)
    return _missed(request, now, 0.0, run_s) if now + run_s > request.deadline_at else None


def timed_out(
    request: Request, model: ModelTraffic, timeout_s: float, now: float, *, held: bool
) -> Refusal | None:
    """Return a refusal if a waiting or held request has waited for at least `timeout_s`; None otherwise."""
    if now < (request.queued_at or now) + timeout_s:
        return None
    if held:
        reason = "the service was draining"
    else:
        reason = "no replica had enough capacity" if model.accounts else "no replica of the model is ready"
    message = f"the request waited {timeout_s:g} s, but {reason}: try again later"
    wait_s = max((wait or 0.0 for wait in model.waits_s(now)), default=None)
    return Refusal(503, "queue_timeout", message, _retry_after_s(wait_s, model.oldest_wait_s(now)))


def reserve(request: Request, quotas: Quotas) -> Refusal | None:
    """Reserve the request's maximum usage in the quotas of its tenant and key. Return a refusal if any quota
    would be exceeded."""
    first = request.first
    held = quotas.reserve(
        request.tenant,
        request.key_id,
        prompt_tokens=first.prompt_tokens,
        max_tokens=first.max_tokens,
        samples=first.num_seqs,
        may_lower=first.may_lower,
    )
    if not isinstance(held, Shortage):
        request.hold(held)
        return None
    wait_s = None if held.wait_s == math.inf else held.wait_s
    useless = not held.useful
    return Refusal(429, "rate_limit_exceeded", held.message, wait_s, useless=useless, kind=held.kind)


def unknown_model(name: str, known: Iterable[str]) -> Refusal:
    """Return a refusal for a request whose model is not served."""
    message = f"there is no model {name!r}; available models: {', '.join(known) or 'none'}"
    return Refusal(404, "model_not_found", message)


def failed_model(name: str, reason: str) -> Refusal:
    """Return a refusal for a request whose model cannot start any replica."""
    message = f"model {name!r} cannot be served: {reason}"
    return Refusal(503, "model_failed", message, _FAILED_RETRY_S)


def no_replica(name: str) -> Refusal:
    """Return a refusal for a request whose model has no ready replica. The caller may fall back to a
    different model."""
    message = f"no replica of model {name!r} is ready: try again later"
    return Refusal(503, "model_failed", message, _FAILED_RETRY_S)


def paused(pause: AdmissionPause) -> Refusal:
    """Return a refusal for a request that arrives while admission is paused."""
    return Refusal(503, "draining", pause.reason, _DRAIN_RETRY_S)


def suspended(tenant: TenantTraffic) -> Refusal:
    """Return a refusal for a request from a suspended tenant."""
    message = f"tenant {tenant.name!r} is suspended: contact the operator of this server"
    return Refusal(403, "tenant_suspended", message)


def _no_place(
    request: Request,
    model: ModelTraffic,
    tenants: Tenants,
    waiting: Waiting,
    wait_s: float | None,
    now: float,
) -> Refusal | None:
    tenant = tenants.of(request.tenant)
    limits: list[tuple[str, str, Use, int | None]] = [
        ("tenant", tenant.name, tenant.use, tenant.quota.queued_requests)
    ]
    if request.key_id:
        most = tenants.key_quota(request.key_id).queued_requests
        limits.append(("key", request.key_id, tenant.key(request.key_id), most))
    for scope, name, use, most in limits:
        if most is not None and use.queued >= most:
            message = (
                f"{use.queued} requests from {scope} {name!r} are waiting, and the limit is {most}: try "
                "again later"
            )
            after_s = _retry_after_s(wait_s, model.oldest_wait_s(now))
            return Refusal(429, "tenant_queue_full", message, after_s, kind="requests")
    rules, use, tokens = model.rules, tenant.use, request.admit.prompt_tokens
    if waiting.requests >= rules.limit:
        message = f"the queue has reached its limit of {waiting.requests} waiting requests"
    elif waiting.tokens and waiting.tokens + tokens > rules.tokens:
        message = (
            f"the waiting requests have {waiting.tokens} prompt tokens in total, and the limit is "
            f"{rules.tokens}"
        )
    elif use.queued >= _MAX_FREE_MULTIPLE * (
        rules.limit - waiting.requests
    ) or use.queued_tokens >= _MAX_FREE_MULTIPLE * (rules.tokens - waiting.tokens):
        message = (
            f"{waiting.requests} requests are waiting, including {use.queued} from tenant "
            f"{tenant.name!r}, and the remaining space in the queue is reserved for other tenants"
        )
    else:
        return None
    after_s = _retry_after_s(model.waits_s(now)[request.request_class], model.oldest_wait_s(now))
    return Refusal(503, "queue_full", f"{message}: try again later", after_s)


def _too_late(request: Request, model: ModelTraffic, wait_s: float | None) -> Refusal | None:
    """Return a refusal if the request would wait too long; None otherwise."""
    rules, shedder = model.rules, model.shedder
    if shedder.refuses(request.request_class, wait_s, rules):
        most_s = min(rules.overload * rules.target_s(request.request_class), rules.timeout_s)
        return Refusal(503, "overloaded", shedder.reason, _bounded((wait_s or 0.0) - most_s))
    if wait_s is not None and wait_s > rules.timeout_s:
        message = (
            f"the expected waiting time is {wait_s:.0f} s, more than the limit of {rules.timeout_s:g} "
            "s: try again later"
        )
        return Refusal(503, "overloaded", message, _bounded(wait_s - rules.timeout_s))
    return None


def _deadline(
    request: Request,
    model: ModelTraffic,
    tenants: Tenants,
    wait_s: float | None,
    now: float,
    *,
    waits: bool,
) -> Refusal | None:
    """Return a refusal if the request would miss its deadline or cause an earlier request to miss a promised
    deadline; None otherwise. If `waits` is set, a start time is promised even if the predicted waiting time
    is zero, because fair sharing between tenants may delay the request."""
    deadline = request.deadline_at or now
    if wait_s is None or not model.predictable:
        return _missed(request, now, 0.0, 0.0) if deadline <= now else None
    tenant = tenants.of(request.tenant)
    most = most_tokens(tenant.outputs, tenants.outputs, request.most_each)
    margin = 1.0 if model.forecast.measured else _PREDICTION_MARGIN
    wait_s *= margin
    run_s = margin * _RUN_MARGIN * model.run_s(request, most) + _MIN_MARGIN_S
    begin_by = deadline - run_s
    if now + wait_s > begin_by:
        return _missed(request, now, wait_s, run_s)
    if waits:
        if not wait_s:
            # A replica already has credit, so no credit report will trigger a search for dispatchable
            # requests. The next periodic search may be up to `_SEARCH_EVERY_S` away.
            begin_by -= _SEARCH_EVERY_S
        promised_s = model.promise_s(request, most * request.admit.num_seqs)
        begin_from = model.promises_from(now) + model.first_credit_s(LEVELS - 1, now)
        late_s = begin_from - model.queue.promises.latest_begin_with(begin_by, promised_s)
        if late_s > 0.0:
            model.expect_load(request)
            return _missed(request, now, begin_by - now + late_s, run_s)
        request.begin_by, request.promised_s = begin_by, promised_s
    return None


def _missed(request: Request, now: float, wait_s: float, run_s: float) -> Refusal:
    left_s = max(0.0, (request.deadline_at or now) - now)
    message = (
        f"the deadline is in {left_s * 1e3:.0f} ms, but the request is expected to wait "
        f"{wait_s * 1e3:.0f} ms and to run for {run_s * 1e3:.0f} ms"
    )
    return Refusal(503, "deadline_unreachable", message, useless=True)


def _retry_after_s(wait_s: float | None, oldest_s: float) -> float:
    """Return the retry delay for a refused client, in seconds: the expected time to serve `_DRAINED_PART` of
    the queue. If waiting times cannot be predicted, the estimate is based on how long the oldest request has
    waited."""
    return _bounded(oldest_s if wait_s is None else _DRAINED_PART * wait_s)


def _bounded(after_s: float) -> float:
    return min(_MAX_RETRY_S, max(1.0, round(after_s, 1)))
