"""Panels that several screens show: throughput, latency, queue, KV caches, GPUs, alerts and processes."""

from __future__ import annotations

from collections.abc import Callable

from appliance.snapshot import Alert, Gpu, KvCache, LatencyPercentiles, Process, Rates, Severity, Snapshot
from console import units
from console.context import Context
from console.glyphs import bar as bar_of
from console.glyphs import bar_legend, chart, meter, per_cell, unknown_bar
from console.history import LATENCIES, Point
from console.lines import Line, Span, beside, clip, fit, heading, line, span, spread, titles, wrap
from console.roles import Role

STATE_ROLES: dict[str, Role] = {
    "ready": "good",
    "accepting": "good",
    "starting": "warn",
    "loading": "warn",
    "waiting": "warn",
    "draining": "warn",
    "sleeping": "info",
    "drained": "warn",
    "announced": "warn",
    "silent": "bad",
    "restarting": "bad",
    "degraded": "bad",
    "failed": "bad",
    "stopped": "bad",
    "closed": "bad",
    "firing": "bad",
    "acknowledged": "info",
    "silenced": "dim",
    "resolved": "good",
    "available": "dim",
}
SEVERITY_ROLES: dict[Severity, Role] = {"critical": "bad", "warning": "warn", "info": "info"}
CLASS_ROLES: dict[str, Role] = {"P0": "p0", "P1": "p1", "P2": "p2", "P3": "p3"}


def state_text(name: str) -> str:
    """Return the text for a model's state. "available" is shown as "on demand", because the next request
    loads the model."""
    return "on demand" if name == "available" else name


def history_chart(
    context: Context,
    value: Callable[[Point], float | None],
    width: int,
    height: int,
    role: Role,
    top: float | None = None,
) -> list[Line]:
    """Return a chart of the newest values. `value` returns the value to plot for a history point. `top` is
    the value at the chart's upper edge."""
    history = context.history
    values = history.last(value, width * per_cell(context.glyphs))
    return chart(values, width, height, context.glyphs, role, top, phase=history.phase)


def shown_span(context: Context, width: int) -> str:
    """Describe the period that a chart of this width covers."""
    return units.seconds(context.history.span_of(width * per_cell(context.glyphs)))


