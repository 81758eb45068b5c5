"""The states of a request (waiting, running, ended) and the transitions between them.

    accept ──► queue or hold ──► dispatch ──► leave_replica ──► end
                │  ▲               │
       refuse ◄─┘  └───────────────┘ the replica failed and the front sent the next attempt

A request ends when it has been settled and no replica holds any of its submissions. Normally, its front
settles it. If it is refused or its front has died, the core settles it instead. A dispatched request leaves
its replica in exactly one of four ways:

- Its `Finished` message arrives. The engine returns the credit.
- The front settles it without submitting it. The credit is refunded.
- The front died, or closed its channel, before submitting it. The credit is refunded when the replica reports
  the front in `Report.disconnected_fronts`.
- The replica dies. The replica's account is discarded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from appliance.channel.core_messages import Abort, Admitted, Preempted, Refused
from appliance.traffic.admission import FALLBACK_CODES, Refusal, hopeless, timed_out
from appliance.traffic.checks import Checks
from appliance.traffic.credits import CreditAccount
from appliance.traffic.model import ModelTraffic
from appliance.traffic.request import Request, own_settle, row_of
from appliance.traffic.rules import QueueRules
from appliance.traffic.state import TrafficState
from engine.levels import split_level
from engine.rank_messages import Finished
from store.requests import RequestRow

log = logging.getLogger(__name__)

Send = Callable[[str, Admitted | Refused | Abort | Preempted], None]
"""Delivers a message to the named front, or does nothing if that front has disconnected."""


class RowSink(Protocol):
    """Receives the rows of the request log; implemented by `store.requests.RequestLog`."""

    def open(self, row: RequestRow) -> bool: ...
    def end(self, row: RequestRow) -> bool: ...


class RequestLifecycle:
    """Moves requests between states. `salt(tenant)` returns the tenant's prefix-cache salt. `unix` returns
    the wall-clock time, which is used for the log."""

    def __init__(
        self,
        state: TrafficState,
        *,
        send: Send,
        rows: RowSink,
        salt: Callable[[str], str],
        unix: Callable[[], float],
        rules: QueueRules,
    ) -> None:
        self.rules = rules
        self._state = state
        self._send = send
        self._rows = rows
        self._salt = salt
        self._unix = unix
        self._checks = Checks()
        """Schedules the timeout and deadline checks of waiting requests."""
        self._serial = 0

    def set_rules(self, rules: QueueRules) -> None:
        """Apply new queue rules, including to requests that are already waiting."""
        self.rules = rules
        now = self._state.clock()
        for request in self._state.in_flight.values():
            if request.queued_at is not None:
                self._checks.push(request, rules.timeout_s, now)

    # ── waiting ──

    def accept(self, request: Request, model: ModelTraffic, *, hold: bool) -> None:
        """Log a new request and queue it, or hold it until admission resumes."""
        if not request.is_logged and not request.is_shadow:
            request.is_logged = True
            self._rows.open(row_of(request, self._unix()))
        self._begin_waiting(request)
        if hold:
            self._state.pauses.hold(request)
        else:
            self.queue(request, model)

    def queue(self, request: Request, model: ModelTraffic) -> None:
        """Queue a request for its first dispatch."""
        self._serial += 1
        model.outstanding.wait(request)
        model.push(request, self._serial)
        if request.front in self._state.broken_fronts:
            model.strand(request)
        self.dispatch(model)

    def resume(self, request: Request, model: ModelTraffic) -> None:
        """Queue a request that has lost its replica, ahead of requests waiting for their first dispatch."""
        self._begin_waiting(request)
        model.outstanding.wait(request)
        waiting = model.stranded if request.front in self._state.broken_fronts else model.resumed
        waiting[request.request_id] = request
        self.dispatch(model)

    def stop_waiting(self, request: Request) -> None:
        """Remove a request from its queue, if it is waiting."""
        if request.queued_at is None:
            return
        request.queued_at = None
        self._checks.remove(request)
        self._count_waiting(request, -1)
        if not self._state.pauses.let_go(request):
            model = self._state.models[request.unit]
            model.remove(request)
            model.outstanding.begin(request)

    def refuse_late(self, now: float) -> None:
        """Refuse requests that have waited too long or can no longer meet their deadline."""
        for request in self._checks.due(now):
            model, held = self._state.models[request.unit], request in self._state.pauses
            timeout_s = self.rules.timeout_s
            reason = timed_out(request, model, timeout_s, now, held=held) or hopeless(request, model, now)
            if reason is None:
                self._checks.push(request, timeout_s, now)
            else:
                self.refuse(request, reason)

    def _begin_waiting(self, request: Request) -> None:
        request.queued_at = now = self._state.clock()
        self._count_waiting(request, 1)
        self._checks.push(request, self.rules.timeout_s, now)

    def _count_waiting(self, request: Request, sign: int) -> None:
        # Each sample of a resumed request is a separate submission, but all samples share the prompt.
        prompt_tokens = request.first.prompt_tokens
        self._state.waiting_tokens += sign * prompt_tokens
        for use in self._state.tenants.of(request.tenant).uses(request.key_id):
            use.queue(prompt_tokens, sign)

    # ── running ──

    def dispatch_all(self) -> None:
        """Dispatch every model's waiting requests while its replicas have credit."""
        for model in self._state.models.values():
            self.dispatch(model)

    def dispatch(self, model: ModelTraffic) -> None:
        """Dispatch the model's waiting requests while its replicas have credit."""
        state, now = self._state, self._state.clock()
        while (turn := model.next_turn(now)) is not None:
            request, account, level = turn
            if (reason := hopeless(request, model, now)) is not None:
                self.refuse(request, reason)
                continue
            if request.queue_ms is None and request.queued_at is not None:
                request.queue_ms = (now - request.queued_at) * 1000
            state.running += not request.dispatched
            state.admitted += 1
            reserved_slots = model.start(turn, now)
            priority, urgency = split_level(level)
            self.stop_waiting(request)
            self._send(
                request.front,
                Admitted(
                    request.request_id,
                    request.admit.attempt,
                    account.replica,
                    self._salt(request.first.shadow_of or request.tenant),
                    priority,
                    urgency=urgency,
                    reserved_slots=reserved_slots,
                    most_tokens=request.most_tokens,
                    rate_limits=state.quotas.rate_limits(request.tenant, request.key_id),
                ),
            )

    def finish(self, account: CreditAccount, finished: Finished) -> None:
        """Record that a replica has reported a submission as finished."""
        request = self._state.in_flight.get(finished.request_id)
        left = request.dispatched.get(account) if request else None
        if request is None or left is None:
            log.error(
                "replica %s finished request %s, which was not dispatched to it",
                account.replica,
                finished.request_id,
            )
            return
        samples = len(finished.finish_reason)
        left.end(samples, finished.credit_tokens)
        request.count(finished)
        self._state.preemptions += finished.preemptions
        if finished.generated_tokens:
            tokens = finished.generated_tokens // samples
            self._state.tenants.learn_output(request.tenant, tokens, request.most_each)
        if left.submissions == 0:
            self.leave_replica(request, account)
            self.end_if_complete(request)

    def take_back(self, request: Request, account: CreditAccount) -> None:
        """Refund the credit for the request's submissions that were dispatched to the replica but never
        reached it."""
        left = request.dispatched.get(account)
        if left is not None:
            account.refund(left.level, left.seqs, left.tokens)
            self.leave_replica(request, account)
            self.dispatch(self._state.models[account.model])

    def leave_replica(self, request: Request, account: CreditAccount, *, exited: bool = False) -> None:
        """Record that the request is no longer running on the replica. Set `exited` if the replica has
        exited."""
        del request.dispatched[account]
        if request.dispatched:
            return
        self._state.running -= 1
        model = self._state.models[account.model]
        model.stop(request)
        model.uses.end(request.tenant, self._state.clock())
        self._charge(request)
        if exited and request.settled is None:
            # The request will continue on another replica, so it still counts against its tenant's and key's
            # limits. Otherwise, another request could start in its place, and the limit would be exceeded
            # once this request continues.
            request.keeps_place = True
        else:
            self._leave_place(request)

    def _leave_place(self, request: Request) -> None:
        """Stop counting the request against its tenant's and key's limits."""
        request.keeps_place = False
        models, own = self._state.models, request.unit
        tenant = self._state.tenants.of(request.tenant)
        freed = tenant.leave(own, request.key_id, request.running_seqs, request.kv_tokens)
        for name in freed & models.keys():
            models[name].reconsider(tenant, request.key_id, 1)
            if name != own:
                self.dispatch(models[name])

    def _charge(self, request: Request) -> None:
        """Charge the tenant for the request's tokens. If a replica was lost, the number of tokens is unknown
        until the request is settled."""
        model = self._state.models.get(request.unit)
        if model is not None and (request.settled is not None or not request.counts_unknown):
            model.charge(request, request.service(self.rules.output_weight))

    # ── end of a request ──

    def refuse(self, request: Request, reason: Refusal) -> None:
        """Refuse a new or waiting request. If part of its answer has already been sent, the front ends the
        answer with an error."""
        self.stop_waiting(request)
        if request.admit.may_fall_back and reason.code in FALLBACK_CODES:
            self._fall_back(request, reason)
            return
        self._state.refused += 1
        limits = (
            self._state.quotas.rate_limits(request.tenant, request.key_id) if reason.status == 429 else None
        )
        self._send(request.front, reason.to_message(request, limits))
        if request.admit.attempt == 0:
            request.settled = own_settle(request, reason.status, "error", reason.message, self._unix())
            self.end_if_complete(request)
        # After the first attempt, the client may already have received part of the answer. The front will
        # report how many tokens were delivered.

    def _fall_back(self, request: Request, reason: Refusal) -> None:
        """Withdraw a request from a model that cannot run it. The front then either submits the request again
        for the fallback model or settles it."""
        request.falls_back = True
        request.begin_by, request.promised_s, request.most_tokens = None, 0.0, None
        if (model := self._state.models.get(request.unit)) is not None:
            model.outstanding.end(request)
        if (held := request.reservation) is not None:
            request.reservation = None
            self._state.quotas.settle(held, 0)
            self._state.quotas.close(held)
        message = msgspec.structs.replace(reason.to_message(request, None), falls_back=True)
        self._send(request.front, message)

    def end_without_front(self, request: Request) -> None:
        """Settle a request whose front process has exited."""
        if request.settled is None:
            self.stop_waiting(request)
            request.front_died = True
            request.settled = own_settle(request, 499, "cancelled", "the front process died", self._unix())
        self.end_if_complete(request)

    def end_if_complete(self, request: Request) -> None:
        """End the request if it is settled and no replica holds any of its submissions."""
        state = self._state
        if request.settled is None or request.dispatched:
            return
        if state.in_flight.pop(request.request_id, None) is None:
            return
        state.ended += 1
        if (model := state.models.get(request.unit)) is not None:
            model.outstanding.end(request)
            if request.settled.ttft_ms is not None:
                model.ttft.add(state.clock(), request.settled.ttft_ms / 1e3)
        if request.keeps_place:
            self._leave_place(request)
            self.dispatch_all()
        self._charge(request)
        state.tenants.of(request.tenant).service += request.charged
        if (held := request.reservation) is not None:
            state.quotas.settle(held, request.taken_tokens)
            state.quotas.close(held)
        if request.is_shadow:
            return
        now = self._unix()
        state.recent.add(request, now)
        self._rows.end(row_of(request, now))
