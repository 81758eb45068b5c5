"""The requests in flight: each is followed from its `Admit` to the one row in the log that ends it.

    Admit ──► queued ──► Admitted ──► running ──► Settle and every Finished, in any order ──► the row ends
                │  ▲                    │
     Refused ◄──┘  └── Admit(attempt+1) ┘ the replica died

A request ends when the front has said its last word (`Settle`, or the core for it: refused, front died) and
nothing of it is left on any replica. What was dispatched to a replica leaves it in exactly one of four ways:
its `Finished` arrives (the engine grants the credit again) · the front withdraws it before submitting
(refunded) · the front died or closed its channel before submitting (refunded at `Report.fronts_gone`) · the
replica dies (void: its account dies with it).

No I/O here, no clock of its own, no event loop: what happens is told by calls, in any order.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from appliance.messages import Abort, Admit, Admitted, Refused, Rejected, Settle
from appliance.traffic.closures import Closure, Closures
from appliance.traffic.credits import CreditAccount
from appliance.traffic.queue import RequestQueue
from appliance.traffic.request import OnReplica, Request, rejected_row, row_of
from engine.messages import Finished, Report
from store.requests import RequestRow

log = logging.getLogger(__name__)

_DRAIN_RETRY_S = 5.0
_FAILED_RETRY_S = 30.0


class Clock(Protocol):
    """Seconds since 1970."""

    def __call__(self) -> float: ...


class RowSink(Protocol):
    """The request log (`store.requests.RequestLog`)."""

    def open(self, row: RequestRow) -> bool: ...
    def end(self, row: RequestRow) -> bool: ...


class _Model:
    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self.queue: RequestQueue[Request] = RequestQueue()
        self.accounts: list[CreditAccount] = []
        self.failure: str | None = None


class QueueFigures(NamedTuple):
    """How full the house is."""

    waiting: int
    running: int
    oldest_wait_s: float
    admitted: int
    refused: int
    ended: int


class Ledger:
    """Every request in flight, the queues and the replicas' accounts.

    `send(front, message)` delivers to a front; a front that is gone swallows it. `salt(tenant)` is the
    prefix cache's salt of a tenant.
    """

    def __init__(
        self,
        *,
        send: Callable[[str, Admitted | Refused | Abort], None],
        rows: RowSink,
        salt: Callable[[str], str],
        clock: Clock,
        queue_limit: int,
        queue_timeout_s: float,
    ) -> None:
        self._send = send
        self._rows = rows
        self._salt = salt
        self._clock = clock
        self._queue_limit = queue_limit
        self._queue_timeout_s = queue_timeout_s
        self._models: dict[str, _Model] = {}
        self._requests: dict[str, Request] = {}
        self._admitted = 0
        self._refused = 0
        self._ended = 0
        self._closures = Closures()
        self._held: OrderedDict[str, Request] = OrderedDict()
        """Requests that came while their model was closed, and wait until it is open again."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    # ── models and replicas ──

    def add_model(self, name: str, version: str) -> None:
        """Take requests for this model from now on."""
        self._models[name] = _Model(name, version)

    def remove_model(self, name: str) -> None:
        """Take no more requests for this model; those that wait are refused. Its replicas must be lost."""
        held = [request for request in self._held.values() if request.first.model == name]
        waiting = [*self._models[name].queue, *held]
        for request in waiting:
            self._unqueue(request)
        del self._models[name]
        for request in waiting:
            self._refuse_unknown(request)

    def set_version(self, name: str, version: str) -> None:
        """The files behind the model are others now."""
        self._models[name].version = version

    def recover_model(self, name: str) -> None:
        """A replica of it may answer soon: requests may wait again."""
        self._models[name].failure = None

    def failure(self, name: str) -> str | None:
        """Why the model's requests are refused; None if they are not."""
        return self._models[name].failure

    def fail_model(self, name: str, why: str) -> None:
        """None of its replicas can be started until something is mended: refuse what waits and what comes."""
        model = self._models[name]
        model.failure = why
        for request in list(model.queue):
            self._refuse_failed(request, why)

    def add_replica(self, account: CreditAccount) -> None:
        """A replica is ready and every front has its channel to it."""
        self._models[account.model].accounts.append(account)
        self._dispatch(self._models[account.model])

    def retire_replica(self, account: CreditAccount) -> None:
        """Give the replica nothing more; what it has goes on, until it is no longer `occupied`."""
        accounts = self._models[account.model].accounts
        if account in accounts:
            accounts.remove(account)

    def occupied(self, account: CreditAccount) -> bool:
        """Whether anything runs on the replica."""
        return any(account in request.dispatched for request in self._requests.values())

    def lose_replica(self, account: CreditAccount) -> None:
        """The replica is dead: what it had is void. Its requests go on when their fronts ask again."""
        accounts = self._models[account.model].accounts
        if account in accounts:
            accounts.remove(account)
        for request in list(self._requests.values()):
            if request.dispatched.pop(account, None) is not None:
                request.lost_counts = True
                self._end_if_complete(request)

    def report(self, account: CreditAccount, report: Report) -> None:
        """The replica's own word: what ended, what it can take, whose channel closed."""
        for finished in report.finished:
            self._finish(account, finished)
        for front in report.fronts_gone:
            account.lost_fronts.add(front)
            for request in [r for r in self._requests.values() if r.front == front]:
                # All that it did submit has been counted above.
                self._take_back(request, account)
                self._end_if_complete(request)
        account.grant(report.credit_rows, report.credit_tokens)
        self._dispatch(self._models[account.model])

    # ── fronts ──

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
        request = Request(front, admit, model.version if model else "")
        self._requests[admit.request_id] = request
        if model is None:
            self._refuse_unknown(request)
        elif (closure := self._closures.of(admit.model)) is not None and not closure.hold:
            self._refuse_closed(request, closure)
        elif model.failure is not None:
            self._refuse_failed(request, model.failure)
        elif (waiting := self._waiting()) >= self._queue_limit:
            message = f"{waiting} requests are waiting, which is the limit: try again later"
            self._refuse(request, 503, "queue_full", message, self._retry_after())
        else:
            self._rows.open(row_of(request, self._clock()))
            if closure is None:
                self._enqueue(model, request)
            else:
                request.queued_at = self._clock()
                self._held[request.request_id] = request

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
        """A front refused a request by itself: a row, nothing else."""
        model = self._models.get(rejected.model)
        self._rows.end(rejected_row(rejected, model.version if model else None, self._clock()))

    def lose_front(self, front: str) -> None:
        """The front is dead. What it submitted is cancelled by the replicas, which say when that is done."""
        for request in [r for r in self._requests.values() if r.front == front]:
            if request.settled is None:
                self._unqueue(request)
                request.settled = self._own_settle(request, 499, "cancelled", "the front process died")
            self._end_if_complete(request)

    # ── drain ──

    def close(self, model: str | None, why: str, *, hold: bool = False) -> None:
        """Take nothing new for `model` (None: for any). What waits and runs goes on; what comes is refused,
        or held until `open`."""
        self._closures.close(model, Closure(why, hold))
        self._look_after_held()

    def open(self, model: str | None) -> None:
        """End what `close` began: what was held for it takes its place in the queue."""
        self._closures.open(model)
        self._look_after_held()

    def _look_after_held(self) -> None:
        for request in list(self._held.values()):
            closure, model = self._closures.of(request.first.model), self._models[request.first.model]
            if closure is not None and closure.hold:
                continue
            if closure is not None:
                self._refuse_closed(request, closure)
            elif model.failure is not None:
                self._refuse_failed(request, model.failure)
            else:
                del self._held[request.request_id]
                self._enqueue(model, request)

    def unfinished(self, model: str | None = None) -> list[Request]:
        """The requests in flight (of `model`, None: of all) that are not held: what a drain waits for."""
        return [
            request
            for request in self._requests.values()
            if request.request_id not in self._held and model in (None, request.first.model)
        ]

    def held(self, model: str | None = None) -> int:
        """How many requests are held (for `model`, None: for any)."""
        return sum(1 for request in self._held.values() if model in (None, request.first.model))

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
        return sum([self.abort(request.request_id, message) for request in self.unfinished(model)])

    def accounts_of(self, request_id: str) -> list[CreditAccount]:
        """Where a request runs now."""
        request = self._requests.get(request_id)
        return list(request.dispatched) if request else []

    def expire(self) -> None:
        """Refuse what has waited too long. To be called a few times a second."""
        latest = self._clock() - self._queue_timeout_s
        for request in [r for r in self._held.values() if r.queued_at is not None and r.queued_at < latest]:
            message = f"the request waited {self._queue_timeout_s:g} s while the service was draining"
            self._refuse(request, 503, "queue_timeout", f"{message}: try again later", self._retry_after())
        for model in self._models.values():
            for request in [r for r in model.queue if r.queued_at is not None and r.queued_at < latest]:
                why = "no replica had room for it" if model.accounts else "no replica of the model is ready"
                message = f"the request waited {self._queue_timeout_s:g} s and {why}: try again later"
                self._refuse(request, 503, "queue_timeout", message, self._retry_after())

    def figures(self) -> QueueFigures:
        """How full the house is."""
        waiting = self._waiting()
        return QueueFigures(
            waiting=waiting,
            running=sum(1 for request in self._requests.values() if request.dispatched),
            oldest_wait_s=self._oldest_wait_s(),
            admitted=self._admitted,
            refused=self._refused,
            ended=self._ended,
        )

    def queued(self, model: str) -> int:
        """Requests that wait for this model."""
        return len(self._models[model].queue)

    # ── a request's turn ──

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
            self._refuse_unknown(request)
        elif model.failure is not None:
            self._refuse_failed(request, model.failure)
        else:
            self._enqueue(model, request, first=True)

    def _enqueue(self, model: _Model, request: Request, first: bool = False) -> None:
        if request.queued_at is None:
            request.queued_at = self._clock()
        model.queue.push(request.request_id, request, request.request_class, first=first)
        self._dispatch(model)

    def _unqueue(self, request: Request) -> None:
        if request.queued_at is None:
            return
        request.queued_at = None
        if self._held.pop(request.request_id, None) is None:
            self._models[request.first.model].queue.remove(request.request_id, request.request_class)

    def _dispatch(self, model: _Model) -> None:
        """Late binding: hand out turns while a replica has credit."""
        while any(account.open for account in model.accounts):
            for request in model.queue:
                account = self._account_for(model.accounts, request)
                if account is not None:
                    break
            else:
                return
            self._start(request, account)

    def _account_for(self, accounts: Iterable[CreditAccount], request: Request) -> CreditAccount | None:
        # A replica that the request was on before is one that its front has lost, whether or not we know yet.
        fit = [
            account
            for account in accounts
            if account.open and account not in request.tried and request.front not in account.lost_fronts
        ]
        return max(fit, key=lambda account: (account.available_rows, account.available_tokens), default=None)

    def _start(self, request: Request, account: CreditAccount) -> None:
        admit = request.admit
        if request.queue_ms is None and request.queued_at is not None:
            request.queue_ms = (self._clock() - request.queued_at) * 1000
        self._unqueue(request)
        account.spend(admit.rows, admit.prompt_tokens)
        request.dispatched[account] = OnReplica(admit)
        request.tried.add(account)
        request.latest = account
        request.cached_tokens = 0
        self._admitted += 1
        salt = self._salt(admit.identity.tenant)
        turn = Admitted(request.request_id, admit.attempt, account.replica, salt, request.request_class)
        self._send(request.front, turn)

    def _finish(self, account: CreditAccount, finished: Finished) -> None:
        request = self._requests.get(finished.request_id)
        left = request.dispatched.get(account) if request else None
        if request is None or left is None:
            log.error("%s finished %s, which it was not given", account.replica, finished.request_id)
            return
        left.submissions -= 1
        left.rows -= len(finished.finish)
        left.tokens -= finished.credit_tokens
        request.generated_tokens += finished.generated_tokens
        request.cached_tokens += finished.cached_tokens
        request.preemptions += finished.preemptions
        if request.batch_size_at_start is None:
            request.batch_size_at_start = finished.batch_size
        if left.submissions == 0:
            del request.dispatched[account]
            self._end_if_complete(request)

    def _take_back(self, request: Request, account: CreditAccount) -> None:
        """What the request still has on the replica was never submitted."""
        left = request.dispatched.pop(account, None)
        if left is not None:
            account.refund(left.rows, left.tokens)
            self._dispatch(self._models[account.model])

    # ── a request's end ──

    def _refuse_unknown(self, request: Request) -> None:
        message = f"there is no model {request.first.model!r}: there are {', '.join(self._models) or 'none'}"
        self._refuse(request, 404, "model_not_found", message)

    def _refuse_closed(self, request: Request, closure: Closure) -> None:
        self._refuse(request, 503, "draining", closure.why, _DRAIN_RETRY_S)

    def _refuse_failed(self, request: Request, why: str) -> None:
        message = f"the model {request.first.model!r} cannot be served: {why}"
        self._refuse(request, 503, "model_failed", message, _FAILED_RETRY_S)

    def _refuse(
        self, request: Request, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        self._unqueue(request)
        self._refused += 1
        request.settled = self._own_settle(request, status, "error", message)
        attempt = request.admit.attempt
        self._send(request.front, Refused(request.request_id, attempt, status, code, message, retry_after_s))
        self._end_if_complete(request)

    def _own_settle(self, request: Request, status: int, finish_reason: str, error: str) -> Settle:
        """The core's last word where the front has none. What reached the client is unknown: not billed."""
        return Settle(
            request_id=request.request_id,
            submitted=False,
            status=status,
            finish_reason=finish_reason,
            error=error,
            delivered_tokens=0,
            e2e_ms=(self._clock() - request.first.arrived_at) * 1000,
        )

    def _end_if_complete(self, request: Request) -> None:
        if request.settled is None or request.dispatched:
            return
        if self._requests.pop(request.request_id, None) is None:
            return
        self._ended += 1
        self._rows.end(row_of(request, self._clock()))

    # ── figures ──

    def _waiting(self) -> int:
        return sum(len(model.queue) for model in self._models.values()) + len(self._held)

    def _oldest_wait_s(self) -> float:
        waiting = [request for model in self._models.values() for request in model.queue]
        waits = [r.queued_at for r in (*waiting, *self._held.values()) if r.queued_at is not None]
        return max(0.0, self._clock() - min(waits)) if waits else 0.0

    def _retry_after(self) -> float:
        """What the oldest has waited is the best guess for what the next would."""
        return min(60.0, max(1.0, round(self._oldest_wait_s())))
