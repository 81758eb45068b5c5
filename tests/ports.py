"""TCP ports for services that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a free TCP port on the loopback interface. Linux assigns clients only ports from 32768 on, so no
    connection can take this port before the service listens on it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
