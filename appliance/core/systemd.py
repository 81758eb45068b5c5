"""The interface to systemd: sockets opened by systemd, state reports, and the watchdog. The protocols are
described in sd_listen_fds(3), sd_notify(3) and sd_watchdog_enabled(3). If systemd did not start the process,
this module does nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, MutableMapping
from typing import TypeVar

log = logging.getLogger(__name__)

EXTENSION_US = 30_000_000
"""During long operations, the start timeout is repeatedly extended by this many microseconds."""
_EVERY_S = 1.0
_FIRST_DESCRIPTOR = 3
T = TypeVar("T")


class Manager:
    """The service manager that started this process, if any."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Read the service manager's environment variables, removing them from `environ` so that child
        processes do not use them."""
        self.sockets = _take_sockets(environ)
        """Listening sockets opened by the service manager. Code that takes a socket from this list must close
        it."""
        self.watchdog_s = _watchdog_s(environ)
        """Maximum interval, in seconds, between keep-alives, or None if the service manager expects none."""
        self._socket: socket.socket | None = None
        address = environ.pop("NOTIFY_SOCKET", "")
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            try:
                self._socket.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            except OSError as error:
                log.warning("cannot connect to the service manager's socket %s: %s", address, error.strerror)
                self.close()

    @property
    def listens(self) -> bool:
        """Whether there is a service manager to report to."""
        return self._socket is not None

    def tell(self, **state: str | int) -> bool:
        """Report a state such as READY=1 or STATUS="loading". Never blocks; returns False if the report was
        not sent."""
        if self._socket is None:
            return False
        text = "\n".join(f"{name}={_one_line(str(value))}" for name, value in state.items())
        try:
            self._socket.send(text.encode("utf-8", "replace"))
        except OSError as error:
            log.debug("the service manager did not accept %s: %s", text, error)
            return False
        return True

    async def wait_for(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result. Until `work` has finished, repeatedly ask the service
        manager to keep waiting."""
        working = asyncio.create_task(asyncio.to_thread(work))
        while not working.done():
            self.tell(EXTEND_TIMEOUT_USEC=EXTENSION_US, WATCHDOG=1)
            await asyncio.wait([working], timeout=_EVERY_S)
        return working.result()

    def close(self) -> None:
        """Close the connection to the service manager."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _take_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    taken = []
    for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count)):
        os.set_inheritable(descriptor, False)
        taken.append(socket.socket(fileno=descriptor))
    return taken


def _watchdog_s(environ: MutableMapping[str, str]) -> float | None:
    pid, usec = environ.pop("WATCHDOG_PID", ""), environ.pop("WATCHDOG_USEC", "")
    meant = pid in ("", str(os.getpid()))
    return int(usec) / 1e6 if meant and usec.isdecimal() and int(usec) else None


def _one_line(text: str) -> str:
    return " ".join(text.split())
