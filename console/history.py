"""The recent past of a few figures, for charts. The history has one point per snapshot and a bounded
length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from appliance.snapshot import Batch, Snapshot

MAX_POINTS = 1200


class Point(NamedTuple):
    """The charted figures of one snapshot. None is an unknown figure."""

    at: float
    prompt_tokens_per_s: float | None
    cached_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    requests_per_s: float | None
    failed_per_s: float | None
    running: int
    waiting: int
    kv: float | None
    """Share of the KV blocks in use, over all replicas."""
    ttft_p50_ms: float | None
    itl_p50_ms: float | None
    gpus: tuple[float | None, ...]
    """Utilisation of each GPU, in percent."""


class History:
    """The points of the last minutes."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        self.batches: dict[str, deque[Batch]] = {}
        """The newest slices of each replica, oldest first."""

    def add(self, snapshot: Snapshot) -> None:
        """Add the figures of a snapshot. A snapshot with a known time is ignored."""
        if self.points and snapshot.at <= self.points[-1].at:
            return
        rates, latency = snapshot.rates, snapshot.latency
        total = sum(one.blocks_total for one in snapshot.kv)
        self.points.append(
            Point(
                at=snapshot.at,
                prompt_tokens_per_s=rates.prompt_tokens_per_s,
                cached_tokens_per_s=rates.cached_tokens_per_s,
                generated_tokens_per_s=rates.generated_tokens_per_s,
                requests_per_s=rates.requests_per_s,
                failed_per_s=rates.failed_per_s,
                running=snapshot.queue.running,
                waiting=snapshot.queue.waiting,
                kv=sum(one.blocks_used for one in snapshot.kv) / total if total else None,
                ttft_p50_ms=latency.ttft.p50_ms if latency.ttft else None,
                itl_p50_ms=latency.itl.p50_ms if latency.itl else None,
                gpus=tuple(gpu.utilization_percent for gpu in snapshot.gpus),
            )
        )
        for batch in snapshot.batches:
            slices = self.batches.setdefault(batch.replica, deque(maxlen=MAX_POINTS))
            if not slices or batch.at > slices[-1].at:
                slices.append(batch)
        present = {batch.replica for batch in snapshot.batches}
        for gone in set(self.batches) - present:
            del self.batches[gone]

    def last(self, figure: Callable[[Point], float | None], points: int) -> list[float | None]:
        """Return one figure of the newest points, oldest first."""
        skipped = max(0, len(self.points) - points)
        return [figure(self.points[index]) for index in range(skipped, len(self.points))]

    @property
    def span_s(self) -> float:
        """Time between the oldest and the newest point."""
        return self.points[-1].at - self.points[0].at if len(self.points) > 1 else 0.0
