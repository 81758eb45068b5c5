"""Tests that changes to tenants, keys and peers are checked, audited and stored."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from store.audit import AuditRow
from store.control import ControlStore, read_policies
from store.control_schema import CONTROL
from store.database import WritableDatabase
from store.errors import ConflictError, UnknownKeyError, UnknownPeerError, UnknownTenantError
from store.evidence import verify_audit
from store.migrations import Schema
from store.policies import KeyRecord, PeerRecord, Policies, Quota, TenantRecord
from tests.audit_trail import read_audit

ACTOR = "uid:0"


def tenant(control: ControlStore, name: str = "acme", **changes: Any) -> TenantRecord:
    control.create_tenant(actor=ACTOR, name=name, changes=changes).result(60)
    return control.policies.tenants[name]


def last_row(control: ControlStore) -> tuple[AuditRow, dict[str, Any]]:
    """Return the newest audit row, and its parameters combined with the old and new values."""
    row = read_audit(control.path)[-1]
    values = {name: json.loads(getattr(row, name) or "null") for name in ("before", "after")}
    return row, {**json.loads(row.params), **values}


def test_two_tenants_exist_from_the_first_start(control):
    assert list(control.policies.tenants) == ["default", "local"]
    assert control.policies.tenants["local"] == TenantRecord(
        name="local", created_at=control.policies.tenants["local"].created_at
    )


def test_memory_and_file_agree_after_every_change(control):
    tenant(control, weight=4.0, quota={"tokens_per_day": 1e6, "kv_share": 0.5})
    tenant(control, "gone")
    control.delete_tenant(actor=ACTOR, name="gone").result(60)
    control.set_tenant(actor=ACTOR, name="acme", changes={"cache_group": "lab", "log_days": 3.5}).result(60)
    control.suspend_tenant(actor=ACTOR, name="acme").result(60)
    made = control.create_key(
        actor=ACTOR,
        name="k",
        tenant="acme",
        scopes=("read", "inference"),
        models=("a", "b"),
        highest_class=2,
        quota=Quota(concurrent_requests=3),
    ).result(60)
    control.rotate_key(actor=ACTOR, key_id=made.record.id, overlap_s=60).result(60)
    control.map_peer(actor=ACTOR, kind="uid", number=1000, tenant="acme").result(60)
    control.map_peer(actor=ACTOR, kind="gid", number=100, tenant="default").result(60)
    control.unmap_peer(actor=ACTOR, kind="gid", number=100).result(60)
    on_disk, known = read_policies(control.path), control.policies
    assert (on_disk.tenants, on_disk.keys, on_disk.peers) == (known.tenants, known.keys, known.peers)
    assert list(on_disk.keys) == list(known.keys)
    acme = known.tenants["acme"]
    assert (acme.weight, acme.cache_group, acme.log_days) == (4.0, "lab", 3.5)
    assert acme.quota == Quota(tokens_per_day=1e6, kv_share=0.5) and acme.suspended_at is not None
    assert known.keys[made.record.id].models == ("a", "b")
    assert verify_audit(control.path).ok


def test_changing_one_limit_keeps_the_others_and_none_removes_it(control):
    tenant(control, quota={"requests_per_minute": 60.0, "concurrent_requests": 4})
    control.set_tenant(actor=ACTOR, name="acme", changes={"quota": {"requests_per_minute": None}}).result(60)
    assert control.policies.tenants["acme"].quota == Quota(concurrent_requests=4)


def test_the_audit_row_contains_the_old_and_new_values(control):
    tenant(control, weight=2.0)
    row, params = last_row(control)
    assert (row.action, params["name"], params["before"]) == ("tenants.create", "acme", None)
    assert params["after"]["weight"] == 2.0 and params["after"]["name"] == "acme"
    control.set_tenant(actor="uid:7", name="acme", changes={"weight": 3.0, "highest_class": 1}).result(60)
    row, params = last_row(control)
    assert (row.actor, row.action) == ("uid:7", "tenants.set")
    assert params == {"name": "acme", "before": {"weight": 2.0}, "after": {"weight": 3.0}}
    control.map_peer(actor=ACTOR, kind="uid", number=5, tenant="acme").result(60)
    control.map_peer(actor=ACTOR, kind="uid", number=5, tenant="local").result(60)
    _, params = last_row(control)
    assert params["peer"] == "uid:5"
    assert (params["before"]["tenant"], params["after"]["tenant"]) == ("acme", "local")
    control.delete_tenant(actor=ACTOR, name="acme").result(60)
    _, params = last_row(control)
    assert params["before"]["name"] == "acme" and params["after"] is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": 0.0}, "weight is 0.0: use a number from 0.001 to 1000"),
        ({"weight": 1e-300}, "weight is 1e-300"),
        ({"weight": float("nan")}, "weight is nan"),
        ({"highest_class": 4}, r"highest_class is 4: use 0 \(real-time\)"),
        ({"default_class": -1}, "default_class is -1"),
        ({"default_max_tokens": 0}, "default_max_tokens is 0: use a whole number from 1 to "),
        ({"cache_group": ""}, "cache_group is ''"),
        ({"log_policy": "all"}, "log_policy is 'all': use metadata, hashes or full"),
        ({"log_days": 0.0}, "log_days is 0.0"),
        (
            {"quota": {"tokens_per_day": -1.0}},
            r"tokens_per_day is -1.0: use a number from 1e-06 to 1e\+15, or none for no limit;",
        ),
        ({"quota": {"requests_per_minute": float("inf")}}, "requests_per_minute is inf"),
        ({"quota": {"tokens_per_minute": 1e308, "burst_s": 3600.0}}, "tokens_per_minute is 1e\\+308"),
        ({"quota": {"concurrent_requests": 0}}, "concurrent_requests is 0: use a whole number from 1 to "),
        ({"quota": {"kv_share": 1.5}}, "kv_share is 1.5: use a number from 1e-06 to 1, or none"),
        ({"quota": {"burst_s": 0.0}}, "burst_s is 0.0: use a number from 1e-06 to 3.15576e\\+09$"),
        ({"name": "other"}, "name cannot be set"),
        ({"suspended_at": 1.0}, "suspended_at cannot be set"),
    ],
)
def test_invalid_values_are_refused_by_name_and_change_nothing(control, changes, said):
    before = tenant(control)
    with pytest.raises(ValueError, match=said):
        control.set_tenant(actor=ACTOR, name="acme", changes=changes).result(60)
    assert control.policies.tenants["acme"] == before
    assert read_policies(control.path).tenants["acme"] == before
    assert [row.action for row in read_audit(control.path)] == ["tenants.create"]


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "ä", "x" * 65, "a\n"])
def test_names_of_tenants_that_are_unsafe_in_urls_or_file_names_are_refused(control, name):
    with pytest.raises(ValueError, match="name is"):
        tenant(control, name)


def test_errors_distinguish_names_that_are_taken_unknown_or_built_in(control):
    tenant(control)
    with pytest.raises(ConflictError, match="tenant 'acme' already exists"):
        tenant(control)
    for change in (
        control.set_tenant(actor=ACTOR, name="nobody", changes={"weight": 2.0}),
        control.suspend_tenant(actor=ACTOR, name="nobody"),
        control.delete_tenant(actor=ACTOR, name="nobody"),
        control.map_peer(actor=ACTOR, kind="uid", number=1, tenant="nobody"),
        control.create_key(actor=ACTOR, name="k", tenant="nobody"),
    ):
        with pytest.raises(UnknownTenantError, match="no tenant 'nobody'"):
            change.result(60)
    for name in ("local", "default"):
        with pytest.raises(ConflictError, match="built in"):
            control.delete_tenant(actor=ACTOR, name=name).result(60)
    assert control.list_keys() == []


def test_a_tenant_can_be_deleted_only_when_no_key_or_peer_uses_it(control):
    tenant(control)
    made = control.create_key(actor=ACTOR, name="k", tenant="acme").result(60)
    control.map_peer(actor=ACTOR, kind="gid", number=7, tenant="acme").result(60)
    with pytest.raises(ConflictError, match=f"in use by key {made.record.id}, gid 7: revoke"):
        control.delete_tenant(actor=ACTOR, name="acme").result(60)
    control.revoke_key(actor=ACTOR, key_id=made.record.id).result(60)
    with pytest.raises(ConflictError, match="gid 7"):
        control.delete_tenant(actor=ACTOR, name="acme").result(60)
    control.unmap_peer(actor=ACTOR, kind="gid", number=7).result(60)
    control.delete_tenant(actor=ACTOR, name="acme").result(60)
    assert "acme" not in control.policies.tenants
    assert [key.tenant for key in control.list_keys()] == ["acme"]


def test_suspending_twice_keeps_the_first_time_and_resuming_clears_it(control):
    tenant(control)
    first = control.suspend_tenant(actor=ACTOR, name="acme").result(60).after
    assert isinstance(first, TenantRecord) and first.suspended_at is not None
    assert control.suspend_tenant(actor=ACTOR, name="acme").result(60).after == first
    control.resume_tenant(actor=ACTOR, name="acme").result(60)
    assert control.policies.tenants["acme"].suspended_at is None


def test_a_rotated_key_and_the_new_key_are_both_valid_for_a_while(control, monkeypatch):
    tenant(control)
    old = control.create_key(
        actor=ACTOR, name="k", tenant="acme", scopes=("inference", "read"), models=("m",), highest_class=3
    ).result(60)
    rotated = control.rotate_key(actor=ACTOR, key_id=old.record.id, overlap_s=100.0).result(60)
    new = rotated.created
    assert new.key != old.key and new.record.id != old.record.id
    for field in ("name", "tenant", "scopes", "models", "highest_class", "quota", "expires_at"):
        assert getattr(new.record, field) == getattr(old.record, field), field
    assert rotated.former.replaced_by == new.record.id
    assert control.lookup(old.key) is not None and control.lookup(new.key) == new.record
    later = time.time() + 101
    monkeypatch.setattr("store.control.time.time", lambda: later)
    assert control.lookup(old.key) is None and control.lookup(new.key) is not None
    _, params = last_row(control)
    assert params["before"] == {"expires_at": None, "replaced_by": None}
    assert params["after"]["replaced_by"] == params["after"]["successor"]["id"] == new.record.id
    everything = b"".join(file.read_bytes() for file in control.path.parent.iterdir())
    assert new.key.encode() not in everything


def test_a_rotation_never_extends_the_old_key_and_gives_the_new_one_the_same_lifetime(control):
    expires_at = time.time() + 50
    old = control.create_key(actor=ACTOR, name="k", tenant="default", expires_at=expires_at).result(60)
    rotated = control.rotate_key(actor=ACTOR, key_id=old.record.id, overlap_s=1000.0).result(60)
    assert rotated.former.expires_at == expires_at
    new = rotated.created.record
    assert new.expires_at is not None
    assert abs((new.expires_at - new.created_at) - (expires_at - old.record.created_at)) < 1e-3


def test_a_key_is_rotated_once_and_only_while_it_is_valid(control):
    old = control.create_key(actor=ACTOR, name="k", tenant="default").result(60).record
    new = control.rotate_key(actor=ACTOR, key_id=old.id, overlap_s=60).result(60).created.record
    with pytest.raises(ConflictError, match=f"was replaced by key {new.id}: rotate that key instead"):
        control.rotate_key(actor=ACTOR, key_id=old.id, overlap_s=60).result(60)
    at_once = control.rotate_key(actor=ACTOR, key_id=new.id, overlap_s=0).result(60)
    assert not at_once.former.valid_at(time.time())
    with pytest.raises(ConflictError, match="is expired"):
        control.set_key(actor=ACTOR, key_id=new.id, changes={"name": "x"}).result(60)
    control.revoke_key(actor=ACTOR, key_id=at_once.created.record.id).result(60)
    with pytest.raises(ConflictError, match="is revoked"):
        control.rotate_key(actor=ACTOR, key_id=at_once.created.record.id, overlap_s=0).result(60)
    with pytest.raises(UnknownKeyError):
        control.rotate_key(actor=ACTOR, key_id="key_0", overlap_s=0).result(60)
    with pytest.raises(ValueError, match="overlap_s is -1"):
        control.rotate_key(actor=ACTOR, key_id=old.id, overlap_s=-1)
    with pytest.raises(ValueError, match="one year"):
        control.rotate_key(actor=ACTOR, key_id=old.id, overlap_s=366 * 86_400 + 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scopes": ()}, r"scopes is \[\]: use one or more of inference, admin, read"),
        ({"scopes": ("root",)}, "scopes is"),
        ({"scopes": ("read", "read")}, "each at most once"),
        ({"models": ()}, "use 1 to 256 printable names, or none for all models"),
        ({"models": ("a\n",)}, r"models is \['a"),
        ({"models": tuple(map(str, range(257)))}, "use 1 to 256 printable names"),
        ({"name": "x" * 201}, "use 1 to 200 printable characters"),
        ({"highest_class": 9}, "highest_class is 9"),
        ({"expires_at": 5.0}, "which is in the past"),
        ({"quota": {"queued_requests": 0}}, "queued_requests is 0"),
        ({"tenant": "local"}, "tenant cannot be set"),
        ({"sha256": "00"}, "sha256 cannot be set"),
    ],
)
def test_invalid_rights_of_a_key_are_refused_by_name(control, changes, said):
    key = control.create_key(actor=ACTOR, name="k", tenant="default").result(60).record
    with pytest.raises(ValueError, match=said):
        control.set_key(actor=ACTOR, key_id=key.id, changes=changes).result(60)
    assert control.list_keys() == [key]


def test_the_rights_of_a_key_can_be_changed(control):
    key = control.create_key(actor=ACTOR, name="k", tenant="default").result(60).record
    changes = {"scopes": ("admin",), "models": ("m",), "quota": {"tokens_per_minute": 10.0}}
    control.set_key(actor=ACTOR, key_id=key.id, changes=changes).result(60)
    (now,) = control.list_keys()
    assert (now.scopes, now.models, now.quota) == (("admin",), ("m",), Quota(tokens_per_minute=10.0))
    assert last_row(control)[1]["before"]["scopes"] == ["inference"]


@pytest.mark.parametrize(("kind", "number"), [("pid", 1), ("uid", -1), ("gid", 2**32 - 1)])
def test_only_valid_users_and_groups_can_be_mapped(control, kind, number):
    with pytest.raises(ValueError, match=r"use uid or gid|use a Linux"):
        control.map_peer(actor=ACTOR, kind=kind, number=number, tenant="local").result(60)
    with pytest.raises(UnknownPeerError, match="is not mapped"):
        control.unmap_peer(actor=ACTOR, kind=kind, number=number).result(60)


def test_a_file_from_before_tenants_existed_keeps_its_keys_and_gets_their_tenants(tmp_path: Path) -> None:
    path = tmp_path / "control.db"
    before = Schema(CONTROL.name, CONTROL.migrations[:2])
    old = WritableDatabase(path, before, "FULL")
    old.connection.execute(
        "INSERT INTO keys VALUES ('key_1', 'laptop', 'acme corp', 'ak-12345', 'ff', 1000.5, NULL, NULL)"
    )
    old.close()
    control = ControlStore(path)
    control.start()
    try:
        assert list(control.policies.tenants) == ["acme corp", "default", "local"]
        assert control.list_keys() == [
            KeyRecord(
                id="key_1",
                name="laptop",
                tenant="acme corp",
                prefix="ak-12345",
                sha256="ff",
                created_at=1000.5,
            )
        ]
        control.set_tenant(actor=ACTOR, name="acme corp", changes={"weight": 2.0}).result(60)
    finally:
        control.close()


def test_an_auditor_reads_tenants_and_keys_with_plain_sql(control):
    tenant(control, quota={"tokens_per_day": 5000.0}, highest_class=0)
    control.create_key(actor=ACTOR, name="k", tenant="acme", scopes=("read",)).result(60)
    control.map_peer(actor=ACTOR, kind="uid", number=3, tenant="acme").result(60)
    with closing(sqlite3.connect(f"file:{control.path}?mode=ro", uri=True)) as connection:
        (row,) = connection.execute(
            "SELECT highest_class, default_class, keys, peers, json_extract(quota, '$.tokens_per_day') "
            "FROM tenant_list WHERE name = 'acme'"
        )
        assert row == ("P0", "P1", 1, 1, 5000.0)
        assert connection.execute("SELECT scopes, quota FROM key_list").fetchall() == [('["read"]', "{}")]


def test_policies_objects_are_immutable(control):
    held = control.policies
    tenant(control)
    assert "acme" not in held.tenants and control.policies is not held
    peer = PeerRecord(kind="uid", number=1, tenant="local", created_at=0.0)
    assert Policies(peers=[peer]).peers[("uid", 1)] is peer
