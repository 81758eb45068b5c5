"""Answers requests with an `Idempotency-Key`: the first request runs, and retries receive its recorded
answer.

The rules follow draft-ietf-httpapi-idempotency-key-header and Stripe's API. An idempotency key is valid for
one caller, one endpoint and one body. A request that reuses a key with a different body is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.channel.front_messages import Claim, HandOver, Retried
from appliance.front.app_state import AppState
from appliance.front.body import ClientDisconnected
from appliance.front.errors import ApiError, invalid
from appliance.front.generation_task import GenerationTask
from appliance.front.request_context import RequestContext, context_of
from appliance.front.respond import GenerationResponse
from appliance.front.retries import KeyedRun
from appliance.host.memory_files import new_memory
from store.policies import INTERACTIVE

_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
_FRAMING = frozenset([b"content-length", b"transfer-encoding", b"expect"])
"""Headers that describe how the body was transferred."""

PrepareTask = Callable[[], Awaitable[GenerationTask]]


def key_of(request: Request) -> bytes | None:
    """Return the request's `Idempotency-Key`, or None if there is none. Raises a 400 if the key is
    invalid."""
    keys: list[bytes] = [value for name, value in request.scope["headers"] if name == b"idempotency-key"]
    if len(keys) > 1 or not all(_KEY.fullmatch(key) for key in keys):
        raise invalid(
            "Idempotency-Key", "must be sent once, with 1 to 255 printable ASCII characters and no spaces"
        )
    return keys[0] if keys else None


async def answer(
    state: AppState, request: Request, key: bytes, body: bytearray, prepare: PrepareTask
) -> Response:
    """Return the response to a generation request with an idempotency key. `prepare` is called if the request
    has to be run. Raises `ApiError` if the request is refused."""
    context, retries = context_of(request), state.retries
    connection = context.connection
    scope = _digest(context.identity.tenant, context.identity.key_id or context.peer, context.endpoint, key)
    # The model can be part of the path (Azure's routes), so include the path in the fingerprint.
    fingerprint = _digest(context.model, hashlib.sha256(body).digest())
    claim = Claim(scope, context.request_id)
    while True:
        run = retries.runs.get(scope)
        if run is None:
            claimed = await retries.claim(claim)
            if claimed.action == "run":
                break
            if claimed.action == "hand over":
                await _hand_over(state, request, scope, body)
                return Response()
            continue
        if run.fingerprint != fingerprint:
            raise ApiError(
                422,
                "this Idempotency-Key was already used with a different body: use a new key for each new "
                "request",
                param="Idempotency-Key",
                code="idempotency_key_reused",
            )
        was_running = not run.ended.is_set()
        if was_running:
            run.follow(connection)
            await run.ended.wait()
            connection.release()
        if connection.disconnected:
            raise ClientDisconnected
        if run.answer is not None:
            _log_retry(state, context, run, was_running)
            return run.answer
    body.clear()
    context.retry_of = claimed.retry_of
    run = retries.begin(claim, fingerprint)
    run.follow(connection)
    try:
        return _FirstResponse(state, context, await prepare(), run)
    except BaseException:
        run.end()
        raise


class _FirstResponse(GenerationResponse):
    """The response to the first request with an idempotency key. The `KeyedRun` also stores this response,
    for retries."""

    def __init__(self, state: AppState, context: RequestContext, task: GenerationTask, run: KeyedRun) -> None:
        super().__init__(state, context, task)
        self._run = run
        run.generation = self.generation
        run.generation.on_disconnect = partial(run.leave, context.connection)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run, connection = self._run, self._context.connection
        connection.on_chunk = run.record
        try:
            await super().__call__(scope, receive, partial(run.send, send))
            run.complete(self)
        finally:
            connection.on_chunk = None
            run.end()


def _log_retry(state: AppState, context: RequestContext, run: KeyedRun, was_running: bool) -> None:
    # `Retried` adds this request's only row in the log.
    context.admitted = True
    context.request_class = run.request_class
    state.to_core(
        Retried(
            **context.logged_fields(),
            retry="joined" if was_running else "repeated",
            retry_of=run.request_id,
            request_class=INTERACTIVE if run.request_class is None else run.request_class,
            status=run.status,
            finish_reason=run.finish_reason,
            e2e_ms=context.elapsed_ms(),
        )
    )


async def _hand_over(state: AppState, request: Request, key_scope: bytes, body: bytearray) -> None:
    """Pass the client's connection and request to the front that owns the idempotency key."""
    peer, connection = request.scope["state"]["peer"], request.scope["state"]["connection"]
    descriptor, further = await connection.leave()
    if connection.disconnected:
        return
    memory = new_memory("request", b"".join([_head(request.scope, len(body)), body, further]))
    try:
        state.hand_over(HandOver(key_scope, peer.kind, peer.address), (descriptor, memory))
    finally:
        os.close(memory)
    connection.abort()
    # Wait until this process has closed its own descriptor for the connection.
    await request.receive()


def _digest(*parts: str | bytes) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def _head(scope: Scope, length: int) -> bytes:
    """Return the request head as bytes, with a Content-Length header."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b %b HTTP/%b" % (scope["method"].encode(), target, scope["http_version"].encode())]
    lines += [b"%b: %b" % (name, value) for name, value in scope["headers"] if name not in _FRAMING]
    return b"\r\n".join([*lines, b"content-length: %d" % length, b"", b""])
