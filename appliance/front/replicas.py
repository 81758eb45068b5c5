"""The front's channels to replicas."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from engine.client import ReplicaClient
from engine.messages import Output, Submit

log = logging.getLogger(__name__)


class Link:
    """The channel to one replica, and the callbacks for its loss."""

    def __init__(self, name: str, sock: socket.socket, on_closed: Callable[[Link], None]) -> None:
        self.name = name
        self._on_closed = on_closed
        self._owners: dict[int, Callable[[], None]] = {}
        self._client = ReplicaClient(sock, self._lost)

    @property
    def closed(self) -> bool:
        """Whether the replica is disconnected."""
        return self._client.closed

    @property
    def backlog_bytes(self) -> int:
        """Bytes of submissions that the replica's socket has not accepted yet."""
        return self._client.backlog_bytes

    def next_handle(self) -> int:
        """Return a new handle for a submission."""
        return self._client.next_handle()

    def submit(self, submit: Submit, sink: Callable[[Output], None], on_lost: Callable[[], None]) -> None:
        """Send a submission; `sink` gets its outputs. If the replica disconnects before they are complete,
        `on_lost` is called, once for each submission."""
        self._owners[submit.handle] = on_lost
        self._client.submit(submit, sink)

    def cancel(self, handle: int, sample: int | None = None) -> None:
        """Cancel the submission, or one sample of it."""
        self._client.cancel(handle, sample)

    def forget(self, handle: int) -> None:
        """Forget the submission's `on_lost`."""
        self._owners.pop(handle, None)

    def close(self) -> None:
        """Close the channel; the replica cancels the submissions of this front."""
        self._client.close()

    def _lost(self, handles: list[int]) -> None:
        self._on_closed(self)
        for handle in handles:
            on_lost = self._owners.pop(handle, None)
            if on_lost is not None:
                on_lost()


class Replicas:
    """The links by replica name. A restarted replica replaces its predecessor."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def attach(self, name: str, sock: socket.socket) -> None:
        """Add a channel to a replica."""
        self._links[name] = Link(name, sock, self._closed)

    def get(self, name: str) -> Link | None:
        """Return the open link to a replica, or None."""
        link = self._links.get(name)
        return None if link is None or link.closed else link

    def _closed(self, link: Link) -> None:
        log.warning("replica %s disconnected", link.name)
        if self._links.get(link.name) is link:
            del self._links[link.name]
