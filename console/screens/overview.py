"""Overview: throughput, latency, queue, KV caches, GPUs, alerts and processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from appliance.snapshot import LatencyPercentiles, Snapshot
from console import units
from console.context import Context
from console.filters import Cell
from console.lines import BLANK, Line, Span, beside
from console.screens import panels
from console.screens.base import JUMP_LETTERS, Fact, Table, View, table

_GAP = 3
_LISTS: dict[str, tuple[Callable[[Snapshot], Sequence[object]], tuple[str, ...]]] = {
    "queue": (
        lambda snapshot: snapshot.queue.classes,
        ("name", "waiting", "oldest_wait_s", "expected_wait_s", "target_s"),
    ),
    "models": (lambda snapshot: snapshot.models, ("name", "state", "version", "queued")),
    "gpus": (
        lambda snapshot: snapshot.gpus,
        ("number", "utilization_percent", "used_bytes", "memory_bytes", "power_w", "temperature_c"),
    ),
    "kv": (
        lambda snapshot: snapshot.kv,
        ("replica", "blocks_total", "blocks_used", "blocks_cached", "hit_rate"),
    ),
    "alerts": (
        lambda snapshot: snapshot.alerts,
        ("id", "severity", "state", "where", "description", "since"),
    ),
    "tenants": (lambda snapshot: snapshot.tenants, ("name", "running", "tokens_per_s", "share")),
    "processes": (
        lambda snapshot: snapshot.host.processes,
        ("name", "role", "pid", "cpu_percent", "memory_bytes", "restarts"),
    ),
}
"""The entries and fields to export, for each panel that shows a list."""


class OverviewView(View):
    """The screen shown at startup."""

    name = "overview"
    key = "1"
    title = "Overview"
    can_jump = True
    short = "Overview"
    can_zoom = True
    help_text = (
        "The current state of the service: throughput, latency, queue, KV caches, GPUs, alerts and "
        "processes. The arrow keys select a panel; {zoom} maximizes it. :export exports the selected panel's "
        "table or, if it has none, the values not shown in any table."
    )
    explanations = (
        *("generated_tokens_per_s", "prompt_tokens_per_s", "cached", "peak", "ttft", "itl", "queue", "e2e"),
        *("percentiles", "class_name", "waiting", "oldest_wait_s", "expected_wait_s", "target_s"),
        *("failed_per_s", "refused_per_s"),
        *("name", "state", "steps_running", "queued", "generated_tokens"),
        *("utilization_percent", "used_bytes", "power_w", "temperature_c", "kv_used", "block_state"),
        *("hit_rate", "alerts", "running", "tokens_per_s", "share"),
        *("process_name", "cpu_percent", "load_1m", "host_memory", "disk_free"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.chosen = ""
        """Name of the selected panel."""
        self._columns: list[list[str]] = [[], []]
        """Names of the panels that each column showed in the last frame."""

    @property
    def hints(self) -> tuple[tuple[str, str], ...]:
        """Commands shown in the footer."""
        return (("move right", "panel"), ("zoom", "all panels" if self.zoomed else "zoom"))

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        snapshot = context.snapshot
        assert snapshot is not None
        left_width = (width - _GAP) // 2
        right_width = width - _GAP - left_width
        tall = height >= 30
        gap = 1 if tall else 0
        if self.zoomed:
            return _panel(self.chosen, context, snapshot, width, height)[:height]

        def panel(name: str, wide: int, high: int) -> list[Line]:
            return _panel(name, context, snapshot, wide, high)

        order = ("latency", "queue", "models") if tall else ("latency", "queue")
        left = {name: panel(name, left_width, min(6, len(snapshot.models)) + 2) for name in order}
        used = sum(len(one) + gap for one in left.values())
        left = {"throughput": panel("throughput", left_width, max(7, min(20, height - used))), **left}
        order = ("gpus", "kv", "alerts") if tall else ("alerts", "gpus", "kv")
        right = {name: panel(name, right_width, 8 if tall else 4) for name in order}
        space = height - sum(len(one) + gap for one in right.values())
        if tall and space >= 12:
            right["tenants"] = panel("tenants", right_width, min(space - 7, len(snapshot.tenants) + 2))
            space -= len(right["tenants"]) + gap
        if space >= 3:
            right["processes"] = panel("processes", right_width, space)
        self._columns = [list(left), list(right)]
        for column in (left, right):
            if self.chosen in column:
                column[self.chosen] = _marked(column[self.chosen], Span("▸ ", "accent"))
            if context.jumping:
                for name in column:
                    letter = JUMP_LETTERS[self._panels().index(name)]
                    column[name] = _marked(column[name], Span(f"{letter} ", "tab"))
        lines = beside(
            _stack(list(left.values()), tall),
            _stack(list(right.values()), tall),
            left_width,
            right_width,
            _GAP,
        )
        return lines[:height]

    def move(self, rows: int) -> None:
        super().move(rows)
        column, row = self._position()
        names = self._columns[column]
        self._choose(column, max(0, min(len(names) - 1, row + rows)) if self.chosen else 0)

    def sideways(self, columns: int) -> None:
        column, row = self._position()
        self._choose(max(0, min(1, column + columns)) if self.chosen else 0, row)

    def _panels(self) -> list[str]:
        return [name for column in self._columns for name in column]

    def jump(self, number: int) -> bool:
        names = self._panels()
        if number >= len(names):
            return False
        self.chosen = names[number]
        return True

    def zoom(self) -> bool:
        if not self.chosen:
            self._choose(0, 0)
        return bool(self.chosen) and super().zoom()

    def open(self) -> bool:
        if not self.zoomed:
            self.zoom()
        return True

    def back(self) -> bool:
        if super().back():
            return True
        was_chosen, self.chosen = bool(self.chosen), ""
        return was_chosen

    def _position(self) -> tuple[int, int]:
        """Return the selected panel's column and row."""
        for column, names in enumerate(self._columns):
            if self.chosen in names:
                return column, names.index(self.chosen)
        return 0, 0

    def _choose(self, column: int, row: int) -> None:
        names = self._columns[column]
        if names:
            self.chosen = names[min(row, len(names) - 1)]

    def export(self, context: Context) -> Table:
        snapshot = context.snapshot
        assert snapshot is not None
        if self.chosen in _LISTS:
            rows, columns = _LISTS[self.chosen]
            return table(rows(snapshot), *columns)
        return ["metric", "value"], [[name, value] for name, value in _values(snapshot).items()]

    def facts(self, context: Context) -> list[Fact]:
        snapshot = context.snapshot
        assert snapshot is not None
        rates, latency, queue = snapshot.rates, snapshot.latency, snapshot.queue
        firing = sum(one.state == "firing" for one in snapshot.alerts)
        total = sum(one.blocks_total for one in snapshot.kv)
        used = sum(one.blocks_used for one in snapshot.kv)

        def pair(one: LatencyPercentiles | None) -> str:
            if one is None:
                return f"p50 {units.UNKNOWN}  p99 {units.UNKNOWN}"
            return f"p50 {units.ms(one.p50_ms)}  p99 {units.ms(one.p99_ms)} ({units.seconds(one.window_s)})"

        facts: list[Fact] = [
            (
                "state",
                f"{snapshot.state} {snapshot.reason}".strip(),
                panels.STATE_ROLES.get(snapshot.state, "text"),
            ),
            ("alerts", f"{firing} firing" if firing else "none firing", "bad" if firing else "good"),
            ("output tokens/s", units.rate(rates.generated_tokens_per_s), "text"),
            ("prompt tokens/s", units.rate(rates.prompt_tokens_per_s), "text"),
            ("TTFT", pair(latency.ttft), "text"),
            ("ITL", pair(latency.itl), "text"),
            ("running", units.count(queue.running), "text"),
            ("waiting", f"{queue.waiting:,} of {queue.limit:,}", "text"),
            (
                "errors",
                f"failed {panels.failed(rates)}  refused {units.rate(rates.refused_per_s)}/s",
                "bad" if rates.failed_per_s else "text",
            ),
            ("KV used", units.percent(units.ratio(used, total)), "text"),
        ]
        for gpu in snapshot.gpus:
            memory = units.ratio(gpu.used_bytes, gpu.memory_bytes)
            values = (
                panels.kernel_time(gpu),
                f"memory {units.percent(memory)}",
                panels.celsius(gpu.temperature_c),
            )
            facts.append((f"GPU {gpu.number}", " ".join(values), "warn" if gpu.throttle_reasons else "text"))
        return facts


