"""Usage: tokens and costs for the last few days, by day, tenant and key."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.pages import UsageRow
from console import units
from console.context import Context
from console.lines import BLANK, Line, fact_lines
from console.screens.table import TableColumn, TableView
from console.source import USAGE_DAYS, ListName


def _key(row: UsageRow) -> str:
    return row.key_name or row.key_id or "(no key)"


def _cost(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:,.2f}"


class UsageView(TableView[UsageRow]):
    """The screen that shows usage."""

    name = "usage"
    key = "7"
    title = "Usage"
    short = "Tenants"
    alternate = "keys"
    help_text = (
        f"Usage by day, tenant and key, for requests that finished in the last {USAGE_DAYS} days, including "
        "today. The heading shows totals for the rows that match the filter. For earlier days or usage by "
        "model, run appliance usage."
    )
    sorted_by = "day"
    reverse = True
    empty = f"no requests finished in the last {USAGE_DAYS} days"
    columns = (
        TableColumn("day", "DAY", 10, lambda r: r.day, right=False),
        TableColumn(
            "tenant", "TENANT", 12, lambda r: r.tenant, right=False, flexible=True, role=lambda r: "bold"
        ),
        TableColumn("key_name", "KEY", 14, _key, right=False, flexible=True, role=lambda r: "dim"),
        TableColumn(
            "requests", "REQUESTS", 9, lambda r: r.requests, lambda r: units.count(r.requests), drop=2
        ),
        TableColumn(
            "failed",
            "FAILED",
            7,
            lambda r: r.failed,
            lambda r: units.count(r.failed),
            role=lambda r: "warn" if r.failed else "dim",
            drop=3,
        ),
        TableColumn(
            "prompt_tokens", "PROMPT", 12, lambda r: r.prompt_tokens, lambda r: units.count(r.prompt_tokens)
        ),
        TableColumn(
            "cached_tokens",
            "CACHED",
            12,
            lambda r: r.cached_tokens,
            lambda r: units.count(r.cached_tokens),
            drop=1,
        ),
        TableColumn(
            "output_tokens",
            "OUTPUT",
            12,
            lambda r: r.output_tokens,
            lambda r: units.count(r.output_tokens),
            role=lambda r: "output",
        ),
        TableColumn("cost", "COST", 10, lambda r: r.cost, lambda r: _cost(r.cost)),
    )
    explanations = tuple(column.name for column in columns)

    def lists(self) -> tuple[ListName, ...]:
        return ("usage",)

    def rows(self, context: Context) -> Sequence[UsageRow]:
        return context.rows_of("usage", UsageRow)

    def id_of(self, row: UsageRow) -> str:
        return f"{row.day} {row.tenant} {row.key_id}"

    def note(self, context: Context) -> str:
        rows = self.ordered(context)
        if not rows:
            return ""
        prompt, output = (
            units.short(sum(getattr(row, name) for row in rows))
            for name in ("prompt_tokens", "output_tokens")
        )
        costs = [row.cost for row in rows if row.cost is not None]
        cost = f" · cost {_cost(sum(costs))}" if costs else ""
        return f"{USAGE_DAYS} days · {prompt} prompt and {output} output tokens{cost}"

    def describe(self, row: UsageRow, context: Context, width: int) -> list[Line]:
        facts = (
            ("day", f"{row.day} (UTC)"),
            ("tenant", row.tenant or units.UNKNOWN),
            ("key", " ".join(part for part in (row.key_name, row.key_id) if part) or "(no key)"),
            ("requests", f"{units.count(row.requests)} ({units.count(row.failed)} failed)"),
            ("prompt tokens", f"{units.count(row.prompt_tokens)} ({units.count(row.cached_tokens)} cached)"),
            ("output tokens", f"{units.count(row.output_tokens)} delivered"),
            ("cost", _cost(row.cost)),
        )
        return [BLANK, *fact_lines(facts, width)]
