"""The API's endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from appliance.front import documents
from appliance.front.body import parse_body, read_body, receive_body
from appliance.front.box import Box
from appliance.front.call import call_of
from appliance.front.errors import invalid
from appliance.front.idempotency import answer, has_key
from appliance.front.job import Job
from appliance.front.models import allows
from appliance.front.prepare import (
    chat_job,
    chat_tokens,
    completion_job,
    decode,
    named_model,
    text_tokens,
)
from appliance.front.sampling import check_token_ids
from appliance.front.schemas import (
    ChatRequest,
    CompletionRequest,
    DeploymentChatRequest,
    DeploymentCompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from appliance.front.tokens import tokenized
from appliance.messages import ServedModel
from appliance.scopes import routes_for

_WHOLE_OR_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer; with `stream`, chunks as server-sent events, then [DONE].",
        "content": {"text/event-stream": {}},
    }
}

_IDEMPOTENCY_KEY = {
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "A retry with the same key and body joins the first request's run, or repeats its "
            "answer. With another body: 422.",
            "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
        }
    ]
}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": documents.ErrorDocument} for status in statuses}


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """Bodies are read by `read_body`; this is what the OpenAPI document says of them."""
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _document(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "appliance",
        "max_model_len": model.max_model_len,
    }


def api_routes(box: Box, describe: Callable[[], dict[str, Any]]) -> APIRouter:
    """Every endpoint but those of health. All of them need an identity, which the gate has found, of scope
    inference. `describe` makes the OpenAPI document."""
    router = APIRouter(responses=_errors(400, 401, 403, 408, 503), route_class=routes_for("inference"))
    with_model = _errors(404)
    with_body = _errors(404, 413, 415)
    generated = {**with_body, **_errors(409, 422, 429), **_WHOLE_OR_STREAMED}

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """This API, described."""
        return _json(describe())

    @router.get("/v1/models", response_model=documents.ModelListDocument, tags=["models"])
    async def list_models(request: Request) -> Response:
        """The served models that the key opens."""
        identity = call_of(request).identity
        served = [model for model in box.catalog.served if allows(identity, model.name)]
        return _json({"object": "list", "data": [_document(model) for model in served]})

    @router.get(
        "/v1/models/{model:path}",
        response_model=documents.ModelDocument,
        tags=["models"],
        responses=with_model,
    )
    async def show_model(request: Request, model: str) -> Response:
        """One served model."""
        return _json(_document(box.catalog.get(model, call_of(request).identity).served))

    async def generate(
        request: Request, kind: type[Any], make_job: Callable[..., Awaitable[Job]], model: str | None = None
    ) -> Response:
        """Answer a generation request whose body is of this kind; `model` is the one that its path names."""
        call = call_of(request)
        data = await receive_body(request, box.limits.max_body_bytes)
        body = parse_body(data, kind, box.limits.max_body_bytes, call)
        if model is not None:
            body.model = model
        if not has_key(request):
            # Two megabytes at most, which would otherwise be held until the prompt is encoded.
            data.clear()
        found = named_model(box, call, body)
        return await answer(box, request, call, data, lambda: make_job(box, found, call, body))

    @router.post(
        "/v1/chat/completions",
        response_model=documents.ChatCompletionDocument,
        responses=generated,
        openapi_extra=_body(ChatRequest) | _IDEMPOTENCY_KEY,
        tags=["generation"],
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await generate(request, ChatRequest, chat_job)

    @router.post(
        "/v1/completions",
        response_model=documents.CompletionDocument,
        responses=generated,
        openapi_extra=_body(CompletionRequest) | _IDEMPOTENCY_KEY,
        tags=["generation"],
    )
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await generate(request, CompletionRequest, completion_job)

    # Azure's routes. The longer path first: a model's name may have slashes.
    @router.post("/openai/deployments/{model:path}/chat/completions", include_in_schema=False)
    async def deployment_chat_completions(request: Request, model: str) -> Response:
        """Answer a conversation by the model that the path names."""
        return await generate(request, DeploymentChatRequest, chat_job, model)

    @router.post("/openai/deployments/{model:path}/completions", include_in_schema=False)
    async def deployment_completions(request: Request, model: str) -> Response:
        """Continue prompts by the model that the path names."""
        return await generate(request, DeploymentCompletionRequest, completion_job, model)

    @router.post(
        "/tokenize",
        response_model=documents.TokenizeDocument,
        responses=with_body,
        openapi_extra=_body(TokenizeRequest),
        tags=["tokens"],
    )
    async def tokenize(request: Request) -> Response:
        """Text, or a conversation, as the model's token ids."""
        call = call_of(request)
        body = await read_body(request, TokenizeRequest, box.limits.max_body_bytes)
        model = box.catalog.get(body.model, call.identity)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        if body.messages is not None:
            continues = bool(body.continue_final_message)
            tokens = await chat_tokens(
                box,
                model,
                call,
                body.messages,
                body.add_generation_prompt is not False and not continues,
                bool(body.add_special_tokens),
                continue_final_message=continues,
            )
        else:
            tokens = await text_tokens(
                box, model, call, body.prompt or "", body.add_special_tokens is not False
            )
        box.charge(call, len(tokens))
        return await tokenized(model, tokens, bool(body.return_token_strs))

    @router.post(
        "/detokenize",
        response_model=documents.DetokenizeDocument,
        responses=with_body,
        openapi_extra=_body(DetokenizeRequest),
        tags=["tokens"],
    )
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        call = call_of(request)
        body = await read_body(request, DetokenizeRequest, box.limits.max_body_bytes)
        model = box.catalog.get(body.model, call.identity)
        token_ids = check_token_ids(model, body.tokens, "tokens")
        box.charge(call, len(token_ids))
        return _json({"prompt": await decode(box, model, call, token_ids, skip_special=False)})

    return router
