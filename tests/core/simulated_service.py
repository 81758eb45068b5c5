"""A simulated service around the real request manager. Its fronts and replicas follow the protocol. The test
decides when each message is delivered, so it can create any order of events between two processes."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from appliance.channel.core_messages import Abort, Admitted, Refused
from appliance.channel.front_messages import Admit, Settle
from appliance.channel.identity import Identity
from appliance.traffic.credits import CreditAccount
from appliance.traffic.quotas import Quotas
from appliance.traffic.request_manager import RequestManager
from appliance.traffic.rules import QueueRules
from engine.levels import LEVELS, level_of
from engine.rank_messages import Finished, Report
from store.requests import RequestRow

SLOTS, TOKENS = 4, 40


class Rows:
    """A request log that keeps its rows in memory."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.ended: list[RequestRow] = []

    def open(self, row: RequestRow) -> bool:
        self.opened.append(row.request_id)
        return True

    def end(self, row: RequestRow) -> bool:
        self.ended.append(row)
        return True


@dataclass
class Submission:
    """A front's submission to a replica."""

    front: str
    request_id: str
    seqs: int
    tokens: int
    level: int


@dataclass
class FakeReplica:
    """An engine that accepts submissions, finishes them and sends reports. The engine accepts a submission
    when it reads it."""

    account: CreditAccount
    alive: bool = True
    inbox: dict[str, deque[Submission | None]] = field(default_factory=dict)
    """Submissions that the engine has not read yet, keyed by front. None marks the end of file."""
    running: list[Submission] = field(default_factory=list)
    to_core: deque[Report] = field(default_factory=deque)
    returned_seqs: list[int] = field(default_factory=lambda: [0] * LEVELS)
    returned_tokens: list[int] = field(default_factory=lambda: [0] * LEVELS)
    news: list[Finished] = field(default_factory=list)
    closed_fronts: list[str] = field(default_factory=list)

    def take(self, front: str) -> None:
        submission = self.inbox[front].popleft()
        if submission is None:
            for disconnected in [s for s in self.running if s.front == front]:
                self.finish(disconnected, "cancelled")
            self.closed_fronts.append(front)
            del self.inbox[front]
        else:
            self.running.append(submission)

    def finish(self, submission: Submission, how: str = "length") -> None:
        self.running.remove(submission)
        self.returned_seqs[submission.level] += submission.seqs
        self.returned_tokens[submission.level] += submission.tokens
        self.news.append(
            Finished(
                submission.request_id, 0, 0, submission.tokens, 0, 5 * submission.seqs, 0, 1,
                [how] * submission.seqs, submission.tokens,
            )
        )  # fmt: skip

    def report(self) -> None:
        report = Report(
            step=1,
            credit_seqs=SLOTS + sum(self.returned_seqs),
            credit_tokens=TOKENS + sum(self.returned_tokens),
            returned_seqs=tuple(self.returned_seqs),
            returned_tokens=tuple(self.returned_tokens),
            finished=self.news,
            disconnected_fronts=self.closed_fronts,
        )
        self.to_core.append(report)
        self.news, self.closed_fronts = [], []


@dataclass
class Ask:
    """The state of one request in a front."""

    admit: Admit
    waiting: bool = True
    """Whether the front is waiting for a reply to its latest `Admit`."""
    replica: FakeReplica | None = None
    """Replica to which the latest attempt was submitted."""
    left: bool = False


@dataclass
class FakeFront:
    """A front that follows the protocol."""

    name: str
    alive: bool = True
    asks: dict[str, Ask] = field(default_factory=dict)
    to_core: deque[Any] = field(default_factory=deque)
    from_core: deque[Any] = field(default_factory=deque)
    buried: bool = False
    """Whether the core has read the end of file from the front's channel."""


