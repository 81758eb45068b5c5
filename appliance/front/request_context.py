"""The context of one HTTP request in the front, from the arrival of the request head to the end of the
response."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from appliance.channel.front_messages import LoggedFields
from appliance.channel.identity import Identity
from appliance.front.body_budget import BodyReservation
from appliance.http import Connection
from appliance.http.headers import header

_SANE_ID = re.compile(rb"[A-Za-z0-9._:@+/=-]{1,64}")
_MAX_ECHOED_BYTES = 1024


@dataclass(slots=True)
class RequestContext:
    """A request's caller, endpoint and timestamps. Created by the gate; the endpoint later adds the model,
    the token counts, and whether the answer is streamed."""

    request_id: str
    identity: Identity
    peer: str
    endpoint: str
    connection: Connection
    body: BodyReservation
    """Memory reserved for the request's body."""
    asked_class: str = ""
    deadline_ms: float | None = None
    """Time limit, in milliseconds, for the complete answer, measured from `arrived_at`."""
    request_class: int | None = None
    """The service class, 0 to 3, or None until the body has been parsed."""
    model: str = ""
    fallback_of: str = ""
    """The model that the client requested, if the request has been moved to that model's fallback."""
    stream: bool = False
    user: str = ""
    """The body's `user` field. Written to the request log."""
    prompt_tokens: int = 0
    encoded_tokens: int = 0
    """Number of prompt tokens before truncation (`truncate_prompt_tokens`)."""
    work_tokens: int = 0
    """Cost, in tokens, of the parsing and encoding that this front has done for the request. If the front
    refuses the request, the tenant is charged this cost."""
    admitted: bool = False
    """Whether `Admit` has been sent. If so, the request must be closed with `Settle` or `Refused` instead of
    `Rejected`."""
    prepared: Callable[[], None] = lambda: None
    """The function returned by `Catalog.prepare`. Call it after sending `Admit`, or when the request ends
    without being sent to the core."""
    retry_of: str = ""
    """Id of the earlier request with the same `Idempotency-Key`, if its answer is no longer stored."""
    arrived_at: float = field(default_factory=time.time)
    """Unix time at which the request arrived."""
    started: float = field(default_factory=time.monotonic)

    @property
    def caller(self) -> str:
        """The caller's identity for traffic splits: the key (or, for requests without a key, the local user)
        and the `user` field."""
        return f"{self.identity.key_id or self.peer}\0{self.user}"

    def logged_fields(self) -> dict[str, Any]:
        """Return the request's values for the fields of `LoggedFields`."""
        return {name: getattr(self, name) for name in LoggedFields.__struct_fields__}

    def elapsed_ms(self, until: float | None = None) -> float:
        """Return the time, in milliseconds, from reading the request head to `until` (default: now)."""
        return ((time.monotonic() if until is None else until) - self.started) * 1000.0


def context_of(request: Request) -> RequestContext:
    """Return the context that the gate created for the request."""
    context: RequestContext = request.scope["state"]["context"]
    return context


def make_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return a new request id, unique in the request log. If the client's `X-Request-Id` contains only common
    characters, the id begins with it, so that operators can find the request by the client's id. A suffix
    makes the id unique, because clients resend the same id when they retry.
    """
    own = header(headers, b"x-request-id")
    if own is not None and _SANE_ID.fullmatch(own):
        return f"{own.decode()}.{secrets.token_hex(6)}"
    return f"req-{secrets.token_hex(12)}"


def response_ids(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """Return the response headers that identify the request. `x-request-id` is the client's id exactly as
    sent, or the id in the request log if the client sent none. `x-appliance-request-id` is always the id in
    the request log."""
    own = header(headers, b"x-request-id")
    logged = request_id.encode()
    echoed = own if own and len(own) <= _MAX_ECHOED_BYTES else logged
    return [(b"x-request-id", echoed), (b"x-appliance-request-id", logged)]
