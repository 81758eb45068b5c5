"""Recent values of a few metrics, for charts: one point per snapshot, up to a maximum length."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import msgspec

from appliance.history.pages import TelemetryColumns
from appliance.snapshot import Batch, Snapshot

MAX_POINTS = 1200
_MAX_STEPS = 3
"""Two chart points that are at least this many intervals apart have a gap between them."""
HISTORY_METRICS = (
    "at,rates.*,queue.running,queue.waiting,latency.*.p99_ms,kv[*].blocks_total,kv[*].blocks_used,"
    "gpus[*].utilization_percent,host.cpu_percent,batches[*].*"
)
"""The recorded metrics that `add_columns` needs."""
LATENCIES = ("ttft", "itl", "queue", "e2e")
_NAME = re.compile(r"(kv|gpus|batches)\[(.*)\]\.(\w+)")
_SUMS = ("steps", "decode_steps", "mixed_steps", "computed_tokens", "generated_tokens", "preemptions")
_BATCH_TYPES = get_type_hints(Batch)


class Point(NamedTuple):
    """One snapshot's charted values. None means unknown."""

    at: float
    prompt_tokens_per_s: float | None
    cached_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    running: int | None
    waiting: int | None
    kv: float | None
    """Share of KV blocks in use, across all replicas."""
    cpu_percent: float | None
    latencies: tuple[float | None, ...]
    """99th percentiles of `LATENCIES`, in milliseconds."""
    gpus: dict[int, float | None]
    """Utilisation in percent, keyed by GPU number. GPUs without a recorded utilisation are missing."""


def _unknown_point(at: float) -> Point:
    return Point(at, None, None, None, None, None, None, None, (None,) * len(LATENCIES), {})


def _unknown_slice(before: Batch, at: float) -> Batch:
    """Return an empty time slice for a replica that has reported no steps since the slice `before`."""
    return Batch(
        model=before.model,
        replica=before.replica,
        at=at,
        span_s=0.0,
        step=before.step,
        max_num_seqs=before.max_num_seqs,
        max_num_batched_tokens=before.max_num_batched_tokens,
    )


