"""A server with GPU-like replicas in virtual time. The real request manager and the real engine scheduler
exchange the real messages. Only the device, the channels' delays and the clients are simulated. The
simulation is deterministic and much faster than real time.

    server = SimulatedServer(tenants=[TenantRecord(name="a", created_at=0.0, weight=2.0)])
    server.add_replica(slots=256)
    poisson(server, "a", per_s=50.0, shape=uniform((100, 900), (20, 200)))
    server.run(60.0)
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from appliance.channel.core_messages import Abort, Admitted, Refused
from appliance.channel.front_messages import Admit, Settle
from appliance.channel.identity import Identity
from appliance.traffic.quotas import Quotas
from appliance.traffic.request_manager import RequestManager
from appliance.traffic.rules import QueueRules
from engine.messages import Output, SamplingParams, Submit, pack_tokens
from store.policies import KeyRecord, Policies, TenantRecord
from store.requests import RequestRow
from tests.core.scheduler_replica import FRONT, HOP_S, MODEL, SchedulerReplica, Speed

RESUBMIT_S = 0.05
"""Time, in seconds, from a replica's death until the fronts resubmit its requests."""
TICK_S = 0.25
PREDICTED = 0.8
"""Ratio of a step's predicted duration to its actual duration. It is below 1, because the engine predicts
lower bounds of durations."""
_PROMPT = [1] * 131_072
_EPOCH = 1000.0


class Shape(NamedTuple):
    """The size of a request and of its answer."""

    prompt: int
    output: int
    """Number of tokens that the answer will have."""
    max_tokens: int
    """Maximum number of tokens that the client allows."""


@dataclass(eq=False)
class Asked:
    """A client's request and its result. Times are virtual seconds."""

    request_id: str
    tenant: str
    shape: Shape
    arrived_at: float
    deadline_s: float | None
    asked_class: str
    done: Callable[[Asked], None] | None
    admit: Admit
    decided_at: float | None = None
    refused: Refused | None = None
    admitted_at: float | None = None
    overtook: bool = False
    """Whether the request was dispatched ahead of waiting requests in higher-priority classes."""
    first_token_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0

    samples: int = 1
    """Number of samples for each prompt."""
    tokens_of: list[int] = field(default_factory=list)
    """Number of tokens generated for each sample of each prompt."""
    unfinished: set[int] = field(default_factory=set)
    """Indices into `tokens_of` for the samples that are still running."""
    attempt: int = 0
    replica: SchedulerReplica | None = None

    @property
    def ttft_s(self) -> float:
        assert self.first_token_at is not None
        return self.first_token_at - self.arrived_at

    @property
    def met(self) -> bool:
        """Return whether the answer was complete by the request's deadline."""
        assert self.deadline_s is not None
        return self.ended_at is not None and self.ended_at <= self.arrived_at + self.deadline_s


@dataclass
class _Rows:
    """A request log that keeps its rows by id. It also keeps the ids of rows that were closed twice."""

    open_ids: set[str] = field(default_factory=set)
    ended: int = 0
    preemptions: int = 0
    last: deque[RequestRow] = field(default_factory=lambda: deque(maxlen=1000))

    def open(self, row: RequestRow) -> bool:
        assert row.request_id not in self.open_ids
        self.open_ids.add(row.request_id)
        return True

    def end(self, row: RequestRow) -> bool:
        self.open_ids.discard(row.request_id)
        self.ended += 1
        self.preemptions += row.preemptions
        self.last.append(row)
        return True


