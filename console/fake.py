"""A source with a simulated service, for `appliance console --demo` and the tests. In tests, the clock is
simulated too, so the same seed gives the same snapshots."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
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
from appliance.protocol import (
    ClassStatus,
    Done,
    DrainStatus,
    FrontStatus,
    LimitUsage,
    ModelStatus,
    ReplicaStatus,
    Silence,
    SocketStatus,
)
from appliance.snapshot import (
    Alert,
    Batch,
    BlockMap,
    Host,
    KvCache,
    Latency,
    LatencyPercentiles,
    Process,
    Queue,
    Rates,
    ServiceTotals,
    Snapshot,
    TenantUse,
    UnfinishedRequest,
)
from console.fake_alerts import FakeAlerts
from console.fake_machine import gpus_of
from console.fake_recording import FakeRecording
from console.fake_rows import DEMO_OPERATOR, FakeRows
from console.simulation import (
    BLOCK_TOKENS,
    SHARED,
    WINDOW_S,
    Ended,
    SimReplica,
    SimRequest,
    SimTenant,
    Simulation,
)
from console.source import ListName, Row, SourceError

FIXED_TIME = 1_790_000_000.0
"""The time on the clock in tests, in unix seconds."""


_RATE_WINDOW_S = 10.0
_PAST_S = 120
"""The demo simulates this many seconds before its start, to fill its charts and its recording."""


class _Counters(NamedTuple):
    """The counters at one point in time, for computing rates."""

    at: float
    totals: ServiceTotals
    tokens: dict[str, int]
    """Prompt and output tokens of each tenant."""


class FakeSource:
    """Delivers the snapshots of a simulated service."""

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
        """`now` fixes the clock: each snapshot is then exactly `interval_s` after the previous one, and
        `next` does not wait."""
        self.interval_s = interval_s
        self.reads_blocks = True
        self._real_time = now is None
        start = time.time() - _PAST_S if now is None else now
        self.simulation = Simulation(
            seed=seed, requests=requests, blocks=blocks, gpus=gpus, tenants=tenants, now=start - 12.0
        )
        self._past: deque[_Counters] = deque()
        self._rows = FakeRows(self.simulation)
        self._alerts = FakeAlerts(self._rows.log, start)
        self._recording = FakeRecording(self._rows)
        self._first = True

    async def next(self) -> Snapshot:
        """Return the next snapshot."""
        if self._real_time and self._first:
            await asyncio.to_thread(self._run_past)
        elif self._real_time:
            # After a delay, the simulation catches up with the clock.
            due = self.simulation.now + self.interval_s
            await asyncio.sleep(max(0.0, due - time.time()))
        self._first = False
        return self.step()

    def step(self) -> Snapshot:
        """Advance the simulated clock by one interval, and return the snapshot."""
        self._advance(self.interval_s)
        snapshot = self._snapshot()
        self._recording.add(snapshot)
        return snapshot

    def _run_past(self) -> None:
        """Simulate and record the minutes before the start. As in the history of a service, individual KV
        blocks are not recorded."""
        for _ in range(_PAST_S):
            self._advance(1.0)
            self._recording.add(self._snapshot(blocks=False))

    def _advance(self, seconds: float) -> None:
        sim = self.simulation
        sim.advance(seconds)
        self._rows.log.advance()
        tokens = {name: tenant.prompt + tenant.billed for name, tenant in sim.tenants.items()}
        self._past.append(_Counters(sim.now, self._totals(), tokens))
        while len(self._past) > 2 and self._past[0].at < sim.now - _RATE_WINDOW_S:
            self._past.popleft()

    async def rows(self, name: ListName) -> Sequence[Row]:
        """Return one of the simulated service's lists."""
        if name == "rules":
            return self._alerts.rules()
        return self._alerts.silences() if name == "silences" else self._rows.of(name)

    async def verify(self) -> ChainReport:
        """Verify the simulated audit chain."""
        return self._rows.verify()

    async def what_if(self, parameters: msgspec.Struct) -> QuotaForecast:
        """Refuse, because the demo has no limits to change."""
        raise SourceError("the demo does not replay requests: connect to a running service")

    async def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        """Perform an action on the simulated service. Raises SourceError for actions that are not
        simulated."""
        sim, action = self.simulation, action_of(parameters)
        match parameters:
            case CancelRequest(request_id=request_id):
                if not sim.cancel(request_id):
                    raise SourceError(
                        f"request {request_id} is not in flight: choose a request from the list"
                    )
                message = f"request {request_id} cancelled"
            case DrainService(model=model):
                sim.paused[model] = sim.now
                self._rows.record(action.name, model or "service")
                return self._drain(model, sim.now)
            case ResumeService(model=model):
                if sim.paused.pop(model, None) is None:
                    raise SourceError(f"{'the service' if model is None else model} is not drained")
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
        """Return the recording of the minutes since the demo started."""
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
            state="draining" if None in sim.paused else "ready",
            config_file="/etc/appliance/appliance.toml",
            run_dir="/run/appliance",
            state_dir="/var/lib/appliance",
            totals=totals,
            rates=self._rates(totals),
            latency=self._latency(),
            queue=self._queue(),
            batches=[self._batch(one) for one in sim.replicas],
            kv=[self._kv(one, blocks=blocks) for one in sim.replicas],
            requests=[self._request(one) for one in self._unfinished()],
            gpus=gpus_of(sim),
            models=self._models(),
            tenants=self._tenant_uses(),
            alerts=[],
            stalls=sorted(
                (one for replica in sim.replicas for one in replica.stalls), key=lambda one: one.at
            ),
            host=self._host(),
            drains=[self._drain(model, since) for model, since in sim.paused.items()],
            fronts=self._fronts(),
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

    def _unfinished(self) -> list[SimRequest]:
        sim = self.simulation
        running = [request for replica in sim.replicas for request in replica.running]
        return sorted([*sim.queue, *running], key=lambda one: (one.arrived, one.id))

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
            mine = [sim.now - one.arrived for one in sim.queue if one.number == number]
            classes.append(
                ClassStatus(
                    name=f"P{number}",
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
            hit_rate=replica.cached_tokens / max(1, replica.prompt_tokens),
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
            class_name=f"P{one.number}",
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

    def _tenant_uses(self) -> list[TenantUse]:
        # Unfinished requests count with their maximum number of tokens.
        held: Counter[str] = Counter()
        for request in self._unfinished():
            held[request.tenant] += request.max_tokens
        tenants = self.simulation.tenants.values()
        service = {tenant.name: sum(cost for _, cost in tenant.recent) for tenant in tenants}
        total = sum(service.values())
        active = sum(tenant.weight for tenant in tenants if tenant.running + tenant.waiting)
        return [self._tenant_use(one, held[one.name], service[one.name], total, active) for one in tenants]

    def _tenant_use(
        self, one: SimTenant, held: int, service: float, all_service: float, active: float
    ) -> TenantUse:
        """`service` is the number of weighted tokens of the tenant in the last minute, `all_service` that of
        all tenants, and `active` the weight of the tenants that have requests."""
        usage = []
        left_s = []
        for limit in one.limits:
            used = int(min(limit.level + held, limit.capacity))
            usage.append(
                LimitUsage(
                    limit=limit.name,
                    capacity=int(limit.capacity),
                    used=used,
                    held=held,
                    resets_in_s=used / limit.capacity * limit.period_s,
                )
            )
            burn = service / WINDOW_S - limit.capacity / limit.period_s
            if burn > 0:
                left_s.append((limit.capacity - limit.level) / burn)
        if one.concurrent is not None:
            usage.append(
                LimitUsage(
                    limit="concurrent_requests",
                    capacity=one.concurrent,
                    used=one.running,
                    held=one.running,
                    resets_in_s=None,
                )
            )
        return TenantUse(
            name=one.name,
            suspended_at=one.suspended_at,
            weight=one.weight,
            highest_class=one.highest_class,
            keys=3,
            peers=0,
            running=one.running,
            waiting=one.waiting,
            tokens_per_s=self._tokens_per_s(one.name),
            service_tokens=one.service,
            share=service / all_service if all_service else None,
            fair_share=one.weight / active if one.running + one.waiting else None,
            requests=one.requests,
            refused=one.refused,
            prompt_tokens=one.prompt,
            cached_tokens=one.cached,
            billed_tokens=one.billed,
            usage=usage,
            exhausted_in_s=min(left_s, default=None),
        )

    def _models(self) -> list[ModelStatus]:
        sim = self.simulation
        found = []
        for name in dict.fromkeys(one.model for one in sim.replicas):
            paused = bool(sim.paused.keys() & {None, name})
            replicas = [self._replica(one, paused) for one in sim.replicas if one.model == name]
            left = sum(one.running for one in replicas)
            found.append(
                ModelStatus(
                    name=name,
                    folder=f"/srv/models/{name}",
                    version=f"sha256:{abs(len(name) * 7_919_111):08x}",
                    created=1_780_000_000,
                    state=("draining" if left else "drained") if paused else "ready",
                    max_model_len=131_072 if "70b" in name else 32_768,
                    queued=sum(one.model == name for one in sim.queue),
                    drain_eta_s=self._drain_eta_s(name),
                    replicas=replicas,
                )
            )
        return found

    def _replica(self, one: SimReplica, paused: bool) -> ReplicaStatus:
        ranks = len(one.gpus)
        return ReplicaStatus(
            name=one.name,
            state="draining" if paused else "ready",
            pids=[5000 + gpu for gpu in one.gpus],
            devices=[f"cuda:{gpu}" for gpu in one.gpus],
            backend="cuda",
            dtype="bfloat16",
            weights="fp8",
            kv_cache_dtype="fp8",
            tensor_parallel_size=ranks,
            links="NVLink (18 links)" if ranks > 1 else "",
            collectives="peer memory" if ranks > 1 else "",
            parameters=70_600_000_000 if ranks > 1 else 8_200_000_000,
            weight_bytes=one.weight_bytes,
            kv_bytes=one.kv_bytes,
            predicted_bytes=one.used_bytes - (311 << 20),
            used_bytes=one.used_bytes,
            load_seconds=one.load_seconds,
            max_num_seqs=one.max_num_seqs,
            max_num_batched_tokens=one.budget,
            step=int(one.step),
            credit_seqs=one.max_num_seqs - len(one.running),
            credit_tokens=one.budget,
            last_report_s=0.04,
            running=len(one.running),
            blocks_total=one.blocks,
            blocks_used=one.used,
            blocks_cached=len(one.cached),
            preemptions=one.preemptions,
            prompt_tokens=one.prompt_tokens,
            cached_tokens=one.cached_tokens,
            computed_tokens=one.computed_tokens,
            generated_tokens=one.generated_tokens,
            decode_steps=int(one.slice["decode_steps"]),
            step_ms=one.slice["step_ms"],
            idle_us=one.slice["idle_us"],
            mixed_steps=int(one.slice["mixed_steps"]),
            mixed_step_ms=one.slice["mixed_step_ms"],
            mixed_idle_us=one.slice["mixed_idle_us"],
        )

    def _drain(self, model: str | None, since: float) -> DrainStatus:
        sim = self.simulation
        running = sum(len(one.running) for one in sim.replicas if model in (None, one.model))
        elapsed = sim.now - since
        return DrainStatus(
            model=model,
            state="draining" if running else "drained",
            grace_s=120.0,
            grace_left_s=max(0.0, 120.0 - elapsed),
            queue=False,
            started_at=since,
            elapsed_s=elapsed,
            running=running,
            queued=0,
            held=0,
            tokens_left=running * 170,
            eta_s=self._drain_eta_s(model),
        )

    def _drain_eta_s(self, model: str | None) -> float:
        """Return the time until the longest running request has generated all its output tokens."""
        replicas = [one for one in self.simulation.replicas if model in (None, one.model)]
        left_ms = [
            (request.output - request.generated) * one.decode_ms
            for one in replicas
            for request in one.running
        ]
        return max(left_ms, default=0.0) / 1000

    def _fronts(self) -> list[FrontStatus]:
        tokens = sum(one.generated_tokens for one in self.simulation.replicas)
        running = sum(len(one.running) for one in self.simulation.replicas)
        return [
            FrontStatus(
                name=f"front-{number}",
                state="ready",
                pid=4800 + number,
                connections=running // 2 + 11 * number,
                busy_connections=running // 2,
                max_connections=4096,
                streams=running // 2,
                requests=self.simulation.counts["admitted"] // 2,
                tokens=tokens // 2,
                cpu_seconds=tokens / 2 * 14e-6,
                cpu_us_per_token=14.1 + number,
            )
            for number in (1, 2)
        ]

    def _host(self) -> Host:
        random = self.simulation.random
        processes = [
            Process(
                name="core", role="core", pid=4711, cpu_percent=random.uniform(6, 9), memory_bytes=187 << 20
            )
        ]
        for number in (1, 2):
            processes.append(
                Process(
                    name=f"front-{number}",
                    role="front",
                    pid=4800 + number,
                    cpu_percent=random.uniform(28, 41),
                    memory_bytes=(240 + 9 * number) << 20,
                    restarts=0,
                )
            )
        for replica in self.simulation.replicas:
            processes.append(
                Process(
                    name=replica.name,
                    role="replica",
                    pid=5000 + replica.gpus[0],
                    cpu_percent=random.uniform(94, 100) * len(replica.gpus),
                    memory_bytes=(3 + len(replica.gpus)) << 30,
                    restarts=0,
                )
            )
        return Host(
            name="gpu-01",
            cpus=96,
            cpu_percent=random.uniform(9, 13),
            load_1m=random.uniform(9, 12),
            memory_bytes=1024 << 30,
            memory_used_bytes=141 << 30,
            disk_bytes=3500 << 30,
            disk_free_bytes=2210 << 30,
            processes=processes,
        )
