"""Tests of changes to tenants, keys and peers through the admin API of a real core: permissions, effects and
audit rows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import msgspec
import pytest

from appliance.actions import ACTIONS, action_of
from appliance.actions.parameters import (
    CreateKey,
    CreateTenant,
    DeleteTenant,
    DrainService,
    MapPeer,
    ReloadConfig,
    ResumeTenant,
    RevokeKey,
    RotateKey,
    SetKey,
    SetTenant,
    SuspendTenant,
    UnmapPeer,
)
from appliance.admin import auditing, effects
from appliance.admin.alerts import AlertAdmin
from appliance.admin.drains import DrainAdmin
from appliance.admin.handlers import BackupAdmin, RequestAdmin, handlers
from appliance.admin.keys import KeyAdmin
from appliance.admin.models import ModelAdmin
from appliance.admin.peers import PeerAdmin
from appliance.admin.shadows import ShadowAdmin
from appliance.admin.splits import SplitAdmin
from appliance.admin.tenants import TenantAdmin
from appliance.client import AdminClient, AdminError
from appliance.protocol import Done, NewKey, Tenant
from store.control import ControlStore
from store.errors import OutcomeUnknownError
from tests.core.conftest import Service, read_answer
from tests.waiting import wait_until

pytestmark = pytest.mark.system
Make = Callable[..., Service]


@pytest.fixture
def service(make_service: Make) -> Iterator[Service]:
    running = make_service().start_and_wait()
    yield running


def audit(service: Service) -> list[dict[str, Any]]:
    """Return the results recorded in the audit chain, oldest first."""
    service.audit()  # wait until all rows are written
    path = f"file:{service.state_dir}/control.db?mode=ro"
    with closing(sqlite3.connect(path, uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute("SELECT * FROM audit WHERE phase IS NOT 'intent' ORDER BY seq")
        return [dict(row) for row in rows]


def message(done: msgspec.Struct) -> str:
    assert isinstance(done, Done)
    return done.message


def new_key(service: Service, **fields: Any) -> NewKey:
    made = service.admin.act(CreateKey(name="k", **fields))
    assert isinstance(made, NewKey)
    return made


def test_changes_by_operators_are_shown_and_survive_a_restart(service: Service) -> None:
    admin = service.admin
    made = admin.act(CreateTenant(name="acme", weight=2.0, tokens_per_day=1e6))
    assert isinstance(made, Tenant) and (made.weight, made.quota.tokens_per_day) == (2.0, 1e6)
    changed = admin.act(SetTenant(name="acme", tokens_per_day=None, concurrent_requests=3, highest_class=0))
    assert isinstance(changed, Tenant) and changed.quota.tokens_per_day is None
    key = new_key(service, tenant="acme", scopes=["read"], models=["m"], kv_share=0.5)
    admin.act(SetKey(id=key.id, models=None, name="renamed"))
    rotated = admin.act(RotateKey(id=key.id, overlap_s=60.0))
    assert isinstance(rotated, NewKey) and rotated.replaces == key.id and rotated.replaced_until is not None
    assert message(admin.act(MapPeer(peer="uid:4242", tenant="acme"))) == "uid 4242 mapped to tenant acme"

    def check() -> None:
        tenant = next(tenant for tenant in admin.tenants() if tenant.name == "acme")
        assert (tenant.quota.concurrent_requests, tenant.highest_class) == (3, 0)
        assert (tenant.keys, tenant.peers) == (2, 1)
        old, new = admin.keys()
        assert (old.name, old.replaced_by, new.scopes, new.models) == ("renamed", new.id, ("read",), None)
        assert new.quota.kv_share == 0.5
        peers = {(peer.kind, peer.number): (peer.tenant, peer.source) for peer in admin.peers()}
        assert peers[("uid", 4242)] == ("acme", "mapped")
        assert peers[("uid", os.geteuid())] == ("local", "settings")

    check()
    assert service.stop() == 0
    service.start_and_wait()
    check()
    admin.act(UnmapPeer(peer="uid:4242"))
    for known in (key, rotated):
        admin.act(RevokeKey(id=known.id))
    assert message(admin.act(DeleteTenant(name="acme"))) == "tenant acme deleted"
    assert [tenant.name for tenant in admin.tenants()] == ["default", "local"]


def test_a_key_given_instead_of_its_id_is_stored_nowhere(service: Service) -> None:
    key = new_key(service).key
    for slip in (RevokeKey(id=key), SetKey(id=key, name="x"), CreateKey(name=key), DeleteTenant(name=key)):
        with contextlib.suppress(AdminError):
            service.admin.act(slip)
    rows = [row for row in service.audit() if f"{key[:8]}..." in row.params]
    assert [row.action for row in rows if row.phase == "intent"] == [
        *("keys.revoke", "keys.set", "keys.create", "tenants.delete"),
    ]
    # The service writes the log in a separate thread.
    wait_until(lambda: f"tenants.delete by uid:{os.geteuid()}" in service.log.read_text())
    assert key not in service.log.read_text() and f"{key[:8]}..." in service.log.read_text()
    assert key not in str(service.audit())


def test_a_denied_client_cannot_forge_a_line_of_the_log(service: Service) -> None:
    key = new_key(service, scopes=["read"]).key
    transport = httpx.HTTPTransport(uds=str(service.run_dir / "admin.sock"))
    with httpx.Client(transport=transport, base_url="http://server", timeout=600) as http:
        refused = http.post("/actions/keys.revoke", headers={"Authorization": f"Bearer {key}"}, json={})
        # The log line describes the latest of the denied requests.
        wait_until(lambda: "denied POST '/actions/keys.revoke'" in service.log.read_text())
        nobody = http.get("/status%0Aforged line", headers={"Authorization": "Bearer ak-wrong"})
    assert (refused.status_code, nobody.status_code) == (403, 401)
    wait_until(lambda: "denied GET '/status\\nforged line'" in service.log.read_text())
    lines = service.log.read_text().splitlines()
    assert not any(line.startswith("forged") for line in lines)
    assert any("denied POST '/actions/keys.revoke'" in line and "key:key_" in line for line in lines)


def test_denied_actions_are_audited_a_limited_number_of_times_a_minute(service: Service) -> None:
    made = new_key(service, scopes=["read"])
    transport = httpx.HTTPTransport(uds=str(service.run_dir / "admin.sock"))
    with httpx.Client(transport=transport, base_url="http://server", timeout=600) as http:
        reader = {"Authorization": f"Bearer {made.key}"}
        for _ in range(30):
            assert http.post("/actions/keys.revoke", headers=reader, json={"id": made.id}).status_code == 403
        # A read, a request with an unknown key, and a request with invalid parameters add no row.
        http.get("/actions/keys.revoke", headers=reader)
        http.post("/actions/keys.revoke", headers={"Authorization": "Bearer ak-wrong"}, json={})
        assert http.post("/actions/keys.revoke", json={"bogus": 1}).status_code == 400
    with AdminClient(service.run_dir) as client:
        client.act(CreateTenant(name="after"))  # This row is the last one in the audit chain.
    rows = [row for row in service.audit() if row.action == "keys.revoke"]
    assert 10 <= len(rows) <= 20, "10 rows per minute, for one minute or two"
    assert {row.actor for row in rows} == {f"uid:{os.geteuid()} key:{made.id}"}
    assert {row.params for row in rows} == {"{}"} and {row.phase for row in rows} == {"result"}
    assert all(row.result.startswith("refused: this request needs a key with scope 'admin'") for row in rows)


def test_each_change_is_audited_with_its_actor_and_host_and_the_old_and_new_values(service: Service) -> None:
    service.admin.act(CreateTenant(name="acme"))
    service.admin.act(SetTenant(name="acme", weight=3.0, requests_per_minute=60.0))
    with pytest.raises(AdminError, match="in use by uid 9"):
        service.admin.act(MapPeer(peer="uid:9", tenant="acme"))
        service.admin.act(DeleteTenant(name="acme"))
    made, changed, mapped, refused = audit(service)
    assert {row["actor"] for row in audit(service)} == {f"uid:{os.getuid()}"}
    assert {row["host"] for row in audit(service)} == {socket.gethostname()}
    assert json.loads(made["after"])["name"] == "acme" and made["before"] is None
    assert json.loads(changed["before"]) == {"quota": {}, "weight": 1.0}
    assert json.loads(changed["after"]) == {"quota": {"requests_per_minute": 60.0}, "weight": 3.0}
    assert mapped["action"] == "peers.map"
    assert (refused["action"], refused["result"].partition(":")[0]) == ("tenants.delete", "refused")


def test_parameters_that_are_nested_too_deeply_are_refused(shared: Service) -> None:
    transport = httpx.HTTPTransport(uds=str(shared.run_dir / "admin.sock"))
    body = '{"name": "m", "folder": "/m", "settings": {"a": ' + "[" * 30_000
    with httpx.Client(transport=transport, base_url="http://server", timeout=600) as http:
        refused = http.post("/actions/models.add", content=body)
    assert refused.status_code == 400 and "models.add: " in refused.json()["message"]


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        (SetTenant(name="nobody", weight=1.0), 404, "no tenant 'nobody'"),
        (CreateTenant(name="local"), 409, "tenant 'local' already exists"),
        (CreateTenant(name="a b"), 400, "name is 'a b'"),
        (DeleteTenant(name="default"), 409, "built in"),
        (SetKey(id="key_0", name="x"), 404, "key_0"),
        (RotateKey(id="key_0"), 404, "key_0"),
        (CreateKey(name="x", tenant="nobody"), 404, "no tenant 'nobody'"),
        (CreateKey(name="x", scopes=["root"]), 400, "scopes is"),
        (CreateKey(name="x", requests_per_minute=0.0), 400, "requests_per_minute is 0.0"),
        (MapPeer(peer="pid:1", tenant="local"), 400, "peer 'pid:1' is not valid: write it as uid:1000"),
        (MapPeer(peer="uid:99999999999", tenant="local"), 400, "is not valid: write it as uid"),
        (UnmapPeer(peer="gid:3"), 404, "gid 3 is not mapped"),
        (SuspendTenant(name="nobody"), 404, "no tenant"),
        (DrainService(grace_s=1e300), 400, "<= 604800.0 - at `[$].grace_s`"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else None,
)
def test_errors_have_distinct_status_codes(
    shared: Service, asked: msgspec.Struct, status: int, said: str
) -> None:
    with pytest.raises(AdminError, match=said) as caught:
        shared.admin.act(asked)
    assert caught.value.status == status


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("core"))
    running.start_and_wait()
    yield running
    running.stop()


def test_running_requests_continue_unless_they_are_cancelled(service: Service) -> None:
    # The fake front sends requests for the tenant "t".
    service.admin.act(CreateTenant(name="t"))
    running = service.connect("m 100000")
    wait_until(lambda: [request.state for request in service.admin.in_flight()] == ["running"])
    assert (
        message(service.admin.act(SuspendTenant(name="t")))
        == "tenant t suspended; its running requests continue"
    )
    time.sleep(0.2)
    assert len(service.admin.in_flight()) == 1
    service.admin.act(ResumeTenant(name="t"))
    ended = service.admin.act(SuspendTenant(name="t", cancel=True))
    assert message(ended) == "tenant t suspended; cancelling 1 request"
    assert read_answer(running)[-1] == "front-0 aborted the tenant that sent this request was suspended"
    wait_until(lambda: service.admin.in_flight() == [])


def test_the_read_scope_allows_reading_and_the_admin_scope_allows_actions(service: Service) -> None:
    reader, operator = new_key(service, scopes=["read"]), new_key(service, scopes=["admin"])
    app = new_key(service)
    with AdminClient(service.run_dir, key=reader.key) as looking:
        assert looking.status().state == "ready"
        assert len(looking.keys()) == 3 and looking.tenants() and looking.peers() and not looking.in_flight()
        with pytest.raises(
            AdminError, match="needs a key with scope 'admin'; your key's scopes: read"
        ) as caught:
            looking.act(RevokeKey(id=app.id))
        assert caught.value.status == 403
    with AdminClient(service.run_dir, key=operator.key) as acting:
        assert acting.status().state == "ready"
        acting.act(RevokeKey(id=app.id))
    assert audit(service)[-1]["actor"] == f"uid:{os.getuid()} key:{operator.id}"
    for key, said, status in (
        (app.key, "this key is unknown, revoked or expired", 401),
        ("ak-nothing", "this key is unknown, revoked or expired", 401),
        (new_key(service).key, "has neither scope 'admin' nor scope 'read'", 403),
    ):
        with AdminClient(service.run_dir, key=key) as turned, pytest.raises(AdminError, match=said) as caught:
            turned.status()
        assert caught.value.status == status


def test_an_operator_key_of_a_suspended_tenant_is_denied(service: Service) -> None:
    service.admin.act(CreateTenant(name="ops"))
    key = new_key(service, tenant="ops", scopes=["admin"])
    with AdminClient(service.run_dir, key=key.key) as acting:
        acting.status()
        service.admin.act(SuspendTenant(name="ops"))
        with pytest.raises(AdminError, match=r"'ops' .* is suspended"):
            acting.status()
        with pytest.raises(AdminError, match="suspended"):
            acting.act(ResumeTenant(name="ops"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can switch to another user")
def test_operators_are_identified_by_uid_and_group(open_folder: Path, make_service: Make) -> None:
    service = make_service(
        "[admin]\nuids = [4001]\ngroups = [4100, 'no such group']\n[unix]\nadmin_mode = '0666'",
        folder=open_folder,
    )
    service.run_dir.mkdir(mode=0o755)
    service.start_and_wait()
    key = new_key(service, scopes=["read"])
    sock = service.run_dir / "admin.sock"
    assert (sock.stat().st_gid, sock.stat().st_mode & 0o777) == (4100, 0o666)

    def status_for(uid: int, gid: int, groups: list[int], key: str = "") -> int:
        source = """
