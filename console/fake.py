"""A source backed by a simulated service, for `appliance console --demo` and the tests. In tests, the clock
is simulated too, so that the same seed gives the same snapshots."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from appliance.actions import action_of
from appliance.actions.parameters import (
    AcknowledgeAlert,
    CancelRequest,
    DrainService,
    ResumeService,
    ResumeTenant,
    SilenceAlerts,
    SuspendTenant,
    UnsilenceAlerts,
)
from appliance.history.forecasts import QuotaForecast
from appliance.pages import ChainReport
from appliance.protocol import Done, Silence
from appliance.protocol.status import CLASS_NAMES, ClassStatus, ServiceState, SocketStatus
from appliance.snapshot import (
    Alert,
    Batch,
    BlockMap,
    KvCache,
    Latency,
    LatencyPercentiles,
    Queue,
    Rates,
    ServiceTotals,
    Snapshot,
    UnfinishedRequest,
)
from console.fake_alerts import FakeAlerts
from console.fake_machine import fronts_of, gpus_of, host_of
from console.fake_models import drain_of, models_of
from console.fake_recording import FakeRecording
from console.fake_rows import DEMO_OPERATOR, OTHER_OPERATOR, FakeRows
from console.fake_tenants import tenants_of
from console.simulated import (
    BLOCK_TOKENS,
    SHARED,
    WINDOW_S,
    Ended,
    SimDrain,
    SimReplica,
    SimRequest,
    SimTenant,
)
from console.simulation import Simulation
from console.source import ListName, Row, SourceError

FIXED_TIME = 1_790_000_000.0
"""Time at which the simulated clock starts in tests, in unix seconds."""


_RATE_WINDOW_S = 10.0
_PAST_S = 120
"""Seconds that the demo simulates before it starts, to fill its charts and recording."""


_DRAIN_AFTER_S, _DRAIN_S, _DRAIN_EVERY_S = _PAST_S + 6.0, 42.0, 360.0
"""Timing of the drains performed by the simulated second operator. The first drain begins soon after the demo
opens. Drains never overlap with the incidents in `console.fake_machine`, which overheat a GPU that serves the
same model."""


class _Counters(NamedTuple):
    """Counter values at one time, for computing rates."""

    at: float
    totals: ServiceTotals
    tokens: dict[str, int]
    """Each tenant's prompt and output tokens."""


class _Prompts(NamedTuple):
    """Each replica's prompt token count at one point in time, and how many of these tokens were cached."""

    at: float
    tokens: dict[str, tuple[int, int]]


