"""The recent past of a few figures, for charts. The history has one point per snapshot and a bounded
length."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

from appliance.history.pages import TelemetryColumns
from appliance.snapshot import Batch, Snapshot

MAX_POINTS = 1200
HISTORY_FIGURES = (
    "at,rates.*,queue.running,queue.waiting,latency.ttft.p50_ms,latency.itl.p50_ms,kv[*].blocks_total,"
    "kv[*].blocks_used,gpus[*].utilization_percent,batches[*].*"
)
"""The recorded figures that `add_columns` needs."""
_NAME = re.compile(r"(kv|gpus|batches)\[(.*)\]\.(\w+)")
_BATCH_TYPES = get_type_hints(Batch)


class Point(NamedTuple):
    """The charted figures of one snapshot. None means unknown."""

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
        self.resolution_s = 0
        """Resolution of a recorded past; 0 for snapshots."""

    def add(self, snapshot: Snapshot) -> None:
        """Add the figures of a snapshot. A snapshot whose time has already been added is ignored."""
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
        self._add_batches(snapshot.batches)

    def continued_from(self, until: float, resolution_s: int, points: int) -> float:
        """Prepare the history to hold the last `points` points up to a time at this resolution. Removes
        points that do not belong to it, and returns the time from which points are missing."""
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
        """Add recorded figures (`HISTORY_FIGURES`) in the same way as `add` would have added their
        snapshots."""
        plain, lists = _grouped(columns)
        totals = [figures["blocks_total"] for figures in lists["kv"].values() if "blocks_total" in figures]
        used = [figures["blocks_used"] for figures in lists["kv"].values() if "blocks_used" in figures]
        gpus = [one["utilization_percent"] for one in lists["gpus"].values()]
        unknown = [None] * len(columns.at)

        for row, at in enumerate(columns.at):

            def figure(name: str, row: int = row) -> float | None:
                return plain.get(name, unknown)[row]

            total = sum(column[row] or 0.0 for column in totals)
            self.points.append(
                Point(
                    at=figure("at") or at,
                    prompt_tokens_per_s=figure("rates.prompt_tokens_per_s"),
                    cached_tokens_per_s=figure("rates.cached_tokens_per_s"),
                    generated_tokens_per_s=figure("rates.generated_tokens_per_s"),
                    requests_per_s=figure("rates.requests_per_s"),
                    failed_per_s=figure("rates.failed_per_s"),
                    running=round(figure("queue.running") or 0),
                    waiting=round(figure("queue.waiting") or 0),
                    kv=sum(column[row] or 0.0 for column in used) / total if total else None,
                    ttft_p50_ms=figure("latency.ttft.p50_ms"),
                    itl_p50_ms=figure("latency.itl.p50_ms"),
                    gpus=tuple(column[row] for column in gpus),
                )
            )
            self._add_batches(
                [
                    _batch(replica, {name: column[row] for name, column in figures.items()})
                    for replica, figures in lists["batches"].items()
                    if figures.get("at", unknown)[row] is not None
                ]
            )

    def complete(self, batches: list[Batch]) -> None:
        """Add the texts to the newest slices, because figures do not contain them."""
        for batch in batches:
            slices = self.batches.get(batch.replica)
            if slices and abs(slices[-1].at - batch.at) < 0.001:
                slices[-1] = batch

    def _add_batches(self, batches: list[Batch]) -> None:
        for batch in batches:
            slices = self.batches.setdefault(batch.replica, deque(maxlen=MAX_POINTS))
            if not slices or batch.at > slices[-1].at:
                slices.append(batch)
        for gone in set(self.batches) - {batch.replica for batch in batches}:
            del self.batches[gone]

    def last(self, figure: Callable[[Point], float | None], points: int) -> list[float | None]:
        """Return one figure of the newest points, oldest first."""
        skipped = max(0, len(self.points) - points)
        return [figure(self.points[index]) for index in range(skipped, len(self.points))]

    @property
    def span_s(self) -> float:
        """Time between the oldest and the newest point."""
        return self.points[-1].at - self.points[0].at if len(self.points) > 1 else 0.0


Column = list[float | None]


def _grouped(columns: TelemetryColumns) -> tuple[dict[str, Column], dict[str, dict[str, dict[str, Column]]]]:
    """Return the figures keyed by name, and those of lists keyed by the names of the list, the entry and the
    figure."""
    plain: dict[str, Column] = {}
    lists: dict[str, dict[str, dict[str, Column]]] = {"kv": {}, "gpus": {}, "batches": {}}
    for name, column in columns.figures.items():
        if found := _NAME.fullmatch(name):
            lists[found[1]].setdefault(found[2], {})[found[3]] = column
        else:
            plain[name] = column
    return plain, lists


def _batch(replica: str, figures: dict[str, float | None]) -> Batch:
    fields: dict[str, Any] = {"model": "", "replica": replica, "at": 0.0, "span_s": 0.0, "step": 0}
    for name, value in figures.items():
        kind = _BATCH_TYPES.get(name)
        if value is not None and kind is not None:
            fields[name] = round(value) if kind in (int, int | None) else value
    return Batch(**fields)
