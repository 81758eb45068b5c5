"""A simulated service under a plausible load, for the demo and the tests. It simulates arrivals, queueing,
prefill, decoding, KV blocks and limits. The same seed and steps always give the same results."""

from __future__ import annotations

import math
import random
import zlib
from collections import deque

from appliance.snapshot import STALL_FACTOR, Stall
from console.simulated import (
    BLOCK_TOKENS,
    KEY_NAMES,
    SHARED,
    STARTUP_S,
    WINDOW_S,
    Ended,
    SimDrain,
    SimLimit,
    SimReplica,
    SimRequest,
    SimTenant,
)
from console.source import MAX_ROWS

TENANTS = (
    *(
        "search",
        "support-bot",
        "research",
        "docs-rag",
        "mobile",
        "codegen",
        "translate",
        "analytics",
        "voice",
    ),
    *("moderation", "batch-jobs", "ml-eval", "partners", "legal", "billing", "marketing", "hr-assist"),
    *("ops-chat", "qa-tests", "intern-lab"),
)
_PREFILL_TOKENS_PER_S = 6000
_MAX_DISPATCH_S = 0.08
"""Maximum time a request spends in the queue if a slot is free."""
_MAX_STEP_FACTORS = (*[1.0, 1.02, 1.05, 1.1] * 10, 2.4)
"""Possible durations of a time slice's longest step, as multiples of the mean step time."""
_MAX_STALLS = 16


