"""The routes that tell without a key whether the service answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from appliance.front.box import Box
from appliance.front.documents import HealthDocument
from appliance.scopes import OPEN, routes_for

_RETRY_AFTER_S = 5
_OTHERWISE: dict[int | str, dict[str, Any]] = {404: {"model": HealthDocument}, 503: {"model": HealthDocument}}


def health_routes(box: Box) -> APIRouter:
    """Health: no identity needed."""
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
    async def ready(model: str | None = None) -> Response:
        """Whether a request would be answered now, to the model named or to each that is not drained; if not,
        why."""
        reason = ""
        if model is not None:
            reason = box.silent_models.get(model) or box.catalog.problems.get(model, "")
            if not reason and not box.catalog.serves(model):
                return _answer(404, "not_ready", f"there is no model {model!r}")
        elif not box.ready:
            reason = box.not_ready_reason or "no reason was given"
        elif box.catalog.problem:
            reason = box.catalog.problem
        return _answer(503, "not_ready", reason) if reason else _answer(200, "ready", None)

    return router


def _answer(status: int, word: str, reason: str | None) -> Response:
    headers = {"retry-after": str(_RETRY_AFTER_S)} if status == 503 else None
    body = msgspec.json.encode({"status": word, "reason": reason})
    return Response(body, status, headers, "application/json")
