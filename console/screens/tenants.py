"""Tenants: each tenant's usage, compared with its limits and fair share."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.actions import TargetKind
from appliance.protocol import Key, LimitUsage, PeerMapping
from appliance.snapshot import TenantUse
from console import units
from console.context import Context
from console.glyphs import GlyphSet, meter
from console.lines import Line, clip, fact_lines, fit, heading, line, span, wrap
from console.roles import Role
from console.screens.table import TableColumn, TableView
from console.source import ListName


def fullest(row: TenantUse) -> LimitUsage | None:
    """Return the limit closest to being exhausted, or None if the tenant has no limits."""
    return max(row.usage, key=lambda one: one.used / max(1, one.capacity), default=None)


def _fullest_share(row: TenantUse) -> float | None:
    one = fullest(row)
    return None if one is None else one.used / max(1, one.capacity)


def _fullest_text(row: TenantUse) -> str:
    one = fullest(row)
    return "no limits" if one is None else f"{units.percent(_fullest_share(row)):>4} {one.limit}"


def _fullest_role(row: TenantUse) -> Role:
    share = _fullest_share(row)
    return "dim" if share is None else "bad" if share >= 0.95 else "warn" if share >= 0.8 else "text"


class TenantsView(TableView[TenantUse]):
    """The screen that shows all tenants."""

    name = "tenants"
    key = "7"
    title = "Tenants"
    short = "Tenants"
    alternate = "usage"
    help_text = (
        "Each tenant's usage, limits and fair share. Below the table are the selected tenant's limits, keys "
        "and local users. Press {variant} to see usage by day, tenant and key, and again to see all keys and "
        "local users."
    )
    target: TargetKind = "tenant"
    sorted_by = "tokens_per_s"
    reverse = True
    empty = "no tenants"
    columns = (
        TableColumn(
            "name",
            "TENANT",
            14,
            lambda r: r.name,
            right=False,
            flexible=True,
            role=lambda r: "bad" if r.suspended_at is not None else "bold",
        ),
        TableColumn(
            "state",
            "STATE",
            9,
            lambda r: "active" if r.suspended_at is None else "suspended",
            right=False,
            drop=5,
            role=lambda r: "dim" if r.suspended_at is None else "bad",
        ),
        TableColumn(
            "highest_class",
            "CL",
            3,
            lambda r: None if r.highest_class is None else f"P{r.highest_class}",
            right=False,
            drop=8,
        ),
        TableColumn("weight", "WEIGHT", 6, lambda r: r.weight, lambda r: _number(r.weight), drop=7),
        TableColumn("running", "RUN", 4, lambda r: r.running, lambda r: units.count(r.running)),
        TableColumn("waiting", "WAIT", 5, lambda r: r.waiting, lambda r: units.count(r.waiting)),
        TableColumn(
            "tokens_per_s",
            "TOK/S",
            6,
            lambda r: r.tokens_per_s,
            lambda r: units.rate(r.tokens_per_s),
            role=lambda r: "output",
        ),
        TableColumn(
            "share", "SHARE", 6, lambda r: r.share, lambda r: units.percent(r.share), drop=3, unit="%"
        ),
        TableColumn(
            "fair_share",
            "FAIR",
            5,
            lambda r: r.fair_share,
            lambda r: units.percent(r.fair_share),
            drop=4,
            unit="%",
        ),
        TableColumn(
            "limit_used",
            "LIMIT MOST USED",
            25,
            _fullest_share,
            _fullest_text,
            right=False,
            role=_fullest_role,
            unit="%",
        ),
        TableColumn(
            "exhausted_in_s",
            "FULL IN",
            8,
            lambda r: r.exhausted_in_s,
            lambda r: units.seconds(r.exhausted_in_s) if r.exhausted_in_s is not None else "-",
            drop=6,
            unit="s",
        ),
        TableColumn(
            "refused",
            "REFUSED",
            8,
            lambda r: r.refused,
            lambda r: units.count(r.refused),
            drop=2,
            role=lambda r: "warn" if r.refused else "dim",
        ),
        TableColumn(
            "requests", "REQUESTS", 9, lambda r: r.requests, lambda r: units.count(r.requests), drop=9
        ),
        TableColumn(
            "billed_tokens",
            "BILLED",
            8,
            lambda r: r.billed_tokens,
            lambda r: units.short(r.billed_tokens),
            drop=10,
        ),
        TableColumn("keys", "KEYS", 5, lambda r: r.keys, lambda r: units.count(r.keys), drop=11),
    )
    explanations = (*(column.name for column in columns), "tenant_prompt_tokens", "limits")

    def rows(self, context: Context) -> Sequence[TenantUse]:
        return context.snapshot.tenants if context.snapshot else []

    def id_of(self, row: TenantUse) -> str:
        return row.name

    def lists(self) -> tuple[ListName, ...]:
        return ("callers",)

    def required_lists(self) -> tuple[ListName, ...]:
        return ()

    def title_of(self, row: TenantUse) -> str:
        return f"{row.name}: limit usage"

    def describe(self, row: TenantUse, context: Context, width: int) -> list[Line]:
        lines = limit_lines(row.usage, width, context.glyphs)
        if not row.usage:
            lines.append([span("no limits", "dim")])
        lines.append(heading("Usage", width, "totals since the service started"))
        facts = [
            ("state", "active" if row.suspended_at is None else "suspended: new requests are refused"),
            ("running", units.counted(row.running, "request")),
            ("waiting", units.counted(row.waiting, "request")),
            ("tokens/s", units.rate(row.tokens_per_s)),
            ("share of service", f"{units.percent(row.share)} (fair share {units.percent(row.fair_share)})"),
            ("weight", _number(row.weight)),
            ("requests", units.count(row.requests)),
            ("refused", units.count(row.refused)),
            ("prompt tokens", f"{units.count(row.prompt_tokens)} ({units.count(row.cached_tokens)} cached)"),
            ("billed tokens", units.count(row.billed_tokens)),
        ]
        if row.exhausted_in_s is not None:
            facts.append(("limit reached in", units.seconds(row.exhausted_in_s)))
        return [*lines, *fact_lines(facts, width), *_callers(row, context, width)]


def limit_lines(usage: Sequence[LimitUsage], width: int, glyphs: GlyphSet) -> list[Line]:
    """Return one line per limit, with its usage."""
    lines: list[Line] = []
    size = max(8, width - 66)
    for one in usage:
        share = one.used / max(1, one.capacity)
        resets = (
            "until requests end"
            if one.resets_in_s is None
            else f"resets in {units.seconds(one.resets_in_s)}"
            if one.used
            else ""
        )
        lines.append(
            [
                span(f"{one.limit:<20}"),
                *meter(share, size, glyphs),
                span(f" {units.percent(share):>4} ", "bold"),
                span(f"{units.short(one.used):>7} of {units.short(one.capacity):>6}  {resets}", "dim"),
            ]
        )
    return lines


def _callers(row: TenantUse, context: Context, width: int) -> list[Line]:
    """Return a tenant's keys, local users and groups."""
    lines = [heading("Keys and local users", width, units.counted(row.keys, "valid key"))]
    if "callers" not in context.rows:
        return [*lines, *wrap(context.row_errors.get("callers", "loading…"), width, "dim")]
    now = context.snapshot.at if context.snapshot else 0.0
    for key in context.rows_of("callers", Key):
        if key.tenant != row.name or key.revoked_at is not None:
            continue
        limit = max(key.usage, key=lambda one: one.used / max(1, one.capacity), default=None)
        use = "" if limit is None else f"{units.percent(limit.used / max(1, limit.capacity))} {limit.limit}"
        expiry = (
            "never expires" if key.expires_at is None else f"expires in {units.seconds(key.expires_at - now)}"
        )
        expired = key.expires_at is not None and key.expires_at <= now
        lines.append(
            clip(
                [
                    span(f"{fit(key.name, 20)} ", "bold"),
                    span(f"{fit(key.id, 14)} "),
                    span(f"{fit(', '.join(key.scopes), 16)} ", "dim"),
                    span("expired  " if expired else f"{expiry}  ", "bad" if expired else "dim"),
                    span(use),
                ],
                width,
            )
        )
    for peer in context.rows_of("callers", PeerMapping):
        if peer.tenant == row.name:
            name = "any other local user" if peer.kind == "any" else f"{peer.kind} {peer.number}"
            lines.append(line(span(f"{name:<26} ", "bold"), span(f"from {peer.source}", "dim")))
    return lines if len(lines) > 1 else [*lines, [span("no keys and no local users", "dim")]]


def _number(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:g}"
