"""An SSH server on the loopback interface and an SSH client that forwards a Unix socket. The server and, on a
machine without `ssh`, the client are separate processes of this module, which use asyncssh."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncssh

_ROOT = Path(__file__).resolve().parents[2]
_USER = "operator"


class _ForwardingServer(asyncssh.SSHServer):
    """Permits the forwarding of Unix sockets, and nothing else. Prints the path of each forwarded
    connection."""

    def unix_connection_requested(self, dest_path: str) -> bool:
        print(dest_path, flush=True)
        return True


async def _serve(folder: Path, uid: int, gids: list[int]) -> None:
    """Run the SSH server as this user. The first of `gids` is the user's primary group."""
    options = asyncssh.SSHServerConnectionOptions(
        server_factory=_ForwardingServer,
        server_host_keys=[asyncssh.read_private_key(folder / "host")],
        authorized_client_keys=asyncssh.read_authorized_keys(str(folder / "client.pub")),
    )
    acceptor = await asyncssh.listen("127.0.0.1", 0, options=options)
    if uid != os.geteuid():
        os.setgroups(gids)
        os.setgid(gids[0])
        os.setuid(uid)
    print(acceptor.get_port(), flush=True)
    await acceptor.wait_closed()


async def _forward(folder: Path, port: int, local: str, remote: str) -> None:
    """Forward the socket as `ssh -N -L local:remote` does."""
    Path(local).unlink(missing_ok=True)
    async with asyncssh.connect(
        "127.0.0.1", port, username=_USER, client_keys=[str(folder / "client")], known_hosts=None, config=None
    ) as connection:
        await connection.forward_local_path(local, remote)
        await connection.wait_closed()


class SshServer:
    """An SSH server that runs as the given user. `folder` receives its keys and its output."""

    def __init__(self, folder: Path, uid: int, gids: list[int]) -> None:
        self._folder = folder
        for name in ("host", "client"):
            key = asyncssh.generate_private_key("ssh-ed25519")
            key.write_private_key(folder / name)
            (folder / name).chmod(0o600)
            key.write_public_key(folder / f"{name}.pub")
        self._output = folder / "forwarded"
        self._process = _start(self._output, _module("serve", folder, uid, *gids))
        _wait(lambda: self._output.read_text().endswith("\n"), self._process, self._output)
        self._port = int(self._output.read_text())

    def forwarded(self) -> list[str]:
        """Return the path of each connection that the server has been asked to forward."""
        return self._output.read_text().splitlines()[1:]

    @contextmanager
    def forward(self, local: Path, remote: Path) -> Iterator[None]:
        """Forward connections from the socket `local` to the socket `remote`, as `docs/admin-api.md` advises
        operators to do."""
        output = self._folder / "client.log"
        process = _start(output, self._client(str(local), str(remote)))
        try:
            _wait(lambda: _accepts(local), process, output)
            yield
        finally:
            _end(process)

    def close(self) -> None:
        _end(self._process)

    def _client(self, local: str, remote: str) -> list[str]:
        if shutil.which("ssh") is None:
            return _module("forward", self._folder, self._port, local, remote)
        options = {
            "ExitOnForwardFailure": "yes",
            "StreamLocalBindUnlink": "yes",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
        }
        return [
            *("ssh", "-F", "/dev/null", "-N", "-L", f"{local}:{remote}", "-i", str(self._folder / "client")),
            *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
            *("-p", str(self._port), f"{_USER}@127.0.0.1"),
        ]


def _module(*words: object) -> list[str]:
    return [sys.executable, "-m", "tests.system.ssh_forward", *map(str, words)]


def _start(output: Path, command: list[str]) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        ended = process.poll() is not None
        assert not ended and time.monotonic() < deadline, f"{process.args!r}:\n{output.read_text()}"
        time.sleep(0.05)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def main() -> None:
    command, folder, number, *rest = sys.argv[1:]
    if command == "serve":
        asyncio.run(_serve(Path(folder), int(number), [int(gid) for gid in rest]))
    else:
        asyncio.run(_forward(Path(folder), int(number), *rest))


if __name__ == "__main__":
    main()
