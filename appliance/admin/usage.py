"""Reports usage per day, tenant, key and model, with costs at the prices in the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from appliance.admin.query import QueryError
from appliance.pages import USAGE_COLUMNS, UsageQuery, UsageReport, UsageRow
from appliance.settings import ModelPrices
from store.policies import Policies
from store.usage import DailyUsage, UsageFilter, read_usage

DEFAULT_DAYS = 30
MAX_DAILY_ROWS = 50_000
"""Maximum number of daily usage rows that a report may add up."""
_MILLION = 1e6


class UsageReader:
    """Reads the usage of tenants, keys and models. `report` may be called from any thread."""

    def __init__(
        self,
        path: Path,
        prices: Callable[[], Mapping[str, ModelPrices]],
        policies: Callable[[], Policies],
        limit_s: float,
    ) -> None:
        self._path = path
        self._prices = prices
        self._policies = policies
        self._limit_s = limit_s

    def report(self, query: UsageQuery) -> UsageReport:
        """Return the usage selected by the query. Raises QueryError if the query is invalid, and StoreError
        if the database fails."""
        today = datetime.now(UTC).date()
        since = query.since or (today - timedelta(days=DEFAULT_DAYS)).isoformat()
        until = query.until or today.isoformat()
        for name, day in (("since", since), ("until", until)):
            try:
                datetime.fromisoformat(day)
            except ValueError:
                raise QueryError(f"{name}={day!r} is not valid: use a day such as 2026-11-20") from None
        wanted = UsageFilter(since, until, query.tenant, query.key_id, query.model)
        rows = read_usage(self._path, wanted, MAX_DAILY_ROWS + 1, self._limit_s)
        if len(rows) > MAX_DAILY_ROWS:
            raise QueryError(
                f"the usage from {since} to {until} has more than {MAX_DAILY_ROWS:,} daily rows: select "
                "fewer days, or one tenant, key or model"
            )
        prices, keys = self._prices(), self._policies().keys
        by = query.by.split(",")
        groups: dict[tuple[str, ...], list[DailyUsage]] = {}
        columns = [column for column in USAGE_COLUMNS if column in by]
        for row in rows:
            groups.setdefault(tuple(_value(row, column) for column in columns), []).append(row)
        reported = []
        for values, group in groups.items():
            summed = _sum(group, prices)
            for column, value in zip(columns, values, strict=True):
                setattr(summed, "key_id" if column == "key" else column, value)
            if summed.key_id and (key := keys.get(summed.key_id)) is not None:
                summed.key_name = key.name
            reported.append(summed)
        used = {row.model for row in rows if row.model and row.prompt_tokens + row.output_tokens}
        return UsageReport(
            rows=reported,
            total=_sum(rows, prices),
            unpriced_models=sorted(used - prices.keys()) if prices else [],
        )


def _value(row: DailyUsage, column: str) -> str:
    return str(getattr(row, "key_id" if column == "key" else column))


def _sum(rows: Iterable[DailyUsage], prices: Mapping[str, ModelPrices]) -> UsageRow:
    """Return the totals of these rows, including costs."""
    total = UsageRow(requests=0, failed=0, prompt_tokens=0, cached_tokens=0, output_tokens=0)
    for row in rows:
        for name in ("requests", "failed", "prompt_tokens", "cached_tokens", "output_tokens"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
        if (price := prices.get(row.model)) is not None:
            total.cost = (total.cost or 0.0) + cost(row, price)
    return msgspec.structs.replace(total, cost=None if total.cost is None else round(total.cost, 6))


def cost(row: DailyUsage, price: ModelPrices) -> float:
    """Return the cost of a row's usage, at the prices of the row's model."""
    cached = price.prompt if price.cached is None else price.cached
    prompt_tokens = max(0, row.prompt_tokens - row.cached_tokens)
    amount = prompt_tokens * price.prompt + row.cached_tokens * cached + row.output_tokens * price.output
    return amount / _MILLION
