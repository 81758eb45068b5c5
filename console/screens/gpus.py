"""GPUs: utilisation, memory by purpose, power, temperature, clocks, links and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from appliance.snapshot import Gpu, MigInstance
from console import units
from console.context import Context
from console.glyphs import bar, bar_legend, unknown_bar
from console.history import Point
from console.lines import BLANK, Line, clip, fact_lines, heading, line, span, wrap
from console.roles import Role
from console.screens.panels import celsius, gpu_text, history_chart, kernel_time, shown_span, watts
from console.screens.table import TableColumn, TableView

_LINK_FIELDS = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")


def memory_parts(gpu: Gpu) -> tuple[int | None, int | None, int | None, int | None]:
    """Return the memory used by weights, by the KV cache and by everything else, and the free memory, in
    bytes. Unknown values are None."""
    if gpu.used_bytes is None:
        return gpu.weight_bytes, gpu.kv_bytes, None, None
    free = None if gpu.memory_bytes is None else gpu.memory_bytes - gpu.used_bytes
    if gpu.weight_bytes is None or gpu.kv_bytes is None:
        return gpu.weight_bytes, gpu.kv_bytes, None, free
    return gpu.weight_bytes, gpu.kv_bytes, max(0, gpu.used_bytes - gpu.weight_bytes - gpu.kv_bytes), free


def _used(gpu: Gpu) -> float | None:
    return units.ratio(gpu.used_bytes, gpu.memory_bytes)


def _use(gpu: Gpu) -> float | None:
    return units.ratio(gpu.utilization_percent, 100)


def _text(name: str, form: Callable[[Any], str]) -> Callable[[Gpu], str]:
    """Return a function that formats one of a GPU's fields."""
    return lambda gpu: gpu_text(gpu, form(getattr(gpu, name)), name)


def _name(gpu: Gpu) -> str:
    """Return the GPU's name, or the reason why the GPU cannot be read."""
    return gpu.error or gpu.name


def _plain(value: int | None) -> str:
    return units.UNKNOWN if value is None else f"{value}"


def _throttle(gpu: Gpu) -> str:
    reasons = gpu.throttle_reasons
    return gpu_text(
        gpu, units.UNKNOWN if reasons is None else ", ".join(reasons) or "none", "throttle_reasons"
    )


def _errors(gpu: Gpu) -> str:
    both = f"{_text('ecc_uncorrected', _plain)(gpu)}/{_text('ecc_corrected', _plain)(gpu)}"
    return gpu_text(gpu, both, "ecc_uncorrected", "ecc_corrected")


def _xid(gpu: Gpu, none: str) -> str:
    text = units.UNKNOWN if gpu.last_xid is None else str(gpu.last_xid or none)
    return gpu_text(gpu, text, "last_xid")


def _link(gpu: Gpu) -> float | None:
    if gpu.nvlink_tx_bytes_per_s is None or gpu.nvlink_rx_bytes_per_s is None:
        return None
    return gpu.nvlink_tx_bytes_per_s + gpu.nvlink_rx_bytes_per_s