import os, socket, sys
uid, gid, groups, path, key = int(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3]), sys.argv[4], sys.argv[5]
os.setgroups(groups); os.setgid(gid); os.setuid(uid)
sock = socket.socket(socket.AF_UNIX); sock.connect(path)
head = f"Authorization: Bearer {key}\\r\\n" if key else ""
sock.sendall(f"GET /status HTTP/1.1\\r\\nHost: x\\r\\n{head}\\r\\n".encode())
print(sock.recv(1000).split()[1].decode())
"""
        words = [str(uid), str(gid), repr(groups), str(sock), key]
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", source, *words], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert status_for(4001, 4001, []) == 200
    assert status_for(4002, 4100, []) == 200
    assert status_for(4002, 4002, [7, 4100]) == 200
    assert status_for(4002, 4002, [7]) == 403
    assert status_for(4002, 4002, [7], key.key) == 200
    assert "no such group" in service.log.read_text()


def test_a_change_that_the_disk_does_not_finish_has_an_unknown_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "_MAX_CHANGE_S", 0.2)
    control = ControlStore(tmp_path / "control.db")
    control.start()
    begun, disk_answers = threading.Event(), threading.Event()

    def apply(connection: sqlite3.Connection) -> None:
        begun.set()
        assert disk_answers.wait(60)

    async def change() -> None:
        await effects.committed(control.change(actor="test", action="keys.create", params={}, apply=apply))

    with pytest.raises(OutcomeUnknownError, match=r"unknown whether the change was made.*audit list"):
        asyncio.run(change())
    assert begun.wait(60)
    disk_answers.set()
    control.close()
    with closing(sqlite3.connect(control.path)) as connection:
        rows = connection.execute("SELECT action, result FROM audit").fetchall()
    assert rows == [("keys.create", "ok")]


def test_an_action_continues_while_the_disk_does_not_store_its_audit_entry(
    make_service: Make,
) -> None:
    """Another process locks the database, which delays the entry by more than `_MAX_AUDIT_WAIT_S`."""
    service = make_service().start_and_wait()
    before = time.monotonic()
    database = service.state_dir / "control.db"
    with closing(sqlite3.connect(database, timeout=600, isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        service.admin.act(ReloadConfig())
        assert time.monotonic() - before > auditing._MAX_AUDIT_WAIT_S
        lock.execute("COMMIT")
    # The service writes the log in a separate thread.
    wait_until(lambda: "the audit row was not written within 3 s" in service.log.read_text())

    def phases() -> list[str | None]:
        action = action_of(ReloadConfig()).name
        rows = service.audit()
        return [row.phase for row in rows if row.action == action]

    wait_until(lambda: phases() == ["intent", "result"], description="the audit entries")


def test_every_action_of_the_registry_has_a_handler_for_its_parameters() -> None:
    nothing: Any = None
    table = handlers(
        tenants=TenantAdmin(control=nothing, usage=nothing, peers=nothing, publish=nothing, cancel=nothing),
        keys=KeyAdmin(control=nothing, usage=nothing, publish=nothing, cancel=nothing),
        peers=PeerAdmin(control=nothing, unix=nothing, publish=nothing),
        models=ModelAdmin(
            states=nothing,
            registry=nothing,
            operations=nothing,
            swaps=nothing,
            on_demand=nothing,
            manager=nothing,
            routing=nothing,
            fronts=nothing,
            check=nothing,
            settings=nothing,
            declared_in=nothing,
        ),
        splits=SplitAdmin(registry=nothing, routing=nothing, fronts=nothing, check_declared=nothing),
        shadows=ShadowAdmin(
            registry=nothing, routing=nothing, fronts=nothing, states=nothing, results=nothing
        ),
        drains=DrainAdmin(nothing, nothing, nothing),
        requests=RequestAdmin(nothing, nothing, nothing),
        backups=BackupAdmin(nothing),
        alerts=AlertAdmin(nothing),
        reload=nothing,
    )
    assert table.keys() == {action.parameters for action in ACTIONS}
    assert {parameters: get_type_hints(handler)["asked"] for parameters, handler in table.items()} == {
        action.parameters: action.parameters for action in ACTIONS
    }


def test_every_action_of_the_registry_is_audited_before_and_after(make_service: Make) -> None:
    service = make_service().start_and_wait()
    tried = []
    for action in ACTIONS:
        # Only these actions succeed: creating a key, reloading unchanged settings, starting a backup, and
        # pruning an empty registry.
        named = {"model": "none:such"} if action.name in ("drain", "resume") else {}
        required = {
            field.name: None if field.name == "weights" else "none:such"
            for field in msgspec.structs.fields(action.parameters)
            if field.required
        }
        tried.append((action.name, named | required))
        with contextlib.suppress(AdminError):
            service.admin.act(msgspec.convert(named | required, action.parameters))
    rows = service.audit()
    assert len(rows) == 2 * len(ACTIONS)
    for (name, params), before, after in zip(tried, rows[::2], rows[1::2], strict=True):
        assert (before.action, before.phase, before.result) == (name, "intent", "")
        assert (after.action, after.phase, after.act) == (name, "result", before.act) and after.result
        assert params.items() <= json.loads(before.params).items()
        assert before.actor == after.actor == f"uid:{os.geteuid()}" and before.host == os.uname().nodename
        done = name in ("keys.create", "config.reload", "backup.begin", "models.prune")
        assert after.result == "ok" if done else after.result.startswith("refused: "), after
