"""The API's endpoints. All of them require the `inference` scope. Routes that need no scope are in
`health`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.channel.served_models import Route
from appliance.front import documents
from appliance.front.app_state import AppState
from appliance.front.body import parse_body, read_body, receive_body
from appliance.front.errors import ApiError, invalid
from appliance.front.generation_task import GenerationTask, RequestCopy
from appliance.front.idempotency import key_of, respond
from appliance.front.models import LoadedModel, allows
from appliance.front.prepare_chat import chat_task
from appliance.front.prepare_completion import completion_task
from appliance.front.prepare_task import named_model
from appliance.front.request_context import RequestContext, context_of
from appliance.front.respond import GenerationResponse
from appliance.front.sampling import check_token_ids
from appliance.front.schemas import (
    ChatRequest,
    CompletionRequest,
    DeploymentChatRequest,
    DeploymentCompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from appliance.front.tokenization import chat_tokens, decode, text_tokens
from appliance.front.tokens import tokenized
from appliance.http.openapi import Operation
from appliance.scopes import ScopedRoute

Body = TypeVar("Body", bound=GenerationRequest)

SECURITY: tuple[dict[str, list[str]], ...] = ({"key": []},)
"""OpenAPI security requirement for the API's routes."""

_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "A retry with the same key and body joins the first request if it is still running, or "
    "gets the stored answer. A request with the same key and a different body is refused with 422.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


def api_routes(state: AppState, describe: Callable[[], dict[str, Any]]) -> list[ScopedRoute]:
    """Return the API's routes. `describe` returns the OpenAPI document."""
    api = _Api(state)

    async def openapi(request: Request) -> Response:
        return _json(describe())

    return [
        _route("GET", "/openapi.json", openapi),
        _route(
            "GET",
            "/v1/models",
            api.list_models,
            _models("List the served models", documents.ModelListDocument),
        ),
        _route(
            "GET",
            "/v1/models/{model:path}",
            api.show_model,
            _models("Show a served model", documents.ModelDocument, 404),
        ),
        _route(
            "POST",
            "/v1/chat/completions",
            api.chat_completions,
            _generation(
                "Generate an answer to a conversation", ChatRequest, documents.ChatCompletionDocument
            ),
        ),
        _route(
            "POST",
            "/v1/completions",
            api.completions,
            _generation("Continue one or more prompts", CompletionRequest, documents.CompletionDocument),
        ),
        # Azure's routes. The longer path comes first, because model names can contain slashes.
        _route("POST", "/openai/deployments/{model:path}/chat/completions", api.deployment_chat_completions),
        _route("POST", "/openai/deployments/{model:path}/completions", api.deployment_completions),
        _route(
            "POST",
            "/tokenize",
            api.tokenize,
            _tokens(
                "Convert text or a conversation to token ids", TokenizeRequest, documents.TokenizeDocument
            ),
        ),
        _route(
            "POST",
            "/detokenize",
            api.detokenize,
            _tokens("Convert token ids to text", DetokenizeRequest, documents.DetokenizeDocument),
        ),
    ]