def _values(snapshot: Snapshot) -> dict[str, Cell]:
    """Return the overview's values that are not part of a list, keyed by admin API name."""
    parts = {name: getattr(snapshot, name) for name in ("rates", "latency", "queue", "host")}
    found: dict[str, Cell] = {"state": snapshot.state}

    def add(value: object, name: str) -> None:
        if isinstance(value, msgspec.Struct):
            for field in value.__struct_fields__:
                add(getattr(value, field), f"{name}.{field}")
        elif value is None or isinstance(value, str | int | float):
            found[name] = value

    for name, part in parts.items():
        add(part, name)
    return found


def _panel(name: str, context: Context, snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Return a panel of the overview. `height` is used only for panels with variable height."""
    match name:
        case "throughput":
            return panels.throughput(context, snapshot, width, height)
        case "latency":
            return panels.latency(context, snapshot, width)
        case "queue":
            return panels.queue(context, snapshot, width)
        case "models":
            return panels.models(snapshot, width, height)
        case "gpus":
            return panels.gpus(context, snapshot, width)
        case "kv":
            return panels.kv(context, snapshot, width)
        case "tenants":
            return panels.tenants(context, snapshot, width, height)
        case "alerts":
            return panels.alerts(snapshot, width, height)
    return panels.processes(context, snapshot, width, height)


def _marked(panel: list[Line], mark: Span) -> list[Line]:
    """Return a panel with a mark at the start of its heading."""
    return [[mark, *panel[0][1:]], *panel[1:]]


def _stack(blocks: list[list[Line]], spaced: bool) -> list[Line]:
    lines: list[Line] = []
    for block in blocks:
        lines += block
        if spaced:
            lines.append(BLANK)
    return lines
