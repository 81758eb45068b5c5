"""TCP ports for services that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return a free TCP port below 32768 on the loopback interface. By default, Linux's ephemeral ports start
    at 32768, so no client connection can take this port before the service listens on it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
