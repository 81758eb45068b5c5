"""A scrape: the counters as they are, and whatever is a level, read at that moment.

It costs as much as there are series, whatever is in the house: no request is looked at, and no front or
replica is asked anything. What replicas that compute say of themselves is 100 ms or a step old at most.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from appliance.classes import CLASS_NAMES
from appliance.listeners import Doors
from appliance.models.replicas import Replica
from appliance.switchboard import Switchboard
from appliance.traffic.figures import ModelFigures
from appliance.watch.metrics.counting import CountedRows
from appliance.watch.metrics.exposition import render
from appliance.watch.metrics.tenants import OTHERS
from engine.logs import log_state
from engine.messages import BLOCK_TOKENS
from store.control import ControlStore
from store.policies import Policies
from store.writer import Writer

_KEPT_S = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Scraper:
    """Makes the exposition of one service."""

    def __init__(
        self,
        counted: CountedRows,
        switchboard: Switchboard,
        control: ControlStore,
        writers: Sequence[Writer],
        doors: Doors,
        *,
        version: str,
        started_at: float,
    ) -> None:
        self._families = families = counted.families
        self._tenants = counted.tenants
        self._switchboard = switchboard
        self._control = control
        self._databases: list[ControlStore | Writer] = [control, *writers]
        self._doors = doors
        self._policies: Policies | None = None
        self._models: list[str] = []
        self._text, self._made_at = b"", -math.inf
        families.info.set(1, version)
        families.process_started.set(started_at)

    def __call__(self) -> bytes:
        """Every metric, in Prometheus' text format; as of 50 ms ago at most, so that nobody who may scrape
        keeps the core busy with it."""
        now = time.monotonic()
        if now >= self._made_at + _KEPT_S:
            self._text, self._made_at = self.make(), now
        return self._text

    def make(self) -> bytes:
        """The text as of now."""
        self._forget()
        models = self._switchboard.ledger.models()
        self._read_service()
        self._read_models(models)
        self._read_tenants()
        self._read_replicas()
        self._read_fronts()
        self._read_store()
        self._read_log()
        self._read_gateway_names(models)
        return render(self._families)

    def _forget(self) -> None:
        """Tenants and models that are not there any more leave, with what was counted of them."""
        families, policies = self._families, self._control.policies
        if policies is not self._policies:
            self._policies = policies
            families.tenant_limit.clear()  # a limit may have been lifted
            families.tenant_limit_left.clear()
            if self._tenants.forget_deleted():
                for family in families.by("tenant"):
                    family.keep("tenant", (*self._tenants, OTHERS))
        models = list(self._switchboard.models)
        if models != self._models:
            self._models = models
            for family in families.by("model"):
                family.keep("model", (*models, OTHERS))

    def _read_service(self) -> None:
        families, switchboard = self._families, self._switchboard
        families.ready.set(0 if switchboard.readiness.reason() else 1)
        draining = switchboard.stopping or switchboard.drains.of(None)
        families.draining.set(0 if draining is None else 1)
        families.problems.set(switchboard.problems.total)
        families.held.set(switchboard.ledger.held())
        families.accepted.clear()
        for listener in self._doors.listeners:
            families.accepted.add(listener.accepted, listener.name)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        families.process_cpu.set(usage.ru_utime + usage.ru_stime)
        families.process_memory.set(int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES)

    def _read_models(self, models: list[ModelFigures]) -> None:
        families = self._families
        for model in models:
            for number, name in enumerate(CLASS_NAMES):
                families.waiting.set(model.waiting[number], model.name, name)
                families.oldest_wait.set(model.oldest_wait_s[number], model.name, name)
            families.resuming.set(model.resuming, model.name)
            families.running.set(model.running, model.name)
            families.overload.set(model.overload_step, model.name)

    def _read_tenants(self) -> None:
        families, ledger = self._families, self._switchboard.ledger
        for name in self._tenants:
            tenant = ledger.tenant(name)
            families.tenant_service.set(tenant.service, name)
            families.tenant_waiting.set(tenant.waiting, name)
            families.tenant_running.set(tenant.running, name)
            for bucket in ledger.quotas.buckets(name):
                families.tenant_limit.set(bucket.rate.capacity, name, bucket.limit)
                families.tenant_limit_left.set(bucket.level, name, bucket.limit)

    def _read_replicas(self) -> None:
        families = self._families
        for family in families.by("replica"):
            family.clear()
        for replica in self._switchboard.replicas:
            self._read_replica(replica, replica.model, replica.name)

    def _read_replica(self, replica: Replica, *labels: str) -> None:
        families, status, steps = self._families, replica.status(), replica.steps
        families.replica_state.set(1, *labels, status.state)
        families.replica_restarts.set(status.restarts, *labels)
        families.sequences.set(status.running, *labels, "running")
        families.sequences.set(status.waiting, *labels, "waiting")
        families.kv_blocks.set(status.blocks_total, *labels)
        families.kv_used.set(status.blocks_used, *labels)
        families.kv_cached.set(status.blocks_cached, *labels)
        families.credit_seqs.set(status.credit_seqs, *labels)
        families.credit_tokens.set(status.credit_tokens, *labels)
        families.engine_prompt_tokens.set(status.prompt_tokens, *labels)
        families.engine_cached_tokens.set(status.cached_tokens, *labels)
        families.engine_generated_tokens.set(status.generated_tokens, *labels)
        families.preemptions.set(status.preemptions, *labels)
        for kind, total in (("decode", steps.decode), ("mixed", steps.mixed)):
            families.step_seconds.set(total.steps, total.seconds, *labels, kind)
            families.idle_seconds.set(total.steps, total.idle_s, *labels, kind)

    def _read_fronts(self) -> None:
        families = self._families
        for family in families.by("front"):
            family.clear()
        for front in self._switchboard.fronts:
            # Its place's name: that of its process changes with each one.
            status, name = front.status(), f"front-{front.number}"
            families.front_state.set(1, name, status.state)
            families.front_restarts.set(status.restarts, name)
            families.front_cpu.set(status.cpu_seconds, name)
            families.front_connections.set(status.connections, name)
            families.front_unauthenticated_connections.set(status.unauthenticated_connections, name)
            families.front_refused_connections.set(status.refused_connections, name)
            families.front_evicted_connections.set(status.evicted_connections, name)
            families.front_cut_off_connections.set(status.cut_off_connections, name)
            families.front_refused_bodies.set(status.refused_bodies, name)
            families.front_streams.set(status.streams, name)
            families.front_requests.set(status.requests, name)
            families.front_tokens.set(status.tokens, name)
            families.front_unauthenticated.set(status.unauthenticated, name)
            families.front_kept_answers.set(status.kept_answers, name)
            families.front_kept_bytes.set(status.kept_bytes, name)
            families.front_dropped_texts.set(status.dropped_texts, name)

    def _read_store(self) -> None:
        families = self._families
        for database in self._databases:
            state, name = database.state(), database.path.stem
            families.store_waiting.set(state.lag_rows, name)
            families.store_lag.set(state.lag_ms / 1e3, name)
            families.store_failing.set(state.failing_s, name)
            families.store_committed.set(state.committed_rows, name)
            families.store_dropped.set(state.dropped_rows, name)
            families.store_rejected.set(state.rejected_rows, name)
        trail = self._control.trail.state()
        families.audit_rows.set(trail.head.seq)
        families.audit_spooled.set(trail.spool.rows)
        families.audit_lost.set(trail.spool.lost)

    def _read_log(self) -> None:
        dropped = self._families.log_dropped_lines
        dropped.clear()
        dropped.set(log_state().dropped_lines, "core")
        for front in self._switchboard.fronts:
            dropped.set(front.status().log_dropped_lines, f"front-{front.number}")
        for replica in self._switchboard.replicas:
            dropped.set(replica.status().log_dropped_lines, replica.name)

    def _read_gateway_names(self, models: list[ModelFigures]) -> None:
        families, fleet = self._families, self._switchboard.fleet
        for family in families.by("model_name"):
            family.clear()
        for model in models:
            ready = [replica.status() for replica in fleet.of(model.name) if replica.account is not None]
            blocks = sum(status.blocks_total for status in ready)
            used = sum(status.blocks_used for status in ready)
            families.vllm_waiting.set(sum(model.waiting) + model.resuming, model.name)
            families.vllm_running.set(model.running, model.name)
            # Without a ready replica there is no room at all.
            families.vllm_kv_usage.set(used / blocks if blocks else 1.0, model.name)
            families.vllm_cache_config.set(1, model.name, str(BLOCK_TOKENS), str(blocks))
            families.vllm_lora.set(time.time(), model.name, "0", "", "")
