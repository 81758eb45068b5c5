"""Whether a new request may wait for its turn. Decided when it comes; what may wait is refused later only
when its time has run out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from appliance.messages import RateLimits, Refused
from appliance.traffic.admission_pauses import AdmissionPause
from appliance.traffic.model import ModelTraffic
from appliance.traffic.outputs import most_tokens
from appliance.traffic.quotas import Quotas, Shortage
from appliance.traffic.request import Request
from appliance.traffic.tenants import Tenant, Tenants, Use
from engine.messages import LEVELS

_SHARE_OF_WHAT_IS_LEFT = 4.0
"""Of the queue's places: a tenant may hold so many times those that are free (the
dynamic threshold of Choudhury and Hahne, 1998), so that one that floods never takes the last."""
_MAX_RETRY_S = 120.0
"""Clients of OpenAI's API do not wait for longer."""
_DRAIN_RETRY_S = 5.0
_FAILED_RETRY_S = 30.0
_DRAINED_PART = 0.1
"""Of what waits: when it is gone, a client may try again."""
_RUN_MARGIN = 1.2
"""Of the time that an answer takes at the measured rates: they may be worse when it is made."""
_HOPELESS = 0.85
"""Part of that time which is too little to begin with."""
_MIN_MARGIN_S = 0.02


class Refusal(NamedTuple):
    """Why a request does not run, for its client."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    useless: bool = False
    """To try again."""
    kind: str = ""
    """As `Refused.kind`."""

    def told(self, request: Request, limits: RateLimits | None) -> Refused:
        """What its front is told of it, with what is left of the caller's limits."""
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
    """In the whole house."""

    requests: int
    tokens: int


def refusal(
    request: Request, model: ModelTraffic, tenants: Tenants, waiting: Waiting, now: float, *, held: bool
) -> Refusal | None:
    """Why the request may not wait; None if it may. One that is to be `held` waits whatever is free, and
    nobody knows for how long. Then `request.begin_by` and `promised_s` say what its
    deadline asks of the queue."""
    tenant = tenants.of(request.tenant)
    if tenant.suspended:
        return suspended(tenant)
    wait_s = 0.0 if not held and model.starts_at_once(request, tenant, now) else None
    if wait_s is None:
        wait_s = model.wait_s(request, tenant, now) if model.predictable and not held else None
        why = _no_place(request, model, tenants, waiting, wait_s, now) or _too_late(request, model, wait_s)
        if why is not None:
            return why
    if (
        request.deadline_at is not None
        and (why := _deadline(request, model, tenants, wait_s, now)) is not None
    ):
        return why
    model.expect_load(request)
    return None


def hopeless(request: Request, model: ModelTraffic, now: float) -> Refusal | None:
    """Why a request that waits cannot meet its deadline even if it gets its turn now; None if it can."""
    if request.deadline_at is None:
        return None
    run_s = 0.0
    # How much of an answer is left that a replica's death cut off is not known, and its client has read it.
    if model.predictable and not request.admit.attempt:
        run_s = _HOPELESS * model.run_s(request, request.expected_tokens / max(1, request.admit.rows))
    return _missed(request, now, 0.0, run_s) if now + run_s > request.deadline_at else None


def timed_out(
    request: Request, model: ModelTraffic, timeout_s: float, now: float, *, held: bool
) -> Refusal | None:
    """Why a request that waits, or is `held`, waits no longer; None if it has not waited for so long."""
    if now < (request.queued_at or now) + timeout_s:
        return None
    if held:
        why = "the service was draining"
    else:
        why = "no replica had room for it" if model.accounts else "no replica of the model is ready"
    message = f"the request waited {timeout_s:g} s and {why}: try again later"
    wait_s = max((wait or 0.0 for wait in model.waits_s(now)), default=None)
    return Refusal(503, "queue_timeout", message, _retry_after_s(wait_s, model.oldest_wait_s(now)))


def reserve(request: Request, quotas: Quotas) -> Refusal | None:
    """Have its quotas hold what it may need at most; why it is refused if they do not have it left."""
    first = request.first
    held = quotas.reserve(
        request.tenant,
        request.key_id,
        prompt_tokens=first.prompt_tokens,
        max_tokens=first.max_tokens,
        samples=first.rows,
        may_lower=first.may_lower,
    )
    if not isinstance(held, Shortage):
        request.hold(held)
        return None
    wait_s = None if held.wait_s == math.inf else held.wait_s
    useless = not held.useful
    return Refusal(429, "rate_limit_exceeded", held.message, wait_s, useless=useless, kind=held.kind)


def unknown_model(name: str, known: Iterable[str]) -> Refusal:
    """No such model is served."""
    message = f"there is no model {name!r}: there are {', '.join(known) or 'none'}"
    return Refusal(404, "model_not_found", message)


