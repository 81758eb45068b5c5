"""TCP ports for services that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A TCP port of the loopback interface that is free. Linux gives no client a port below 32768, so that no
    other connection takes this one before the service listens there."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
