"""Requests with an `Idempotency-Key`: the first request runs; retries join its run or receive its stored
response.

As in draft-ietf-httpapi-idempotency-key-header and at Stripe, a key is specific to its caller and to one
endpoint, and identifies one body: the same key with a different body is refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import os
import re
from collections.abc import Awaitable, Callable
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.front.app_state import AppState
from appliance.front.body_budget import BodyReservation
from appliance.front.comments import COMMENT
from appliance.front.errors import ApiError, invalid
from appliance.front.generation import CLIENT_DISCONNECTED
from appliance.front.generation_task import GenerationTask
from appliance.front.keyed_run import Follower, KeyedRun
from appliance.front.request_context import RequestContext
from appliance.front.respond import GenerationResponse
from appliance.http import Connection, drop_frames
from appliance.memory_files import new_memory
from appliance.messages import HandOver, Retried
from store.policies import INTERACTIVE

log = logging.getLogger(__name__)

HEADER = b"idempotency-key"
_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
_FRAMING = frozenset([b"content-length", b"transfer-encoding", b"expect"])
"""Headers that describe how the body was sent."""
_RATE_LIMITS = b"x-ratelimit-"
"""Prefix of headers that are no longer valid when a response is repeated."""

PrepareTask = Callable[[], Awaitable[GenerationTask]]


def key_of(request: Request) -> bytes | None:
    """Return the request's `Idempotency-Key`, or None. Raises a 400 for an invalid one."""
    keys: list[bytes] = [value for name, value in request.scope["headers"] if name == HEADER]
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        raise invalid(
            "Idempotency-Key", "must be sent once, with 1 to 255 printable ASCII characters and no spaces"
        )
    return keys[0]


async def answer(
    state: AppState,
    request: Request,
    context: RequestContext,
    key: bytes,
    body: bytearray,
    prepare: PrepareTask,
) -> Response:
    """Return the response to a generation request that has a key. `prepare` is called if the request needs to
    run. Raises `ApiError`."""
    scope = _digest(context.identity.tenant, context.identity.key_id or context.peer, context.endpoint, key)
    # Azure's routes contain the model in their path.
    fingerprint = _digest(context.model, hashlib.sha256(body).digest())
    known = state.retries.find(scope)
    run = known or state.retries.claim(scope, fingerprint, context.request_id)
    # The run is claimed once, on behalf of all requests that wait for it.
    claimed = await asyncio.shield(run.claimed)
    if claimed.is_elsewhere:
        await _hand_over(state, request, scope, body)
        return Response()
    if run.fingerprint != fingerprint:
        raise ApiError(
            422,
            "this Idempotency-Key was already used with a different body: use a new key for each new request",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )
    if known is None:
        context.retry_of = claimed.retry_of
        # The run may continue after this client has disconnected, and the caller then releases the body.
        state.background.run(_run(state, context, context.body.moved(), run, prepare))
    return _Replay(state, context, run, is_first=known is None)


async def _run(
    state: AppState, context: RequestContext, body: BodyReservation, run: KeyedRun, prepare: PrepareTask
) -> None:
    """Run the request, with `run` in place of a client connection. Releases `body`, which `prepare` uses."""
    scope: Scope = {"type": "http"}
    try:
        try:
            task = await prepare()
        finally:
            # This frame would keep the parsed body alive, which can be much larger than the prompts built
            # from it.
            del prepare
            run.request_class = context.request_class
        as_client = dataclasses.replace(context, connection=run, body=body)
        response = GenerationResponse(state, as_client, task, comments=False)
        run.generation = response.generation
        await response(scope, _receive_nothing, run.send)
        run.status = response.status
        run.finish_reason = response.generation.finish_reason(response.status)
    except ApiError as error:
        drop_frames(error)
        run.status = error.status
        state.reject(context, error)
        await error.response()(scope, _receive_nothing, run.send)
    except Exception as error:
        log.exception("request %s failed", context.request_id)
        drop_frames(error)
        run.abort()
    finally:
        body.release()
        run.end()
        state.retries.ended(run)


