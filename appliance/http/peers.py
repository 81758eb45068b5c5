"""The process or host at the other end of a connection."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from typing import Literal, NamedTuple

from appliance.ownership import UCRED

_SO_PEERGROUPS = 59
"""The socket option that returns a peer's groups, from asm-generic/socket.h (Linux 4.13 or later). Python's
socket module does not define it."""
_MAX_GROUPS_BYTES = 1024
"""Maximum size, in bytes, of a socket option that Python can read; enough for 256 groups."""


class Peer(NamedTuple):
    """A client's identity, as determined when it connected. For TCP, `uid` is -1; for a Unix socket,
    `address` is empty."""

    kind: Literal["unix", "tcp"]
    uid: int
    address: str
    gids: tuple[int, ...] = ()
    """Groups of a Unix socket's peer: the primary group first, then the others in ascending order."""

    @property
    def source(self) -> str:
        """Origin of the connection: a TCP peer's address or a Unix peer's uid. For IPv6, this is the
        address's /64 network, because one host can use every address in it."""
        if self.kind == "unix":
            return str(self)
        host = self.address.rpartition(":")[0].strip("[]")
        if ":" not in host:
            return host
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
        return host

    def __str__(self) -> str:
        return f"uid {self.uid}" if self.kind == "unix" else self.address


def unix_peer(sock: socket.socket) -> Peer:
    """Return the process that connected to a Unix socket, as recorded by the kernel. For a process in more
    than 256 groups, only the primary group is returned."""
    _, uid, gid = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
    others = b""
    with contextlib.suppress(
        OSError
    ):  # The peer has too many groups, or the kernel is too old to report them.
        others = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS_BYTES)
    gids = sorted({number for (number,) in struct.iter_unpack("I", others)} - {gid})
    return Peer("unix", uid, "", (gid, *gids))


def peer_of(sock: socket.socket, address: str = "") -> Peer:
    """Return the peer of a connected socket. If a TCP peer's address is already known, pass it as
    `address`."""
    if sock.family == socket.AF_UNIX:
        return unix_peer(sock)
    if not address:
        with contextlib.suppress(OSError):  # The client has already disconnected.
            host, port = sock.getpeername()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Peer("tcp", -1, address)
