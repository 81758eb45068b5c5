"""Health checks, which need no identity.

Clients without one learn whether the service is ready, and nothing about its models: neither their names nor
what is wrong with them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from appliance.front.box import Box
from appliance.front.documents import ErrorDocument, HealthDocument
from appliance.front.errors import unauthorized
from appliance.front.models import allows
from appliance.messages import Identity
from appliance.scopes import OPEN, routes_for

_RETRY_AFTER_S = 5
_MAX_NAME_SHOWN = 80
_OTHERWISE: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorDocument},
    404: {"model": HealthDocument},
    503: {"model": HealthDocument},
}


def health_routes(box: Box) -> APIRouter:
    """Return the health routes."""
    router = APIRouter(tags=["health"], route_class=routes_for(OPEN))

    @router.get("/health/live", response_model=HealthDocument)
    async def live() -> Response:
        """Whether this front answers at all."""
        return _answer(200, "live", None)

    @router.get("/health", response_model=HealthDocument, responses={503: {"model": HealthDocument}})
    async def health() -> Response:
        """Whether a request would be answered now, as /health/ready; without the reason, which names models:
        the path that other servers have."""
        is_ready = box.ready and not box.catalog.problem
        return _answer(200, "ready", None) if is_ready else _answer(503, "not_ready", None)

    @router.get("/health/ready", response_model=HealthDocument, responses=_OTHERWISE)
    async def ready(request: Request, model: str | None = None) -> Response:
        """Whether a request would be answered now: by the model named, which needs a key, or by each model
        that is not drained. Why not is told to clients with a key or a user that the service knows."""
        identity: Identity | None = request.scope["state"].get("identity")
        if model is not None:
            if identity is None:
                raise unauthorized(
                    "whether one model is ready is told with a key only: send 'Authorization: Bearer KEY', "
                    "or ask for /health/ready",
                    "missing_api_key",
                )
            reason = box.silent_models.get(model) or box.catalog.problems.get(model, "")
            if not allows(identity, model) or not (reason or box.catalog.serves(model)):
                return _answer(404, "not_ready", f"there is no model {model[:_MAX_NAME_SHOWN]!r}")
            return _answer(503, "not_ready", reason) if reason else _answer(200, "ready", None)
        if box.ready and not box.catalog.problem:
            return _answer(200, "ready", None)
        reason = box.catalog.problem if box.ready else box.not_ready_reason or "no reason was given"
        if identity is None or identity.models is not None:
            reason = "not ready; the reason is told with a key for all models"
        return _answer(503, "not_ready", reason)

    return router


def _answer(status: int, word: str, reason: str | None) -> Response:
    headers = {"retry-after": str(_RETRY_AFTER_S)} if status == 503 else None
    body = msgspec.json.encode({"status": word, "reason": reason})
    return Response(body, status, headers, "application/json")
