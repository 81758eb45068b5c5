"""Implements `appliance usage`, which shows usage per day, tenant, key and model."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from appliance import calls
from appliance.cli.failure import CommandLineError
from appliance.cli.output import Column, of_count, paint, print_json, printable, table, terminal_width
from appliance.cli.service import admin_client
from appliance.cli.times import moment
from appliance.pages import USAGE_COLUMNS, UsageQuery, UsageRow

_NUMBERS = (
    Column("REQUESTS", right=True),
    Column("FAILED", right=True, drop=3),
    Column("PROMPT", right=True),
    Column("CACHED", right=True, drop=2),
    Column("OUTPUT", right=True),
)


def show_usage(
    run_dir: str | None,
    *,
    since: str | None,
    until: str | None,
    tenant: str | None,
    key: str | None,
    model: str | None,
    by: str,
    as_json: bool,
) -> None:
    """Print the usage and its total."""
    columns = by.replace(" ", "").split(",")
    if wrong := [column for column in columns if column not in USAGE_COLUMNS]:
        raise CommandLineError(
            f"--by {wrong[0]!r} is not a column: use one or more of {', '.join(USAGE_COLUMNS)}"
        )
    query = UsageQuery(
        since=_day(since, "--since"),
        until=_day(until, "--until"),
        tenant=tenant,
        key_id=key,
        model=model,
        by=",".join(dict.fromkeys(columns)),
    )
    with admin_client(run_dir) as client:
        report = client.call(calls.usage(query))
    if as_json:
        print_json(report)
        return
    if not report.rows:
        print("No requests ended in this period.", file=sys.stderr)
        return
    shown = [column for column in USAGE_COLUMNS if column in columns]
    priced = report.total.cost is not None
    headings = [
        *(Column(column.upper(), flexible=column != "day") for column in shown),
        *_NUMBERS,
        *([Column("COST", right=True)] if priced else []),
    ]
    rows = [[*(_value(row, column) for column in shown), *_numbers(row, priced)] for row in report.rows]
    rows.append(["total", *[""] * (len(shown) - 1), *_numbers(report.total, priced)])
    heading, *lines = table(headings, rows, width=terminal_width())
    print(paint(heading, "dim"))
    for line in lines[:-1]:
        print(line)
    print(paint(lines[-1], "bold"))
    if report.unpriced_models:
        names = printable(", ".join(report.unpriced_models))
        print(f"No prices are set for: {names}. Their tokens are not included in the costs.", file=sys.stderr)


def _day(text: str | None, option: str) -> str | None:
    if text is None:
        return None
    at = moment(text, option, ahead=False)
    # A date without a time means a UTC day, because usage is counted per UTC day.
    return text.strip() if len(text.strip()) == 10 else datetime.fromtimestamp(at, UTC).date().isoformat()


def _value(row: UsageRow, column: str) -> str:
    if column == "key":
        return printable(row.key_name or row.key_id or "(no key)")
    return printable(getattr(row, column) or "(unknown)")


def _numbers(row: UsageRow, priced: bool) -> list[str]:
    counts = (row.requests, row.failed, row.prompt_tokens, row.cached_tokens, row.output_tokens)
    cost = [] if not priced else ["" if row.cost is None else f"{row.cost:,.4f}"]
    return [*map(of_count, counts), *cost]
