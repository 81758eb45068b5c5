"""Models: replicas, state, memory and load progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from appliance.actions import TargetKind
from appliance.protocol import ModelStatus, ReplicaStatus, ScalingStatus, precision
from appliance.protocol.registry import RegisteredModel
from console import units
from console.context import Context
from console.glyphs import meter
from console.lines import Line, clip, fact_lines, heading, span, titles, wrap
from console.roles import Role
from console.screens.panels import STATE_ROLES, state_text
from console.screens.table import TableColumn, TableView
from console.source import ListName

_RECENT_S = 5.0
"""Steps that ended less than this many seconds ago are shown without their age, because showing it would
change the layout several times per second."""


class ModelRow(NamedTuple):
    """A model, with totals over its replicas."""

    model: ModelStatus

    @property
    def ready(self) -> int:
        """Number of ready replicas."""
        return sum(one.state == "ready" for one in self.model.replicas)

    @property
    def fraction(self) -> float | None:
        """Progress of the loading replica, or None if no replica is loading."""
        return next((one.fraction for one in self.model.replicas if one.fraction is not None), None)

    def total(self, name: str) -> int | None:
        """Sum a value over the replicas. Return None if there are no replicas."""
        replicas = self.model.replicas
        return sum(getattr(one, name) for one in replicas) if replicas else None


def _progress(row: ModelRow) -> str:
    state = state_text(row.model.state)
    return state if row.fraction is None else f"{state} {units.percent(row.fraction)}"


def _kv(row: ModelRow) -> float | None:
    return units.ratio(row.total("blocks_used"), row.total("blocks_total"))


def _role(row: ModelRow) -> Role:
    return STATE_ROLES.get(row.model.state, "dim")


class ModelsView(TableView[ModelRow]):
    """The screen that shows all models."""

    name = "models"
    key = "6"
    title = "Models"
    short = "Models"
    help_text = (
        "All models. Below the table: the selected model's replicas (load progress, predicted and used "
        "memory), versions, aliases and traffic splits. {open} shows them full-screen."
    )
    target: TargetKind = "model"
    sorted_by = "name"
    empty = "no models are configured"
    columns = (
        TableColumn(
            "name", "MODEL", 18, lambda r: r.model.name, right=False, flexible=True, role=lambda r: "bold"
        ),
        TableColumn("state", "STATE", 12, lambda r: r.model.state, _progress, right=False, role=_role),
        TableColumn(
            "replicas",
            "READY",
            6,
            lambda r: r.ready,
            lambda r: f"{r.ready}/{len(r.model.replicas)}",
            fact="replicas",
        ),
        TableColumn("queued", "QUEUED", 7, lambda r: r.model.queued, lambda r: units.count(r.model.queued)),
        TableColumn(
            "running", "SEQS", 6, lambda r: r.total("running"), lambda r: units.count(r.total("running"))
        ),
        TableColumn("kv_used", "KV", 5, _kv, lambda r: units.percent(_kv(r)), unit="%"),
        TableColumn(
            "weight_bytes",
            "WEIGHTS",
            8,
            lambda r: r.total("weight_bytes"),
            lambda r: units.size(r.total("weight_bytes") or None),
            drop=4,
            unit="bytes",
        ),
        TableColumn(
            "generated_tokens",
            "OUTPUT",
            8,
            lambda r: r.total("generated_tokens"),
            lambda r: units.short(r.total("generated_tokens")),
            drop=3,
            role=lambda r: "output",
        ),
        TableColumn(
            "max_model_len",
            "CONTEXT",
            8,
            lambda r: r.model.max_model_len or None,
            lambda r: units.count(r.model.max_model_len or None),
            drop=5,
        ),
        TableColumn("restarts", "RESTARTS", 8, lambda r: r.total("restarts"), drop=6),
        TableColumn(
            "version", "VERSION", 16, lambda r: r.model.version, right=False, drop=7, role=lambda r: "dim"
        ),
    )
    explanations = (
        *(column.name for column in columns if column.name != "running"),
        *(
            "steps_running",
            "step_ms",
            "idle_us",
            "predicted_bytes",
            "replica_memory",
            "load_seconds",
            "replica_kv_bytes",
        ),
        *("credit_seqs", "links", "version_number", "added", "folder", "aliases", "split", "shadow"),
        *("scaled_replicas", "demand", "scaling_reason", "scaling_refusal"),
    )

    def rows(self, context: Context) -> Sequence[ModelRow]:
        return [ModelRow(one) for one in context.snapshot.models] if context.snapshot else []

    def id_of(self, row: ModelRow) -> str:
        return row.model.name

    def lists(self) -> tuple[ListName, ...]:
        return ("models",)

    def required_lists(self) -> tuple[ListName, ...]:
        return ()

    def title_of(self, row: ModelRow) -> str:
        state = "loads on demand" if row.model.state == "available" else row.model.state
        return f"{row.model.name}: {state}"

    def describe(self, row: ModelRow, context: Context, width: int) -> list[Line]:
        model = row.model
        role: Role = "dim" if model.state in ("ready", "available") else "warn"
        lines: list[Line] = wrap(model.detail, width, role)
        for one in model.replicas:
            lines += _replica(context, one, width)
        if model.scaling is not None:
            lines += _scaling(model.scaling, width)
        entry = next(
            (one for one in context.rows_of("models", RegisteredModel) if one.name == model.name), None
        )
        if entry is not None:
            return lines + _versions(entry, width)
        reason = context.row_errors.get("models", "loading…")
        folder = (("folder", model.folder), ("version", model.version))
        return [*lines, heading("Versions", width), *wrap(reason, width, "dim"), *fact_lines(folder, width)]


def _replica(context: Context, one: ReplicaStatus, width: int) -> list[Line]:
    used = units.ratio(one.blocks_used, one.blocks_total)
    head = heading(f"{one.name} {one.state}", width, _devices(one))
    head[1] = span(one.name, "title")
    head.insert(2, span(f" {one.state}", STATE_ROLES.get(one.state, "dim")))
    lines = [clip(head, width)]
    if one.load is not None or one.fraction is not None:
        lines += _progress_lines(context, one, width)
    elif one.detail:
        lines += wrap(one.detail, width, "warn")
    if one.last_error:
        is_ready = one.state == "ready"
        name = "last error, before the latest start" if is_ready else "last error"
        lines += wrap(f"{name}: {one.last_error}", width, "dim" if is_ready else "bad")
    if one.remedy:
        lines += wrap(f"next step: {one.remedy}", width, "warn")
    for degraded in one.degraded:
        lines += wrap(f"degraded: {degraded.description}; {degraded.remedy}", width, "warn")
    if not one.blocks_total:
        return lines
    off = _difference(one.used_bytes, one.predicted_bytes)
    loaded_in = units.seconds(one.load_seconds or None)
    facts = (
        ("sequences", f"{one.running} of {one.max_num_seqs}, {one.waiting} waiting"),
        ("KV blocks", f"{one.blocks_used:,} of {one.blocks_total:,} ({units.percent(used)})"),
        ("decode step", _step(context, one, "step_ms", "idle_us")),
        ("mixed step", _step(context, one, "mixed_step_ms", "mixed_idle_us")),
        ("fit", f"{units.size(one.predicted_bytes or None)} predicted"),
        ("memory", f"{units.size(one.used_bytes or None)} used{off}"),
        ("weights", f"{units.size(one.weight_bytes or None)}, loaded in {loaded_in}"),
        ("KV cache", units.size(one.kv_bytes or None)),
        ("credit", f"{one.credit_seqs:,} sequences, {units.short(one.credit_tokens)} tokens"),
        ("restarts", f"{one.restarts}, circuit breaker {one.breaker}"),
        ("links", " · ".join(part for part in (one.links, one.collectives) if part)),
    )
    return lines + fact_lines([fact for fact in facts if fact[1]], width)


def _progress_lines(context: Context, one: ReplicaStatus, width: int) -> list[Line]:
    """Return a replica's load progress: stage, bar, rate and remaining time."""
    size = max(8, min(40, width // 3))
    row: Line = [
        *meter(one.fraction, size, context.glyphs, "accent"),
        span(f" {units.percent(one.fraction):>4} ", "bold"),
    ]
    if one.load is None:
        return [clip([*row, span(f" {one.detail}", "dim")], width)]
    load = one.load
    amount = ""
    if load.total:
        form = units.size if load.unit == "bytes" else units.count
        amount = f"{form(load.done)} of {form(load.total)}" + (
            "" if load.unit == "bytes" else f" {load.unit}"
        )
        if load.rate_per_s:
            amount += f", {form(load.rate_per_s)}/s"
    row += [span(f" {load.stage}", "warn"), span(f"  {amount}"), span(f"  {load.detail}", "dim")]
    row.append(span(f"  {units.seconds(load.left_s)} left", "bold"))
    return [clip(row, width)]


def _scaling(scaling: ScalingStatus, width: int) -> list[Line]:
    facts = [
        ("replicas", f"{scaling.replicas} (minimum {scaling.min_replicas}, maximum {scaling.max_replicas})"),
        ("demand", f"{scaling.demand:.1f} replicas now, {scaling.expected:.1f} expected"),
        ("reason", scaling.reason or units.UNKNOWN),
        ("refusal", scaling.refusal or "none"),
    ]
    return [heading("Scaling", width), *fact_lines(facts, width)]


def _versions(entry: RegisteredModel, width: int) -> list[Line]:
    """Return a model's versions, aliases, splits and shadows."""
    lines = [
        heading("Versions", width, f"from the {entry.source}" if entry.source == "registry" else entry.source)
    ]
    columns = (
        ("", 2),
        ("version", -9),
        ("state", -12),
        ("added", -21),
        ("memory", 8),
        ("", 2),
        ("folder", -6),
    )
    lines.append(titles(*columns))
    for one in sorted(entry.versions, key=lambda one: -one.version):
        mark = (
            "default" if one.version == entry.default else "previous" if one.version == entry.previous else ""
        )
        lines.append(
            clip(
                [
                    span("● " if mark == "default" else "  ", "good"),
                    span(f"{one.version:<9}", "bold"),
                    span(f"{one.state:<12}", STATE_ROLES.get(one.state, "dim")),
                    span(f"{units.date(one.added_at):<21}", "dim"),
                    span(f"{units.size(one.memory_bytes or None):>8}  "),
                    span(one.folder),
                    span(f"  {mark}" if mark else "", "dim"),
                    span(f"  {one.detail}" if one.detail else "", "warn"),
                ],
                width,
            )
        )
    facts = [("aliases", ", ".join(entry.aliases) or "none")]
    if entry.split:
        whole = sum(entry.split.values()) or 1.0
        parts = (f"{name} {units.percent(share / whole)}" for name, share in entry.split.items())
        facts.append(("split", ", ".join(parts)))
    for shadow in entry.shadows:
        agreed = units.percent(shadow.agreement)
        facts.append(
            (
                "shadow",
                f"{units.percent(shadow.share)} of {shadow.name} to {shadow.target}: "
                f"{shadow.compared:,} compared, {agreed} of tokens agree",
            )
        )
    return lines + fact_lines(facts, width)


def _difference(used: int, predicted: int) -> str:
    """Describe how much the used memory differs from the prediction. Return an empty string if either is
    unknown."""
    if not used or not predicted:
        return ""
    share = f"{abs(used / predicted - 1):.1%}"
    if share == "0.0%":
        return ", as predicted"
    return f", {share} {'more' if used > predicted else 'less'} than predicted"


def _step(context: Context, one: ReplicaStatus, duration: str, idle: str) -> str:
    """Return the mean duration and idle time of a replica's newest steps of one kind. `duration` and `idle`
    name the fields with these values in replica reports and in slices."""
    # The engine reports a time of 0 if it has run no steps of this kind since its previous report.
    if getattr(one, duration):
        return f"{units.ms(getattr(one, duration))}, {units.us(getattr(one, idle))} idle"
    known = context.history.batches.get(one.name, ()) if one.state == "ready" else ()
    for batch in reversed(known):
        if getattr(batch, duration) is not None:
            age_s = context.snapshot.at - batch.at if context.snapshot else 0.0
            times = f"{units.ms(getattr(batch, duration))}, {units.us(getattr(batch, idle))} idle"
            return times if age_s < _RECENT_S else f"{times}, {units.seconds(age_s)} ago"
    span_s = context.history.span_of()
    return f"none in the last {units.seconds(span_s)}" if span_s and one.state == "ready" else "none"


def _devices(one: ReplicaStatus) -> str:
    devices = list(dict.fromkeys(one.devices))
    held = precision(one.dtype, one.weights, one.kv_cache_dtype) if one.dtype else units.UNKNOWN
    ranks = f"{len(one.devices)} ranks: " if len(one.devices) > len(devices) else ""
    return f"{ranks}{', '.join(devices) or units.UNKNOWN}, {held}"
