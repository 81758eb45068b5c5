"""The front's channels to replicas."""

from __future__ import annotations

import logging
import socket

from engine.client import ReplicaClient

log = logging.getLogger(__name__)


class ReplicaChannels:
    """The front's channels to replicas, by replica name. A replica keeps its name when it restarts."""

    def __init__(self) -> None:
        self._clients: dict[str, ReplicaClient] = {}

    def attach(self, name: str, sock: socket.socket) -> None:
        """Use a new channel for a replica, replacing the previous one."""

        def closed(handles: list[int]) -> None:
            log.warning("disconnected from replica %s", name)
            if self._clients.get(name) is client:
                del self._clients[name]

        client = self._clients[name] = ReplicaClient(sock, closed)

    def __len__(self) -> int:
        """Return the total number of replicas of all models."""
        return len(self._clients)

    def get(self, name: str) -> ReplicaClient | None:
        """Return the open channel to a replica, or None."""
        client = self._clients.get(name)
        return None if client is None or client.closed else client
