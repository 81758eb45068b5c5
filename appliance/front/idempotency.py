"""Answers requests with an `Idempotency-Key`: the first request runs, and retries receive its recorded
answer.

The rules follow draft-ietf-httpapi-idempotency-key-header and Stripe's API. An idempotency key is valid for
one caller, one endpoint and one body. A request that reuses a key with a different body is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from appliance.channel.front_messages import Claim, HandOver, Retried
from appliance.front.app_state import AppState
from appliance.front.body import ClientDisconnected
from appliance.front.errors import ApiError, invalid
from appliance.front.generation_task import GenerationTask
from appliance.front.request_context import context_of
from appliance.front.respond import GenerationResponse
from appliance.host.memory_files import new_memory

_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
_FRAMING = frozenset([b"content-length", b"transfer-encoding", b"expect"])
"""Headers that describe how the body was transferred."""

PrepareTask = Callable[[], Awaitable[GenerationTask]]


def key_of(request: Request) -> bytes | None:
    """Return the request's `Idempotency-Key`, or None if there is none. Raises a 400 if it is invalid."""
    keys: list[bytes] = [value for name, value in request.scope["headers"] if name == b"idempotency-key"]
    if len(keys) > 1 or not all(_KEY.fullmatch(key) for key in keys):
        raise invalid(
            "Idempotency-Key", "must be sent once, with 1 to 255 printable ASCII characters and no spaces"
        )
    return keys[0] if keys else None


async def respond(
    state: AppState, request: Request, key: bytes, body: bytearray, prepare: PrepareTask
) -> Response:
    """Return the response to a generation request with an idempotency key. `prepare` is called if the request
    has to be run. Raises `ApiError` if the request is refused."""
    context, retries = context_of(request), state.retries
    caller = context.identity.tenant, context.identity.key_id or context.peer
    scope = hashlib.sha256(repr((caller, request.scope["path"], key)).encode()).digest()
    fingerprint = hashlib.sha256(body).digest()
    while True:
        run = retries.runs.get(scope) or retries.claim(Claim(scope, context.request_id), fingerprint)
        claimed = await asyncio.shield(run.claimed)
        if claimed.hand_over:
            await _hand_over(state, request, scope, body)
            return Response()
        if run.claim.request_id == context.request_id:
            break
        if run.fingerprint != fingerprint:
            raise ApiError(
                422,
                "this Idempotency-Key was used with a different body: use a new key for each new request",
                param="Idempotency-Key",
                code="idempotency_key_reused",
            )
        retry = "repeated" if run.answer.done() else "joined"
        answer = await asyncio.shield(run.answer)
        if context.connection.disconnected:
            raise ClientDisconnected
        if answer is not None:
            context.request_class = run.log_fields["request_class"]
            row = context.logged_fields() | run.log_fields | {"retry": retry}
            state.to_core(Retried(**row, e2e_ms=context.elapsed_ms()))
            return answer
    body.clear()
    context.retry_of = claimed.retry_of
    try:
        return GenerationResponse(state, context, await prepare(), run)
    except BaseException:
        retries.drop(run)
        raise


async def _hand_over(state: AppState, request: Request, key_scope: bytes, body: bytearray) -> None:
    """Pass the client's connection and request to the front that owns the idempotency key."""
    scope = request.scope
    peer, connection = scope["state"]["peer"], scope["state"]["connection"]
    descriptor, further = await connection.leave()
    if connection.disconnected:
        return
    target = b"%b?%b" % (scope["raw_path"], scope["query_string"])
    lines = [b"%b %b HTTP/%b" % (scope["method"].encode(), target, scope["http_version"].encode())]
    lines += [b"%b: %b" % (name, value) for name, value in scope["headers"] if name not in _FRAMING]
    lines += [b"content-length: %d" % len(body), b"", b""]
    data = b"".join([b"\r\n".join(lines), body, further])
    with open(new_memory("request", data), "rb") as memory:
        state.hand_over(HandOver(key_scope, peer.address), (descriptor, memory.fileno()))
    connection.abort()