def throughput(context: Context, snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Return the charts of output and input tokens per second."""
    rates = snapshot.rates
    window = f"{units.seconds(rates.window_s)} mean" if rates.window_s else "waiting for the next sample"
    shown = f"last {shown_span(context, width)}"
    lines = [heading("Tokens per second", width, f"{window} · {shown}" if width >= 50 else shown)]
    rows = max(2, height - 3)
    upper = (rows + 1) // 2
    cached = units.percent(units.ratio(rates.cached_tokens_per_s, rates.prompt_tokens_per_s))

    def panel(
        name: str,
        role: Role,
        rate: float | None,
        value: Callable[[Point], float | None],
        size: int,
        note: str,
    ) -> list[Line]:
        points = context.history.last(value, width * per_cell(context.glyphs))
        peak = max((one for one in points if one is not None), default=None)
        left = line(span(f"{name} ", role), span(units.rate(rate), "bold"), span("/s", "dim"))
        if note and width >= 50:
            left.append(span(f"  {note}", "dim"))
        right = line(span("peak ", "label"), span(units.rate(peak), "dim"))
        return [spread(left, right, width), *history_chart(context, value, width, size, role)]

    out = rates.generated_tokens_per_s
    lines += panel("output", "output", out, lambda point: point.generated_tokens_per_s, upper, "")
    if height >= 5:
        into = rates.prompt_tokens_per_s
        note = f"{cached} cached"
        lines += panel("prompt", "input", into, lambda point: point.prompt_tokens_per_s, rows - upper, note)
    return lines[:height]


def latency(context: Context, snapshot: Snapshot, width: int) -> list[Line]:
    """Return the latency percentiles and, in wide panels, a chart of the 99th percentiles."""
    latency = snapshot.latency
    window = next((one.window_s for one in (latency.ttft, latency.itl) if one is not None), None)
    counted = latency.ttft.count if latency.ttft else None
    note = "not reported" if window is None else f"{units.count(counted)} finished in {units.seconds(window)}"
    lines = [heading("Latency", width, note)]
    size = 9 if width >= 44 else 8
    space = width - 7 - 3 * size - 1
    top = titles(("", 7), ("p50", size), ("p90", size), ("p99", size))
    wide = space >= 12
    if wide:
        top.append(span(f" {f'p99, last {shown_span(context, space)}':>{space}}", "dim"))
    lines.append(top)
    for index, (name, one) in enumerate(zip(LATENCIES, _each(snapshot), strict=True)):
        title = name.upper() if name != "queue" else name
        row = _percentiles(title, one, size)
        if wide:
            trend = history_chart(context, _latency_of(index), space, 1, "accent")[0]
            row += [Span(" "), *trend]
        lines.append(row)
    return [clip(row, width) for row in lines]


def _each(snapshot: Snapshot) -> list[LatencyPercentiles | None]:
    return [getattr(snapshot.latency, name) for name in LATENCIES]


def _latency_of(index: int) -> Callable[[Point], float | None]:
    return lambda point: point.latencies[index]


def _percentiles(name: str, one: LatencyPercentiles | None, size: int) -> Line:
    values = (None, None, None) if one is None else (one.p50_ms, one.p90_ms, one.p99_ms)
    return [
        span(f"{name:<7}"),
        *(span(f"{units.ms(value):>{size}}", "dim" if value is None else "bold") for value in values),
    ]


def queue(context: Context, snapshot: Snapshot, width: int) -> list[Line]:
    """Return a table of the queue, with one row per service class, and the error rates."""
    queue = snapshot.queue
    wide = width >= 50
    limit = f" of {queue.limit:,}" if wide else ""
    # Requests waiting for a drain to end are not in any class's queue.
    held = queue.waiting - sum(one.waiting for one in queue.classes)
    waiting = f"{queue.waiting:,}{limit} waiting" + (f", {held:,} held" if held > 0 and queue.classes else "")
    lines = [heading("Queue", width, f"{waiting} · {queue.running:,} running")]
    columns = (("class", -6), ("waiting", 8), ("oldest", 8), ("expect", 8), ("target", 8))
    lines.append(titles(*(columns if wide else columns[:-1])))
    for one in queue.classes:
        late = one.target_s is not None and one.oldest_wait_s > one.target_s
        row = line(
            span(f"{one.name:<6}", CLASS_ROLES.get(one.name, "text")),
            span(f"{one.waiting:>8,}", "bold" if one.waiting else "dim"),
            span(
                f"{units.seconds(one.oldest_wait_s) if one.waiting else '-':>8}", "warn" if late else "text"
            ),
            span(f"{units.seconds(one.expected_wait_s):>8}", "dim"),
        )
        if wide:
            target = "none" if one.target_s is None else units.seconds(one.target_s)
            row.append(span(f"{target:>8}", "dim"))
        if late:
            row.append(span(" late", "warn"))
        lines.append(row)
    # In wide panels, a chart of the waiting requests fills the space beside the classes.
    used = 39 + 5
    if (space := width - used) >= 10 and len(lines) > 2:
        trend = history_chart(context, lambda point: point.waiting, space, len(lines) - 2, "warn")
        lines[1] = spread(lines[1], [span(f"waiting, last {shown_span(context, space)}", "dim")], width)
        lines[2:] = beside(lines[2:], trend, used - 1, space, 1)
    lines.append(_errors(snapshot.rates, width))
    if queue.overload:
        lines += wrap(queue.overload, width, "bad")
    return [clip(row, width) for row in lines]


def failed(rates: Rates, *, share: bool = True) -> str:
    """Format the failed requests per second and, if `share` is true, their share of all finished requests."""
    text = f"{units.rate(rates.failed_per_s)}/s"
    if not share:
        return text
    return f"{text} ({units.percent(units.ratio(rates.failed_per_s, rates.requests_per_s), 1)})"


def _errors(rates: Rates, width: int) -> Line:
    """Return the rates of failed and refused requests."""
    return line(
        span("errors  " if width >= 36 else "", "label"),
        span("failed ", "label"),
        span(failed(rates, share=width >= 44), "bad" if rates.failed_per_s else "bold"),
        span("  refused ", "label"),
        span(f"{units.rate(rates.refused_per_s)}/s", "warn" if rates.refused_per_s else "bold"),
    )


def kv_bar(context: Context, one: KvCache, width: int) -> Line:
    """Return a bar that shows the shares of used and cached blocks."""
    if not one.blocks_total:
        return unknown_bar(width)
    used, cached = one.blocks_used / one.blocks_total, one.blocks_cached / one.blocks_total
    return bar_of([(used, "used"), (cached, "cached")], width, context.glyphs)


def kv(context: Context, snapshot: Snapshot, width: int) -> list[Line]:
    """Return a bar for each replica's KV cache."""
    parts = bar_legend(("used", "cached"), context.glyphs)
    lines = [heading("KV cache", width, f"{parts}, free")]
    name_width = min(max((len(one.replica) for one in snapshot.kv), default=4), max(10, width // 2))
    for one in snapshot.kv:
        used = one.blocks_used / one.blocks_total if one.blocks_total else None
        end = [
            span(f" {units.percent(used):>4}", "bold"),
            *(
                [span(" hit", "label"), span(f" {units.percent(one.hit_rate):>4}", "dim")]
                if width >= 44
                else []
            ),
        ]
        size = width - name_width - 1 - sum(len(part.text) for part in end)
        lines.append([span(f"{fit(one.replica, name_width)} "), *kv_bar(context, one, max(4, size)), *end])
    if not snapshot.kv:
        lines.append([span("no replica has reported", "dim")])
    return [clip(row, width) for row in lines]


def gpus(context: Context, snapshot: Snapshot, width: int) -> list[Line]:
    """Return one line per GPU."""
    lines = [heading("GPUs", width, "kernel time, memory, W, °C")]
    if not snapshot.gpus:
        reason = snapshot.gpu_error or "no NVIDIA GPUs found, or the service does not report GPUs"
        lines += wrap(reason, width, "dim")
    lines += [gpu_line(context, gpu, width) for gpu in snapshot.gpus]
    return lines


def gpu_line(context: Context, gpu: Gpu, width: int) -> Line:
    """Return one line with a GPU's utilisation, memory, power and temperature."""
    memory = units.ratio(gpu.used_bytes, gpu.memory_bytes)
    use = units.ratio(gpu.utilization_percent, 100)
    size = max(3, (width - 30) // 2)
    hot = bool(gpu.throttle_reasons)
    row = [
        span(f"{gpu.number:>2} ", "bold"),
        *meter(use, size, context.glyphs, "accent"),
        span(f" {kernel_time(gpu):>4} "),
        *meter(memory, size, context.glyphs, "used"),
        span(f" {gpu_text(gpu, units.percent(memory), 'used_bytes'):>4}"),
        span(f" {gpu_text(gpu, watts(gpu.power_w), 'power_w'):>5}", "dim"),
        span(f" {gpu_text(gpu, celsius(gpu.temperature_c), 'temperature_c'):>4}", "warn" if hot else "dim"),
        span("T" if hot else " ", "bad"),
    ]
    return clip(row, width)


def gpu_text(gpu: Gpu, text: str, *names: str) -> str:
    """Return a value's text, or "n/a" if the GPU supports none of the fields that the value is based on."""
    return units.NOT_SUPPORTED if set(names) <= set(gpu.unsupported) else text


def kernel_time(gpu: Gpu) -> str:
    """Format the share of time during which a kernel was running. NVML does not report it for GPUs in MIG
    mode."""
    if gpu.error:
        return "ERR"
    if gpu.utilization_percent is None and gpu.mig_instances is not None:
        return "MIG"
    use = units.ratio(gpu.utilization_percent, 100)
    return gpu_text(gpu, units.percent(use), "utilization_percent")


def watts(value: float | None) -> str:
    """Format a power in watts."""
    return units.UNKNOWN if value is None else f"{value:.0f}W"


def celsius(value: float | None) -> str:
    """Format a temperature in degrees Celsius."""
    return units.UNKNOWN if value is None else f"{value:.0f}°"


def alerts(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Return alerts that need attention, most severe first."""
    order = ("critical", "warning", "info")
    active = [one for one in snapshot.alerts if one.state in ("firing", "acknowledged")]
    active.sort(key=lambda one: (one.state == "acknowledged", order.index(one.severity)))
    lines = [heading("Alerts", width, f"{len(active)} active" if active else "")]
    if not active:
        lines.append([span("✓ ", "good"), span("no active alerts", "dim")])
    space = height - 1
    for number, one in enumerate(active):
        if len(lines) - 1 >= space - 1 and number < len(active) - 1:
            lines.append([span(f"… {len(active) - number} more on the Alerts screen", "dim")])
            break
        lines.append(alert_line(one, width))
    return lines[:height]


def alert_line(one: Alert, width: int) -> Line:
    """Describe an alert on one line. The first character shows its severity."""
    role = SEVERITY_ROLES[one.severity]
    sign = {"critical": "‼", "warning": "!", "info": "i"}[one.severity]
    text = units.about(one.where, one.description)
    before, where, after = text.partition(one.where) if one.where else ("", "", text)
    description = [span(before), span(where, "bold"), span(after)]
    return clip([span(f"{sign} ", role), *description, span(f" ({one.state})", "dim")], width)


def models(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Return one line per model."""
    name_width = max(10, width - 36)
    columns = (("model", -name_width - 1), ("state", -11), ("seqs", 7), ("queued", 8), ("output", 9))
    lines = [
        heading("Models", width, "output tokens since the replicas started"),
        clip(titles(*columns), width),
    ]
    for one in snapshot.models[: height - 2]:
        running = sum(replica.running for replica in one.replicas) if one.replicas else None
        output = sum(replica.generated_tokens for replica in one.replicas) if one.replicas else None
        lines.append(
            clip(
                [
                    span(f"{fit(one.name, name_width)} "),
                    span(f"{state_text(one.state):<11}", STATE_ROLES.get(one.state, "dim")),
                    span(f"{units.count(running):>7}"),
                    span(f"{units.count(one.queued):>8}", "dim"),
                    span(f"{units.short(output):>9}", "output"),
                ],
                width,
            )
        )
    return lines


def tenants(context: Context, snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Return the tenants with the highest token rates."""
    name_width = max(10, width // 3)
    size = width - name_width - 20
    shown = sorted(snapshot.tenants, key=lambda one: -(one.tokens_per_s or 0.0))[: max(0, height - 2)]
    note = f"{len(shown)} of {len(snapshot.tenants)}" if len(shown) < len(snapshot.tenants) else ""
    columns = (("tenant", -name_width), ("run", 5), ("tokens/s", 9), ("", 1), ("share of service", -size - 5))
    lines = [heading("Tenants", width, note), clip(titles(*columns), width)]
    for one in shown:
        lines.append(
            clip(
                [
                    span(fit(one.name, name_width)),
                    span(f"{units.count(one.running):>5}"),
                    span(f"{units.rate(one.tokens_per_s):>9} ", "output"),
                    *meter(one.share, size, context.glyphs, "accent"),
                    span(f"{units.percent(one.share):>5}"),
                ],
                width,
            )
        )
    return lines


def processes(context: Context, snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Return the state of the host and the service's processes."""
    host = snapshot.host
    cpu = None if host.cpu_percent is None else host.cpu_percent / 100
    memory = units.ratio(host.memory_used_bytes, host.memory_bytes)
    lines = [heading("Host", width, host.name)]
    facts = [
        ("cpu", units.percent(cpu)),
        ("load", units.UNKNOWN if host.load_1m is None else f"{host.load_1m:.1f}"),
        ("memory" if width >= 44 else "mem", units.percent(memory)),
        ("disk free" if width >= 44 else "free", units.size(host.disk_free_bytes)),
    ]
    needed = sum(len(f"  {name} {value}") for name, value in facts) - 2
    gap = "  " if needed <= width else " "
    row: Line = []
    for number, (name, value) in enumerate(facts):
        row += [span(f"{gap if number else ''}{name} ", "label"), span(value, "bold")]
    lines.append(clip(row, width))
    known: list[Process] = sorted(host.processes, key=lambda one: -(one.cpu_percent or 0.0))
    name_width = max(8, width - 19)
    for one in known[: max(0, height - 3)]:
        cpu_text = units.percent(units.ratio(one.cpu_percent, 100))
        lines.append(
            clip(
                [
                    span(fit(one.name, name_width)),
                    span(f"{cpu_text:>7}"),
                    span(f"{units.size(one.memory_bytes):>8}", "dim"),
                    span(f" {one.restarts}↻" if one.restarts else "", "warn"),
                ],
                width,
            )
        )
    if known:
        lines.insert(2, titles(("process", -name_width), ("cpu", 7), ("memory", 8)))
    return lines[:height]
