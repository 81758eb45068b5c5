"""Admin API routes for the recorded history. All require the `read` scope. The database is read in threads,
and each response is limited in rows and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.admin.log_reading import MAX_READ_S
from appliance.admin.log_routes import answered
from appliance.admin.query import parse_query, query_parameters
from appliance.history.pages import (
    AlertLogPage,
    AlertLogQuery,
    PastSnapshot,
    SnapshotQuery,
    StoredPage,
    StoredQuery,
    TelemetryColumns,
    TelemetryQuery,
)
from appliance.history.reader import PastReader
from appliance.http.openapi import Operation
from appliance.protocol import ErrorBody
from appliance.scopes import ScopedRoute

Query = TypeVar("Query", bound=msgspec.Struct)


def telemetry_routes(history: Path, threads: ThreadPoolExecutor) -> list[ScopedRoute]:
    """Return the routes. `history` is the path of `history.db`, and `threads` run the queries."""
    past = PastReader(history, limit_s=MAX_READ_S)

    def route(
        path: str, query_type: type[Query], answer: Any, read: Callable[[Query], Any], summary: str
    ) -> ScopedRoute:
        async def show(request: Request) -> Response:
            query = parse_query(request, query_type)

            def encoded() -> bytes:
                return msgspec.json.encode(read(query))

            body = await asyncio.get_running_loop().run_in_executor(threads, encoded)
            return Response(body, media_type="application/json")

        operation = Operation(
            summary,
            answer=answer,
            errors=dict.fromkeys((400, 401, 403, 404, 503), ErrorBody),
            parameters=query_parameters(query_type),
        )
        return ScopedRoute("GET", path, answered(show), wanted="read", operation=operation)

    return [
        route(
            "/telemetry/snapshot",
            SnapshotQuery,
            PastSnapshot,
            past.snapshot,
            "Return the service state at a past time",
        ),
        route(
            "/telemetry", TelemetryQuery, TelemetryColumns, past.columns, "Return recorded metrics over time"
        ),
        route(
            "/telemetry/stored",
            StoredQuery,
            StoredPage,
            past.stored,
            "Return a page of samples as they are stored, for export",
        ),
        route(
            "/alert-log",
            AlertLogQuery,
            AlertLogPage,
            past.alert_log,
            "Return the alerts raised between two times, plus those active at the start",
        ),
    ]
