"""Parses a connection's received bytes, one request at a time."""

from __future__ import annotations

from appliance.http.bodies import Body, body_of
from appliance.http.heads import HeadReader, RequestHead

PIECE_BYTES = 64 << 10
"""Maximum number of body bytes to parse at once."""


class RequestParser:
    """Parses a request's head, and then its body in pieces."""

    def __init__(self, received: bytes) -> None:
        """`received` holds bytes already read from the connection by another process."""
        self.received = bytearray(received)
        """Received bytes not yet parsed."""
        self.head = HeadReader()
        """The head of the next request, or None if it is not complete yet."""
        self.body: Body | None = None
        """The body of the request in progress, or None if the body is complete."""

    def read_head(self) -> RequestHead | None:
        """Return the next request's head, or None if it is not complete yet. Raises RequestError if the head
        is too long or malformed."""
        head = self.head.feed(self.received)
        if head is not None:
            self.head, body = HeadReader(), body_of(head)
            self.body = None if body.complete else body
        return head

    def read_body(self) -> bytes:
        """Return the next piece of body content. Raises RequestError if the body is malformed."""
        assert self.body is not None
        content, consumed = self.body.feed(bytes(self.received[:PIECE_BYTES]))
        del self.received[:consumed]
        if self.body.complete:
            self.body = None
        return content

    def drop(self) -> None:
        """Drop unparsed bytes and the unfinished head."""
        self.received.clear()
        self.head = HeadReader()