class Simulation:
    """The simulated service. `advance` moves its clock forward."""

    def __init__(self, *, seed: int, requests: int, blocks: int, gpus: int, tenants: int, now: float) -> None:
        """`requests` is the typical number of unfinished requests. `blocks` is the number of blocks in the
        largest KV cache."""
        self.random = random.Random(seed)
        self.now, self.started = now, now - STARTUP_S
        self.target = requests
        self.gpus = gpus
        self.tenants = {name: self._tenant(index, name) for index, name in enumerate(TENANTS[:tenants])}
        self.replicas = self._replicas(gpus, blocks)
        self.queue: list[SimRequest] = []
        self.ended: deque[Ended] = deque()
        self.finished: deque[SimRequest] = deque(maxlen=MAX_ROWS)
        """The requests that ended most recently, oldest first."""
        self.counts = dict.fromkeys(("admitted", "refused", "ended", "failed", "cancelled", "billed"), 0)
        self.drains: dict[str | None, SimDrain] = {}
        """The drains, keyed by model. The key None stands for the whole service."""
        self._number = 0
        while sum(len(one.running) for one in self.replicas) + len(self.queue) < requests * 0.96:
            self._arrive(self.now - self.random.uniform(0.0, 20.0))
            self._dispatch()
        for replica in self.replicas:
            for request in replica.running:
                if self.random.random() < 0.9:
                    self._start_decoding(replica, request, self.random.uniform(0.05, 0.95))
        for _ in range(24):
            self.advance(0.5)

    def advance(self, seconds: float) -> None:
        """Simulate the next `seconds` seconds."""
        self.now += seconds
        self._arrivals(seconds)
        self._dispatch()
        for replica in self.replicas:
            self._run(replica, seconds)
        for model, drain in self.drains.items():
            self._progress(model, drain)
        for tenant in self.tenants.values():
            for limit in tenant.limits:
                limit.level = max(0.0, limit.level - limit.capacity / limit.period_s * seconds)
            while tenant.recent and tenant.recent[0][0] < self.now - WINDOW_S:
                tenant.recent.popleft()
        while self.ended and self.ended[0].at < self.now - WINDOW_S:
            self.ended.popleft()

    def cancel(self, request_id: str) -> bool:
        """End a request. Return False if it had already ended."""
        for request in self.queue:
            if request.id == request_id:
                self.queue.remove(request)
                self.tenants[request.tenant].waiting -= 1
                self.counts["cancelled"] += 1
                self._finish(request, "cancelled")
                return True
        for replica in self.replicas:
            for request in replica.running:
                if request.id == request_id:
                    self._end(replica, request, cancelled=True)
                    return True
        return False

    def drains_of(self, model: str) -> list[SimDrain]:
        """Return the drains that affect a model."""
        return [self.drains[one] for one in (None, model) if one in self.drains]

    def drained(self, model: str | None) -> list[SimRequest]:
        """Return the unfinished requests that a drain of this model, or of the service, is waiting for."""
        return [one for one in self.unfinished() if model in (None, one.model) and not one.held]

    def _progress(self, model: str | None, drain: SimDrain) -> None:
        """Cancel the requests that have not ended by the end of a drain's grace period, and complete the
        drain once no requests are left."""
        left = self.drained(model)
        if self.now >= drain.since + drain.grace_s:
            drain.cancelled += sum([self.cancel(one.id) for one in left])
            left = []
        if not left and drain.completed_at is None:
            drain.completed_at = self.now

    def unfinished(self) -> list[SimRequest]:
        """Return waiting and running requests, in order of arrival."""
        running = [request for replica in self.replicas for request in replica.running]
        return sorted([*self.queue, *running], key=lambda one: (one.arrived, one.id))

    def _tenant(self, index: int, name: str) -> SimTenant:
        limits = []
        if index % 4 != 3:
            capacity = (600_000.0, 240_000.0, 90_000.0)[index % 3]
            limits.append(SimLimit("tokens_per_minute", capacity, 60.0))
        if index == 2:
            # The tenant soon reaches 90% of this limit, which raises an alert.
            limits.append(SimLimit("tokens_per_day", 12e6, 86_400.0, level=0.899 * 12e6))
        return SimTenant(
            name=name,
            weight=(4.0, 2.0, 1.0, 1.0, 0.5)[index % 5],
            highest_class=(0, 1, 1, 2, 3)[index % 5],
            limits=limits,
            concurrent=None if index % 3 == 0 else 40,
        )

    def _replicas(self, gpus: int, blocks: int) -> list[SimReplica]:
        large = list(range(max(1, gpus // 2)))
        replicas = [
            SimReplica(
                name="llama-3.3-70b-1",
                model="llama-3.3-70b",
                gpus=large,
                blocks=blocks,
                max_num_seqs=512,
                budget=8192,
                weight_bytes=71 << 30,
                decode_ms=13.0,
            )
        ]
        for number, gpu in enumerate(range(len(large), gpus)):
            model, index = ("qwen3-8b", number + 1) if number < 2 else ("qwen3-coder-30b", number - 1)
            replicas.append(
                SimReplica(
                    name=f"{model}-{index}",
                    model=model,
                    gpus=[gpu],
                    blocks=max(256, blocks // 4),
                    max_num_seqs=128,
                    budget=8192,
                    weight_bytes=(16 << 30) if number < 2 else (57 << 30),
                    decode_ms=5.6 if number < 2 else 7.9,
                )
            )
        return replicas

    def _arrivals(self, seconds: float) -> None:
        unfinished = sum(len(one.running) for one in self.replicas) + len(self.queue)
        wave = 1.0 + 0.12 * math.sin((self.now - self.started) / 23.0)
        wanted = self.target * wave - unfinished
        expected = max(0.0, self.target / 22.0 * seconds * wave + wanted * 0.15)
        for _ in range(self._poisson(expected)):
            self._arrive(self.now - self.random.uniform(0.0, seconds))

    def _poisson(self, expected: float) -> int:
        whole = int(expected)
        return whole + (self.random.random() < expected - whole)

    def _arrive(self, at: float) -> None:
        names = list(self.tenants)
        tenant = self.tenants[
            self.random.choices(names, [3.0 / (1 + 0.35 * i) for i in range(len(names))])[0]
        ]
        prompt = int(min(24_000, 40 + self.random.lognormvariate(6.3, 1.0)))
        output = int(min(4000, 16 + self.random.lognormvariate(5.6, 0.7)))
        over = any(limit.level + prompt + output > limit.capacity for limit in tenant.limits)
        models = sorted({one.model for one in self.replicas})
        model = self.random.choices(models, [5 if "70b" in one else 2 for one in models])[0]
        drains = self.drains_of(model)
        if over or tenant.suspended_at is not None or any(not one.hold for one in drains):
            tenant.refused += 1
            self.counts["refused"] += 1
            self._refuse(tenant.name, model, at, prompt)
            return
        self._number += 1
        for limit in tenant.limits:
            limit.level += prompt + output
        tenant.waiting += 1
        self.counts["admitted"] += 1
        wanted = self.random.choices((0, 1, 2, 3), (1, 8, 3, 1))[0]
        self.queue.append(
            SimRequest(
                id=f"req-{self.random.getrandbits(48):012x}",
                tenant=tenant.name,
                key=self.random.randrange(3),
                number=max(tenant.highest_class, wanted),
                model=model,
                arrived=at,
                prompt=prompt,
                cached=int(prompt * self.random.choice((0.0, 0.0, 0.4, 0.8))) // BLOCK_TOKENS * BLOCK_TOKENS,
                output=output,
                max_tokens=1 << max(6, output.bit_length()),
                held=bool(drains),
            )
        )

    def _refuse(self, tenant: str, model: str, at: float, prompt: int) -> None:
        """Record a refused request. Its id is not drawn at random, so that refusals do not change later
        random numbers."""
        number = zlib.crc32(f"{tenant}{at}".encode())
        refused = SimRequest(
            id=f"req-{number:012x}",
            tenant=tenant,
            key=number % len(KEY_NAMES),
            number=1,
            model=model,
            arrived=at,
            prompt=prompt,
            cached=0,
            output=0,
            max_tokens=0,
        )
        self._finish(refused, "error")

    def _dispatch(self) -> None:
        waiting = []
        for request in sorted(self.queue, key=lambda one: (one.number, one.arrived)):
            request.held = request.held and bool(self.drains_of(request.model))
            if request.held:
                request.waited = True
                waiting.append(request)
                continue
            replica = min(
                (one for one in self.replicas if one.model == request.model), key=lambda one: len(one.running)
            )
            blocks = -(-request.prompt // BLOCK_TOKENS) + 1
            space = len(replica.free) + len(replica.cached) - blocks
            if len(replica.running) >= replica.max_num_seqs or space < replica.blocks // 50:
                request.waited = True
                waiting.append(request)
                continue
            replica.take(request, blocks)
            # The delay is derived from the id. Drawing it at random would change all later random numbers.
            delay = int(request.id[-2:], 16) / 0xFF * _MAX_DISPATCH_S
            request.replica = replica.name
            request.started = self.now if request.waited else min(self.now, request.arrived + delay)
            request.computed = request.cached
            replica.running.append(request)
            replica.prompt_tokens += request.prompt
            replica.cached_tokens += request.cached
            tenant = self.tenants[request.tenant]
            tenant.waiting -= 1
            tenant.running += 1
        self.queue = waiting

    def _start_decoding(self, replica: SimReplica, request: SimRequest, done: float) -> None:
        request.started = request.arrived + 0.05
        replica.computed_tokens += request.prompt - request.computed
        request.computed, request.first_token = (
            request.prompt,
            request.arrived + self.random.uniform(0.1, 0.4),
        )
        request.generated = request.output * done
        replica.generated_tokens += int(request.generated)
        needed = -(-int(request.prompt + request.generated) // BLOCK_TOKENS) - len(request.blocks)
        if needed > 0:
            replica.take(request, needed)

    def _run(self, replica: SimReplica, seconds: float) -> None:
        decoding = [one for one in replica.running if one.first_token is not None]
        prefilling = [one for one in replica.running if one.first_token is None]
        step_ms = replica.decode_ms * (1 + len(decoding) / 160) * self.random.uniform(0.97, 1.05)
        mixed_ms = step_ms * 2.6
        pending = sum(one.prompt - one.computed for one in prefilling)
        mixed = min(-(-pending // replica.budget) + (1 if pending else 0), int(seconds * 1000 / mixed_ms))
        left_ms = max(0.0, seconds * 1000 - mixed * mixed_ms)
        decodes = int(left_ms / step_ms) if decoding else 0
        budget, computed, generated, longest = mixed * replica.budget, 0, 0, (0, "", "")
        for request in prefilling:
            chunk = min(budget, request.prompt - request.computed)
            request.computed += chunk
            computed += chunk
            budget -= chunk
            if chunk:
                longest = max(longest, (chunk, request.id, request.tenant))
            # Most prefills are shorter than a simulation step, so the first token's time is computed
            # separately.
            prefill_s = mixed_ms / 1000 + (request.prompt - request.cached) / _PREFILL_TOKENS_PER_S
            first_token = (request.started or self.now) + prefill_s
            if request.computed >= request.prompt and first_token <= self.now:
                request.first_token = first_token
                request.generated = min(request.output, 1 + int((self.now - first_token) * 1000 / step_ms))
                generated += int(request.generated)
        steps = decodes + mixed
        for request in decoding:
            before = int(request.generated)
            request.generated = min(request.output, request.generated + steps)
            generated += int(request.generated) - before
            needed = -(-(request.prompt + int(request.generated)) // BLOCK_TOKENS) - len(request.blocks)
            if needed > 0 and not replica.take(request, needed):
                request.preemptions += 1
                replica.preemptions += 1
        for request in decoding:
            if request.generated >= request.output:
                self._end(replica, request)
        replica.step += steps
        replica.computed_tokens += computed
        replica.generated_tokens += generated
        # A cached prefix's blocks count as shared only while more than one request uses them.
        for request in replica.running[::9]:
            for block in request.blocks[: request.cached // BLOCK_TOKENS]:
                replica.states[block] = SHARED
        longest_tokens = min(longest[0], replica.budget) if mixed else 0
        replica.slice = {
            "decode_steps": decodes,
            "mixed_steps": mixed,
            "step_ms": step_ms,
            "mixed_step_ms": mixed_ms,
            "idle_us": self.random.uniform(4.0, 9.0),
            "mixed_idle_us": self.random.uniform(30.0, 70.0),
            "computed": computed,
            "generated": generated,
            "busy": min(1.0, (mixed * mixed_ms + decodes * step_ms) / (seconds * 1000)),
            "longest_ms": mixed_ms * self.random.choice(_MAX_STEP_FACTORS) if mixed else step_ms * 1.1,
            "longest_decodes": len(decoding),
            "longest_prompt_tokens": longest_tokens,
        }
        if decodes and (longest_ms := replica.slice["longest_ms"]) > STALL_FACTOR * step_ms:
            stall = Stall(
                replica=replica.name,
                at=self.now,
                ms=longest_ms,
                mean_ms=step_ms,
                decodes=len(decoding),
                prompt_tokens=longest_tokens,
                request=longest[1],
                tenant=longest[2],
            )
            replica.stalls = [*replica.stalls, stall][-_MAX_STALLS:]

    def _finish(self, request: SimRequest, reason: str) -> None:
        request.ended_at, request.finish_reason = self.now, reason
        self.finished.append(request)

    def _end(self, replica: SimReplica, request: SimRequest, *, cancelled: bool = False) -> None:
        replica.running.remove(request)
        replica.give_back(request, self.now, keep=request.prompt // BLOCK_TOKENS)
        tenant = self.tenants[request.tenant]
        generated, first = int(request.generated), request.first_token
        tenant.running -= 1
        tenant.requests += 1
        tenant.prompt += request.prompt
        tenant.cached += request.cached
        tenant.billed += generated
        cost = request.prompt - request.cached + 2.0 * generated
        tenant.service += cost
        tenant.recent.append((self.now, cost))
        # Every eighth request ends because it reaches its maximum length.
        self._finish(request, "cancelled" if cancelled else "stop" if request.output % 8 else "length")
        self.counts["ended"] += 1
        self.counts["billed"] += generated
        if cancelled:
            self.counts["cancelled"] += 1
        elif first is not None and request.started is not None:
            self.ended.append(
                Ended(
                    at=self.now,
                    ttft_ms=(first - request.arrived) * 1000,
                    itl_ms=(self.now - first) * 1000 / max(1, generated),
                    queue_ms=max(1.0, (request.started - request.arrived) * 1000),
                    e2e_ms=(self.now - request.arrived) * 1000,
                )
            )