class SimulatedService:
    """The request manager and its environment."""

    def __init__(self, queue_limit: int = 7) -> None:
        self.now = 1000.0
        self.time_of_day = 0.0
        """Difference between the system clock and `now`, in seconds. Tests change it to simulate a change of
        the system clock."""
        self.rows = Rows()
        self.fronts: dict[str, FakeFront] = {}
        self.replicas: list[FakeReplica] = []
        self.asked: list[str] = []
        self.requests = RequestManager(
            send=lambda front, message: self.fronts[front].from_core.append(message),
            rows=self.rows,
            salt=lambda tenant: f"salt of {tenant}",
            clock=lambda: self.now,
            unix=lambda: self.now + self.time_of_day,
            rules=QueueRules(limit=queue_limit, timeout_s=50.0),
            quotas=Quotas(lambda: self.now),
        )
        self.requests.add_model("m", "v1")

    # ── processes ──

    def new_front(self) -> FakeFront:
        front = self.fronts[f"front-{len(self.fronts)}"] = FakeFront(f"front-{len(self.fronts)}")
        self.requests.add_front(front.name)
        for replica in self.live_replicas():
            replica.inbox[front.name] = deque()
        return front

    def new_replica(self) -> FakeReplica:
        replica = FakeReplica(CreditAccount(f"m-{len(self.replicas)}", "m", "cpu"))
        for front in self.fronts.values():
            # A front whose death the core has not noticed yet is attached too. The replica then reads the end
            # of file.
            if not front.buried:
                replica.inbox[front.name] = deque() if front.alive else deque([None])
        self.replicas.append(replica)
        self.requests.add_replica(replica.account)
        replica.report()
        return replica

    def live_fronts(self) -> list[FakeFront]:
        return [front for front in self.fronts.values() if front.alive]

    def live_replicas(self) -> list[FakeReplica]:
        return [replica for replica in self.replicas if replica.alive]

    def on_replicas(self) -> set[str]:
        """Return the requests that run on a replica or are still in its channels."""
        return {
            submission.request_id
            for replica in self.live_replicas()
            for submission in (*replica.running, *itertools.chain(*replica.inbox.values()))
            if submission is not None
        }

    def kill_front(self, front: FakeFront, unwritten: int = 0) -> None:
        """Kill a front. On each of its channels (one to the core and one to each replica), up to `unwritten`
        of the latest messages are lost."""
        front.alive = False
        for _ in range(min(unwritten, len(front.to_core))):
            front.to_core.pop()
        for replica in self.live_replicas():
            inbox = replica.inbox[front.name]
            for _ in range(min(unwritten, len(inbox))):
                inbox.pop()
            inbox.append(None)

    def kill_replica(self, replica: FakeReplica) -> None:
        replica.alive = False

    # ── messages that a front sends ──

    def ask(
        self,
        front: FakeFront,
        submissions: int = 1,
        samples: int = 1,
        tokens: int = 8,
        **changes: Any,
    ) -> str:
        """Send a request whose `Admit` message has the given fields changed."""
        request_id = f"r{len(self.asked)}"
        self.asked.append(request_id)
        admit = Admit(
            request_id=request_id,
            identity=Identity(tenant="t"),
            peer="uid 1",
            endpoint="/v1/completions",
            model="m",
            stream=True,
            submissions=submissions,
            num_seqs=submissions * samples,
            prompt_tokens=submissions * tokens,
            max_tokens=5 * submissions * samples,
            arrived_at=self.now + self.time_of_day,
        )
        admit = msgspec.structs.replace(admit, **changes)
        front.asks[request_id] = Ask(admit)
        front.to_core.append(admit)
        return request_id

    def hear(self, front: FakeFront) -> None:
        """Deliver one message from the core to the front."""
        message = front.from_core.popleft()
        ask = front.asks.get(message.request_id)
        if isinstance(message, Abort):
            if ask is not None:
                self.settle(front, message.request_id, 500)
        elif isinstance(message, Refused):
            if message.attempt == 0:
                front.asks.pop(message.request_id, None)
            elif ask is not None and message.attempt == ask.admit.attempt:
                self.settle(front, message.request_id, message.status)
        elif isinstance(message, Admitted):
            if ask is None or message.attempt != ask.admit.attempt:
                return
            ask.waiting = False
            replica = next(r for r in self.replicas if r.account.replica == message.replica)
            if not replica.alive or front.name not in replica.inbox:
                self.ask_again(front, message.request_id)
                return
            ask.replica = replica
            each = ask.admit.submissions
            for _ in range(each):
                replica.inbox[front.name].append(
                    Submission(
                        front.name,
                        message.request_id,
                        ask.admit.num_seqs // each,
                        ask.admit.prompt_tokens // each,
                        level_of(message.priority, message.urgency),
                    )
                )

    def ask_again(self, front: FakeFront, request_id: str) -> None:
        """Send the next attempt of a request after the death of its replica."""
        ask = front.asks[request_id]
        ask.admit = msgspec.structs.replace(ask.admit, attempt=ask.admit.attempt + 1)
        ask.waiting, ask.replica = True, None
        front.to_core.append(ask.admit)

    def settle(self, front: FakeFront, request_id: str, status: int) -> None:
        """Settle a request in the core. `submitted` is true only if its latest attempt was submitted to a
        replica."""
        ask = front.asks.pop(request_id)
        front.to_core.append(
            Settle(
                request_id=request_id,
                submitted=ask.replica is not None,
                status=status,
                finish_reason="stop" if status == 200 else "cancelled",
                delivered_tokens=3,
                e2e_ms=1.0,
            )
        )

    # ── messages that the core reads ──

    def core_reads_front(self, front: FakeFront) -> None:
        if front.to_core:
            message = front.to_core.popleft()
            if isinstance(message, Admit):
                self.requests.admit(front.name, message)
            else:
                self.requests.settle(front.name, message)
        elif not front.alive:
            self.bury_front(front)

    def bury_front(self, front: FakeFront) -> None:
        if not front.buried:
            front.buried = True
            self.requests.lose_front(front.name)
            front.asks.clear()

    def core_reads_replica(self, replica: FakeReplica) -> None:
        if replica.to_core:
            self.requests.report(replica.account, replica.to_core.popleft())
        elif not replica.alive:
            self.requests.lose_replica(replica.account)

    # ── running to the end ──

    def settle_everything(self) -> None:
        """Deliver all messages and finish all submissions."""
        if not self.live_replicas():
            self.new_replica()
        for _ in range(10_000):
            if not self._step():
                return
        raise AssertionError("the service did not become idle")

    def _step(self) -> bool:
        moved = False
        for front in self.fronts.values():
            while front.to_core:
                self.core_reads_front(front)
                moved = True
            if not front.alive:
                self.bury_front(front)
                front.from_core.clear()
                continue
            while front.from_core:
                self.hear(front)
                moved = True
            for request_id, ask in list(front.asks.items()):
                if ask.replica is not None and not ask.replica.alive:
                    self.ask_again(front, request_id)
                    moved = True
                elif ask.replica is not None and not self._runs(ask.replica, request_id):
                    self.settle(front, request_id, 200)
                    moved = True
        for replica in self.replicas:
            moved = self._step_replica(replica) or moved
        return moved

    def _step_replica(self, replica: FakeReplica) -> bool:
        if not replica.alive:
            while replica.to_core:
                self.core_reads_replica(replica)
            self.requests.lose_replica(replica.account)
            return False
        moved = False
        for front in list(replica.inbox):
            while replica.inbox.get(front):
                replica.take(front)
                moved = True
        for submission in list(replica.running):
            replica.finish(submission)
            moved = True
        if replica.news or replica.closed_fronts:
            replica.report()
        while replica.to_core:
            self.core_reads_replica(replica)
            moved = True
        return moved

    def _runs(self, replica: FakeReplica, request_id: str) -> bool:
        waiting = [s for inbox in replica.inbox.values() for s in inbox if s is not None]
        return any(s.request_id == request_id for s in (*replica.running, *waiting))

    def check_end(self) -> None:
        """Check that no rows, credits or counters are left over."""
        assert len(self.requests.state.in_flight) == 0, [
            (r.request_id, r.state) for r in self.requests.state.in_flight.values()
        ]
        ended = [row.request_id for row in self.rows.ended]
        assert len(set(ended)) == len(ended), "a row ended twice"
        assert len(set(self.rows.opened)) == len(self.rows.opened), "a row opened twice"
        assert set(self.rows.opened) <= set(ended), "a row never ended"
        for replica in self.live_replicas():
            account = replica.account
            assert (account.available_slots, account.available_tokens) == (SLOTS, TOKENS)
        measurements = self.requests.state.queue_stats()
        assert (measurements.waiting, measurements.running) == (0, 0)
        living = {front.name for front in self.fronts.values() if front.alive}
        assert self.requests.state.fronts == living and self.requests.state.broken_fronts <= living, (
            "a dead front is still listed"
        )
        for usage in self.requests.state.quotas.usage("tenant", "t"):
            assert usage.held == 0, "a quota holds tokens for a request that ended"
