"""Samples the service's counters once a second. Snapshots use the samples to compute rates over a short
window, and totals that include replicas that have exited."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from appliance.models.replica import Replica
from appliance.monitoring.ended import EndedRequests
from appliance.snapshot import Rates, ServiceTotals
from appliance.traffic.state import TrafficState
from engine.rank_messages import ReplicaStats

RATE_WINDOW_S = 10.0
HIT_WINDOW_S = 60.0
_EVERY_S = 1.0
_ENGINE_COUNTERS = ("prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens")


class CounterSample(NamedTuple):
    """Counter values at one point in time."""

    at: float
    """Time of the sample, on the monotonic clock."""
    totals: ServiceTotals
    service: Mapping[str, float]
    """Weighted tokens computed for each tenant's finished requests."""
    tokens: Mapping[str, int]
    """Prompt and output tokens of each tenant's finished requests."""
    prefix: Mapping[str, tuple[int, int]]
    """Each replica's prompt tokens and cached prompt tokens."""


class CounterSampler:
    """Keeps the samples of the last minute. Must be used on the event loop thread."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[Replica]],
        traffic: TrafficState,
        ended: EndedRequests,
    ) -> None:
        self._replicas = replicas
        self._traffic = traffic
        self._ended = ended
        self._counted = dict.fromkeys(_ENGINE_COUNTERS, 0)
        self._last: dict[str, tuple[int, ReplicaStats]] = {}
        """Each replica's latest incarnation number and statistics."""
        self._samples: deque[CounterSample] = deque(maxlen=int(HIT_WINDOW_S / _EVERY_S) + 2)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Take a sample every second."""
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self.start)
        self._samples.append(self.sample())

    def stop(self) -> None:
        """Stop taking samples."""
        if self._timer is not None:
            self._timer.cancel()

    def sample(self) -> CounterSample:
        """Return the current counter values."""
        self._count_engines()
        traffic, ended = self._traffic, self._ended
        ended.forget_deleted()
        totals = ServiceTotals(
            **self._counted,
            admitted=traffic.admitted,
            refused=traffic.refused,
            ended=traffic.ended,
            failed=ended.failed,
            cancelled=ended.cancelled,
            preemptions=traffic.preemptions,
            billed_tokens=ended.billed_tokens,
        )
        return CounterSample(
            time.monotonic(),
            totals,
            {name: traffic.tenants.of(name).service for name in ended.tenants},
            {name: one.prompt_tokens + one.billed_tokens for name, one in ended.tenants.items()},
            {name: (report.prompt_tokens, report.cached_tokens) for name, (_, report) in self._last.items()},
        )

    def before(self, now: CounterSample, window_s: float) -> CounterSample | None:
        """Return the oldest sample in the window that ends at `now`."""
        return next((one for one in self._samples if now.at - one.at <= window_s + _EVERY_S / 2), None)

    def rates(self, now: CounterSample) -> Rates:
        """Return the counters' increase per second over the rate window that ends at `now`."""
        then = self.before(now, RATE_WINDOW_S)
        if then is None or now.at - then.at < _EVERY_S / 2:
            return Rates()
        span_s = now.at - then.at

        def rate(name: str) -> float:
            return float(getattr(now.totals, name) - getattr(then.totals, name)) / span_s

        return Rates(
            window_s=span_s,
            prompt_tokens_per_s=rate("prompt_tokens"),
            cached_tokens_per_s=rate("cached_tokens"),
            generated_tokens_per_s=rate("generated_tokens"),
            requests_per_s=rate("ended"),
            refused_per_s=rate("refused"),
            failed_per_s=rate("failed"),
        )

    def hit_rate(self, now: CounterSample, replica: str) -> tuple[float | None, float | None]:
        """Return the fraction of a replica's prompt tokens that were found in the prefix cache during a
        window, and the window's length in seconds."""
        then = self.before(now, HIT_WINDOW_S)
        if then is None or replica not in now.prefix or replica not in then.prefix:
            return None, None
        prompt_tokens, cached_tokens = (
            new - old for new, old in zip(now.prefix[replica], then.prefix[replica], strict=True)
        )
        if prompt_tokens <= 0 or cached_tokens < 0:  # no prompts, or the replica restarted
            return None, now.at - then.at
        return cached_tokens / prompt_tokens, now.at - then.at

    def _count_engines(self) -> None:
        """Add the replicas' counts since the previous sample to the totals. A restarted replica counts from
        0 again."""
        latest: dict[str, tuple[int, ReplicaStats]] = {}
        for replica in self._replicas():
            report = replica.latest_report
            if report is None:
                continue
            incarnation, former = self._last.get(replica.name, (0, None))
            same = former is not None and incarnation == replica.incarnation
            for name in _ENGINE_COUNTERS:
                base = getattr(former, name) if same else 0
                self._counted[name] += max(0, getattr(report, name) - base)
            latest[replica.name] = replica.incarnation, report
        kept = {name: known for name, known in self._last.items() if name not in latest}
        # Remove entries of replicas that no longer exist; otherwise, the table would grow without bound.
        # Replica names are not reused within a minute.
        self._last = latest if len(kept) > len(latest) + 64 else kept | latest
