"""Sends HTTP requests as another user. `python -I -S asker.py UID GID GROUP,GROUP…` reads one line of JSON
per request, `[address, method, path, headers]`, and replies with `[status, body]`. An address is a socket
path or `[host, port]`."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any


def become(uid: int, gid: int, groups: list[int]) -> None:
    """Switch to this user permanently."""
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)


def ask(address: Any, method: str, path: str, headers: list[list[str]]) -> tuple[int, str]:
    """Return the status and the body of a response. The status is 0 if the connection was closed without a
    response."""
    unix = isinstance(address, str)
    with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as sock:
        sock.settimeout(60)
        sock.connect(address if unix else tuple(address))
        body = b'{"no such field": 1}' if method in ("POST", "PUT", "PATCH") else b""
        lines = [f"{method} {path} HTTP/1.1", "Host: server", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        sock.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        answer = b""
        try:
            while data := sock.recv(1 << 16):
                answer += data
        except ConnectionResetError:
            pass
    head, _, content = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    return int(status[0]) if status else 0, content.decode("utf-8", "replace")


def main() -> None:
    """Handle requests until standard input is closed."""
    uid, gid, groups = sys.argv[1:]
    become(int(uid), int(gid), [int(group) for group in groups.split(",") if group])
    for line in sys.stdin:
        print(json.dumps(ask(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
