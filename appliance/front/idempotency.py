"""Requests with an `Idempotency-Key`: the first one runs, its retries join the run or get its answer again.

As in draft-ietf-httpapi-idempotency-key-header and at Stripe: a key belongs to who uses it and to one
endpoint, and goes with one body; the same key with another body is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.front.body_budget import BodyReservation
from appliance.front.box import Box
from appliance.front.call import Call
from appliance.front.comments import send_comments
from appliance.front.errors import ApiError
from appliance.front.generation import CLIENT_LEFT
from appliance.front.job import Job
from appliance.front.recording import Follower
from appliance.front.respond import GenerationResponse
from appliance.front.retries import Record
from appliance.http import Connection, drop_frames
from appliance.memory_files import new_memory
from appliance.messages import HandOver, Retried
from store.policies import INTERACTIVE

log = logging.getLogger(__name__)

HEADER = b"idempotency-key"
_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
_UNSAID = frozenset([b"content-length", b"transfer-encoding", b"expect"])
"""Headers that say how the body came, not what is asked."""
_OF_ITS_TIME = b"x-ratelimit-"

PrepareJob = Callable[[], Awaitable[Job]]


def has_key(request: Request) -> bool:
    """Return whether the request has an `Idempotency-Key`; only then `answer` needs the request's body."""
    return any(name == HEADER for name, _ in request.scope["headers"])


async def answer(box: Box, request: Request, call: Call, body: bytearray, prepare: PrepareJob) -> Response:
    """Return the response to a generation request, whose job `prepare` makes if it is to run. Raises
    `ApiError`."""
    key = _key(request)
    if key is None:
        return GenerationResponse(box, call, await prepare())
    scope = _digest(call.identity.tenant, call.identity.key_id or call.peer, call.endpoint, key)
    # Azure's routes have the model in their path.
    fingerprint = _digest(call.model, body)
    while (known := box.retries.find(scope)) is not None and known.fingerprint != fingerprint:
        await known.claimed.wait()
        if known.verdict == "run":
            raise _conflict()
        # That body was refused, or went to the front that has it: this one asks for itself.
    record = known or box.retries.claim(scope, fingerprint, call.request_id)
    first = known is None
    await record.claimed.wait()
    if record.verdict == "conflict":
        raise _conflict()
    if record.verdict == "elsewhere":
        return MovedResponse(box, call, scope, body)
    if first:
        # The run may outlast this client, with which the caller releases the body.
        box.background.run(_run(box, call, call.body.moved(), record, prepare))
    return RecordedResponse(box, call, record, first)


async def _run(box: Box, call: Call, body: BodyReservation, record: Record, prepare: PrepareJob) -> None:
    """Run the request as if the recording were its client. Releases `body`, which is what `prepare` holds."""
    recording, good = record.recording, False
    scope: Scope = {"type": "http"}
    try:
        try:
            job = await prepare()
        finally:
            # It holds the parsed body, which may be much longer than the prompts that are left of it.
            del prepare
            record.request_class = call.request_class
        as_client = dataclasses.replace(call, connection=recording, body=body, retry_of=record.retry_of)
        response = GenerationResponse(box, as_client, job, comments=False)
        recording.counts = response.generation
        await response(scope, _nothing, recording.send)
        record.status = response.status
        record.finish_reason = response.generation.finish_reason(response.status)
        good = response.status == 200
    except ApiError as error:
        drop_frames(error)
        record.status = error.status
        box.reject(call, error)
        await error.response()(scope, _nothing, recording.send)
    except Exception as error:
        log.exception("request %s failed", call.request_id)
        drop_frames(error)
        recording.abort()
    finally:
        body.release()
        box.retries.ended(record, good)
        recording.end()


