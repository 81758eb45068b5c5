"""Admits requests, dispatches them to replicas, and closes each one exactly once in the request log. The
request manager handles messages from fronts, reports from replicas and changes by operators. `TrafficState`
contains the request manager's data, and `RequestLifecycle` implements the states of a request.
`appliance.traffic.admission` decides whether a new request may wait, `queue` decides the order, and `model`
predicts how long requests will wait.

When a request is accepted, its maximum usage is reserved in its quotas before it starts waiting. A waiting
request is therefore never refused because of a quota, and concurrent requests never exceed a quota. The
unused part is returned when the request is closed.

The request manager does no I/O and needs no event loop; clocks are passed to it. Its methods may be called in
any order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice

import msgspec

from appliance.channel.core_messages import Abort, Preempted, Refused
from appliance.channel.front_messages import Admit, Rejected, Retried, Settle, ShadowDone, Worked
from appliance.channel.identity import SHADOW_IDENTITY, Identity
from appliance.traffic.admission import (
    Refusal,
    Waiting,
    failed_model,
    no_replica,
    paused,
    refusal,
    reserve,
    suspended,
    unknown_model,
)
from appliance.traffic.admission_pauses import AdmissionPause
from appliance.traffic.credits import CreditAccount
from appliance.traffic.lifecycle import RequestLifecycle, RowSink, Send
from appliance.traffic.load_shedder import DROP_BACKGROUND
from appliance.traffic.model import ModelTraffic
from appliance.traffic.outputs import expected_tokens
from appliance.traffic.quotas import Quotas
from appliance.traffic.request import Request, rejected_row, retried_row
from appliance.traffic.rules import QueueRules
from appliance.traffic.shadows import ShadowResults
from appliance.traffic.state import TrafficState
from engine.rank_messages import Report
from store.policies import BACKGROUND, Policies

log = logging.getLogger(__name__)

_DROPPED_RETRY_S = 30.0
MAX_DROPPED = 500
"""Maximum number of background requests that one call of `expire` refuses during overload. Refusing thousands
at once would delay all other requests."""
_TIDY_EVERY_S = 10.0


class RequestManager:
    """Manages every request from its `Admit` message to its end. `salt(tenant)` returns the tenant's
    prefix-cache salt. `clock` is monotonic and measures waiting times; `unix` is the wall clock, for the log.
    """

    def __init__(
        self,
        *,
        send: Send,
        rows: RowSink,
        salt: Callable[[str], str],
        clock: Callable[[], float],
        unix: Callable[[], float],
        rules: QueueRules,
        quotas: Quotas,
    ) -> None:
        self.state = TrafficState(clock, quotas)
        self._lifecycle = RequestLifecycle(
            self.state, send=send, rows=rows, salt=salt, unix=unix, rules=rules
        )
        self._send = send
        self._rows = rows
        self._unix = unix
        self._tidied_at = 0.0
        self.shadows = ShadowResults()
        """Results of requests copied to shadow models."""

    # ── changes by operators ──

    def set_policies(self, policies: Policies) -> None:
        """Apply new tenant and key records, including to requests that are already waiting."""
        state, tenants = self.state, self.state.tenants
        state.quotas.set_policies(policies)
        changed = {tenant.name: tenant for tenant in tenants.set_policies(policies)}
        for tenant in changed.values():
            for model in state.models.values():
                for key_id in tenant.keys or ("",):
                    model.reconsider(tenant, key_id)
            tenant.held_at.clear()
            tenant.follow_rotations(tenants.limits_key)
        for request in [one for one in state.in_flight.values() if one.tenant in changed]:
            request.count_against(tenants.limits_key(request.key_id))
            if request.queued_at is not None and (tenant := changed[request.tenant]).suspended:
                self._lifecycle.refuse(request, suspended(tenant))
        self._lifecycle.dispatch_all()

    def set_rules(self, rules: QueueRules) -> None:
        """Apply new queue rules."""
        for model in self.state.models.values():
            model.set_rules(rules)
        self._lifecycle.set_rules(rules)
        self._lifecycle.dispatch_all()

    def pause_admission(self, model: str | None, reason: str, *, hold: bool = False) -> None:
        """Stop admitting new requests for `model`, or for every model if `model` is None. New requests are
        refused or, if `hold` is set, held until `resume_admission` is called. Requests that are already
        waiting or running are not affected."""
        self.state.pauses.begin(model, AdmissionPause(reason, hold))
        self._release_held()

    def resume_admission(self, model: str | None) -> None:
        """End an admission pause and queue the requests that it held."""
        self.state.pauses.end(model)
        self._release_held()

    def _release_held(self) -> None:
        """Queue or refuse the held requests that no longer need to be held."""
        for request, pause in self.state.pauses.released():
            model = self.state.models[request.unit]
            if pause is not None:
                self._lifecycle.refuse(request, paused(pause))
            elif model.failure is not None:
                self._lifecycle.refuse(request, failed_model(request.first.model, model.failure))
            else:
                self.state.pauses.let_go(request)
                self._lifecycle.queue(request, model)

    def abort(self, request_id: str, message: str) -> bool:
        """Tell a request's front to end the request. Return False if the request is not in flight or is
        already ending."""
        request = self.state.in_flight.get(request_id)
        if request is None or request.settled is not None:
            return False
        self._send(request.front, Abort(request_id, message))
        return True

    def abort_all(self, message: str, model: str | None = None) -> int:
        """Abort all in-flight requests that are not held, optionally only those for `model`. Return their
        number."""
        return sum(
            [self.abort(request.request_id, message) for request in list(self.state.unfinished(model))]
        )

    # ── models and replicas ──

    def add_model(self, name: str, version: str) -> None:
        """Start accepting requests for a model."""
        self.state.models[name] = ModelTraffic(name, version, self._lifecycle.rules, self.state.tenants)

    def remove_model(self, name: str) -> None:
        """Stop accepting requests for a model and refuse its waiting requests. The model must have no
        replicas."""
        state = self.state
        waiting = [*state.models[name].waiting(), *state.pauses.held(name)]
        for request in waiting:
            self._lifecycle.stop_waiting(request)
        del state.models[name]
        for tenant in state.tenants:
            tenant.held_at = {held for held in tenant.held_at if held[0] != name}
        for request in waiting:
            self._lifecycle.refuse(request, unknown_model(request.first.model, state.models))

    def set_version(self, name: str, version: str) -> None:
        """Set the version of the model's files. From now on, it is logged with the model's requests."""
        self.state.models[name].version = version

    def recover_model(self, name: str) -> None:
        """Resume queueing requests for the model, because one of its replicas is starting."""
        self.state.models[name].failure = None

    def fail_model(self, name: str, reason: str) -> None:
        """Refuse the model's waiting and new requests, because none of its replicas can start. `reason` is
        the cause, which an operator must fix."""
        model = self.state.models[name]
        model.failure = reason
        for request in model.waiting():
            self._lifecycle.refuse(request, failed_model(request.first.model, reason))

    def add_replica(self, account: CreditAccount) -> None:
        """Start dispatching requests to a replica, which must be ready and connected to every front."""
        model = self.state.models[account.model]
        model.accounts.append(account)
        model.learned()
        self._lifecycle.dispatch(model)

    def retire_replica(self, account: CreditAccount) -> None:
        """Stop dispatching requests to the replica. Its running requests continue; `TrafficState.occupied`
        returns whether any are left."""
        model = self.state.models[account.model]
        if account in model.accounts:
            model.accounts.remove(account)
            model.learned()

    def preempt(self, account: CreditAccount) -> None:
        """Tell the fronts that the replica is about to be stopped while requests are running on it. The
        requests continue on another replica, as they would if the replica had failed, but the stop does not
        count as a failure."""
        running = [one for one in self.state.in_flight.values() if account in one.dispatched]
        for request in running:
            if request.settled is None:
                self._send(request.front, Preempted(request.request_id))
        if running:
            log.info(
                "stopping %s (running requests: %d); its requests will continue once a replica of the model "
                "is ready",
                account.replica,
                len(running),
            )

    def lose_replica(self, account: CreditAccount) -> None:
        """Record that a replica has exited. The replica's requests continue on other replicas once their
        fronts have sent the next attempt."""
        self.retire_replica(account)
        for request in list(self.state.in_flight.values()):
            if account in request.dispatched:
                request.counts_unknown = True
                self._lifecycle.leave_replica(request, account, exited=True)
                self._lifecycle.end_if_complete(request)
        self._lifecycle.dispatch_all()

    def report(self, account: CreditAccount, report: Report) -> None:
        """Apply a replica's report: finished submissions, returned credits and disconnected fronts."""
        for finished in report.finished:
            self._lifecycle.finish(account, finished)
        for front in report.disconnected_fronts:
            self._lose_channel(front, account)
        account.learn(report)
        model = self.state.models[account.model]
        model.learned()
        self._lifecycle.refuse_late(self.state.clock())
        self._lifecycle.dispatch(model)

    def _lose_channel(self, front: str, account: CreditAccount) -> None:
        """After a front has closed its channel to a replica, take back the front's requests that had not
        reached the replica."""
        if front in self.state.fronts:
            # The replica may report the closed channel before the core notices that the front has exited.
            # Until then, mark the front as broken.
            self.state.broken_fronts.add(front)
        for request in [one for one in self.state.in_flight.values() if one.front == front]:
            if request.queued_at is not None and request not in self.state.pauses:
                self.state.models[request.unit].strand(request)
            self._lifecycle.take_back(request, account)
            self._lifecycle.end_if_complete(request)

    # ── fronts ──

    def add_front(self, front: str) -> None:
        """Add a front that has started. Front names are never reused."""
        self.state.fronts.add(front)

    def lose_front(self, front: str) -> None:
        """Record that a front process has exited. Replicas cancel the front's submissions and report the
        cancellations."""
        for request in [one for one in self.state.in_flight.values() if one.front == front]:
            self._lifecycle.end_without_front(request)
        self.state.fronts.discard(front)
        self.state.broken_fronts.discard(front)

    def admit(self, front: str, admit: Admit) -> None:
        """Queue, hold or refuse a request for which a front has sent `Admit`: its first attempt, or the next
        attempt after a replica was lost."""
        state = self.state
        if admit.shadow_of:
            self._admit_shadow(front, admit)
            return
        known = state.in_flight.get(admit.request_id)
        model = state.models.get(admit.unit or admit.model)
        if known is not None and known.falls_back and known.front == front and known.settled is None:
            known.use_fallback(admit, model.version if model else "")
            self._begin(known, model)
            return
        if known is not None:
            self._readmit(front, known, admit)
            return
        if admit.attempt > 0:
            log.error(
                "request %s: attempt %d arrived, but the request is not in flight",
                admit.request_id,
                admit.attempt,
            )
        key_id = state.tenants.limits_key(admit.identity.key_id)
        request = Request(front, admit, key_id, model.version if model else "", self._deadline_at(admit))
        state.in_flight[admit.request_id] = request
        self._begin(request, model)

    def _admit_shadow(self, front: str, admit: Admit) -> None:
        """Dispatch a copied request immediately, or refuse it. Copied requests never wait and are not
        dispatched while any other request is waiting."""
        state, now = self.state, self.state.clock()
        admit = msgspec.structs.replace(admit, identity=SHADOW_IDENTITY)
        model = state.models.get(admit.unit)
        request = Request(front, admit, "", model.version if model else "")
        reason = Refusal(503, "shadow_dropped", "the copy of the request could not start immediately")
        if (
            model is None
            or model.failure is not None
            or admit.attempt
            or admit.request_id in state.in_flight
            or state.waiting
            or state.pauses.of(request.unit) is not None
            or not model.starts_at_once(request, state.tenants.of(request.tenant), now)
        ):
            self._send(front, reason.to_message(request, None))
            return
        state.in_flight[admit.request_id] = request
        request.due = now + self._lifecycle.rules.late_s(request.request_class)
        self._lifecycle.accept(request, model, hold=False)
        if request.queued_at is not None:
            self._lifecycle.refuse(request, reason)

    def shadow_done(self, done: ShadowDone) -> None:
        """Add a copied request's results to its shadow model's statistics."""
        self.shadows.add(done)

    def _begin(self, request: Request, model: ModelTraffic | None) -> None:
        """Queue a request for the model, or refuse it."""
        state = self.state
        if model is None:
            self._lifecycle.refuse(request, unknown_model(request.first.model, state.models))
            return
        pause = state.pauses.of(request.unit)
        reason = self._refusal(request, model, pause)
        if reason is None:
            model.asked_at = state.clock()
            model.uses.accept(request.tenant, request.admit.keep_alive_s, model.asked_at)
            self._lifecycle.accept(request, model, hold=pause is not None)
        else:
            self._lifecycle.refuse(request, reason)

    def _refusal(self, request: Request, model: ModelTraffic, pause: AdmissionPause | None) -> Refusal | None:
        """Return a refusal for a new request. None means that the request is to be queued or held, and that
        its maximum usage has been reserved in its quotas."""
        if pause is not None and not pause.hold:
            return paused(pause)
        if model.failure is not None:
            return failed_model(request.first.model, model.failure)
        if request.admit.may_fall_back and not model.accounts:
            return no_replica(request.first.model)
        state, now = self.state, self.state.clock()
        tenant = state.tenants.of(request.tenant)
        state.tenants.saw(request.tenant, now)
        each = expected_tokens(tenant.outputs, state.tenants.outputs, request.most_each)
        request.expected_tokens = each * request.admit.num_seqs
        request.due = request.deadline_at or now + self._lifecycle.rules.late_s(request.request_class)
        waiting = Waiting(state.waiting, state.waiting_tokens)
        reason = refusal(request, model, state.tenants, waiting, now, held=pause is not None)
        return reason or reserve(request, state.quotas)

    def _readmit(self, front: str, request: Request, admit: Admit) -> None:
        fits = request.front == front and request.settled is None and request.queued_at is None
        if not fits or admit.attempt <= request.admit.attempt:
            log.error("request %s: unexpected attempt %d from %s", admit.request_id, admit.attempt, front)
            message = "another request with this id is already in flight; use a unique id for each request"
            self._send(front, Refused(admit.request_id, admit.attempt, 409, "duplicate_request", message))
            return
        request.admit = admit
        model = self.state.models.get(request.unit)
        if model is None:
            self._lifecycle.refuse(request, unknown_model(request.first.model, self.state.models))
        elif model.failure is not None:
            self._lifecycle.refuse(request, failed_model(request.first.model, model.failure))
        else:
            self._lifecycle.resume(request, model)

    def _deadline_at(self, admit: Admit) -> float | None:
        """Return the request's deadline on `clock`. Wall-clock time is used only to compute how long ago the
        request arrived."""
        if admit.deadline_ms is None:
            return None
        return self.state.clock() - max(0.0, self._unix() - admit.arrived_at) + admit.deadline_ms / 1e3

    def settle(self, front: str, settle: Settle) -> None:
        """Settle a request that its front has reported as finished."""
        request = self.state.in_flight.get(settle.request_id)
        if request is None or request.front != front or request.settled is not None:
            # The request was already refused, or its channel to the replica broke, before this message
            # arrived.
            log.debug("request %s: %s reported the end of the request again", settle.request_id, front)
            return
        was_queued = request.queued_at is not None
        self._lifecycle.stop_waiting(request)
        request.settled = settle
        if not was_queued and not settle.submitted and request.latest is not None:
            self._lifecycle.take_back(request, request.latest)
        self._lifecycle.end_if_complete(request)

    def reject(self, rejected: Rejected) -> None:
        """Log a request refused by its front and charge the caller's quotas for the front's work."""
        if rejected.work_tokens:
            self._charge_for_work(rejected.identity, rejected.work_tokens, requests=1)
        self._rows.end(rejected_row(rejected, self._version(rejected.model), self._unix()))

    def charge_work(self, worked: Worked) -> None:
        """Charge the caller's quotas for front work that is not part of a request."""
        self._charge_for_work(worked.identity, worked.tokens, requests=0)

    def log_retry(self, retried: Retried) -> None:
        """Log a retry that a front answered with an earlier request's result."""
        self._rows.end(retried_row(retried, self._version(retried.model), self._unix()))

    def _version(self, model: str) -> str | None:
        known = self.state.models.get(model)
        return known.version if known else None

    def _charge_for_work(self, identity: Identity, tokens: int, requests: int) -> None:
        key_id = self.state.tenants.limits_key(identity.key_id)
        self.state.quotas.charge(identity.tenant, key_id, tokens, requests)

    # ── time ──

    def expire(self) -> None:
        """Update predictions and load shedding, and refuse requests that have waited too long. Call this a
        few times per second."""
        now = self.state.clock()
        self._lifecycle.refuse_late(now)
        for model in self.state.models.values():
            model.tick(now)
            if model.shedder.step >= DROP_BACKGROUND:
                reason = Refusal(503, "overloaded", model.shedder.reason, _DROPPED_RETRY_S)
                for request in [t.item for t in islice(model.queue.classes[BACKGROUND], MAX_DROPPED)]:
                    self._lifecycle.refuse(request, reason)
            self._lifecycle.dispatch(model)
        if now - self._tidied_at > _TIDY_EVERY_S:
            self._tidied_at = now
            self._tidy(now)

    def _tidy(self, now: float) -> None:
        self.state.recent.note(self.state.quotas, self._unix())
        self.state.tenants.forget_unseen(now)
        for tenant in self.state.tenants:
            tenant.forget_idle_keys()
        for model in self.state.models.values():
            for fair in model.queue.classes:
                fair.forget_idle()