class _Replay(Response):
    """The response to the first request with a key, or to a retry: the run's answer from the beginning."""

    def __init__(self, state: AppState, context: RequestContext, run: KeyedRun, is_first: bool) -> None:
        super().__init__()
        self._state = state
        self._context = context
        self._run = run
        self._retry: Literal["joined", "repeated"] | None = None
        if not is_first:
            self._retry = "repeated" if run.ended else "joined"
        # The end of this request is logged by the run, or by the row for the retry.
        context.admitted = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        follower = self._run.follow(self._context.connection)
        try:
            await self._play(follower, send)
        finally:
            self._run.leave(follower)
            if self._retry:
                self._log(follower, self._retry)

    async def _play(self, follower: Follower, send: Send) -> None:
        run = self._run
        while not (run.ended or run.streamed or follower.left):
            await run.changed()
        if follower.left or run.head is None:
            # The run failed without producing an answer, so the HTTP server sends a 500.
            return
        self._state.streams += run.streamed
        try:
            await send({**run.head, "headers": self._replayed(run.head["headers"])})
            interval_s = self._state.limits.stream_comment_interval_s or None
            while not follower.left:
                if data := run.read(follower):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                elif run.ended:
                    break
                elif not await run.changed(interval_s):
                    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        finally:
            self._state.streams -= run.streamed
        if run.broken:
            follower.connection.abort()
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _replayed(self, recorded: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        if not self._retry:
            return recorded
        self._context.request_class = self._run.request_class
        return [
            *((name, value) for name, value in recorded if not name.startswith(_RATE_LIMITS)),
            (b"idempotent-replayed", b"true"),
            (b"x-appliance-retry-of", self._run.request_id.encode()),
        ]

    def _log(self, follower: Follower, retry: Literal["joined", "repeated"]) -> None:
        context, run, began = self._context, self._run, follower.first_bytes_at
        self._state.to_core(
            Retried(
                request_id=context.request_id,
                identity=context.identity,
                peer=context.peer,
                endpoint=context.endpoint,
                model=context.model,
                stream=context.stream,
                retry=retry,
                retry_of=run.request_id,
                request_class=INTERACTIVE if run.request_class is None else run.request_class,
                status=CLIENT_DISCONNECTED if follower.left else run.status,
                finish_reason="cancelled" if follower.left else run.finish_reason or "error",
                error="the client disconnected" if follower.left else "",
                arrived_at=context.arrived_at,
                ttft_ms=None if began is None else context.elapsed_ms(began),
                e2e_ms=context.elapsed_ms(),
                user=context.user,
            )
        )


async def _hand_over(state: AppState, request: Request, key_scope: bytes, body: bytearray) -> None:
    """Move the client's connection, including the request, to the front that has the run. Raises a 409 if
    further requests have already arrived on the connection."""
    connection: Connection = request.scope["state"]["connection"]
    if connection.lost:
        return
    descriptor = connection.leave()
    if descriptor is None:
        raise ApiError(
            409,
            "this retry cannot be continued on this connection, because further requests are already "
            "queued on it: send it again on a separate connection",
            code="idempotency_key_in_use",
            retry_after_s=1.0,
            headers={"connection": "close"},
        )
    memory = new_memory("request", _serialized(request.scope, body))
    try:
        peer = request.scope["state"]["peer"]
        state.hand_over(HandOver(key_scope, peer.kind, peer.address), (descriptor, memory))
    finally:
        os.close(memory)
    await connection.abandon()


def _digest(*parts: str | bytes) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def _serialized(scope: Scope, body: bytearray) -> bytes:
    """Serialize the request as HTTP with a content length."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b %b HTTP/%b" % (scope["method"].encode(), target, scope["http_version"].encode())]
    lines += [b"%b: %b" % (name, value) for name, value in scope["headers"] if name not in _FRAMING]
    lines += [b"content-length: %d" % len(body), b"", b""]
    return b"\r\n".join(lines) + body


async def _receive_nothing() -> dict[str, object]:
    raise RuntimeError("a stored answer cannot read the request body")