class RecordedResponse(Response):
    """The response to the first request with a key, or to a retry: what the run answers, from its
    beginning."""

    def __init__(self, box: Box, call: Call, record: Record, first: bool) -> None:
        super().__init__()
        self._box = box
        self._call = call
        self._record = record
        self._retry = "" if first else "repeated" if record.recording.ended else "joined"
        # From here on the request ends with its run, or with a row of its own.
        call.admitted = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._box.retries.joined(self._record)
        follower = Follower(self._record.recording, self._call.connection)
        try:
            await follower.begun.wait()
            if not follower.left:
                await self._play(follower, send)
        finally:
            follower.close()
            if self._retry:
                self._log(follower)

    async def _play(self, follower: Follower, send: Send) -> None:
        recording = follower.recording
        head = recording.head
        if head is None:
            error = ApiError(500, "the front failed to answer; its log says why", code="internal")
            await error.response()({"type": "http"}, _nothing, send)
            return
        headers = head["headers"]
        if self._retry:
            self._call.request_class = self._record.request_class
            headers = [
                *((name, value) for name, value in headers if not name.startswith(_OF_ITS_TIME)),
                (b"idempotent-replayed", b"true"),
                (b"x-appliance-retry-of", self._record.request_id.encode()),
            ]
        if recording.streamed:
            self._box.streams += 1
            try:
                await send({**head, "headers": headers})
                follower.open()
                if interval_s := self._box.limits.stream_comment_interval_s:
                    await send_comments(follower.connection, follower.done, interval_s)
                await follower.done.wait()
            finally:
                self._box.streams -= 1
        else:
            await follower.done.wait()
            if follower.left:
                return
            await send({**head, "headers": headers})
            while piece := follower.read():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _log(self, follower: Follower) -> None:
        call, record = self._call, self._record
        self._box.to_core(
            Retried(
                request_id=call.request_id,
                identity=call.identity,
                peer=call.peer,
                endpoint=call.endpoint,
                model=call.model,
                stream=call.stream,
                retry=self._retry,
                retry_of=record.request_id,
                request_class=INTERACTIVE if record.request_class is None else record.request_class,
                status=CLIENT_LEFT if follower.left else record.status,
                finish_reason="cancelled" if follower.left else record.finish_reason or "error",
                error="the client left" if follower.left else "",
                arrived_at=call.arrived_at,
                ttft_ms=None if follower.first_bytes_at is None else call.elapsed_ms(follower.first_bytes_at),
                e2e_ms=call.elapsed_ms(),
                user=call.user,
            )
        )


class MovedResponse(Response):
    """Another front has the run: the client's connection goes there, with the request as it came."""

    def __init__(self, box: Box, call: Call, scope: bytes, body: bytearray) -> None:
        super().__init__()
        self._box = box
        self._call = call
        self._scope = scope
        self._request_body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"]["connection"]
        if connection.lost:
            return
        descriptor = connection.leave()
        if descriptor is None:
            error = ApiError(
                409,
                "the request with this Idempotency-Key is known, but further requests are already on this "
                "connection: send it again on a connection of its own",
                code="idempotency_key_in_use",
                retry_after_s=1.0,
                headers={"connection": "close"},
            )
            self._box.reject(self._call, error)
            await error.response()(scope, receive, send)
            return
        request = new_memory("request", _as_it_came(scope, self._request_body))
        try:
            peer = scope["state"]["peer"]
            self._box.hand_over(HandOver(self._scope, peer.kind, peer.address), (descriptor, request))
        finally:
            os.close(request)
        await connection.abandon()


def _key(request: Request) -> bytes | None:
    keys = [value for name, value in request.scope["headers"] if name == HEADER]
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        raise ApiError(
            400,
            "Idempotency-Key: give it once, with 1 to 255 printable ASCII characters and no spaces",
            param="Idempotency-Key",
            code="invalid_value",
        )
    key: bytes = keys[0]
    return key


def _digest(*parts: str | bytes | bytearray) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


def _conflict() -> ApiError:
    return ApiError(
        422,
        "this Idempotency-Key was used with another body: a key stands for one request; send a new key with "
        "a new request",
        param="Idempotency-Key",
        code="idempotency_key_reused",
    )


def _as_it_came(scope: Scope, body: bytearray) -> bytes:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b %b HTTP/%b" % (scope["method"].encode(), target, scope["http_version"].encode())]
    lines += [b"%b: %b" % (name, value) for name, value in scope["headers"] if name not in _UNSAID]
    lines += [b"content-length: %d" % len(body), b"", b""]
    return b"\r\n".join(lines) + body


async def _nothing() -> dict[str, object]:
    raise RuntimeError("a recording says nothing")
