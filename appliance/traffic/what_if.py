"""Replays the requests of the last few minutes with different limits, before an operator applies those
limits. The replay runs the real request manager in simulated time, once with the current limits and once with
the new ones, on replicas that are as fast as they were in those minutes
(`appliance.traffic.simulated_replica`). The difference between the two runs is applied to the recorded
outcome (`appliance.traffic.what_if_outcomes`). The replay assumes that clients would send the same requests
at the same times, and that a refused request would have received an answer of the same length as another
answer to its tenant. The replay runs in a separate process (`python -m appliance.traffic.what_if`), because
it can take several seconds.
"""

from __future__ import annotations

import heapq
import math
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from appliance.channel.core_messages import Abort, Admitted, Preempted, Refused
from appliance.channel.front_messages import Admit, Settle, join_reasons
from appliance.channel.identity import Identity
from appliance.history.forecasts import QuotaForecast
from appliance.traffic.buckets import rate_of
from appliance.traffic.quotas import Quotas
from appliance.traffic.recent import PastRequest
from appliance.traffic.request_manager import RequestManager
from appliance.traffic.rules import QueueRules
from appliance.traffic.simulated_replica import ReplicaSpeed, SimulatedReplica, SimulatedSubmission
from appliance.traffic.what_if_outcomes import (
    OVER_QUOTA,
    OVERLOADED,
    Comparison,
    RequestResult,
    tenant_forecast,
)
from engine.client import run_module
from engine.levels import level_of
from store.policies import KeyRecord, Policies, Quota, QuotaScope, TenantRecord
from store.quotas import QuotaLevels, QuotaState
from store.requests import RequestRow

MAX_REPLAY_S = 60.0
"""Time limit for a replay, in seconds."""
_TICK_S = 0.25
"""Interval, in seconds, at which the replayed request manager updates its predictions, as in the service."""
_REPORT_S = 0.5
_SETTLE_S = 600.0
"""Time, in seconds, for which a replay continues after the last arrival, so that its requests can end."""
_STRIDE = 7919
"""Stride for picking answer lengths from a list of known ones. A prime number, so that the lengths are picked
from the whole list."""
_FRONT = "front"
_NOT_ADMISSION = range(400, 500)
"""HTTP statuses of requests refused as invalid: all 4xx except 429 (limit exceeded) and 499 (client
disconnected)."""


class ReplayInput(msgspec.Struct, kw_only=True):
    """The input of a replay."""

    since: float
    until: float
    """The replayed period, in unix time."""
    requests: list[PastRequest]
    replicas: list[ReplicaSpeed]
    rules: QueueRules
    tenants: list[TenantRecord]
    keys: list[KeyRecord]
    levels: list[QuotaLevels]
    """Quota levels at `since`. Quotas that are not listed were unused."""
    changed_tenants: list[TenantRecord] = []
    changed_keys: list[KeyRecord] = []


class ReplayError(RuntimeError):
    """Raised if a replay fails or takes too long."""


class _Replayed(msgspec.Struct):
    """A request in a replay."""

    past: PastRequest
    at: float
    output: int
    status: int = 0
    submissions: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None

    @property
    def result(self) -> RequestResult:
        first, end = self.first_token_at, self.ended_at
        return RequestResult(
            self.status,
            None if first is None else 1e3 * (first - self.at),
            None if end is None else 1e3 * (end - self.at),
        )


class _NoLog:
    """A request log that stores nothing."""

    def open(self, row: RequestRow) -> bool:
        return True

    def end(self, row: RequestRow) -> bool:
        return True


