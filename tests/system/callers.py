"""The callers used by the authentication tests, with their keys, sockets and users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from appliance.actions.parameters import CreateKey, MapPeer, RevokeKey, RotateKey, SuspendTenant
from tests.system.asker import ask
from tests.system.service import Service

STRANGER, MAPPED_UID, MAPPED_GID = 4301, 4302, 4303


class Caller(NamedTuple):
    """A caller, with the socket and the credentials that it uses."""

    name: str
    address: Any
    headers: list[list[str]]
    user: int | None = None
    """The uid and gid of the process that sends the request. If None, the test's own process sends it."""


class Matrix(NamedTuple):
    """A running service, and all callers that the tests use."""

    running: Service
    callers: dict[str, list[Caller]]
    """Callers of the fronts, keyed by their permissions."""
    operators: dict[str, list[Caller]]
    """Callers of the admin socket, keyed by their permissions."""
    metrics_port: int


class Askers:
    """Processes that run as other users."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def ask(self, caller: Caller, method: str, path: str) -> tuple[int, str]:
        if caller.user is None:
            return ask(caller.address, method, path, caller.headers)
        process = self._processes.get(caller.user)
        if process is None:
            script = Path(__file__).with_name("asker.py")
            number = str(caller.user)
            command = [sys.executable, "-I", "-S", str(script), number, number, ""]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._processes[caller.user] = process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([caller.address, method, path, caller.headers]) + "\n")
        process.stdin.flush()
        status, body = json.loads(process.stdout.readline())
        return status, body

    def close(self) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def everybody(running: Service, port: int) -> tuple[dict[str, list[Caller]], dict[str, list[Caller]]]:
    """Return the callers of the fronts and the callers of the admin socket, each grouped by permission."""
    for tenant in ("acme", "stopped"):
        running.tenant(tenant)
    scopes = ["inference", "admin", "read"]
    right = running.key("k", "acme")
    every = running.key("k", scopes=scopes)
    reader, operator = (running.key("k", scopes=[scope]) for scope in ("read", "admin"))
    stopped = running.key("k", "stopped", scopes=scopes)
    running.act(SuspendTenant(name="stopped"))
    # The key must still be valid when it is created, even on a busy machine, so it expires only 10 s later.
    expires_at = time.time() + 10.0
    expired = running.key("k", scopes=scopes, expires_at=expires_at)
    revoked, rotated = (running.act(CreateKey(name=name, scopes=scopes)) for name in ("revoked", "rotated"))
    running.act(RevokeKey(id=revoked.id))
    successor = running.act(RotateKey(id=rotated.id, overlap_s=0.0)).key
    for peer in (f"uid:{MAPPED_UID}", f"gid:{MAPPED_GID}"):
        running.act(MapPeer(peer=peer, tenant="acme"))
    time.sleep(max(0.0, expires_at + 0.2 - time.time()))

    def bearer(secret: str) -> list[list[str]]:
        return [["Authorization", f"Bearer {secret}"]]

    tcp, api, admin = ["127.0.0.1", port], str(running.api_socket), str(running.run_dir / "admin.sock")
    wrong = {
        "wrong": bearer("ak-wrong"),
        "expired": bearer(expired),
        "revoked": bearer(revoked.key),
        "rotated away": bearer(rotated.key),
        "basic": [["Authorization", "Basic " + right]],
        "wrong, then right": bearer("ak-wrong") + bearer(every),
        "beginning of a key": bearer(every[:-1]),
        "key and more": bearer(every + "x"),
        "key and a space": bearer("ak- " + every),
        "in another header": [["X-Api-Key", "ak-wrong"], ["Authorization", "Bearer ak-"]],
    }
    on_tcp_only = {
        "none": [],
        "no key": [["Authorization", "Bearer"]],
        "only in another header": [["X-Key", every], ["X-Auth-Token", every], ["Cookie", every]],
        "placeholder": bearer("placeholder"),
        "claimed uid": [["X-Forwarded-For", "127.0.0.1"], ["X-Remote-User", "root"], ["Remote-User", "0"]],
    }
    may_not = [Caller(f"tcp, {how}", tcp, headers) for how, headers in (wrong | on_tcp_only).items()]
    may_not += [Caller(f"unix, {how}", api, headers) for how, headers in wrong.items()]
    lacks = {"read": bearer(reader), "admin": bearer(operator)}
    lack = [
        Caller(f"{where}, {how}", address, headers)
        for where, address in (("tcp", tcp), ("unix", api))
        for how, headers in lacks.items()
    ]
    suspended = [
        Caller("tcp, suspended", tcp, bearer(stopped)),
        Caller("unix, suspended", api, bearer(stopped)),
    ]
    may = [
        Caller(f"tcp, {how}", tcp, bearer(secret))
        for how, secret in (("right", right), ("every scope", every), ("successor", successor))
    ]
    may += [
        Caller("tcp, lower case", tcp, [["authorization", f"bearer {right}"]]),
        Caller("unix, right", api, bearer(right)),
        Caller("unix, owner", api, []),
        Caller("unix, owner with a placeholder", api, bearer("placeholder")),
    ]
    admin_may_not = [Caller(f"admin, {how}", admin, headers) for how, headers in wrong.items()]
    admin_may_not += [
        Caller("admin, placeholder", admin, bearer("placeholder")),
        Caller("admin, empty key", admin, [["Authorization", "Bearer"]]),
        Caller("admin, suspended", admin, bearer(stopped)),
        Caller("admin, inference", admin, bearer(right)),
    ]
    admin_may = [Caller("admin, owner", admin, []), Caller("admin, key", admin, bearer(operator))]
    looks = [Caller("admin, reader", admin, bearer(reader))]
    if os.geteuid() == 0:
        may_not += [
            Caller("unix, stranger", api, [], STRANGER),
            Caller("unix, stranger with a placeholder", api, bearer("x"), STRANGER),
        ]
        may += [
            Caller("unix, mapped uid", api, [], MAPPED_UID),
            Caller("unix, mapped gid", api, [], MAPPED_GID),
        ]
        may += [Caller("unix, stranger with a key", api, bearer(right), STRANGER)]
        admin_may_not += [
            Caller("admin, stranger", admin, [], STRANGER),
            Caller("admin, mapped uid", admin, [], MAPPED_UID),
        ]
        admin_may += [Caller("admin, stranger with a key", admin, bearer(operator), STRANGER)]
        looks += [Caller("admin, stranger who reads", admin, bearer(reader), STRANGER)]
    else:
        print("not root: other uids cannot be tried")
    return (
        {"unknown": may_not, "lacking": lack, "suspended": suspended, "inference": may},
        {"": admin_may_not, "read": looks, "admin": admin_may},
    )