class History:
    """Points for the last few minutes. If the service delivers no snapshots, or a replica reports no steps,
    the gap is filled with unknown values, so that all points represent the same amount of time."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=MAX_POINTS)
        self.batches: dict[str, deque[Batch]] = {}
        """Each replica's newest time slices of step statistics, oldest first. A slice covers at least a
        second."""
        self.resolution_s = 0
        """Resolution of recorded history, in seconds; 0 for live snapshots."""
        self.interval_s = 1.0
        """Interval between live snapshots, in seconds."""

    @property
    def step_s(self) -> float:
        """The time that one point represents, in seconds."""
        return self.resolution_s or max(1.0, self.interval_s)

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot's values. If several snapshots fall within a second, only the newest is kept. A
        snapshot whose time has already been added is ignored. If the service's clock was set back, the
        history begins again."""
        if self.points and snapshot.at <= self.points[-1].at - _MAX_STEPS * self.step_s:
            self.points.clear()
            self.batches.clear()
        if self.points and snapshot.at <= self.points[-1].at:
            return
        if self.points and int(self.points[-1].at) == int(snapshot.at):
            self.points.pop()
        self._fill_gap(snapshot.at)
        rates, latency = snapshot.rates, snapshot.latency
        total = sum(one.blocks_total for one in snapshot.kv)
        self.points.append(
            Point(
                at=snapshot.at,
                prompt_tokens_per_s=rates.prompt_tokens_per_s,
                cached_tokens_per_s=rates.cached_tokens_per_s,
                generated_tokens_per_s=rates.generated_tokens_per_s,
                running=snapshot.queue.running,
                waiting=snapshot.queue.waiting,
                kv=sum(one.blocks_used for one in snapshot.kv) / total if total else None,
                cpu_percent=snapshot.host.cpu_percent,
                latencies=tuple(
                    one.p99_ms if (one := getattr(latency, name)) is not None else None for name in LATENCIES
                ),
                gpus={gpu.number: gpu.utilization_percent for gpu in snapshot.gpus},
            )
        )
        self._add_batches(snapshot.batches, snapshot.at)

    def _fill_gap(self, until: float) -> None:
        """If the newest point is too old, add points with unknown values for the time since then."""
        if not self.points or until - self.points[-1].at < _MAX_STEPS * self.step_s:
            return
        last, step_s = self.points[-1].at, self.step_s
        missing = math.ceil((until - last) / step_s) - 1
        for number in range(max(1, missing - MAX_POINTS), missing + 1):
            at = last + number * step_s
            self.points.append(_unknown_point(at))
            self._add_batches([], at)

    def prepend(self, earlier: History) -> None:
        """Add the points of another history that are older than all points in this one."""
        first = self.points[0].at if self.points else math.inf
        older = [point for point in earlier.points if int(point.at) < int(first)] if self.points else []
        self.points.extendleft(reversed(older[-(MAX_POINTS - len(self.points)) :]))
        for replica in earlier.batches.keys() - self.batches.keys():
            # The replica had already stopped reporting when this history began.
            self.batches[replica] = deque(earlier.batches[replica], maxlen=MAX_POINTS)
            for point in self.points:
                self._add_unknown(replica, point.at)
        for replica, slices in self.batches.items():
            found = [one for one in earlier.batches.get(replica, ()) if int(one.at) < int(slices[0].at)]
            slices.extendleft(reversed(found[-(MAX_POINTS - len(slices)) :]))

    def continued_from(self, until: float, resolution_s: int, points: int) -> float:
        """Prepare to update this history so that it consists of `points` points up to the time `until`, at
        this resolution. Drop the points that do not fit, and return the time from which points must be
        added."""
        begin = until - points * resolution_s
        last = self.points[-1].at if self.points else float("-inf")
        short = len(self.points) and self.points[0].at > begin + resolution_s
        if self.resolution_s != resolution_s or last < begin or (short and until < last):
            self.points.clear()
            self.batches.clear()
            self.resolution_s = resolution_s
            return begin
        while self.points and self.points[-1].at > until:
            self.points.pop()
        for slices in self.batches.values():
            while slices and slices[-1].at > until:
                slices.pop()
        self.batches = {name: slices for name, slices in self.batches.items() if slices}
        return self.points[-1].at + 0.01 if self.points else begin

    def add_columns(self, columns: TelemetryColumns) -> None:
        """Add recorded values (`HISTORY_METRICS`), with the same result as calling `add` for each
        snapshot."""
        plain, lists = _grouped(columns)
        totals = [metrics["blocks_total"] for metrics in lists["kv"].values() if "blocks_total" in metrics]
        used = [metrics["blocks_used"] for metrics in lists["kv"].values() if "blocks_used" in metrics]
        gpus = {int(number): one["utilization_percent"] for number, one in lists["gpus"].items()}
        unknown = [None] * len(columns.at)

        for row, at in enumerate(columns.at):

            def value(name: str, row: int = row) -> float | None:
                return plain.get(name, unknown)[row]

            self._fill_gap(value("at") or at)
            total = sum(column[row] or 0.0 for column in totals)
            self.points.append(
                Point(
                    at=value("at") or at,
                    prompt_tokens_per_s=value("rates.prompt_tokens_per_s"),
                    cached_tokens_per_s=value("rates.cached_tokens_per_s"),
                    generated_tokens_per_s=value("rates.generated_tokens_per_s"),
                    running=round(value("queue.running") or 0),
                    waiting=round(value("queue.waiting") or 0),
                    kv=sum(column[row] or 0.0 for column in used) / total if total else None,
                    cpu_percent=value("host.cpu_percent"),
                    latencies=tuple(value(f"latency.{name}.p99_ms") for name in LATENCIES),
                    gpus={number: column[row] for number, column in gpus.items()},
                )
            )
            self._add_batches(
                [
                    _batch(replica, {name: column[row] for name, column in metrics.items()})
                    for replica, metrics in lists["batches"].items()
                    if metrics.get("at", unknown)[row] is not None
                ],
                value("at") or at,
            )

    def complete(self, batches: list[Batch]) -> None:
        """Add text fields, which recorded values lack, to the newest slices. The slices keep their numeric
        values, because a slice may cover more time than its entry in `batches` (see `joined`)."""
        for batch in batches:
            slices = self.batches.get(batch.replica)
            if slices and abs(slices[-1].at - batch.at) < 0.001:
                slices[-1] = msgspec.structs.replace(slices[-1], model=batch.model)

    def _add_batches(self, batches: list[Batch], at: float) -> None:
        for batch in batches:
            slices = self.batches.setdefault(batch.replica, deque(maxlen=MAX_POINTS))
            if not slices or int(batch.at) > int(slices[-1].at):
                slices.append(batch)
            elif batch.at > slices[-1].at:
                slices[-1] = joined(slices[-1], batch)
        for absent in self.batches.keys() - {batch.replica for batch in batches}:
            self._add_unknown(absent, at)
            if all(one.steps is None for one in self.batches[absent]):
                del self.batches[absent]

    def _add_unknown(self, replica: str, at: float) -> None:
        """Add an empty slice for a replica that reports no steps, unless there is already a slice for this
        second."""
        slices = self.batches[replica]
        if int(at) > int(slices[-1].at):
            slices.append(_unknown_slice(slices[-1], at))

    def last(self, value: Callable[[Point], float | None], points: int) -> list[float | None]:
        """Return `value(point)` for each of the newest `points` points, oldest first."""
        skipped = max(0, len(self.points) - points)
        return [value(self.points[index]) for index in range(skipped, len(self.points))]

    @property
    def phase(self) -> int:
        """The index of the newest point on the time axis (see `console.glyphs.chart`)."""
        return int(self.points[-1].at // max(1, self.resolution_s)) if self.points else 0

    def span_of(self, points: int = MAX_POINTS) -> float:
        """Return the length, in seconds, of the period that the newest `points` points cover."""
        first = max(0, len(self.points) - points)
        return self.points[-1].at - self.points[first].at if len(self.points) > 1 else 0.0


def joined(first: Batch, second: Batch) -> Batch:
    """Combine two consecutive time slices of a replica's steps into one."""

    def total(name: str) -> int | None:
        values = [getattr(one, name) for one in (first, second)]
        return None if None in values else sum(values)

    def mean(name: str, weight: str) -> float | None:
        weighted = [
            (getattr(one, name), getattr(one, weight) or 1)
            for one in (first, second)
            if getattr(one, name) is not None
        ]
        whole = sum(count for _, count in weighted)
        return sum(value * count for value, count in weighted) / whole if weighted else None

    span_s = first.span_s + second.span_s
    longest = max((first, second), key=lambda one: one.longest_ms or 0.0)
    busy = [(one.busy, one.span_s) for one in (first, second) if one.busy is not None]
    return msgspec.structs.replace(
        second,
        span_s=span_s,
        **{name: total(name) for name in _SUMS},
        step_ms=mean("step_ms", "decode_steps"),
        idle_us=mean("idle_us", "decode_steps"),
        mixed_step_ms=mean("mixed_step_ms", "mixed_steps"),
        mixed_idle_us=mean("mixed_idle_us", "mixed_steps"),
        busy=sum(value * size for value, size in busy) / (sum(size for _, size in busy) or 1.0)
        if busy
        else None,
        longest_ms=longest.longest_ms,
        longest_decodes=longest.longest_decodes,
        longest_prompt_tokens=longest.longest_prompt_tokens,
    )


Column = list[float | None]


def _grouped(columns: TelemetryColumns) -> tuple[dict[str, Column], dict[str, dict[str, dict[str, Column]]]]:
    """Divide recorded metrics into two dicts: single values, keyed by name, and the values of list entries,
    keyed by list, entry and value name."""
    plain: dict[str, Column] = {}
    lists: dict[str, dict[str, dict[str, Column]]] = {"kv": {}, "gpus": {}, "batches": {}}
    for name, column in columns.metrics.items():
        if found := _NAME.fullmatch(name):
            lists[found[1]].setdefault(found[2], {})[found[3]] = column
        else:
            plain[name] = column
    return plain, lists


def _batch(replica: str, metrics: dict[str, float | None]) -> Batch:
    fields: dict[str, Any] = {"model": "", "replica": replica, "at": 0.0, "span_s": 0.0, "step": 0}
    for name, value in metrics.items():
        kind = _BATCH_TYPES.get(name)
        if value is not None and kind is not None:
            fields[name] = round(value) if kind in (int, int | None) else value
    return Batch(**fields)
