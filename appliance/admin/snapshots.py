"""Takes snapshots of the service (`appliance.snapshot`) by reading the state of its components."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import msgspec

from appliance.admin.running import RunningRequests
from appliance.admin.status import StatusReader
from appliance.models.replica import Replica
from appliance.monitoring.burn_rates import BurnRates
from appliance.monitoring.ended import EndedRequests, TenantCounts
from appliance.monitoring.host import ServiceProcess
from appliance.monitoring.machine_reader import MachineReader
from appliance.monitoring.samples import CounterSample, CounterSampler
from appliance.protocol import ReplicaStatus
from appliance.protocol.status import Status
from appliance.snapshot import (
    Alert,
    Batch,
    Gpu,
    KvCache,
    Queue,
    Snapshot,
    Stall,
    TenantUse,
    UnfinishedRequest,
)
from engine.messages import BLOCK_TOKENS
from store.policies import Policies, TenantRecord

MAX_TENANTS = 200
"""Maximum number of tenants in a snapshot. Tenants with requests take precedence."""
_CHOOSE_EVERY_S = 30.0
"""Interval, in seconds, at which the tenants in a snapshot are chosen again if there are more than
`MAX_TENANTS`."""
_COUNT_KEYS_EVERY_S = 15.0


class TenantChoice:
    """Chooses which tenants a snapshot contains if there are more than `MAX_TENANTS`. The choice changes
    rarely, because each change requires a new layout for the recorded telemetry."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._chosen: set[str] = set()
        self._at = float("-inf")

    def choose(self, names: list[str], busy: set[str]) -> list[str]:
        """Return at most `MAX_TENANTS` of the tenants' names, in the given order."""
        if len(names) <= MAX_TENANTS:
            return names
        now, kept = self._clock(), self._chosen.intersection(names)
        if now - self._at >= _CHOOSE_EVERY_S or len(kept) < MAX_TENANTS:
            self._at = now
            ranked = sorted(names, key=lambda name: (name not in busy, name not in kept))
            kept = self._chosen = set(ranked[:MAX_TENANTS])
        return [name for name in names if name in kept]


@dataclass(kw_only=True)
class SnapshotParts:
    """The components from which snapshots are taken."""

    status: StatusReader
    running: RunningRequests
    sampler: CounterSampler
    ended: EndedRequests
    policies: Callable[[], Policies]
    alerts: Callable[[], list[Alert]]
    stalls: Callable[[], list[Stall]]
    machine: MachineReader
    burn_rates: BurnRates = field(default_factory=BurnRates)
    choice: TenantChoice = field(default_factory=TenantChoice)