class GpusView(TableView[Gpu]):
    """The screen that shows all GPUs."""

    name = "gpus"
    key = "5"
    title = "GPUs"
    short = "GPU"
    help_text = (
        "All GPUs, as reported by NVML. n/a means that the GPU does not support a value; -- means that the "
        "value is unknown. Bars below the table show how much of each GPU's memory holds weights, the "
        "KV cache and other data. Press {open} to see all of a GPU's metrics and processes."
    )
    sorted_by = "number"
    empty = "no NVIDIA GPUs found, or the service does not report GPUs"
    columns = (
        TableColumn("number", "GPU", 3, lambda g: g.number, role=lambda g: "bold"),
        TableColumn(
            "utilization_percent",
            "USE",
            5,
            _use,
            kernel_time,
            role=lambda g: "accent",
            unit="%",
        ),
        TableColumn(
            "used_bytes",
            "MEM",
            5,
            _used,
            lambda g: gpu_text(g, units.percent(_used(g)), "used_bytes"),
            unit="%",
        ),
        TableColumn(
            "power_w",
            "POWER",
            6,
            lambda g: g.power_w,
            _text("power_w", watts),
            unit="W",
        ),
        TableColumn(
            "temperature_c",
            "TEMP",
            5,
            lambda g: g.temperature_c,
            _text("temperature_c", celsius),
            role=lambda g: "warn" if g.throttle_reasons else "text",
            unit="°C",
        ),
        TableColumn(
            "sm_clock_mhz", "MHz", 5, lambda g: g.sm_clock_mhz, _text("sm_clock_mhz", _plain), drop=2
        ),
        TableColumn(
            "throttle_reasons",
            "THROTTLED",
            12,
            _throttle,
            right=False,
            drop=1,
            role=lambda g: "bad" if g.throttle_reasons else "dim",
        ),
        TableColumn(
            "nvlink",
            "NVLINK/s",
            8,
            _link,
            lambda g: gpu_text(g, units.size(_link(g)), *_LINK_FIELDS),
            drop=5,
            unit="bytes",
        ),
        TableColumn("ecc", "ECC", 6, lambda g: g.ecc_uncorrected, _errors, drop=6),
        TableColumn(
            "last_xid",
            "XID",
            5,
            lambda g: g.last_xid,
            lambda g: _xid(g, "-"),
            drop=4,
            role=lambda g: "bad" if g.last_xid else "dim",
        ),
        TableColumn(
            "replicas", "REPLICAS", 16, lambda g: ", ".join(g.replicas) or "-", right=False, flexible=True
        ),
        TableColumn("name", "NAME", 14, _name, right=False, drop=7, role=lambda g: "dim"),
    )
    explanations = (
        *(column.name for column in columns if column.name not in ("replicas", "name")),
        *("model_name", "gpu_replicas", "memory_parts", "uuid", "memory_clock_mhz", "mig_instances"),
    )

    def rows(self, context: Context) -> Sequence[Gpu]:
        return context.snapshot.gpus if context.snapshot else []

    def id_of(self, row: Gpu) -> str:
        return str(row.number)

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        if context.snapshot and not context.snapshot.gpus and context.snapshot.gpu_error:
            return [heading("GPUs", width), *wrap(context.snapshot.gpu_error, width, "bad")]
        return super().render(context, width, height)

    def title_of(self, row: Gpu) -> str:
        return f"GPU {row.number}: {_name(row)}"

    def below(self, rows: list[Gpu], context: Context, width: int, height: int) -> list[Line]:
        if not rows or height < len(rows) + 3:
            return super().below(rows, context, width, height)
        parts = bar_legend(("weights", "KV cache", "other"), context.glyphs)
        lines = [BLANK, heading("Memory", width, parts)]
        lines += [_memory(context, gpu, width) for gpu in rows]
        if height - len(lines) >= len(rows) + 2:
            lines += [
                BLANK,
                heading("Kernel time", width, f"last {shown_span(context, width - 10)}"),
            ]
            lines += [_history(context, gpu, width) for gpu in rows]
        return lines + super().below(rows, context, width, height - len(lines))

    def describe(self, row: Gpu, context: Context, width: int) -> list[Line]:
        weights, kv, other, free = memory_parts(row)
        used = _text("used_bytes", units.size)(row)
        power, limit = _text("power_w", watts)(row), _text("power_limit_w", watts)(row)
        clock, highest = _text("sm_clock_mhz", _plain)(row), _text("max_sm_clock_mhz", _plain)(row)
        sent, received = (_text(name, units.size)(row) for name in _LINK_FIELDS)
        uncorrected, corrected = (
            _text(name, units.count)(row) for name in ("ecc_uncorrected", "ecc_corrected")
        )
        facts = (
            ("name", _name(row)),
            ("uuid", row.uuid or units.UNKNOWN),
            ("replicas", ", ".join(row.replicas) or "none"),
            ("kernel time", kernel_time(row)),
            ("memory", f"{used} of {_text('memory_bytes', units.size)(row)} used"),
            ("  weights", units.size(weights)),
            ("  KV cache", units.size(kv)),
            ("  other", units.size(other)),
            ("  free", units.size(free)),
            ("power", f"{power} of at most {limit}"),
            ("temperature", _text("temperature_c", celsius)(row)),
            ("SM clock", f"{clock} of at most {highest} MHz"),
            ("memory clock", f"{_text('memory_clock_mhz', _plain)(row)} MHz"),
            ("throttled by", _throttle(row)),
            ("NVLink", gpu_text(row, f"{sent}/s out, {received}/s in", *_LINK_FIELDS)),
            ("ECC errors", f"{uncorrected} uncorrected, {corrected} corrected"),
            ("last Xid", _xid(row, "none")),
        )
        lines: list[Line] = [_memory(context, row, width)]
        if row.mig_instances is not None:
            lines += fact_lines([("MIG instances", _instances(row.mig_instances))], width)
        lines += fact_lines(facts, width)
        lines.append(heading("Processes", width, "PID, memory on this GPU, command, replica"))
        if row.processes is None:
            return [*lines, [span(gpu_text(row, "not reported", "processes"), "dim")]]
        # In a container, the driver may report process ids other than those of the service's processes.
        is_known = not row.replicas or any(one.replica for one in row.processes)
        for one in row.processes:
            owner = one.replica or ("not part of the service" if is_known else "replica unknown")
            lines.append(
                line(
                    span(f"{one.pid:>8}  "),
                    span(f"{units.size(one.memory_bytes):>7}  ", "bold"),
                    span(f"{one.name}  "),
                    span(owner, "dim" if one.replica or not is_known else "warn"),
                )
            )
        return lines


def _instances(instances: Sequence[MigInstance]) -> str:
    """Return a GPU's MIG instances, each with its memory."""
    texts = [
        f"{one.name}: {units.size(one.used_bytes)} of {units.size(one.memory_bytes)} used"
        for one in instances
    ]
    return " · ".join(texts) or "none: create instances, so that replicas can use the GPU"


def _memory(context: Context, gpu: Gpu, width: int) -> Line:
    weights, kv, other, _ = memory_parts(gpu)
    total = gpu.memory_bytes
    used = _text("used_bytes", units.size)(gpu)
    text = f" {used:>6} of {_text('memory_bytes', units.size)(gpu):>5}"
    size = max(4, width - 4 - len(text))
    if not total or gpu.used_bytes is None:
        meter = unknown_bar(size)
    elif weights is None or kv is None or other is None:
        meter = bar([(gpu.used_bytes / total, "used")], size, context.glyphs)
    else:
        parts: list[tuple[float, Role]] = [
            (weights / total, "cached"),
            (kv / total, "used"),
            (other / total, "warn"),
        ]
        meter = bar(parts, size, context.glyphs)
    return clip([span(f"{gpu.number:>3} ", "bold"), *meter, span(text, "dim")], width)


def _history(context: Context, gpu: Gpu, width: int) -> Line:
    size = width - 10

    def use(point: Point) -> float | None:
        return point.gpus.get(gpu.number)

    trend = history_chart(context, use, size, 1, "accent", 100.0)[0]
    return [
        span(f"{gpu.number:>3} ", "bold"),
        *trend,
        span(f" {kernel_time(gpu):>4}", "dim"),
    ]
