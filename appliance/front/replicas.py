"""The front's channels to replicas."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from engine.client import ReplicaClient
from engine.messages import Output, Submit

log = logging.getLogger(__name__)


class Link:
    """One replica, and who is to be told when it is lost."""

    def __init__(self, name: str, sock: socket.socket, on_closed: Callable[[Link], None]) -> None:
        self.name = name
        self._on_closed = on_closed
        self._owners: dict[int, Callable[[], None]] = {}
        self._client = ReplicaClient(sock, self._lost)

    @property
    def closed(self) -> bool:
        """The replica is gone."""
        return self._client.closed

    @property
    def backlog_bytes(self) -> int:
        """Bytes of submissions that the replica's socket has not accepted yet."""
        return self._client.backlog_bytes

    def next_handle(self) -> int:
        """A handle for a submission, never used before."""
        return self._client.next_handle()

    def submit(self, submit: Submit, sink: Callable[[Output], None], on_lost: Callable[[], None]) -> None:
        """Send it; `sink` gets its outputs. If the replica dies first, `on_lost` is called, once for each
        submission that had not ended."""
        self._owners[submit.handle] = on_lost
        self._client.submit(submit, sink)

    def cancel(self, handle: int, sample: int | None = None) -> None:
        """Nobody waits for the submission, or for this sample of it."""
        self._client.cancel(handle, sample)

    def forget(self, handle: int) -> None:
        """Its owner needs no word of a lost replica any more."""
        self._owners.pop(handle, None)

    def close(self) -> None:
        """Let go of the replica: it cancels what came from here."""
        self._client.close()

    def _lost(self, handles: list[int]) -> None:
        self._on_closed(self)
        for handle in handles:
            on_lost = self._owners.pop(handle, None)
            if on_lost is not None:
                on_lost()


class Replicas:
    """The links by the replicas' names; a restarted replica takes its predecessor's place."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    def attach(self, name: str, sock: socket.socket) -> None:
        """A new channel to a replica."""
        self._links[name] = Link(name, sock, self._closed)

    def get(self, name: str) -> Link | None:
        """The live link to a replica, or None."""
        link = self._links.get(name)
        return None if link is None or link.closed else link

    def _closed(self, link: Link) -> None:
        log.warning("replica %s is gone", link.name)
        if self._links.get(link.name) is link:
            del self._links[link.name]