class SnapshotReader:
    """Takes snapshots. A snapshot's batch counts cover the time since the same reader's previous snapshot, so
    each feed needs its own reader. All readers share `SnapshotParts`. Must be used on the event loop
    thread."""

    def __init__(self, parts: SnapshotParts) -> None:
        self._parts = parts
        self._slices: dict[str, _Counters] = {}
        self._keys: tuple[Policies | None, float, Counter[str]] = (None, float("-inf"), Counter())

    async def read(self) -> Snapshot:
        """Return a snapshot of the current state."""
        running = self._parts.running
        progress = await running.progress()
        # Compute request ages as of the snapshot's time, because readers derive later ages from them.
        at = time.time()
        return self._read(at, running.known(progress, at))

    def _read(self, at: float, requests: list[UnfinishedRequest]) -> Snapshot:
        parts = self._parts
        status = parts.status.status()
        sample = parts.sampler.sample()
        host, gpus, gpu_error = parts.machine.stats(status.state_dir, _processes(status))
        queue = msgspec.structs.asdict(status.queue)
        return Snapshot(
            at=at,
            started_at=status.started_at,
            uptime_s=status.uptime_s,
            version=status.version,
            pid=status.pid,
            state=status.state,
            reason=status.reason,
            config_file=status.config_file,
            run_dir=status.run_dir,
            state_dir=status.state_dir,
            totals=sample.totals,
            rates=parts.sampler.rates(sample),
            latency=parts.ended.latency(),
            queue=Queue(**{name: queue[name] for name in Queue.__struct_fields__}),
            batches=self._batches(),
            kv=[
                self._kv(model.name, replica, sample)
                for model in status.models
                for replica in model.replicas
                if replica.blocks_total
            ],
            requests=requests,
            gpus=with_replicas(gpus, status),
            models=status.models,
            tenants=self._tenants(sample),
            alerts=parts.alerts(),
            stalls=parts.stalls(),
            host=host,
            drains=status.drains,
            fronts=status.fronts,
            sockets=status.sockets,
            current_problems=status.current_problems,
            problems=status.problems,
            audit_rows=status.audit.rows,
            audit_head=status.audit.head,
            audit_recorded_rows=status.audit.recorded_rows,
            gpu_error=gpu_error,
        )

    # ── replicas ──

    def _batches(self) -> list[Batch]:
        now, unix = time.monotonic(), time.time()
        batches, slices = [], {}
        for replica in self._parts.status.models.replicas:
            report = replica.latest_report
            if report is None or replica.info is None:
                continue
            counters = slices[replica.name] = _Counters(replica, now)
            before = self._slices.get(replica.name)
            if before is None or before.incarnation != counters.incarnation:
                before = None
            span_s = 0.0 if before is None else now - before.at
            batches.append(
                Batch(
                    model=replica.model,
                    replica=replica.name,
                    at=unix,
                    span_s=span_s,
                    step=report.step,
                    running=report.running,
                    waiting=report.waiting,
                    max_num_seqs=replica.info.max_num_seqs,
                    max_num_batched_tokens=replica.info.max_num_batched_tokens,
                    **({} if before is None else counters.since(before)),
                    **({} if before is None else _longest(replica, before.at)),
                )
            )
        self._slices = slices
        return batches

    def _kv(self, model: str, replica: ReplicaStatus, sample: CounterSample) -> KvCache:
        hit_rate, window_s = self._parts.sampler.hit_rate(sample, replica.name)
        return KvCache(
            model=model,
            replica=replica.name,
            blocks_total=replica.blocks_total,
            blocks_used=replica.blocks_used,
            blocks_cached=replica.blocks_cached,
            block_tokens=BLOCK_TOKENS,
            kv_bytes=replica.kv_bytes or None,
            kv_cache_dtype=replica.kv_cache_dtype,
            prompt_tokens=replica.prompt_tokens,
            cached_tokens=replica.cached_tokens,
            hit_rate=hit_rate,
            hit_window_s=window_s,
            blocks_shared=replica.blocks_shared,
            preemptions=replica.preemptions,
            evictions=replica.evictions,
        )

    # ── tenants ──

    def _tenants(self, sample: CounterSample) -> list[TenantUse]:
        parts, traffic = self._parts, self._parts.status.traffic
        policies = parts.policies()
        known = {name: traffic.tenants.of(name) for name in policies.tenants}
        busy_names = {name for name, one in known.items() if not one.use.idle}
        chosen = [policies.tenants[name] for name in parts.choice.choose(list(policies.tenants), busy_names)]
        usage = {one.name: traffic.usage("tenant", one.name) for one in chosen}
        now = time.monotonic()
        parts.burn_rates.record(now, usage)
        keys = self._valid_keys(policies)
        peers = Counter(peer.tenant for peer in policies.peers.values())
        busy = sum(one.weight for name, one in known.items() if name in busy_names)
        then = parts.sampler.before(sample, 10.0)
        span_s = 0.0 if then is None else sample.at - then.at
        service = {
            name: total - (0.0 if then is None else then.service.get(name, 0.0))
            for name, total in sample.service.items()
        }
        whole = sum(service.values())

        def use(tenant: TenantRecord) -> TenantUse:
            name, one = tenant.name, known[tenant.name]
            counts = parts.ended.tenants.get(name) or TenantCounts()
            tokens = sample.tokens.get(name, 0) - (0 if then is None else then.tokens.get(name, 0))
            return TenantUse(
                name=name,
                suspended_at=tenant.suspended_at,
                weight=tenant.weight,
                highest_class=tenant.highest_class,
                keys=keys[name],
                peers=peers[name],
                running=one.use.running,
                waiting=one.use.queued,
                tokens_per_s=tokens / span_s if span_s else None,
                service_tokens=one.service,
                share=service.get(name, 0.0) / whole if whole > 0 and span_s else None,
                fair_share=one.weight / busy if name in busy_names else None,
                requests=counts.requests,
                refused=counts.refused,
                prompt_tokens=counts.prompt_tokens,
                cached_tokens=counts.cached_tokens,
                billed_tokens=counts.billed_tokens,
                usage=usage[name],
                exhausted_in_s=parts.burn_rates.exhausted_in_s(now, name, usage[name]),
            )

        return [use(tenant) for tenant in chosen]

    def _valid_keys(self, policies: Policies) -> Counter[str]:
        """Return the number of valid keys per tenant. Keys are recounted when a policy changes and, because
        they can expire, at regular intervals."""
        known, at, count = self._keys
        if known is not policies or time.monotonic() - at > _COUNT_KEYS_EVERY_S:
            now = time.time()
            count = Counter(key.tenant for key in policies.keys.values() if key.valid_at(now))
            self._keys = policies, time.monotonic(), count
        return count


