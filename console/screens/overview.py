"""Overview: throughput, latency, queue, KV caches, GPUs, alerts and processes."""

from __future__ import annotations

from console import units
from console.context import Context
from console.lines import BLANK, Line, beside
from console.screens import panels
from console.screens.base import View

_GAP = 3


class OverviewView(View):
    """The first screen."""

    name = "overview"
    key = "1"
    title = "Overview"
    short = "Overview"
    help_text = (
        "What the service does at present: throughput, latency, queue, KV caches, GPUs, alerts and processes."
    )
    figures = (
        *("generated_tokens_per_s", "prompt_tokens_per_s", "cached", "ttft", "itl", "queue", "e2e"),
        *("waiting", "oldest_wait_s", "expected_wait_s", "target_s", "running", "kv_used", "hit_rate"),
        *(
            "utilization_percent",
            "used_bytes",
            "power_w",
            "temperature_c",
            "alerts",
            "cpu_percent",
            "load_1m",
        ),
    )

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        snapshot = context.snapshot
        assert snapshot is not None
        left_width = (width - _GAP) // 2
        right_width = width - _GAP - left_width
        tall = height >= 30
        models = min(6, len(snapshot.models)) + 1
        charts = max(6, min(16, height - 16 - models)) if tall else 7
        left = [
            panels.throughput(context, snapshot, left_width, charts),
            panels.latency(snapshot, left_width),
            panels.queue(context, snapshot, left_width),
        ]
        if tall:
            left.append(panels.models(snapshot, left_width, models))
        alerts = panels.alerts(snapshot, right_width, 8 if tall else 4)
        right = [
            panels.gpus(context, snapshot, right_width),
            panels.kv(context, snapshot, right_width),
            alerts,
        ]
        if not tall:
            right = [alerts, *right[:2]]
        used = sum(len(panel) for panel in right) + (len(right) if tall else 0)
        if height - used >= 3:
            right.append(panels.processes(context, snapshot, right_width, height - used))
        lines = beside(_stack(left, tall), _stack(right, tall), left_width, right_width, _GAP)
        return lines[:height]

    def facts(self, context: Context) -> list[tuple[str, str, str]]:
        snapshot = context.snapshot
        assert snapshot is not None
        rates, latency, queue = snapshot.rates, snapshot.latency, snapshot.queue
        firing = sum(one.state == "firing" for one in snapshot.alerts)
        total = sum(one.blocks_total for one in snapshot.kv)
        used = sum(one.blocks_used for one in snapshot.kv)

        def pair(one: object) -> str:
            values = (getattr(one, "p50_ms", None), getattr(one, "p99_ms", None))
            return f"p50 {units.ms(values[0])}  p99 {units.ms(values[1])}"

        facts = [
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
            ("KV used", units.percent(units.ratio(used, total)), "text"),
        ]
        for gpu in snapshot.gpus:
            use = None if gpu.utilization_percent is None else gpu.utilization_percent / 100
            memory = units.ratio(gpu.used_bytes, gpu.memory_bytes)
            text = f"{units.percent(use)} memory {units.percent(memory)} {panels.celsius(gpu.temperature_c)}"
            facts.append((f"GPU {gpu.number}", text, "warn" if gpu.throttle_reasons else "text"))
        return facts


def _stack(blocks: list[list[Line]], spaced: bool) -> list[Line]:
    lines: list[Line] = []
    for block in blocks:
        lines += block
        if spaced:
            lines.append(BLANK)
    return lines