class FakeSource:
    """Delivers snapshots of a simulated service."""

    label = "demo"
    kind: Literal["demo"] = "demo"

    def __init__(
        self,
        *,
        seed: int = 7,
        requests: int = 180,
        blocks: int = 4096,
        gpus: int = 4,
        tenants: int = 8,
        interval_s: float = 0.5,
        now: float | None = None,
    ) -> None:
        """If `now` is given, the simulated clock starts there, snapshots are exactly `interval_s` apart, and
        `next` does not wait."""
        self.interval_s = interval_s
        self.reads_blocks = True
        self._real_time = now is None
        start = time.time() - _PAST_S if now is None else now
        self.simulation = Simulation(
            seed=seed, requests=requests, blocks=blocks, gpus=gpus, tenants=tenants, now=start - 12.0
        )
        self._began = self.simulation.now
        self._scheduled: SimDrain | None = None
        """The latest drain started by the simulated second operator."""
        self._was_due = False
        self._past: deque[_Counters] = deque()
        self._prompts: deque[_Prompts] = deque()
        self._rows = FakeRows(self.simulation)
        self._alerts = FakeAlerts(self._rows.log, start)
        self._recording = FakeRecording(self._rows)
        self._first = True

    async def next(self) -> Snapshot:
        """Return the next snapshot."""
        if self._real_time and self._first:
            await asyncio.to_thread(self._run_past)
        elif self._real_time:
            # After a delay, the simulation catches up with real time.
            due = self.simulation.now + self.interval_s
            await asyncio.sleep(max(0.0, due - time.time()))
        self._first = False
        return self.step()

    def step(self) -> Snapshot:
        """Advance the simulated clock by one interval and return the snapshot."""
        self._advance(self.interval_s)
        snapshot = self._snapshot()
        self._recording.add(snapshot)
        return snapshot

    def _run_past(self) -> None:
        """Simulate and record the minutes before the start. As in a real service's history, individual KV
        blocks are not recorded."""
        for _ in range(_PAST_S):
            self._advance(1.0)
            self._recording.add(self._snapshot(blocks=False))

    def _advance(self, seconds: float) -> None:
        sim = self.simulation
        sim.advance(seconds)
        self._drain_for_a_while()
        self._rows.log.advance()
        tokens = {name: tenant.prompt + tenant.billed for name, tenant in sim.tenants.items()}
        self._past.append(_Counters(sim.now, self._totals(), tokens))
        while len(self._past) > 2 and self._past[0].at < sim.now - _RATE_WINDOW_S:
            self._past.popleft()
        replicas = {one.name: (one.prompt_tokens, one.cached_tokens) for one in sim.replicas}
        self._prompts.append(_Prompts(sim.now, replicas))
        while self._prompts[0].at < sim.now - WINDOW_S:
            self._prompts.popleft()

    def _drain_for_a_while(self) -> None:
        """Begin and end the drains of the simulated second operator."""
        sim, model = self.simulation, self.simulation.replicas[-1].model
        if model == sim.replicas[0].model:
            return  # The service has only one model.
        drained = (sim.now - self._began) % _DRAIN_EVERY_S
        due = _DRAIN_AFTER_S <= drained < _DRAIN_AFTER_S + _DRAIN_S
        if due and not self._was_due and model not in sim.drains:
            self._scheduled = sim.drains[model] = SimDrain(since=sim.now)
            self._rows.record("drain", model, OTHER_OPERATOR)
        elif not due and self._scheduled is not None and sim.drains.get(model) is self._scheduled:
            del sim.drains[model]
            self._rows.record("resume", model, OTHER_OPERATOR)
        self._was_due = due

    async def rows(self, name: ListName) -> Sequence[Row]:
        """Return the rows of one of the simulated service's lists, such as the audit trail."""
        if name == "rules":
            return self._alerts.rules()
        return self._alerts.silences() if name == "silences" else self._rows.of(name)

    async def verify(self) -> ChainReport:
        """Verify the simulated audit chain."""
        return self._rows.verify()

    async def what_if(self, parameters: msgspec.Struct) -> QuotaForecast:
        """Raise SourceError, because the demo does not replay requests."""
        raise SourceError("the demo does not replay requests: connect to a running service")

    async def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        """Perform an action on the simulated service. Raises SourceError if the action is not simulated."""
        sim, action = self.simulation, action_of(parameters)
        match parameters:
            case CancelRequest(request_id=request_id):
                if not sim.cancel(request_id):
                    raise SourceError(
                        f"request {request_id} is not in flight: choose a request from the list"
                    )
                message = f"request {request_id} cancelled"
            case DrainService(model=model, grace_s=grace_s, queue=queue):
                sim.drains[model] = SimDrain(since=sim.now, grace_s=grace_s, hold=queue)
                self._rows.record(action.name, model or "service")
                return drain_of(sim, model, sim.drains[model])
            case ResumeService(model=model):
                if sim.drains.pop(model, None) is None:
                    raise SourceError(f"{'the service' if model is None else model} is not draining")
                message = f"{'the service' if model is None else f'model {model}'} accepts requests again"
            case SuspendTenant(name=name):
                self._tenant(name).suspended_at = sim.now
                message = f"tenant {name} suspended"
            case ResumeTenant(name=name):
                self._tenant(name).suspended_at = None
                message = f"tenant {name} resumed"
            case AcknowledgeAlert() | SilenceAlerts() | UnsilenceAlerts():
                result = self._act_on_alerts(parameters)
                self._rows.record(action.name, action.target_name(parameters))
                return result
            case _:
                raise SourceError(f"the demo does not simulate {action.name}: connect to a running service")
        self._rows.record(action.name, action.target_name(parameters))
        return Done(message=message)

    def _act_on_alerts(
        self, parameters: AcknowledgeAlert | SilenceAlerts | UnsilenceAlerts
    ) -> Alert | Silence | Done:
        try:
            match parameters:
                case AcknowledgeAlert(id=id):
                    return self._alerts.acknowledge(id, DEMO_OPERATOR)
                case SilenceAlerts():
                    return self._alerts.silence(parameters, DEMO_OPERATOR)
                case UnsilenceAlerts(id=id):
                    ended = self._alerts.unsilence(id)
                    return Done(message=f"ended the silence of {ended.rule} on {ended.subject}")
        except LookupError as error:
            raise SourceError(str(error)) from error

    def recording(self) -> FakeRecording:
        """Return the demo's recording."""
        return self._recording

    async def close(self) -> None:
        """Do nothing."""

    def _tenant(self, name: str) -> SimTenant:
        if name not in self.simulation.tenants:
            raise SourceError(f"unknown tenant {name}: choose a tenant from the list")
        return self.simulation.tenants[name]

    def _totals(self) -> ServiceTotals:
        sim = self.simulation
        return ServiceTotals(
            prompt_tokens=sum(one.prompt_tokens for one in sim.replicas),
            cached_tokens=sum(one.cached_tokens for one in sim.replicas),
            computed_tokens=sum(one.computed_tokens for one in sim.replicas),
            generated_tokens=sum(one.generated_tokens for one in sim.replicas),
            admitted=sim.counts["admitted"],
            refused=sim.counts["refused"],
            ended=sim.counts["ended"],
            failed=sim.counts["failed"],
            cancelled=sim.counts["cancelled"],
            preemptions=sum(one.preemptions for one in sim.replicas),
            billed_tokens=sim.counts["billed"],
        )

    def _snapshot(self, *, blocks: bool = True) -> Snapshot:
        """Return the current state, with or without individual KV blocks."""
        sim = self.simulation
        totals = self._past[-1].totals
        snapshot = Snapshot(
            at=sim.now,
            started_at=sim.started,
            uptime_s=sim.now - sim.started,
            version="0.1.0",
            pid=4711,
            state=self._state(),
            config_file="/etc/appliance/appliance.toml",
            run_dir="/run/appliance",
            state_dir="/var/lib/appliance",
            totals=totals,
            rates=self._rates(totals),
            latency=self._latency(),
            queue=self._queue(),
            batches=[self._batch(one) for one in sim.replicas],
            kv=[self._kv(one, blocks=blocks) for one in sim.replicas],
            requests=[self._request(one) for one in sim.unfinished()],
            gpus=gpus_of(sim),
            models=models_of(sim),
            tenants=tenants_of(sim, {name: self._tokens_per_s(name) for name in sim.tenants}),
            alerts=[],
            stalls=sorted(
                (one for replica in sim.replicas for one in replica.stalls), key=lambda one: one.at
            ),
            host=host_of(sim),
            drains=[drain_of(sim, model, drain) for model, drain in sim.drains.items()],
            fronts=fronts_of(sim),
            sockets=[
                SocketStatus(
                    name="api", address="/run/appliance/api.sock", state="accepting", accepted=91_042
                ),
                SocketStatus(
                    name="admin", address="/run/appliance/admin.sock", state="accepting", accepted=812
                ),
            ],
            audit_rows=len(self._rows.audit),
            audit_head=self._rows.head,
            audit_recorded_rows=max(0, len(self._rows.audit) - 2),
        )
        snapshot.alerts = self._alerts.observe(snapshot)
        return snapshot

    def _state(self) -> ServiceState:
        drain = self.simulation.drains.get(None)
        if drain is None:
            return "ready"
        return "draining" if drain.completed_at is None else "drained"

    def _rates(self, totals: ServiceTotals) -> Rates:
        earlier = self._past[0].totals
        span = self.simulation.now - self._past[0].at
        if not span:
            return Rates()

        def of(name: str) -> float:
            return float(getattr(totals, name) - getattr(earlier, name)) / span

        return Rates(
            window_s=span,
            prompt_tokens_per_s=of("prompt_tokens"),
            cached_tokens_per_s=of("cached_tokens"),
            generated_tokens_per_s=of("generated_tokens"),
            requests_per_s=of("ended"),
            refused_per_s=of("refused"),
            failed_per_s=of("failed"),
        )

    def _tokens_per_s(self, tenant: str) -> float | None:
        first, last = self._past[0], self._past[-1]
        span = last.at - first.at
        return (last.tokens[tenant] - first.tokens[tenant]) / span if span else None

    def _latency(self) -> Latency:
        ended = self.simulation.ended

        def of(name: str) -> LatencyPercentiles:
            values = sorted(map(attrgetter(name), ended))
            if not values:
                return LatencyPercentiles(window_s=WINDOW_S, count=0)
            p50, p90, p99 = (values[min(len(values) - 1, int(len(values) * q))] for q in (0.5, 0.9, 0.99))
            count = len(values)
            return LatencyPercentiles(window_s=WINDOW_S, count=count, p50_ms=p50, p90_ms=p90, p99_ms=p99)

        names = Ended.__dataclass_fields__
        return Latency(**{name.removesuffix("_ms"): of(name) for name in names if name.endswith("_ms")})

    def _queue(self) -> Queue:
        sim = self.simulation
        waits = [sim.now - one.arrived for one in sim.queue]
        classes = []
        for number, target in enumerate((0.5, 2.0, 30.0, None)):
            mine = [sim.now - one.arrived for one in sim.queue if one.number == number and not one.held]
            classes.append(
                ClassStatus(
                    name=CLASS_NAMES[number],
                    waiting=len(mine),
                    oldest_wait_s=max(mine, default=0.0),
                    expected_wait_s=len(mine) * 0.08,
                    target_s=target,
                )
            )
        return Queue(
            waiting=len(sim.queue),
            running=sum(len(one.running) for one in sim.replicas),
            oldest_wait_s=max(waits, default=0.0),
            waiting_tokens=sum(one.prompt for one in sim.queue),
            limit=2048,
            classes=classes,
        )

    def _batch(self, replica: SimReplica) -> Batch:
        part = replica.slice
        return Batch(
            model=replica.model,
            replica=replica.name,
            at=self.simulation.now,
            span_s=self.interval_s,
            step=int(replica.step),
            steps=int(part["decode_steps"] + part["mixed_steps"]),
            decode_steps=int(part["decode_steps"]),
            mixed_steps=int(part["mixed_steps"]),
            step_ms=part["step_ms"] if part["decode_steps"] else None,
            mixed_step_ms=part["mixed_step_ms"] if part["mixed_steps"] else None,
            idle_us=part["idle_us"] if part["decode_steps"] else None,
            mixed_idle_us=part["mixed_idle_us"] if part["mixed_steps"] else None,
            running=len(replica.running),
            waiting=0,
            max_num_seqs=replica.max_num_seqs,
            max_num_batched_tokens=replica.budget,
            computed_tokens=int(part["computed"]),
            generated_tokens=int(part["generated"]),
            preemptions=0,
            busy=part["busy"],
            longest_ms=part["longest_ms"],
            longest_decodes=int(part["longest_decodes"]),
            longest_prompt_tokens=int(part["longest_prompt_tokens"]),
        )

    def _kv(self, replica: SimReplica, *, blocks: bool) -> KvCache:
        order = [one.id for one in replica.running]
        index = {request: number for number, request in enumerate(order)}
        return KvCache(
            model=replica.model,
            replica=replica.name,
            blocks_total=replica.blocks,
            blocks_used=replica.used,
            blocks_cached=len(replica.cached),
            blocks_shared=replica.states.count(SHARED),
            block_tokens=BLOCK_TOKENS,
            kv_bytes=replica.kv_bytes,
            kv_cache_dtype="fp8",
            prompt_tokens=replica.prompt_tokens,
            cached_tokens=replica.cached_tokens,
            hit_rate=self._hit_rate(replica),
            hit_window_s=WINDOW_S,
            preemptions=replica.preemptions,
            evictions=replica.evictions,
            blocks=None
            if not blocks
            else BlockMap(
                states=bytes(replica.states),
                owners=replica.owners(index),
                requests=order,
                tenants=[one.tenant for one in replica.running],
                request_blocks=[len(one.blocks) for one in replica.running],
                preemptions=[one.preemptions for one in replica.running],
                ages=replica.ages(self.simulation.now),
            ),
        )

    def _hit_rate(self, replica: SimReplica) -> float | None:
        """Return the fraction of the last minute's prompt tokens that were served from the prefix cache."""
        before = self._prompts[0].tokens[replica.name]
        prompt, cached = replica.prompt_tokens - before[0], replica.cached_tokens - before[1]
        return cached / prompt if prompt else None

    def _request(self, one: SimRequest) -> UnfinishedRequest:
        now = self.simulation.now
        queued = one.started is None
        return UnfinishedRequest(
            request_id=one.id,
            state="queued" if queued else "running",
            model=one.model,
            tenant=one.tenant,
            key_id=one.key_id,
            peer="",
            front=f"front-{1 + one.key % 2}",
            replica=one.replica,
            attempt=0,
            age_s=now - one.arrived,
            prompt_tokens=one.prompt,
            max_tokens=one.max_tokens,
            class_name=CLASS_NAMES[one.number],
            phase="queued" if queued else "prefill" if one.first_token is None else "decode",
            key_name=one.key_name,
            stream=one.key != 1,
            queue_s=(now if one.started is None else one.started) - one.arrived,
            ttft_s=None if one.first_token is None else one.first_token - one.arrived,
            cached_tokens=None if queued else one.cached,
            computed_tokens=one.computed,
            generated_tokens=int(one.generated),
            blocks=None if queued else len(one.blocks),
            preemptions=None if queued else one.preemptions,
        )
