"""The requests in flight: each is followed from its `Admit` to the one row in the log that ends it.

    Admit ──► queued ──► Admitted ──► running ──► Settle and every Finished, in any order ──► the row ends
                │  ▲                    │
     Refused ◄──┘  └── Admit(attempt+1) ┘ the replica died

A request ends when the front has said its last word (`Settle`, or the core for it: refused, front died) and
nothing of it is left on any replica. What was dispatched to a replica leaves it in exactly one of four ways:
its `Finished` arrives (the engine grants the credit again) · the front withdraws it before submitting
(refunded) · the front died or closed its channel before submitting (refunded at `Report.fronts_gone`) · the
replica dies (void: its account dies with it).

What it may need at most is reserved of its quotas when it is accepted, before it waits: nobody who waits is
refused for a quota later, and however many come at once, those accepted can never use more than is left.
Whatever becomes of it, what it did not use comes back once, with its end.

Whether a new request may wait is `appliance.traffic.admission`'s to say, whose turn it is `queue`'s, how soon
`model`'s. No I/O here, no clock of its own, no event loop: what happens is told by calls, in any order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from appliance.messages import Abort, Admit, Admitted, Identity, Refused, Rejected, Retried, Settle, Worked
from appliance.traffic.admission import (
    Refusal,
    Waiting,
    closed,
    failed_model,
    hopeless,
    refusal,
    reserve,
    suspended,
    timed_out,
    unknown_model,
)
from appliance.traffic.admission_pauses import AdmissionPause
from appliance.traffic.books import Books, Clock
from appliance.traffic.checks import Checks
from appliance.traffic.credits import BACKGROUND, CreditAccount
from appliance.traffic.load_shedder import DROP_BACKGROUND
from appliance.traffic.model import ModelTraffic
from appliance.traffic.outputs import expected_tokens
from appliance.traffic.quotas import Quotas
from appliance.traffic.request import Request, own_settle, rejected_row, retried_row, row_of
from appliance.traffic.rules import QueueRules
from engine.messages import Finished, Report
from store.policies import Policies
from store.requests import RequestRow

log = logging.getLogger(__name__)

_DROPPED_RETRY_S = 30.0
MAX_DROPPED = 500
"""At a look, of what an overload gives up: thousands at once would hold up everybody else."""
_TIDY_EVERY_S = 10.0


class RowSink(Protocol):
    """The request log (`store.requests.RequestLog`)."""

    def open(self, row: RequestRow) -> bool: ...
    def end(self, row: RequestRow) -> bool: ...


class RequestManager(Books):
    """Leads every request from its `Admit` to its end; what there is now can be read of `Books`.

    `send(front, message)` delivers to a front; a front that is gone swallows it. `salt(tenant)` is the
    prefix cache's salt of a tenant. `clock` never jumps, and says who has waited for how long; `unix` is the
    time of day, for the log.
    """

    def __init__(
        self,
        *,
        send: Callable[[str, Admitted | Refused | Abort], None],
        rows: RowSink,
        salt: Callable[[str], str],
        clock: Clock,
        unix: Clock,
        rules: QueueRules,
        quotas: Quotas,
    ) -> None:
        super().__init__(clock, quotas)
        self._send = send
        self._rows = rows
        self._salt = salt
        self._unix = unix
        self._rules = rules
        self._checks = Checks()
        """When a request that waits may have waited too long."""
        self._serial = 0
        self._tidied_at = 0.0
        self._fronts: set[str] = set()
        """That live."""
        self._lost_fronts: set[str] = set()
        """Fronts that closed a channel to a replica: they are dying, or of no use. What is dispatched for
        them may not arrive."""

    # ── what operators decide ──

    def set_policies(self, policies: Policies) -> None:
        """Go by these tenants and keys from now on, also for what waits."""
        self.quotas.set_policies(policies)
        changed = {tenant.name: tenant for tenant in self._tenants.set_policies(policies)}
        for tenant in changed.values():
            for model in self._models.values():
                for key_id in tenant.keys or ("",):
                    model.reconsider(tenant, key_id)
            tenant.held_at.clear()
            tenant.follow_rotations(self._tenants.limits_key)
        for request in [one for one in self._requests.values() if one.tenant in changed]:
            request.count_against(self._tenants.limits_key(request.key_id))
            if request.queued_at is not None and (tenant := changed[request.tenant]).suspended:
                self._refuse(request, suspended(tenant))
        self._dispatch_all()

    def set_rules(self, rules: QueueRules) -> None:
        """Go by these rules for the queue from now on."""
        self._rules = rules
        now = self._clock()
        for model in self._models.values():
            model.set_rules(rules)
        for request in self._requests.values():
            if request.queued_at is not None:
                self._checks.push(request, rules.timeout_s, now)
        self._dispatch_all()

    # ── models and replicas ──

    def add_model(self, name: str, version: str) -> None:
        """Take requests for this model from now on."""
        self._models[name] = ModelTraffic(name, version, self._rules, self._tenants)

    def remove_model(self, name: str) -> None:
        """Take no more requests for this model; those that wait are refused. Its replicas must be lost."""
        waiting = [*self._models[name].waiting(), *self._pauses.held(name)]
        for request in waiting:
            self._unqueue(request)
        del self._models[name]
        for tenant in self._tenants:
            tenant.held_at = {held for held in tenant.held_at if held[0] != name}
        for request in waiting:
            self._refuse(request, unknown_model(request.first.model, self._models))

    def set_version(self, name: str, version: str) -> None:
        """The files behind the model are others now."""
        self._models[name].version = version

    def recover_model(self, name: str) -> None:
        """A replica of it may answer soon: requests may wait again."""
        self._models[name].failure = None

    def fail_model(self, name: str, why: str) -> None:
        """None of its replicas can be started until something is mended: refuse what waits and what comes."""
        model = self._models[name]
        model.failure = why
        for request in model.waiting():
            self._refuse(request, failed_model(request.first.model, why))

    def add_replica(self, account: CreditAccount) -> None:
        """A replica is ready and every front has its channel to it."""
        model = self._models[account.model]
        model.accounts.append(account)
        model.learned()
        self._dispatch(model)

    def retire_replica(self, account: CreditAccount) -> None:
        """Give the replica nothing more; what it has goes on, until it is no longer `occupied`."""
        model = self._models[account.model]
        if account in model.accounts:
            model.accounts.remove(account)
            model.learned()

    def lose_replica(self, account: CreditAccount) -> None:
        """The replica is dead: what it had is void. Its requests go on when their fronts ask again."""
        self.retire_replica(account)
        for request in list(self._requests.values()):
            if account in request.dispatched:
                request.lost_counts = True
                self._leave(request, account, lost=True)
                self._end_if_complete(request)
        self._dispatch_all()

    def report(self, account: CreditAccount, report: Report) -> None:
        """The replica's own word: what ended, what it can take, whose channel closed."""
        for finished in report.finished:
            self._finish(account, finished)
        for front in report.fronts_gone:
            self._lose_channel(front, account)
        account.learn(report)
        model = self._models[account.model]
        model.learned()
        self._refuse_late(self._clock())
        self._dispatch(model)

    # ── fronts ──

    def add_front(self, front: str) -> None:
        """A front has started, and may ask. No other has its name, ever."""
        self._fronts.add(front)

    def admit(self, front: str, admit: Admit) -> None:
        """A front asks for a turn: the first time, or again after it lost the replica."""
        known = self._requests.get(admit.request_id)
        if known is not None:
            self._readmit(front, known, admit)
            return
        if admit.attempt > 0:
            log.error(
                "request %s: attempt %d of a request that is not in flight", admit.request_id, admit.attempt
            )
        model = self._models.get(admit.model)
        key_id = self._tenants.limits_key(admit.identity.key_id)
        request = Request(front, admit, key_id, model.version if model else "", self._deadline_at(admit))
        self._requests[admit.request_id] = request
        if model is None:
            self._refuse(request, unknown_model(request.first.model, self._models))
        elif (pause := self._pauses.of(admit.model)) is not None and not pause.hold:
            self._refuse(request, closed(pause))
        elif model.failure is not None:
            self._refuse(request, failed_model(request.first.model, model.failure))
        elif (
            why := self._judge(request, model, pause is not None) or reserve(request, self.quotas)
        ) is not None:
            self._refuse(request, why)
        else:
            self._rows.open(row_of(request, self._unix()))
            self._wait(request, self._clock())
            if pause is None:
                self._enqueue(model, request)
            else:
                self._pauses.hold(request)

    def settle(self, front: str, settle: Settle) -> None:
        """A front's last word on a request."""
        request = self._requests.get(settle.request_id)
        if request is None or request.front != front or request.settled is not None:
            # It was refused, or its replica's channel was found dead, while this was on its way.
            log.debug("request %s: settled by %s after its end", settle.request_id, front)
            return
        was_queued = request.queued_at is not None
        self._unqueue(request)
        request.settled = settle
        if not was_queued and not settle.submitted and request.latest is not None:
            self._take_back(request, request.latest)
        self._end_if_complete(request)

    def reject(self, rejected: Rejected) -> None:
        """A front refused a request by itself: a row, and a charge for the work."""
        if rejected.work_tokens:
            self._charge_for_work(rejected.identity, rejected.work_tokens, requests=1)
        model = self._models.get(rejected.model)
        self._rows.end(rejected_row(rejected, model.version if model else None, self._unix()))

    def charge_work(self, worked: Worked) -> None:
        """A front did work that no request pays for: a charge, no row."""
        self._charge_for_work(worked.identity, worked.tokens, requests=0)

    def log_retry(self, retried: Retried) -> None:
        """A front answered a request from another one's run: a row, nothing else."""
        model = self._models.get(retried.model)
        self._rows.end(retried_row(retried, model.version if model else None, self._unix()))

    def _charge_for_work(self, identity: Identity, tokens: int, requests: int) -> None:
        key_id = self._tenants.limits_key(identity.key_id)
        self.quotas.charge(identity.tenant, key_id, tokens, requests)

    def lose_front(self, front: str) -> None:
        """The front is dead. What it submitted is cancelled by the replicas, which say when that is done."""
        for request in [r for r in self._requests.values() if r.front == front]:
            if request.settled is None:
                self._unqueue(request)
                request.front_died = True
                request.settled = own_settle(
                    request, 499, "cancelled", "the front process died", self._unix()
                )
            self._end_if_complete(request)
        self._fronts.discard(front)
        self._lost_fronts.discard(front)

    # ── drain ──

    def pause_admission(self, model: str | None, why: str, *, hold: bool = False) -> None:
        """Take nothing new for `model` (None: for any). What waits and runs goes on; what comes is refused,
        or held until `open`."""
        self._pauses.begin(model, AdmissionPause(why, hold))
        self._look_after_held()

    def resume_admission(self, model: str | None) -> None:
        """End what `close` began: what was held for it takes its place in the queue."""
        self._pauses.end(model)
        self._look_after_held()

    def _look_after_held(self) -> None:
        for request, pause in self._pauses.released():
            model = self._models[request.first.model]
            if pause is not None:
                self._refuse(request, closed(pause))
            elif model.failure is not None:
                self._refuse(request, failed_model(request.first.model, model.failure))
            else:
                self._pauses.let_go(request)
                self._enqueue(model, request)

    # ── operator and time ──

    def abort(self, request_id: str, message: str) -> bool:
        """Have a request's front end it. False if there is no such request, or it is ending already."""
        request = self._requests.get(request_id)
        if request is None or request.settled is not None:
            return False
        self._send(request.front, Abort(request_id, message))
        return True

    def abort_all(self, message: str, model: str | None = None) -> int:
        """Abort every request in flight (of `model`, None: of all) that is not held; their number."""
        return sum([self.abort(request.request_id, message) for request in list(self.unfinished(model))])

    def expire(self) -> None:
        """Refuse what has waited too long, and move with the load. To be called a few times a second."""
        now = self._clock()
        self._refuse_late(now)
        for model in self._models.values():
            model.tick(now)
            if model.shedder.step >= DROP_BACKGROUND:
                why = Refusal(503, "overloaded", model.shedder.reason, _DROPPED_RETRY_S)
                for request in [t.item for t in islice(model.queue.classes[BACKGROUND], MAX_DROPPED)]:
                    self._refuse(request, why)
            self._dispatch(model)
        if now - self._tidied_at > _TIDY_EVERY_S:
            self._tidied_at = now
            self._tidy(now)

    # ── into the queue and out of it ──

    def _judge(self, request: Request, model: ModelTraffic, held: bool) -> Refusal | None:
        """Why a new request is refused; None if it may wait, or be held."""
        now = self._clock()
        tenant = self._tenants.of(request.tenant)
        self._tenants.saw(request.tenant, now)
        each = expected_tokens(tenant.outputs, self._tenants.outputs, request.most_each)
        request.expected_tokens = each * request.admit.rows
        request.due = request.deadline_at or now + self._rules.late_s(request.request_class)
        waiting = Waiting(self._waiting(), self._waiting_tokens)
        return refusal(request, model, self._tenants, waiting, now, held=held)

    def _readmit(self, front: str, request: Request, admit: Admit) -> None:
        fits = request.front == front and request.settled is None and request.queued_at is None
        if not fits or admit.attempt <= request.admit.attempt:
            log.error("request %s: attempt %d from %s does not fit", admit.request_id, admit.attempt, front)
            message = "another request with this id is in flight: give each its own"
            self._send(front, Refused(admit.request_id, admit.attempt, 409, "duplicate_request", message))
            return
        request.admit = admit
        model = self._models.get(request.first.model)
        if model is None:
            self._refuse(request, unknown_model(request.first.model, self._models))
        elif model.failure is not None:
            self._refuse(request, failed_model(request.first.model, model.failure))
        else:
            self._wait(request, self._clock())
            model.outstanding.wait(request)
            waiting = model.stranded if front in self._lost_fronts else model.resumed
            waiting[request.request_id] = request
            self._dispatch(model)

    def _deadline_at(self, admit: Admit) -> float | None:
        """Return the deadline by `clock`. The time of day only says how long ago the request arrived."""
        if admit.deadline_ms is None:
            return None
        return self._clock() - max(0.0, self._unix() - admit.arrived_at) + admit.deadline_ms / 1e3

    def _wait(self, request: Request, now: float) -> None:
        """It begins to wait."""
        request.queued_at = now
        self._waiting_tokens += request.admit.prompt_tokens
        for use in self._tenants.of(request.tenant).uses(request.key_id):
            use.queue(request.admit.prompt_tokens, 1)
        self._checks.push(request, self._rules.timeout_s, now)

    def _enqueue(self, model: ModelTraffic, request: Request) -> None:
        """It waits for its first turn."""
        self._serial += 1
        model.outstanding.wait(request)
        model.push(request, self._serial)
        if request.front in self._lost_fronts:
            model.strand(request)
        self._dispatch(model)

    def _unqueue(self, request: Request) -> None:
        """It waits no more."""
        if request.queued_at is None:
            return
        request.queued_at = None
        self._waiting_tokens -= request.admit.prompt_tokens
        for use in self._tenants.of(request.tenant).uses(request.key_id):
            use.queue(request.admit.prompt_tokens, -1)
        if not self._pauses.let_go(request):
            model = self._models[request.first.model]
            model.remove(request)
            model.outstanding.begin(request)

    def _lose_channel(self, front: str, account: CreditAccount) -> None:
        """A front's channel to a replica is closed: all that it did submit there has been counted."""
        if front in self._fronts:
            # Of one that is dead, replicas say it later, and nothing comes of it any more.
            self._lost_fronts.add(front)
        for request in [r for r in self._requests.values() if r.front == front]:
            if request.queued_at is not None and request not in self._pauses:
                self._models[request.first.model].strand(request)
            self._take_back(request, account)
            self._end_if_complete(request)

    def _refuse_late(self, now: float) -> None:
        """Refuse what has run out of time while it waited."""
        timeout_s = self._rules.timeout_s
        for request in self._checks.due(now):
            model, held = self._models[request.first.model], request in self._pauses
            why = timed_out(request, model, timeout_s, now, held=held) or hopeless(request, model, now)
            if why is None:
                self._checks.push(request, timeout_s, now)
            else:
                self._refuse(request, why)

    def _tidy(self, now: float) -> None:
        self._tenants.forget_unseen(now)
        for tenant in self._tenants:
            tenant.forget_idle_keys()
        for model in self._models.values():
            for fair in model.queue.classes:
                fair.forget_idle()

    # ── a request's turn ──

    def _dispatch_all(self) -> None:
        for model in self._models.values():
            self._dispatch(model)

    def _dispatch(self, model: ModelTraffic) -> None:
        """Hand out turns while somebody may have one."""
        now = self._clock()
        while (turn := model.next_turn(now)) is not None:
            request, account, _ = turn
            if (why := hopeless(request, model, now)) is not None:
                self._refuse(request, why)
                continue
            if request.queue_ms is None and request.queued_at is not None:
                request.queue_ms = (now - request.queued_at) * 1000
            self._running += not request.dispatched
            self._admitted += 1
            spare_slots = model.start(turn, now)
            self._unqueue(request)
            salt = self._salt(request.tenant)
            attempt = request.admit.attempt
            self._send(
                request.front,
                Admitted(
                    request.request_id,
                    attempt,
                    account.replica,
                    salt,
                    turn.priority,
                    urgency=turn.urgency,
                    spare_slots=spare_slots,
                    most_tokens=request.most_tokens,
                    rate_limits=self.quotas.rate_limits(request.tenant, request.key_id),
                ),
            )

    def _finish(self, account: CreditAccount, finished: Finished) -> None:
        request = self._requests.get(finished.request_id)
        left = request.dispatched.get(account) if request else None
        if request is None or left is None:
            log.error("%s finished %s, which it was not given", account.replica, finished.request_id)
            return
        rows = len(finished.finish_reason)
        left.end(rows, finished.credit_tokens)
        request.count(finished)
        self._preemptions += finished.preemptions
        if finished.generated_tokens:
            self._tenants.learn_output(request.tenant, finished.generated_tokens // rows, request.most_each)
        if left.submissions == 0:
            self._leave(request, account)
            self._end_if_complete(request)

    def _take_back(self, request: Request, account: CreditAccount) -> None:
        """What the request still has on the replica was never submitted."""
        left = request.dispatched.get(account)
        if left is not None:
            account.refund(left.level, left.rows, left.tokens)
            self._leave(request, account)
            self._dispatch(self._models[account.model])

    def _leave(self, request: Request, account: CreditAccount, *, lost: bool = False) -> None:
        """Nothing of the request is on the replica any more, which was `lost` or not."""
        del request.dispatched[account]
        if request.dispatched:
            return
        self._running -= 1
        self._models[account.model].stop(request)
        self._charge(request)
        if lost and request.settled is None:
            # It is to go on: whoever took its place meanwhile would be one too many.
            request.keeps_place = True
        else:
            self._leave_place(request)

    def _leave_place(self, request: Request) -> None:
        """It counts against the limits of its tenant and key no more."""
        request.keeps_place = False
        tenant, own = self._tenants.of(request.tenant), request.first.model
        freed = tenant.leave(own, request.key_id, request.running_rows, request.kv_tokens)
        for name in freed & self._models.keys():
            self._models[name].reconsider(tenant, request.key_id, 1)
            if name != own:
                self._dispatch(self._models[name])

    def _charge(self, request: Request) -> None:
        """Charge its tenant what the request took. A lost replica's count is known when the request ends."""
        model = self._models.get(request.first.model)
        if model is not None and (request.settled is not None or not request.lost_counts):
            model.charge(request, request.service(self._rules.output_weight))

    # ── a request's end ──

    def _refuse(self, request: Request, why: Refusal) -> None:
        self._unqueue(request)
        self._refused += 1
        limits = self.quotas.rate_limits(request.tenant, request.key_id) if why.status == 429 else None
        self._send(request.front, why.told(request, limits))
        if request.admit.attempt == 0:
            request.settled = own_settle(request, why.status, "error", why.message, self._unix())
            self._end_if_complete(request)
        # Later its client may have a part of the answer: its front says how much.

    def _end_if_complete(self, request: Request) -> None:
        if request.settled is None or request.dispatched:
            return
        if self._requests.pop(request.request_id, None) is None:
            return
        self._ended += 1
        if (model := self._models.get(request.first.model)) is not None:
            model.outstanding.end(request)
        if request.keeps_place:
            self._leave_place(request)
            self._dispatch_all()
        self._charge(request)
        self._tenants.of(request.tenant).service += request.charged
        if (held := request.reservation) is not None:
            self.quotas.settle(held, request.taken_tokens)
            self.quotas.close(held)
        self._rows.end(row_of(request, self._unix()))