class _Api:
    """The API's endpoints. The gate authenticates callers before any endpoint is called."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    async def list_models(self, request: Request) -> Response:
        """List the served models that the caller may use."""
        identity = context_of(request).identity
        listed = [route for route in self._state.catalog.listed if allows(identity, route.name)]
        return _json({"object": "list", "data": [_document(route) for route in listed]})

    async def show_model(self, request: Request) -> Response:
        """Show one served model."""
        name = request.path_params["model"]
        context = context_of(request)
        return _json(_document(self._state.catalog.describe(name, context.identity, context.caller)))

    async def chat_completions(self, request: Request) -> Response:
        """Generate an answer to a conversation."""
        return await self._generate(request, ChatRequest, chat_task)

    async def completions(self, request: Request) -> Response:
        """Generate continuations of one or more prompts."""
        return await self._generate(request, CompletionRequest, completion_task)

    async def deployment_chat_completions(self, request: Request) -> Response:
        """Generate an answer to a conversation, using the model named in the path."""
        return await self._generate(request, DeploymentChatRequest, chat_task)

    async def deployment_completions(self, request: Request) -> Response:
        """Generate continuations of prompts, using the model named in the path."""
        return await self._generate(request, DeploymentCompletionRequest, completion_task)

    async def tokenize(self, request: Request) -> Response:
        """Convert text or a conversation to token ids."""
        state, context = self._state, context_of(request)
        body = await read_body(request, TokenizeRequest, state.limits.max_body_bytes)
        model = await self._named(context, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "send either prompt or messages")
        if body.messages is not None:
            tokens = await chat_tokens(
                state,
                model,
                context,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                add_special_tokens=bool(body.add_special_tokens),
                continue_final_message=bool(body.continue_final_message),
            )
        else:
            special = body.add_special_tokens is not False
            (tokens,) = await text_tokens(
                state, model, context, [body.prompt or ""], add_special_tokens=special
            )
        state.charge(context, len(tokens))
        return await tokenized(model, tokens, bool(body.return_token_strs))

    async def detokenize(self, request: Request) -> Response:
        """Convert token ids to text."""
        state, context = self._state, context_of(request)
        body = await read_body(request, DetokenizeRequest, state.limits.max_body_bytes)
        model = await self._named(context, body.model)
        token_ids = check_token_ids(model, body.tokens, "tokens")
        state.charge(context, len(token_ids))
        return _json({"prompt": await decode(state, model, context, token_ids, skip_special=False)})

    async def _named(self, context: RequestContext, name: str) -> LoadedModel:
        return await self._state.catalog.find(
            name, context.identity, lambda: context.connection.disconnected, context.caller
        )

    async def _generate(
        self,
        request: Request,
        kind: type[Body],
        make_task: Callable[[AppState, LoadedModel, RequestContext, Body], Awaitable[GenerationTask]],
    ) -> Response:
        """Answer a generation request with a body of type `kind`. A model named in the path takes precedence
        over the one in the body."""
        state, context = self._state, context_of(request)
        data = await receive_body(request, state.limits.max_body_bytes)
        body = parse_body(data, kind, state.limits.max_body_bytes, context)
        body.model = request.path_params.get("model", body.model)
        fallback = state.catalog.fallback_of(body.model, context.identity)

        async def fall_back() -> GenerationTask:
            context.fallback_of, body.model = body.model, fallback
            return await make_task(state, await named_model(state, context, body), context, body)

        async def prepare() -> GenerationTask:
            task = await make_task(state, found, context, body)
            task.fall_back = fall_back if fallback and not context.fallback_of else None
            if unit := state.shadows.selects(state.catalog.route_of(context.model)):
                task.copy = RequestCopy(unit, lambda model, copied: make_task(state, model, copied, body))
            return task

        try:
            found = await named_model(state, context, body)
        except ApiError as error:
            if error.status != 503 or not fallback:
                raise
            context.fallback_of, body.model = body.model, fallback
            found = await named_model(state, context, body)
        key = key_of(request)
        if key is None:
            # Free the body's bytes. Otherwise, up to 2 MB would stay in memory while the prompt waits to be
            # encoded.
            data.clear()
            return GenerationResponse(state, context, await prepare())
        return await respond(state, request, key, data, prepare)


def _route(
    method: str,
    path: str,
    endpoint: Callable[[Request], Awaitable[Response]],
    operation: Operation | None = None,
) -> ScopedRoute:
    return ScopedRoute(method, path, endpoint, wanted="inference", operation=operation)


def _models(summary: str, kind: Any, *statuses: int) -> Operation:
    return Operation(summary, kind, tags=("models",), errors=_errors(*statuses), security=SECURITY)


def _tokens(summary: str, body: Any, kind: Any) -> Operation:
    errors = _errors(404, 413, 415)
    return Operation(summary, kind, tags=("tokens",), body=body, errors=errors, security=SECURITY)


def _generation(summary: str, body: Any, kind: Any) -> Operation:
    return Operation(
        summary,
        kind,
        answer_description="The complete answer. With `stream`, chunks of the answer as server-sent events, "
        "followed by [DONE].",
        streams=True,
        tags=("generation",),
        body=body,
        errors=_errors(404, 409, 413, 415, 422, 429),
        parameters=(_IDEMPOTENCY_KEY,),
        security=SECURITY,
    )


def _errors(*statuses: int) -> dict[int, Any]:
    return dict.fromkeys((400, 401, 403, 408, 503, *statuses), documents.ErrorDocument)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _document(route: Route) -> dict[str, Any]:
    return {
        "id": route.name,
        "object": "model",
        "created": route.created,
        "owned_by": "appliance",
        "max_model_len": route.max_model_len or None,
    }
