"""Watches the channels to other ranks. A channel closes when the other rank's process exits. The channels are
watched on a separate thread, because the main thread may be blocked in a collective that waits for the other
rank."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping


class PeerWatch:
    """Calls `on_disconnect(name)` once, on a separate thread, when a peer closes its end of a channel.
    `channels` maps the peers' names to the file descriptors to watch, which must be sockets. Data that
    arrives is not read.
    """

    def __init__(self, channels: Mapping[str, int], on_disconnect: Callable[[str], None]) -> None:
        # Watch duplicates of the descriptors, because their owner may close a channel at any time.
        self._names = {os.dup(descriptor): name for name, descriptor in channels.items()}
        self._on_disconnect = on_disconnect
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="engine-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching the channels and wait for the thread to end."""
        os.close(self._end)
        self._thread.join()

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in self._names:
            poll.register(descriptor, select.POLLRDHUP)
        poll.register(self._ended, 0)
        found = [descriptor for descriptor, _ in poll.poll()]
        disconnected = [self._names[descriptor] for descriptor in found if descriptor in self._names]
        if disconnected and self._ended not in found:
            self._on_disconnect(disconnected[0])
        for descriptor in (*self._names, self._ended):
            os.close(descriptor)
