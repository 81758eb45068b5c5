"""Parses the received bytes of a connection, one request at a time."""

from __future__ import annotations

from appliance.http.bodies import Body, body_of
from appliance.http.heads import HeadReader, RequestHead

PIECE_BYTES = 64 << 10
"""Maximum number of body bytes that are parsed at once."""


class RequestParser:
    """Parses the head of a request, and then its body in pieces."""

    def __init__(self, received: bytes) -> None:
        """`received` contains the bytes that another process had already read from the connection."""
        self.received = bytearray(received)
        """Received bytes that have not been parsed yet."""
        self.head = HeadReader()
        """The head of the next request, or None."""
        self.body: Body | None = None
        """The body of the request in progress, or None if the body is complete."""

    def read_head(self) -> RequestHead | None:
        """Return the head of the next request, or None if the head is not complete yet. Raises
        RequestError."""
        head = self.head.feed(self.received)
        if head is not None:
            self.head, body = HeadReader(), body_of(head)
            self.body = None if body.complete else body
        return head

    def read_body(self) -> bytes:
        """Return the content of the next piece of the body. Raises RequestError."""
        assert self.body is not None
        content, consumed = self.body.feed(bytes(self.received[:PIECE_BYTES]))
        del self.received[:consumed]
        if self.body.complete:
            self.body = None
        return content

    def drop(self) -> None:
        """Drop the bytes that have not been parsed, and the unfinished head."""
        self.received.clear()
        self.head = HeadReader()
