"""Admin API routes that return lists page by page or as a stream. All require the `read` scope."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.admin.bodies import error_answer, json_answer
from appliance.admin.log_reading import LogReading
from appliance.admin.query import QueryError, parse_query, query_parameters
from appliance.admin.streams import Streams, TooManyStreamsError
from appliance.history.reader import NotRecordedError, TooManyValuesError
from appliance.http.openapi import Operation
from appliance.pages import (
    AuditPage,
    AuditQuery,
    LogPage,
    LogQuery,
    RequestLogQuery,
    RequestPage,
    UsageQuery,
    UsageReport,
)
from appliance.protocol import ErrorBody
from appliance.scopes import ScopedRoute
from store.errors import SlowQueryError, StoreError

Query = TypeVar("Query", RequestLogQuery, AuditQuery, LogQuery)

_ERRORS = dict.fromkeys((400, 401, 403, 503), ErrorBody)


def log_routes(reading: LogReading, streams: Streams) -> list[ScopedRoute]:
    """Return the routes for the request log, the audit trail, log lines and usage."""

    async def log_page(query: LogQuery) -> LogPage:
        return reading.log_page(query)

    async def usage(request: Request) -> Response:
        return json_answer(await reading.usage_report(parse_query(request, UsageQuery)))

    return [
        ScopedRoute(
            "GET",
            "/usage",
            answered(usage),
            wanted="read",
            operation=Operation(
                "Return the usage per day, tenant, key or model, with costs",
                answer=UsageReport,
                errors=_ERRORS,
                parameters=query_parameters(UsageQuery),
            ),
        ),
        _route(
            "/request-log",
            RequestLogQuery,
            RequestPage,
            reading.request_page,
            reading.follow_requests,
            streams,
            "Return a page of the request log, or follow the log",
        ),
        _route(
            "/audit",
            AuditQuery,
            AuditPage,
            reading.audit_page,
            reading.follow_audit,
            streams,
            "Return a page of the audit trail, or follow the trail",
        ),
        _route(
            "/logs",
            LogQuery,
            LogPage,
            log_page,
            reading.follow_log,
            streams,
            "Return the newest log lines of the core, front processes and replicas, or follow the log",
        ),
    ]


def _route(
    path: str,
    query_type: type[Query],
    page_type: Any,
    page: Callable[[Query], Awaitable[msgspec.Struct]],
    follow: Callable[[Query], AsyncIterator[bytes]],
    streams: Streams,
    summary: str,
) -> ScopedRoute:
    async def read(request: Request) -> Response:
        query = parse_query(request, query_type)
        if query.follow:
            return streams.response(follow(query))
        return json_answer(await page(query))

    operation = Operation(
        summary,
        answer=page_type,
        description="With `follow`, the response is a stream of JSON lines (application/x-ndjson).",
        errors=_ERRORS,
        parameters=query_parameters(query_type),
    )
    return ScopedRoute("GET", path, answered(read), wanted="read", operation=operation)


def answered(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint so that its errors become error responses."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (QueryError, SlowQueryError, TooManyValuesError) as error:
            return error_answer(400, str(error))
        except NotRecordedError as error:
            return error_answer(404, str(error))
        except (StoreError, TooManyStreamsError) as error:
            return error_answer(503, str(error))

    return answer
