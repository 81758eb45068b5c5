"""A simulated model under a recorded load. The autoscaler adds and removes its replicas in simulated time."""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from pathlib import Path

from appliance.models.autoscaler import Autoscaler, ModelLoad, ScalingRules

RECORDED = Path(__file__).with_name("recorded_load.json")
SLOTS = 16
MEAN_RUN_S = 8.0
"""Mean run time of a request in seconds. With it, one replica serves two requests per second."""


def recorded_shares(points: int) -> list[float]:
    """Return the recorded load at `points` points, as fractions of its peak. Each point is the mean of
    equally many intervals of the recording. An incomplete last group of intervals is dropped."""
    requests = json.loads(RECORDED.read_text())["requests"]
    size = len(requests) // points
    sums = [sum(requests[size * number : size * (number + 1)]) for number in range(points)]
    return [one / max(sums) for one in sums]


def recorded_arrivals(seed: int) -> list[float]:
    """Return the times at which the recorded requests arrive, in seconds. Within each interval of the
    recording, the times are drawn at random with the given seed."""
    recorded = json.loads(RECORDED.read_text())
    draw, seconds = random.Random(seed), recorded["seconds"]
    return sorted(
        seconds * (number + draw.random())
        for number, count in enumerate(recorded["requests"])
        for _ in range(count)
    )


class SimulatedModel:
    """Replicas with `SLOTS` slots each, and a queue that is served in order of arrival."""

    def __init__(self, rules: ScalingRules, *, load_s: float, seed: int, scales: bool = True) -> None:
        """If `scales` is false, the number of replicas stays at `min_replicas`."""
        self.waits_s: list[float] = []
        self.changes: list[tuple[float, int, str]] = []
        """The changes to the number of replicas: time, new number, and reason."""
        self.replica_seconds = 0.0
        self.replicas = rules.min_replicas
        self._ready_at = [0.0] * self.replicas
        """Times at which the replicas are ready."""
        self._rules, self._load_s, self._scales = rules, load_s, scales
        self._draw = random.Random(seed)
        self._scaler = Autoscaler()
        self._queue: deque[float] = deque()
        self._end_times: list[float] = []
        """Times at which the running requests end, as a heap."""
        self._recent: deque[tuple[float, float]] = deque()

    def run(self, arrivals: list[float]) -> None:
        """Serve these requests, and then simulate an hour without requests."""
        position, end = 0, arrivals[-1] + 3600.0
        now = 0.0
        while now < end:
            while position < len(arrivals) and arrivals[position] <= now + 1.0:
                self._serve_until(arrivals[position])
                self._queue.append(arrivals[position])
                self._start(arrivals[position])
                position += 1
            now += 1.0
            self._serve_until(now)
            self._start(now)
            self._scale(now)
            self.replica_seconds += len(self._ready_at)

    def p99_s(self) -> float:
        """Return the 99th percentile of the time that requests waited in the queue."""
        return sorted(self.waits_s)[int(0.99 * len(self.waits_s))]

    def _serve_until(self, now: float) -> None:
        while self._end_times and self._end_times[0] <= now:
            self._start(heapq.heappop(self._end_times))

    def _start(self, now: float) -> None:
        slots = SLOTS * sum(ready_at <= now for ready_at in self._ready_at)
        while self._queue and len(self._end_times) < slots:
            wait_s = now - self._queue.popleft()
            self.waits_s.append(wait_s)
            self._recent.append((now, wait_s))
            heapq.heappush(self._end_times, now + self._draw.expovariate(1 / MEAN_RUN_S))

    def _scale(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - 60.0:
            self._recent.popleft()
        recent = sorted(wait_s for _, wait_s in self._recent)
        load = ModelLoad(
            replicas=self.replicas,
            ready=sum(ready_at <= now for ready_at in self._ready_at),
            demand=(len(self._queue) + len(self._end_times)) / SLOTS,
            wait_s=now - self._queue[0] if self._queue else 0.0,
            ttft_s=recent[int(0.99 * len(recent))] if recent else None,
            load_s=self._load_s,
        )
        decision = self._scaler.decide(now, self._rules, load)
        if decision is None or not self._scales:
            return
        self._scaler.changed(now)
        self.changes.append((now, decision.replicas, decision.reason))
        self.replicas = decision.replicas
        while len(self._ready_at) < decision.replicas:
            self._ready_at.append(now + self._load_s)
        # A removed replica finishes its requests, but its slots are not reused.
        del self._ready_at[decision.replicas :]
