"""Tests of the protocols between systemd and the service, sd_listen_fds(3) and sd_notify(3)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from appliance.core.systemd import Manager

ECHO = """
import json, os, socket
from appliance.core.systemd import Manager
manager = Manager()
print(json.dumps({
    "names": [sock.getsockname() for sock in manager.sockets],
    "listening": [sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) for sock in manager.sockets],
    "inheritable": [sock.get_inheritable() for sock in manager.sockets],
    "watchdog_s": manager.watchdog_s,
    "left": [name for name in os.environ if name.startswith(("LISTEN_", "NOTIFY_", "WATCHDOG_"))],
}))
"""


def activated(environ: dict[str, str], *sockets: socket.socket) -> dict[str, object]:
    """Return the output of a process that is started the way systemd starts it, with sockets from file
    descriptor 3 onwards."""
    copies = [os.dup(sock.fileno()) for sock in sockets]
    moves = " ".join(f"{3 + number}<&{copy}" for number, copy in enumerate(copies))
    script = f'export LISTEN_PID=$$; exec "$0" -c "$1" {moves}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, ECHO],
        env={**os.environ, **environ},
        pass_fds=copies,
        capture_output=True,
        text=True,
        timeout=600,
    )
    for copy in copies:
        os.close(copy)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_sockets_are_taken_over_and_the_variables_removed(tmp_path: Path) -> None:
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(tmp_path / "api.sock"))
    tcp = socket.socket()
    tcp.bind(("127.0.0.1", 0))
    for sock in (unix, tcp):
        sock.listen()
    environ = {
        "LISTEN_FDS": "2",
        "LISTEN_FDNAMES": "a:b",
        "WATCHDOG_USEC": "30000000",
        "NOTIFY_SOCKET": "@no",
    }
    with unix, tcp:
        said = activated(environ, unix, tcp)
        assert said["names"] == [str(tmp_path / "api.sock"), list(tcp.getsockname())]
    assert (said["listening"], said["inheritable"]) == ([1, 1], [False, False])
    assert (said["watchdog_s"], said["left"]) == (30.0, [])


def test_variables_for_another_process_are_ignored() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "2", "WATCHDOG_PID": "1", "WATCHDOG_USEC": "1000000"}
    manager = Manager(environ)
    assert (manager.sockets, manager.watchdog_s, manager.listens) == ([], None, False)
    manager.tell(READY=1)


def test_states_reach_the_manager_and_a_value_is_one_line(tmp_path: Path) -> None:
    for address in (str(tmp_path / "notify"), f"@appliance-test-{os.getpid()}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(f"\0{address[1:]}" if address.startswith("@") else address)
            environ = {"NOTIFY_SOCKET": address}
            manager = Manager(environ)
            assert manager.tell(READY=1, STATUS="two\nREADY=0 lines")
            assert systemd.recv(4096) == b"READY=1\nSTATUS=two READY=0 lines"
            assert environ == {}
            manager.close()


def test_a_manager_that_has_ended_causes_no_error(tmp_path: Path) -> None:
    manager = Manager({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    assert not manager.listens
    manager.tell(READY=1)


def test_a_manager_that_does_not_listen_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        manager = Manager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        while manager.tell(WATCHDOG=1):  # send until the kernel's buffer is full
            pass
        assert not manager.tell(READY=1)
        systemd.recv(4096)
        assert manager.tell(READY=1)
        manager.close()
