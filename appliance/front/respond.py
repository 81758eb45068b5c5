"""Runs a generation task and writes its answer, either in one piece or as a stream."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from appliance.front.answers import answer_steps
from appliance.front.app_state import AppState
from appliance.front.body import ClientDisconnected
from appliance.front.comments import HEAD_DELAY_S, happens_within, send_comments
from appliance.front.errors import ApiError, internal_error
from appliance.front.generation import CLIENT_DISCONNECTED, Generation
from appliance.front.generation_task import GenerationTask
from appliance.front.request_context import RequestContext
from appliance.front.retries import KeyedRun
from appliance.front.stream import EventStream
from appliance.front.turns import in_turns

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse(Response):
    """The response to a generation request. The end of the request is always reported to the core."""

    def __init__(
        self, state: AppState, context: RequestContext, task: GenerationTask, run: KeyedRun | None = None
    ) -> None:
        """If `run` is given, it keeps the answer for retries."""
        super().__init__()
        self.generation = Generation(state, context, task)
        if run is not None:
            self.generation.record = partial(state.retries.record, run, self.generation)
        self.status = 500
        """The request's final status. For a stream, it may differ from the 200 in the response head."""
        self._state = state
        self._context = context
        self._task = task
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._run is None and self._context.connection.disconnected:
            raise ClientDisconnected
        if not self._task.needs_body:
            # The request has been prepared, so its body's memory can be released.
            self._context.body.release()
        generation = self.generation
        error = internal_error().message
        try:
            if self._task.stream:
                failure = await self._stream(generation, scope, receive, send)
            else:
                failure = await self._whole(generation, scope, receive, send)
            self.status, error = (200, "") if failure is None else (failure.status, failure.message)
            if generation.left:
                self.status = CLIENT_DISCONNECTED
        finally:
            if not generation.ended.is_set():
                generation.abort(error)
            generation.settle(self.status, error)
            if self._run is not None:
                self._state.retries.end(self._run, generation, self.status)
            # The generation's callbacks refer to the stream, which refers back to the generation. Break this
            # reference cycle so that both are freed immediately; the garbage collector would free them only
            # after about a thousand streams.
            generation.on_progress = generation.on_end = generation.on_fallback = generation.record = None
            self._state.active.pop(self._context.request_id, None)
            if generation.is_kept and generation.ran:
                self._state.keeper.keep(generation.transcript())
            self._context.body.release()
            self._context.connection.release()
            if self.status == 200 and not generation.left:
                self._state.shadows.begin(generation)

    async def _whole(
        self, generation: Generation, scope: Scope, receive: Receive, send: Send
    ) -> ApiError | None:
        generation.start()
        await generation.ended.wait()
        if generation.left:
            return None
        if generation.failure is not None:
            await self._fail(generation, generation.failure, scope, receive, send)
            return generation.failure
        answer = await in_turns(answer_steps(generation))
        if generation.record is not None:
            generation.record(answer)
        response = Response(answer, headers=generation.headers, media_type="application/json")
        await response(scope, receive, send)
        if not generation.left:
            generation.delivered_tokens = sum(sample.delivered for sample in generation.samples)
        return None

    async def _stream(
        self, generation: Generation, scope: Scope, receive: Receive, send: Send
    ) -> ApiError | None:
        stream = EventStream(generation)
        generation.start()
        # Delay the response head, so that the response can still carry the HTTP status of an early error.
        interval_s = self._state.limits.stream_comment_interval_s
        if interval_s:
            await happens_within(generation.begun, HEAD_DELAY_S)
        else:
            await generation.begun.wait()
        if generation.left:
            return None
        if generation.failure is not None:
            await self._fail(generation, generation.failure, scope, receive, send)
            return generation.failure
        headers = [(name.encode(), value.encode()) for name, value in generation.headers.items()]
        self._state.streams += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS + headers})
            stream.open()
            if interval_s:
                await send_comments(self._context.connection, stream, interval_s)
            await stream.done.wait()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._state.streams -= 1
        return generation.failure

    async def _fail(
        self, generation: Generation, failure: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        failure.headers.update(generation.headers)
        await failure.response()(scope, receive, send)