class _Replay:
    """One run of the request manager in simulated time. All times are in unix seconds."""

    def __init__(self, given: ReplayInput) -> None:
        self.now = given.since
        self._given = given
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._running: dict[str, _Replayed] = {}
        self._replicas = {speed.replica: SimulatedReplica(speed) for speed in given.replicas}
        self._reported = dict.fromkeys(self._replicas, given.since)
        self._changes = dict.fromkeys(self._replicas, 0)
        """Sequence number of each replica's most recently scheduled change. Earlier changes are ignored."""
        self._manager = RequestManager(
            send=self._hear,
            rows=_NoLog(),
            salt=str,
            clock=lambda: self.now,
            unix=lambda: self.now,
            rules=given.rules,
            quotas=Quotas(lambda: self.now),
        )
        self._manager.add_front(_FRONT)

    def run(self, policies: Policies, requests: Sequence[_Replayed]) -> None:
        """Replay the requests with the given limits and store each request's result in the request."""
        given, manager = self._given, self._manager
        manager.set_policies(policies)
        manager.state.quotas.restore(QuotaState(levels=_levels(given, policies)), given.since)
        for unit in {speed.unit for speed in given.replicas}:
            manager.add_model(unit, "")
        for replica in self._replicas.values():
            replica.advance(self.now)
            manager.add_replica(replica.account)
            manager.report(replica.account, replica.report([]))
        for number, request in enumerate(requests):
            self._at(max(given.since, request.at), partial(self._arrive, str(number), request))
        last = requests[-1].at if requests else given.until
        self._at(self.now, self._tick)
        while self._events and (self._running or self.now <= last) and self.now < last + _SETTLE_S:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (max(self.now, time), self._serial, event))

    def _tick(self) -> None:
        self._manager.expire()
        for name, replica in self._replicas.items():
            if self.now - self._reported[name] >= _REPORT_S:
                replica.advance(self.now)
                self._report(replica, [])
        self._at(self.now + _TICK_S, self._tick)

    def _arrive(self, request_id: str, request: _Replayed) -> None:
        past = request.past
        self._running[request_id] = request
        self._manager.admit(
            _FRONT,
            Admit(
                request_id=request_id,
                identity=Identity(tenant=past.tenant, key_id=past.key_id, highest_class=0),
                peer="",
                endpoint="",
                model=past.unit,
                stream=False,
                submissions=past.submissions,
                num_seqs=past.num_seqs,
                prompt_tokens=past.prompt_tokens,
                max_tokens=past.max_tokens,
                may_lower=past.may_lower,
                arrived_at=self.now,
                asked_class=f"P{past.request_class}",
                deadline_ms=past.deadline_ms,
            ),
        )

    def _hear(self, front: str, message: Admitted | Refused | Abort | Preempted) -> None:
        request = self._running.get(message.request_id)
        if request is None or isinstance(message, Abort | Preempted):
            return
        if isinstance(message, Refused):
            request.status = OVER_QUOTA if message.status == OVER_QUOTA else OVERLOADED
            del self._running[message.request_id]
            return
        past, replica = request.past, self._replicas[message.replica]
        samples = max(1, past.num_seqs // past.submissions)
        most = math.inf if message.most_tokens is None else message.most_tokens
        each = max(1, min(round(request.output / past.num_seqs), int(min(most, 1 << 30))))
        request.submissions = past.submissions
        # The request manager sends this message in the middle of a change to its own state. The submissions
        # are therefore only scheduled here, and delivered afterwards.
        for index in range(past.submissions):
            submission = SimulatedSubmission(
                request_id=message.request_id,
                index=index,
                level=level_of(message.priority, message.urgency),
                sequences=samples,
                prompt_tokens=past.prompt_tokens // past.submissions,
                cached_tokens=past.cached_tokens // past.submissions,
                output_each=each,
            )
            self._at(self.now + replica.lag_s, partial(self._submit, replica, submission))

    def _submit(self, replica: SimulatedReplica, submission: SimulatedSubmission) -> None:
        replica.submit(submission, self.now)
        self._schedule(replica)

    def _schedule(self, replica: SimulatedReplica) -> None:
        name = replica.speed.replica
        self._changes[name] += 1
        number = self._changes[name]
        if (at := replica.next_change()) < math.inf:
            self._at(at, lambda: self._change(replica, number))

    def _change(self, replica: SimulatedReplica, number: int) -> None:
        if number != self._changes[replica.speed.replica]:
            return
        replica.advance(self.now)
        started, ended = replica.change()
        for submission in started:
            request = self._running[submission.request_id]
            request.first_token_at = request.first_token_at or self.now
        self._schedule(replica)
        if started or ended:
            self._report(replica, ended)
        for submission in ended:
            self._end(submission)

    def _end(self, submission: SimulatedSubmission) -> None:
        request = self._running[submission.request_id]
        request.submissions -= 1
        if request.submissions:
            return
        request.ended_at, request.status = self.now, 200
        del self._running[submission.request_id]
        self._manager.settle(
            _FRONT,
            Settle(
                request_id=submission.request_id,
                submitted=True,
                status=200,
                finish_reason=join_reasons(["length"]),
                delivered_tokens=submission.output_each * request.past.num_seqs,
                e2e_ms=1e3 * (self.now - request.at),
            ),
        )

    def _report(self, replica: SimulatedReplica, ended: list[SimulatedSubmission]) -> None:
        self._reported[replica.speed.replica] = self.now
        self._manager.report(replica.account, replica.report(ended))


def replay(given: ReplayInput) -> QuotaForecast:
    """Replay the requests with the current limits and with the new ones, then compare the results."""
    units = {speed.unit for speed in given.replicas}
    chosen = [
        one
        for one in given.requests
        if one.unit in units and _reached_admission(one) and _ended_at(one) >= given.since
    ]
    tenants = {**{one.name: one for one in given.tenants}, **{one.name: one for one in given.changed_tenants}}
    keys = {**{one.id: one for one in given.keys}, **{one.id: one for one in given.changed_keys}}
    present = _run(given, Policies(given.tenants, given.keys), chosen)
    changed = _run(given, Policies(tenants.values(), keys.values()), chosen)
    # Requests that are already running when the replay starts only contribute load; they are not counted.
    forecasts = []
    for name in sorted({one.tenant for one in chosen if one.arrived_at >= given.since}):
        mine = [
            Comparison(_recorded(one), before.result, after.result)
            for one, before, after in zip(chosen, present, changed, strict=True)
            if one.tenant == name and one.arrived_at >= given.since
        ]
        forecasts.append(tenant_forecast(name, mine))
    counted = sum(one.arrived_at >= given.since for one in chosen)
    return QuotaForecast(
        since=given.since,
        until=given.until,
        requests=counted,
        left_out=sum(one.arrived_at >= given.since for one in given.requests) - counted,
        tenants=forecasts,
    )


def _run(given: ReplayInput, policies: Policies, chosen: Sequence[PastRequest]) -> list[_Replayed]:
    """Replay the requests with the given limits."""
    requests = _prepared(chosen)
    _Replay(given).run(policies, requests)
    return requests


def replay_apart(given: ReplayInput) -> QuotaForecast:
    """Run a replay in a separate process and wait for its result. Raises ReplayError if the replay fails or
    takes too long."""
    try:
        found = run_module("appliance.traffic.what_if", msgspec.msgpack.encode(given), MAX_REPLAY_S)
        return msgspec.msgpack.decode(found, type=QuotaForecast)
    except subprocess.TimeoutExpired as error:
        raise ReplayError(
            f"the replay of {len(given.requests):,} requests took longer than {MAX_REPLAY_S:g} s: "
            "try again when the machine is less busy"
        ) from error
    except (OSError, subprocess.CalledProcessError, msgspec.MsgspecError) as error:
        lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
        raise ReplayError(f"the replay failed: {error} {lines[-1] if lines else ''}".rstrip()) from error


def _reached_admission(one: PastRequest) -> bool:
    return one.status in (OVER_QUOTA, 499) or one.status not in _NOT_ADMISSION


def _recorded(one: PastRequest) -> RequestResult:
    # A refusal also has a duration, but it is not the latency of an answer.
    answered = one.status == 200
    return RequestResult(one.status, one.ttft_ms if answered else None, one.e2e_ms if answered else None)


def _ended_at(one: PastRequest) -> float:
    return math.inf if not one.status else one.arrived_at + (one.e2e_ms or 0.0) / 1e3


def _prepared(chosen: Sequence[PastRequest]) -> list[_Replayed]:
    """Return the requests with their answer lengths. A request that never ran gets the length of another
    answer to its tenant: if possible, one whose limit was at least as large, because an answer cut off by a
    smaller limit does not show how long it would have been.
    """
    answers: dict[str, list[tuple[float, float]]] = {}
    for one in chosen:
        if one.output_tokens:
            pair = (one.max_tokens / one.num_seqs, one.output_tokens / one.num_seqs)
            answers.setdefault(one.tenant, []).append(pair)
    for known in answers.values():
        known.sort()
    prepared = []
    for number, one in enumerate(chosen):
        output = one.output_tokens or 0
        if not output:
            known, each = answers.get(one.tenant, []), one.max_tokens / one.num_seqs
            if known:
                first = bisect_left(known, (each, 0.0))
                first = first if first < len(known) else 0
                each = known[first + number * _STRIDE % (len(known) - first)][1]
            output = max(1, min(one.max_tokens, round(each * one.num_seqs)))
        prepared.append(_Replayed(one, one.arrived_at, output))
    return prepared


def _levels(given: ReplayInput, policies: Policies) -> list[QuotaLevels]:
    """Return the quota levels at the start of the replay under the given limits. If a limit has changed, its
    level is scaled so that the same fraction of the limit remains."""
    found = []
    present = Policies(given.tenants, given.keys)
    for levels in given.levels:
        old, new = (_quota(one, levels.scope, levels.name) for one in (present, policies))
        values: dict[str, float] = {}
        for limit, level in levels.remaining.items():
            before, after = rate_of(old, limit), rate_of(new, limit)
            if before is not None and after is not None:
                values[limit] = level * after.capacity / before.capacity
        found.append(QuotaLevels(scope=levels.scope, name=levels.name, at=given.since, remaining=values))
    return found


def _quota(policies: Policies, scope: QuotaScope, name: str) -> Quota:
    known: Mapping[str, TenantRecord | KeyRecord] = policies.tenants if scope == "tenant" else policies.keys
    return known[name].quota if name in known else Quota()


def main() -> None:
    """Read a replay's input from standard input, run the replay, and write the forecast to standard output as
    msgpack."""
    given = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ReplayInput)
    sys.stdout.buffer.write(msgspec.msgpack.encode(replay(given)))


if __name__ == "__main__":
    main()
