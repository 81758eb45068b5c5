"""Health checks, which require no identity.

A client without an identity learns only whether the service is ready. Model names and the reason for not
being ready are withheld.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.channel.identity import Identity
from appliance.front.app_state import AppState
from appliance.front.documents import ErrorDocument, HealthDocument, HealthState
from appliance.front.errors import unauthorized
from appliance.front.models import allows
from appliance.http.openapi import Operation
from appliance.scopes import OPEN, ScopedRoute

_RETRY_AFTER_S = 5
_MAX_NAME_SHOWN = 80
_MODEL = {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}


def health_routes(state: AppState) -> list[ScopedRoute]:
    """Return the routes of the health checks."""
    health = _Health(state)
    live = Operation(
        "Report that this server process is running", HealthDocument, tags=("health",), security=()
    )
    simple = live._replace(summary="Report whether the service is ready", errors={503: HealthDocument})
    ready = live._replace(
        summary="Report whether the service is ready to answer requests, with the reason if it is not",
        description="Checks every model that is not drained. With the `model` parameter, which requires a "
        "key, only that model is checked.",
        errors={401: ErrorDocument, 404: HealthDocument, 503: HealthDocument},
        parameters=(_MODEL,),
    )
    return [
        ScopedRoute("GET", "/health/live", health.live, wanted=OPEN, operation=live),
        ScopedRoute("GET", "/health", health.simple, wanted=OPEN, operation=simple),
        ScopedRoute("GET", "/health/ready", health.ready, wanted=OPEN, operation=ready),
    ]


class _Health:
    def __init__(self, state: AppState) -> None:
        self._state = state

    async def live(self, request: Request) -> Response:
        """Report that this front is responding."""
        return _answer(200, "live")

    async def simple(self, request: Request) -> Response:
        """Report readiness on a path that other inference servers also use. The response is the same as that
        of /health/ready, but without the reason, which would reveal model names."""
        is_ready = self._state.ready and not self._state.catalog.problem
        return _answer(200, "ready") if is_ready else _answer(503, "not_ready")

    async def ready(self, request: Request) -> Response:
        """Report whether one model, or every model that is not drained, is ready. Checking a single model
        requires an identity. When all models are checked, the reason is shown only to callers who may use
        every model."""
        state = self._state
        identity: Identity | None = request.scope["state"].get("identity")
        model = request.query_params.get("model")
        if model is not None:
            return self._ready_model(model, identity)
        if state.ready and not state.catalog.problem:
            return _answer(200, "ready")
        reason = state.catalog.problem if state.ready else state.not_ready_reason or "no reason was reported"
        if identity is None or identity.models is not None:
            reason = "not ready: to see the reason, send a key that permits all models"
        return _answer(503, "not_ready", reason)

    def _ready_model(self, model: str, identity: Identity | None) -> Response:
        state = self._state
        if identity is None:
            raise unauthorized(
                "checking a single model requires a key; send 'Authorization: Bearer KEY', or use "
                "/health/ready without a model",
                "missing_api_key",
            )
        unit = state.catalog.unit_of(model)
        reason = state.silent_models.get(model) or state.catalog.problems.get(unit, "")
        if not allows(identity, model) or not (reason or state.catalog.serves(model)):
            return _answer(
                404,
                "not_ready",
                f"there is no model {model[:_MAX_NAME_SHOWN]!r}; GET /v1/models lists the available models",
            )
        return _answer(503, "not_ready", reason) if reason else _answer(200, "ready")


def _answer(status: int, name: HealthState, reason: str | None = None) -> Response:
    headers = {"retry-after": str(_RETRY_AFTER_S)} if status == 503 else None
    body = msgspec.json.encode(HealthDocument(status=name, reason=reason))
    return Response(body, status, headers, "application/json")
