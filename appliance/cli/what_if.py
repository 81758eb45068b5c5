"""Prints the predicted effect of new limits (`--what-if`)."""

from __future__ import annotations

import msgspec

from appliance import calls
from appliance.cli.output import Column, of_count, print_json, print_table, printable
from appliance.cli.service import admin_client
from appliance.cli.times import local

_COLUMNS = (
    Column("TENANT", flexible=True),
    Column("REQUESTS", right=True, drop=3),
    Column("OVER LIMIT", right=True),
    Column("REFUSED", right=True, drop=2),
    Column("TTFT P99", right=True, drop=1),
    Column("E2E P99", right=True),
)


def print_forecast(run_dir: str | None, asked: msgspec.Struct, *, as_json: bool) -> None:
    """Print the predicted outcomes of each tenant's requests next to the recorded outcomes."""
    with admin_client(run_dir) as client:
        forecast = client.call(calls.what_if(asked))
    if as_json:
        print_json(forecast)
        return
    print(
        f"replay of {of_count(forecast.requests)} requests since {local(forecast.since)}: recorded → with "
        "the new limits; nothing was changed"
    )
    if forecast.left_out:
        print(
            f"{of_count(forecast.left_out)} requests are left out: they are invalid, or no ready replica has "
            "a known speed"
        )
    rows = []
    for one in forecast.tenants:
        before, after = one.recorded, one.predicted
        rows.append(
            (
                printable(one.tenant),
                of_count(before.admitted + before.over_quota + before.refused),
                f"{of_count(before.over_quota)} → {of_count(after.over_quota)}",
                f"{of_count(before.refused)} → {of_count(after.refused)}",
                f"{_ms(before.ttft_p99_ms)} → {_ms(after.ttft_p99_ms)}",
                f"{_ms(before.e2e_p99_ms)} → {_ms(after.e2e_p99_ms)}",
            )
        )
    print_table(_COLUMNS, rows)


def _ms(value: float | None) -> str:
    return "--" if value is None else f"{value:,.0f} ms"
