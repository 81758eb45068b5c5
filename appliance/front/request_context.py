"""One HTTP request as the front sees it, from its header on."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from appliance.front.body_budget import BodyReservation
from appliance.http.headers import header
from appliance.messages import Identity

_SANE_ID = re.compile(rb"[A-Za-z0-9._:@+/=-]{1,64}")
_MAX_ECHOED_BYTES = 1024


class ResponseSink(Protocol):
    """Who is answered: a connection (`appliance.http.Connection`), or a recording for several."""

    on_writable: Callable[[], None] | None
    on_lost: Callable[[], None] | None
    last_chunk_at: float
    """When `write_chunk` was called last, in seconds of the monotonic clock; 0 before the first context."""

    @property
    def writable(self) -> bool: ...
    @property
    def lost(self) -> bool: ...
    def write_chunk(self, data: bytes) -> None: ...
    def release(self) -> None: ...
    def abort(self) -> None: ...
    def cut_off(self) -> None: ...


@dataclass(slots=True)
class RequestContext:
    """Who asked for what, and when. The gate makes it; the endpoint fills in model, stream and counts."""

    request_id: str
    identity: Identity
    peer: str
    endpoint: str
    connection: ResponseSink
    body: BodyReservation
    """The memory that is reserved for the request's body."""
    asked_class: str = ""
    deadline_ms: float | None = None
    """After `arrived_at`, when the whole answer must be there."""
    request_class: int | None = None
    """What it gets, 0 to 3, once its body says what it asks for."""
    model: str = ""
    stream: bool = False
    user: str = ""
    """The body's `user`, for the log."""
    prompt_tokens: int = 0
    encoded_tokens: int = 0
    """Of its prompts before `truncate_prompt_tokens` removed any."""
    work_tokens: int = 0
    """What parsing and encoding it has cost so far, in tokens. If this front refuses the request, its tenant
    is charged them."""
    admitted: bool = False
    """`Admit` was sent: the request ends with `Settle` or `Refused`, never with `Rejected`."""
    retry_of: str = ""
    """The request id of an earlier run with the same `Idempotency-Key`, whose answer is lost."""
    arrived_at: float = field(default_factory=time.time)
    """Unix seconds."""
    started: float = field(default_factory=time.monotonic)

    def elapsed_ms(self, until: float | None = None) -> float:
        """Milliseconds since the request's header was read."""
        return ((time.monotonic() if until is None else until) - self.started) * 1000.0


def context_of(request: Request) -> RequestContext:
    """The call that the gate made for this request."""
    context: RequestContext = request.scope["state"]["context"]
    return context


def make_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return a fresh request id, which is unique in the request log.

    It begins with the client's own `X-Request-Id`, if that has usual characters only: so an operator finds
    the request by the name that the client gave it, although clients repeat their id when they retry.
    """
    own = header(headers, b"x-request-id")
    if own is not None and _SANE_ID.fullmatch(own):
        return f"{own.decode()}.{secrets.token_hex(6)}"
    return f"req-{secrets.token_hex(12)}"


def response_ids(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """Return the response's headers that name the request: `x-request-id` is the client's own id, exactly as
    it was sent, or else the log's; `x-appliance-request-id` is always the log's."""
    own = header(headers, b"x-request-id")
    logged = request_id.encode()
    echoed = own if own and len(own) <= _MAX_ECHOED_BYTES else logged
    return [(b"x-request-id", echoed), (b"x-appliance-request-id", logged)]