def failed_model(name: str, why: str) -> Refusal:
    """No replica of the model can be started."""
    message = f"the model {name!r} cannot be served: {why}"
    return Refusal(503, "model_failed", message, _FAILED_RETRY_S)


def paused(pause: AdmissionPause) -> Refusal:
    """Return the refusal of a request while admission is paused."""
    return Refusal(503, "draining", pause.why, _DRAIN_RETRY_S)


def suspended(tenant: Tenant) -> Refusal:
    """Nothing of the tenant is served."""
    message = f"tenant {tenant.name!r} is suspended: ask the operator of this box"
    return Refusal(403, "tenant_suspended", message)


def _no_place(
    request: Request,
    model: ModelTraffic,
    tenants: Tenants,
    waiting: Waiting,
    wait_s: float | None,
    now: float,
) -> Refusal | None:
    tenant, oldest_s = tenants.of(request.tenant), model.oldest_wait_s(now)
    whose: list[tuple[str, Use, int | None]] = [
        (f"tenant {tenant.name!r}", tenant.use, tenant.quota.queued_requests)
    ]
    if request.key_id:
        limit = tenants.key_quota(request.key_id).queued_requests
        whose.append((f"key {request.key_id!r}", tenant.key(request.key_id), limit))
    for name, use, most in whose:
        if most is not None and use.queued >= most:
            message = f"{use.queued} requests of {name} are waiting, and its limit is {most}: try again later"
            after_s = _retry_after_s(wait_s, oldest_s)
            return Refusal(429, "tenant_queue_full", message, after_s, kind="requests")
    rules, use, tokens = model.rules, tenant.use, request.admit.prompt_tokens
    if waiting.requests >= rules.limit:
        message = f"{waiting.requests} requests are waiting, which is the limit"
    elif waiting.tokens and waiting.tokens + tokens > rules.tokens:
        message = f"requests of {waiting.tokens} tokens are waiting, and the limit is {rules.tokens}"
    elif use.queued >= _SHARE_OF_WHAT_IS_LEFT * (
        rules.limit - waiting.requests
    ) or use.queued_tokens >= _SHARE_OF_WHAT_IS_LEFT * (rules.tokens - waiting.tokens):
        message = (
            f"{waiting.requests} requests are waiting, {use.queued} of them tenant {tenant.name!r}'s: the "
            f"places that are left are for others"
        )
    else:
        return None
    after_s = _retry_after_s(model.waits_s(now)[request.request_class], oldest_s)
    return Refusal(503, "queue_full", f"{message}: try again later", after_s)


def _too_late(request: Request, model: ModelTraffic, wait_s: float | None) -> Refusal | None:
    """Refused for the time that it would wait."""
    rules, shedder = model.rules, model.shedder
    if shedder.refuses(request.request_class, wait_s, rules):
        most_s = min(rules.overload * rules.target_s(request.request_class), rules.timeout_s)
        return Refusal(503, "overloaded", shedder.reason, _bounded((wait_s or 0.0) - most_s))
    if wait_s is not None and wait_s > rules.timeout_s:
        message = (
            f"the request would wait {wait_s:.0f} s for its turn, and the most that is waited here is "
            f"{rules.timeout_s:g} s: try again later"
        )
        return Refusal(503, "overloaded", message, _bounded(wait_s - rules.timeout_s))
    return None


def _deadline(
    request: Request, model: ModelTraffic, tenants: Tenants, wait_s: float | None, now: float
) -> Refusal | None:
    """Refused because its deadline would be missed, or would make another miss that was promised before."""
    deadline = request.deadline_at or now
    if wait_s is None or not model.predictable:
        return _missed(request, now, 0.0, 0.0) if deadline <= now else None
    tenant = tenants.of(request.tenant)
    most = most_tokens(tenant.outputs, tenants.outputs, request.most_each)
    run_s = _RUN_MARGIN * model.run_s(request, most) + _MIN_MARGIN_S
    begin_by = deadline - run_s
    if now + wait_s > begin_by:
        return _missed(request, now, wait_s, run_s)
    if wait_s > 0.0:
        promised_s = model.promise_s(request, most * request.admit.rows)
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
        f"the deadline is in {left_s * 1e3:.0f} ms, but at the measured rates the answer takes "
        f"{wait_s * 1e3:.0f} ms of waiting and {run_s * 1e3:.0f} ms of computing"
    )
    return Refusal(503, "deadline_unreachable", message, useless=True)


def _retry_after_s(wait_s: float | None, oldest_s: float) -> float:
    """When a client should try again that would wait so long now: when a part of what waits is gone. Where
    nobody knows, what the oldest has waited is the best guess."""
    return _bounded(oldest_s if wait_s is None else _DRAINED_PART * wait_s)


def _bounded(after_s: float) -> float:
    return min(_MAX_RETRY_S, max(1.0, round(after_s, 1)))