class SimulatedServer:
    """A server in virtual time. `now` starts at 0."""

    def __init__(
        self,
        *,
        rules: QueueRules = QueueRules(),  # noqa: B008
        tenants: Iterable[TenantRecord] = (),
        keys: Iterable[KeyRecord] = (),
        seed: int = 0,
    ) -> None:
        self.now = 0.0
        self.draw = random.Random(seed)
        self.rows = _Rows()
        self.asked: list[Asked] = []
        self.replicas: list[SchedulerReplica] = []
        self._replicas_made = 0
        self.served: dict[str, float] = {}
        """Weighted number of computed tokens per tenant. A request's prompt tokens are counted when its first
        output token arrives, and each output token is counted when it is generated."""
        self.requests = RequestManager(
            send=lambda front, message: self.after(HOP_S, lambda: self._front_hears(message)),
            rows=self.rows,
            salt=str,
            clock=lambda: _EPOCH + self.now,
            unix=lambda: _EPOCH + self.now,
            rules=rules,
            quotas=Quotas(lambda: self.now),
        )
        self.rules = rules
        self.requests.set_policies(Policies(tenants, keys))
        self.requests.add_model(MODEL, "v1")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._in_flight: dict[str, Asked] = {}
        self._handles: dict[int, tuple[Asked, int, int]] = {}
        """For each handle: the request, the number of its attempt, and the index of its first sample."""
        self.at(0.0, self._tick)

    def add_replica(
        self,
        *,
        slots: int = 256,
        max_num_batched_tokens: int = 8192,
        max_mixed_tokens: int | None = None,
        blocks: int = 20_000,
        prefix_cache: bool = False,
        speed: Speed = Speed(),  # noqa: B008
        predicted: bool = True,
    ) -> SchedulerReplica:
        """Add a replica that is ready immediately. `predicted` is true if the engine predicts the replica's
        rates, as it does on GPUs."""
        self._replicas_made += 1
        name = f"{MODEL}-{self._replicas_made}"
        replica = SchedulerReplica(
            self,
            name,
            slots=slots,
            max_num_batched_tokens=max_num_batched_tokens,
            max_mixed_tokens=max_mixed_tokens,
            blocks=blocks,
            prefix_cache=prefix_cache,
            speed=speed,
        )
        if predicted:
            replica.account.predict(PREDICTED * speed.step_s, PREDICTED * speed.prompt_token_s)
        self.replicas.append(replica)
        self.requests.add_replica(replica.account)
        replica.report([])
        return replica

    def kill_replica(self, replica: SchedulerReplica) -> None:
        """Kill a replica. The front resubmits the rest of each request that ran on it."""
        replica.dead = True
        self.replicas.remove(replica)
        self.after(HOP_S, lambda: self.requests.lose_replica(replica.account))
        interrupted = [asked for asked in self._in_flight.values() if asked.replica is replica]
        self.after(RESUBMIT_S, lambda: [self._resubmit(asked) for asked in interrupted])

    def _resubmit(self, asked: Asked) -> None:
        asked.attempt += 1
        asked.replica = None
        shape, left = asked.shape, asked.unfinished
        emitted = sum(asked.tokens_of[index] for index in left)
        again = msgspec.structs.replace(
            asked.admit,
            attempt=asked.attempt,
            submissions=len(left),
            num_seqs=len(left),
            prompt_tokens=len(left) * shape.prompt + emitted,
            max_tokens=len(left) * shape.max_tokens - emitted,
        )
        self.requests.admit(FRONT, again)

    # ── time ──

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Call `event` at a virtual time."""
        self._serial += 1
        heapq.heappush(self._events, (max(time, self.now), self._serial, event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Call `event` after `seconds` virtual seconds."""
        self.at(self.now + seconds, event)

    def run(self, until: float) -> None:
        """Run the simulation until the virtual time `until`."""
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until

    def _tick(self) -> None:
        self.requests.expire()
        self.after(TICK_S, self._tick)

    # ── clients and the front ──

    def ask(
        self,
        tenant: str,
        shape: Shape,
        *,
        deadline_s: float | None = None,
        asked_class: str = "",
        highest_class: int = 0,
        key_id: str = "",
        prompts: int = 1,
        samples: int = 1,
        done: Callable[[Asked], None] | None = None,
    ) -> Asked:
        """Send a request. `shape` is the size of each prompt and of each sample. `done` is called after the
        request is answered or refused."""
        request_id = f"r{len(self.asked)}"
        admit = Admit(
            request_id=request_id,
            identity=Identity(tenant=tenant, key_id=key_id, highest_class=highest_class),
            peer="simulated",
            endpoint="/v1/completions",
            model=MODEL,
            stream=True,
            submissions=prompts,
            num_seqs=prompts * samples,
            prompt_tokens=prompts * shape.prompt,
            max_tokens=prompts * samples * shape.max_tokens,
            arrived_at=_EPOCH + self.now,
            asked_class=asked_class,
            deadline_ms=None if deadline_s is None else 1e3 * deadline_s,
        )
        asked = Asked(request_id, tenant, shape, self.now, deadline_s, asked_class, done, admit)
        asked.samples, asked.tokens_of = samples, [0] * (prompts * samples)
        asked.unfinished = set(range(prompts * samples))
        self.asked.append(asked)
        self._in_flight[request_id] = asked
        self.after(HOP_S, lambda: self.requests.admit(FRONT, admit))
        return asked

    def _front_hears(self, message: Admitted | Refused | Abort) -> None:
        asked = self._in_flight.get(message.request_id)
        if asked is None or isinstance(message, Abort):
            return
        if asked.decided_at is None:
            asked.decided_at = self.now
        if isinstance(message, Refused):
            asked.refused = message
            if asked.attempt:
                self._settle(asked)
            self._end(asked)
            return
        if asked.admitted_at is None:
            asked.admitted_at = self.now
        asked.overtook |= asked.asked_class != "" and message.priority < int(asked.asked_class[1])
        replica = next((r for r in self.replicas if r.account.replica == message.replica), None)
        if replica is None:  # The replica died while the message was on its way.
            self.after(RESUBMIT_S, lambda: self._resubmit(asked))
            return
        asked.replica = replica
        firsts = sorted(asked.unfinished) if asked.attempt else range(0, len(asked.tokens_of), asked.samples)
        prompt, submits = _PROMPT[: asked.shape.prompt], []
        for first in firsts:
            self._serial += 1
            self._handles[self._serial] = (asked, asked.attempt, first)
            submits.append(
                Submit(
                    handle=self._serial,
                    request_id=asked.request_id,
                    prompt=pack_tokens(prompt),
                    output_token_ids=_PROMPT[: asked.tokens_of[first]] if asked.attempt else [],
                    n=1 if asked.attempt else asked.samples,
                    # All simulated prompts begin with the same tokens, so each request gets its own salt to
                    # prevent prefix cache hits.
                    cache_salt=asked.request_id,
                    sampling=SamplingParams(max_tokens=asked.shape.output, ignore_eos=True),
                    **_order_of(message),
                )
            )
        self.after(HOP_S, lambda: [replica.submit(submit) for submit in submits])

    def hear(self, replica: SchedulerReplica, outputs: list[Output]) -> None:
        """Deliver a step's frame to the front."""
        served, weight = self.served, self.rules.output_weight
        for output in outputs:
            asked, attempt, index = self._handles[output.handle]
            if asked.attempt != attempt:
                continue  # This output was sent by a replica that has since died.
            index += output.sample
            tokens = len(output.token_ids)
            if not asked.tokens and tokens:
                asked.first_token_at = self.now
                served[asked.tenant] = served.get(asked.tenant, 0.0) + asked.admit.prompt_tokens
            asked.tokens += tokens
            asked.tokens_of[index] += tokens
            served[asked.tenant] = served.get(asked.tenant, 0.0) + weight * tokens
            if output.finish_reason:
                asked.unfinished.discard(index)
            if output.finish_reason and not asked.unfinished:
                asked.ended_at = self.now
                self._settle(asked)
                self._end(asked)

    def _settle(self, asked: Asked) -> None:
        settle = Settle(
            request_id=asked.request_id,
            submitted=True,
            status=200,
            finish_reason="length",
            delivered_tokens=asked.tokens,
            e2e_ms=1e3 * (self.now - asked.arrived_at),
        )
        self.after(HOP_S, lambda: self.requests.settle(FRONT, settle))

    def _end(self, asked: Asked) -> None:
        del self._in_flight[asked.request_id]
        if asked.done is not None:
            asked.done(asked)


def _order_of(message: Admitted) -> dict[str, int]:
    """Return the fields of `Admitted` that determine when the engine serves the request."""
    return {
        "priority": message.priority,
        "urgency": message.urgency,
        "reserved_slots": message.reserved_slots,
    }
