"""Creates listening sockets: Unix sockets with a file mode and a group, and TCP sockets."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from appliance.rundir import remove_socket

log = logging.getLogger(__name__)

_BACKLOG = 4096


class ListenError(Exception):
    """Raised if the service cannot listen on an address. The message gives the reason and the remedy."""


def bind_unix(path: Path, mode: str, gid: int | None = None) -> socket.socket:
    """Return a listening Unix socket with this file mode. A stale socket file is replaced. The socket's group
    is set to `gid` if this process has permission. The caller must hold the run directory's lock, which
    proves that no other process is using a socket file at this path. Raises ListenError if the socket cannot
    be created.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_socket(path)
        sock.bind(str(path))
        # No client can connect before listen(), so the socket is never accessible to more users than
        # intended.
        _set_access(path, mode, gid)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        hint = ""
        if "too long" in str(error):
            hint = ": use a shorter --run-dir"
        elif error.errno == errno.EADDRINUSE:
            hint = ": the path is a file that is not a socket; move it away"
        raise ListenError(f"cannot listen on {path} ({error.strerror or error}){hint}") from error
    sock.setblocking(False)
    return sock


def bind_tcp(
    host: str, port: int, *, setting: str = "listen", beside: Iterable[socket.socket] = ()
) -> socket.socket:
    """Return a listening TCP socket. Its address may overlap the addresses of the sockets in `beside`. Raises
    a ListenError, which names the setting, if the socket cannot be created."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Set SO_REUSEPORT only while binding this socket. Otherwise, another process could later bind the
            # service's address.
            with _reusing_port(sock, *beside):
                sock.bind(address)
                sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ListenError(
            f"cannot listen on {setting} = {host}:{port} ({error.strerror or error}): use another address"
        ) from error
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def _reusing_port(*sockets: socket.socket) -> Iterator[None]:
    """Allow other sockets to be bound to overlapping addresses while the `with` block runs."""
    if len(sockets) < 2:
        yield
        return
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        yield
    finally:
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)


def change_access(path: Path, mode: str, gid: int | None = None) -> None:
    """Change the group and (octal) file mode of a socket in use. Failures are logged."""
    try:
        _set_access(path, mode, gid)
    except OSError as error:
        log.error("cannot set the mode of %s to %s (%s)", path, mode, error.strerror)


def _set_access(path: Path, mode: str, gid: int | None) -> None:
    if gid is not None:
        try:
            os.chown(path, -1, gid)
        except PermissionError:
            log.warning(
                "cannot change the group of %s to %d, because the service's user is not a member of that "
                "group",
                path,
                gid,
            )
    os.chmod(path, int(mode, 8))


def address_of(sock: socket.socket) -> str:
    """Return the address on which a socket listens: a path, or host:port."""
    return format_address(sock.getsockname())


def format_address(name: str | tuple[object, ...]) -> str:
    """Format a socket address as a path or as host:port."""
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return name


def listens_on(address: str, wanted: tuple[str, int]) -> bool:
    """Return whether a listener on `address` accepts connections to this host and port. Port 0 matches any
    port."""
    host, port = wanted
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except OSError:
        return False
    text = format_address(found)
    return address == text or (port == 0 and address.rpartition(":")[0] == text[:-2])