class _Counters:
    """A replica's counters at one point in time."""

    def __init__(self, replica: Replica, at: float) -> None:
        report, steps = replica.latest_report, replica.steps
        assert report is not None
        self.at = at
        self.incarnation = replica.incarnation
        self.decode, self.mixed = copy(steps.decode), copy(steps.mixed)
        self.computed_tokens, self.generated_tokens = report.computed_tokens, report.generated_tokens
        self.preemptions = report.preemptions

    def since(self, before: _Counters) -> dict[str, Any]:
        """Return the `Batch` fields for the time since the counters `before` were read."""
        decode, mixed = self.decode.since(before.decode), self.mixed.since(before.mixed)
        return {
            "steps": decode.steps + mixed.steps,
            "decode_steps": decode.steps,
            "mixed_steps": mixed.steps,
            "step_ms": decode.mean_ms,
            "mixed_step_ms": mixed.mean_ms,
            "idle_us": decode.mean_idle_us,
            "mixed_idle_us": mixed.mean_idle_us,
            "computed_tokens": self.computed_tokens - before.computed_tokens,
            "generated_tokens": self.generated_tokens - before.generated_tokens,
            "preemptions": self.preemptions - before.preemptions,
            "busy": min(1.0, (decode.seconds + mixed.seconds) / max(1e-9, self.at - before.at)),
        }


def _longest(replica: Replica, since: float) -> dict[str, Any]:
    """Return the `Batch` fields that describe the longest step reported after `since` (monotonic time)."""
    step = replica.steps.longest.since(since)
    if step is None:
        return {}
    return {
        "longest_ms": step.ms,
        "longest_decodes": step.decodes,
        "longest_prompt_tokens": step.prompt_tokens,
    }


def _processes(status: Status) -> list[ServiceProcess]:
    found = [ServiceProcess("core", "core", os.getpid(), status.state, 0)]
    for front in status.fronts:
        if front.pid is not None:
            found.append(ServiceProcess(front.name, "front", front.pid, front.state, front.restarts))
    for model in status.models:
        for replica in model.replicas:
            for rank, pid in enumerate(replica.pids):
                name = replica.name if len(replica.pids) == 1 else f"{replica.name} rank {rank}"
                found.append(ServiceProcess(name, "replica", pid, replica.state, replica.restarts))
    return found


def with_replicas(gpus: Iterable[Gpu], status: Status) -> list[Gpu]:
    """Return copies of the GPU records with three additions: the names of the replicas that use each GPU, the
    memory that they use on it, and the replica that owns each process. A replica uses a GPU if one of its
    processes does. If process ids are unknown, the replica's devices are compared with the GPU and its MIG
    instances instead. For each replica, only the total memory of all ranks is known, so it is divided equally
    among the ranks.
    """
    found: list[Gpu] = []
    number = 0
    for gpu in gpus:
        # As in `appliance.models.gpus`, GPUs and MIG instances are numbered together.
        count = 1 if gpu.mig_instances is None else len(gpu.mig_instances)
        devices = {f"cuda:{one}" for one in range(number, number + count)}
        found.append(_with_replicas(gpu, devices, status))
        number += count
    return found


def _with_replicas(gpu: Gpu, devices: Container[str], status: Status) -> Gpu:
    replicas = [replica for model in status.models for replica in model.replicas]
    owners = {pid: replica for replica in replicas for pid in replica.pids}
    processes = gpu.processes or []
    ranks = [owners[one.pid] for one in processes if one.pid in owners]
    if not ranks:
        # In a container, the driver reports no processes, or process ids from a different PID namespace.
        ranks = [one for one in replicas for device in one.devices if device in devices]
    named = [
        msgspec.structs.replace(one, replica=owners[one.pid].name if one.pid in owners else "")
        for one in processes
    ]
    return msgspec.structs.replace(
        gpu,
        processes=None if gpu.processes is None else named,
        replicas=list(dict.fromkeys(one.name for one in ranks)),
        weight_bytes=sum(one.weight_bytes // max(1, len(one.devices)) for one in ranks),
        kv_bytes=sum(one.kv_bytes // max(1, len(one.devices)) for one in ranks),
    )
