"""Models: their replicas, state, memory and load progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from appliance.actions import TargetKind
from appliance.protocol import ModelStatus, ReplicaStatus, precision
from console import units
from console.context import Context
from console.glyphs import meter
from console.lines import BLANK, Line, heading, line, span, wrap
from console.screens.panels import state
from console.screens.table import TableColumn, TableView


class ModelRow(NamedTuple):
    """A model with its sums over replicas."""

    model: ModelStatus

    @property
    def ready(self) -> int:
        """Number of replicas that are ready."""
        return sum(one.state == "ready" for one in self.model.replicas)

    @property
    def fraction(self) -> float | None:
        """Progress of the replica that is loading, or None if no replica is loading."""
        return next((one.fraction for one in self.model.replicas if one.fraction is not None), None)

    def total(self, name: str) -> int | None:
        """Return the sum of a figure over the replicas, or None if there are no replicas."""
        replicas = self.model.replicas
        return sum(getattr(one, name) for one in replicas) if replicas else None


def _progress(row: ModelRow) -> str:
    return row.model.state if row.fraction is None else f"{row.model.state} {units.percent(row.fraction)}"


def _kv(row: ModelRow) -> float | None:
    return units.ratio(row.total("blocks_used"), row.total("blocks_total"))


def _role(row: ModelRow) -> str:
    return state(row.model.state).role


class ModelsView(TableView[ModelRow]):
    """All models."""

    name = "models"
    key = "6"
    title = "Models"
    short = "Models"
    help_text = (
        "All models. Below the table are the replicas of the model under the cursor; enter shows their "
        "details."
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
            "replicas", "READY", 6, lambda r: r.ready, lambda r: f"{r.ready}/{len(r.model.replicas)}"
        ),
        TableColumn("queued", "QUEUED", 7, lambda r: r.model.queued, lambda r: units.count(r.model.queued)),
        TableColumn(
            "running", "SEQS", 6, lambda r: r.total("running"), lambda r: units.count(r.total("running"))
        ),
        TableColumn("kv_used", "KV", 5, _kv, lambda r: units.percent(_kv(r))),
        TableColumn(
            "weight_bytes",
            "WEIGHTS",
            8,
            lambda r: r.total("weight_bytes"),
            lambda r: units.size(r.total("weight_bytes") or None),
            drop=4,
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
    figures = (*(column.name for column in columns), "step_ms", "idle_us", "credit_seqs", "load_seconds")

    def rows(self, context: Context) -> Sequence[ModelRow]:
        return [ModelRow(one) for one in context.snapshot.models] if context.snapshot else []

    def id_of(self, row: ModelRow) -> str:
        return row.model.name

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        lines = super().render(context, width, height)
        rows = self.ordered(context)
        # The replicas of the model under the cursor fill the space below the table.
        if self.detail or not rows or height - len(lines) < 4:
            return lines
        model = next((row.model for row in rows if row.model.name == self.cursor), rows[0].model)
        return [*lines, BLANK, *_replicas(context, model, width)][:height]

    def describe(self, row: ModelRow, context: Context, width: int) -> list[Line]:
        model = row.model
        lines = [
            BLANK,
            line(
                span("state    ", "dim"),
                state(model.state),
                span(f"  {model.detail}" if model.detail else ""),
            ),
            line(span("folder   ", "dim"), span(model.folder)),
            line(span("version  ", "dim"), span(model.version)),
            line(span("context  ", "dim"), span(f"up to {units.count(model.max_model_len or None)} tokens")),
            BLANK,
        ]
        for one in model.replicas:
            lines += [*_replica(context, one, width), BLANK]
        return lines


def _replicas(context: Context, model: ModelStatus, width: int) -> list[Line]:
    lines = [heading(f"Replicas of {model.name}", width, f"{len(model.replicas)}")]
    if model.detail:
        lines += wrap(model.detail, width, "warn" if model.state != "ready" else "dim")
    for one in model.replicas:
        used = units.ratio(one.blocks_used, one.blocks_total)
        row = [span(f"{one.name:<20} ", "bold"), state(one.state), span("  ")]
        if one.fraction is not None:
            row += [
                *meter(one.fraction, 20, context.glyphs, "accent"),
                span(f" {units.percent(one.fraction)} "),
            ]
        if one.state in ("ready", "draining"):
            row += [
                span(f"{one.running}/{one.max_num_seqs} seqs", "text"),
                span("  KV ", "dim"),
                *meter(used, 10, context.glyphs, "used"),
                span(f" {units.percent(used)}  ", "text"),
                span(_devices(one), "dim"),
            ]
        else:
            row.append(span(one.detail or one.last_error, "dim"))
        lines.append(row)
    return lines


def _replica(context: Context, one: ReplicaStatus, width: int) -> list[Line]:
    facts = (
        ("devices", _devices(one)),
        ("sequences", f"{one.running} running, {one.waiting} waiting, at most {one.max_num_seqs}"),
        (
            "KV blocks",
            f"{one.blocks_used:,} used, {one.blocks_cached:,} cached, {one.blocks_total:,} in total",
        ),
        (
            "memory",
            f"{units.size(one.used_bytes or None)} used, {units.size(one.predicted_bytes or None)} predicted",
        ),
        (
            "weights, KV",
            f"{units.size(one.weight_bytes or None)}, {units.size(one.kv_bytes or None)} per rank",
        ),
        ("decode step", _step(one.step_ms, one.idle_us)),
        ("mixed step", _step(one.mixed_step_ms, one.mixed_idle_us)),
        ("credit", f"{one.credit_seqs:,} sequences, {one.credit_tokens:,} prompt tokens"),
        ("loaded in", units.seconds(one.load_seconds or None)),
        ("restarts", f"{one.restarts}" + (f": {one.last_error}" if one.last_error else "")),
    )
    head = heading(f"Replica {one.name}", width, one.detail)
    lines = [head, line(span("  state        ", "dim"), state(one.state))]
    return lines + [line(span(f"  {name:<13}", "dim"), span(value)) for name, value in facts]


def _step(duration_ms: float, idle_us: float) -> str:
    # The engine reports 0 if there were no steps of the kind since its previous report.
    if not duration_ms:
        return "none since the last report"
    return f"{units.ms(duration_ms)}, device idle {idle_us:.0f} µs before each"


def _devices(one: ReplicaStatus) -> str:
    devices = list(dict.fromkeys(one.devices))
    held = precision(one.dtype, one.weights, one.kv_cache_dtype) if one.dtype else units.UNKNOWN
    ranks = f"{len(one.devices)} ranks on " if len(one.devices) > 1 else ""
    return f"{ranks}{', '.join(devices) or units.UNKNOWN}, {held}"
