"""Tests of the identity table. It is computed from tenants, keys, peers and settings, and sent to fronts."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from appliance.channel.classes import service_class
from appliance.channel.core_messages import Identities
from appliance.channel.identity import Identity
from appliance.core.state import cache_salts
from appliance.front_pool.identities import IdentityRegistry, changes
from appliance.settings import UnixSettings
from store.control import ControlStore
from store.policies import Change, KeyRecord, PeerRecord, Policies, Quota, TenantRecord


def key(name: str, tenant: str = "acme", **fields: Any) -> KeyRecord:
    return KeyRecord(
        id=name, name=name, tenant=tenant, prefix="ak-", sha256=f"hash of {name}", created_at=0.0, **fields
    )


def tenant(name: str, **fields: Any) -> TenantRecord:
    return TenantRecord(name=name, created_at=0.0, **fields)


def peer(kind: str, number: int, tenant: str) -> PeerRecord:
    return PeerRecord(kind=kind, number=number, tenant=tenant, created_at=0.0)


class Server:
    """Policies that a test can change, and the identity table that is computed from them."""

    def __init__(self, *records: TenantRecord | KeyRecord | PeerRecord, unix: Any = "owner") -> None:
        self.policies = Policies([tenant("local"), tenant("default")])
        self.put(*records)
        self.table = IdentityRegistry(lambda: self.policies, UnixSettings(uids=unix))

    def put(self, *records: TenantRecord | KeyRecord | PeerRecord) -> None:
        self.policies = self.policies.with_changes(*(Change(None, record) for record in records))

    def remove(self, record: PeerRecord | TenantRecord | KeyRecord) -> None:
        self.policies = self.policies.with_changes(Change(record, None))

    def key(self, name: str) -> Identity:
        identity = self.table.current().keys[f"hash of {name}"]
        assert identity is not None
        return identity


def test_only_valid_keys_and_named_uids_are_in_the_table() -> None:
    past, future = time.time() - 1, time.time() + 1000
    server = Server(
        tenant("acme"),
        key("good"),
        key("lasting", expires_at=future),
        key("revoked", revoked_at=1.0),
        key("expired", expires_at=past),
        key("orphan", tenant="gone"),
        unix=[1234],
    )
    table = server.table.current()
    assert {name: known and known.key_id for name, known in table.keys.items()} == {
        "hash of good": "good",
        "hash of lasting": "lasting",
    }
    assert server.key("lasting").expires_at == future
    assert set(table.uids) == {0, os.geteuid(), 1234} and table.any_uid is None
    assert {known.tenant for known in table.uids.values()} == {"local"}
    anybody = Server(unix="any").table.current().any_uid
    assert anybody is not None and anybody.tenant == "local"
    assert 1234 not in Server().table.current().uids


def test_mapped_users_and_groups_take_precedence_over_the_settings() -> None:
    server = Server(
        tenant("acme"), peer("uid", 1234, "acme"), peer("uid", 0, "acme"), peer("gid", 50, "acme")
    )
    server.table.unix = UnixSettings(uids=[1234, 77])
    table = server.table.current()
    assert [table.uids[uid].tenant for uid in (1234, 0, 77)] == ["acme", "acme", "local"]
    assert {gid: known.tenant for gid, known in table.gids.items()} == {50: "acme"}
    assert table.uids[1234].scopes == ("inference",)


def test_a_key_restricts_its_tenants_rights_and_never_extends_them() -> None:
    quota = Quota(context_tokens=100)
    server = Server(
        tenant("acme", highest_class=1, default_class=1, quota=quota, default_max_tokens=7),
        key("plain"),
        key("wide", highest_class=0, quota=Quota(context_tokens=900)),
        key("narrow", highest_class=3, quota=Quota(context_tokens=10), models=("m",), scopes=("read",)),
    )
    assert (server.key("plain").highest_class, server.key("plain").context_tokens) == (1, 100)
    assert (server.key("wide").highest_class, server.key("wide").context_tokens) == (1, 100)
    narrow = server.key("narrow")
    assert (narrow.highest_class, narrow.default_class, narrow.context_tokens) == (3, 3, 10)
    assert (narrow.models, narrow.scopes, narrow.default_max_tokens) == (("m",), ("read",), 7)


def test_all_identities_of_a_suspended_tenant_are_marked() -> None:
    server = Server(
        tenant("acme", suspended_at=5.0), key("k"), peer("uid", 9, "acme"), peer("gid", 9, "acme")
    )
    table = server.table.current()
    assert server.key("k").suspended and table.uids[9].suspended and table.gids[9].suspended
    assert not table.uids[0].suspended


def test_the_table_is_computed_again_only_after_a_change() -> None:
    server = Server(tenant("acme"), key("k"))
    first = server.table.current()
    assert server.table.current() is first
    server.put(key("other"))
    second = server.table.current()
    assert second is not first
    assert second.keys["hash of k"] is first.keys["hash of k"]
    server.table.unix = UnixSettings(uids=[5])
    assert 5 in server.table.current().uids


def test_the_changes_for_fronts_add_up_to_the_whole_table() -> None:
    server = Server(tenant("acme"), tenant("other"), *(key(f"k{number}") for number in range(20)))
    before = server.table.current()
    assert changes(before, before) is None
    server.put(tenant("acme", weight=5.0))
    assert changes(before, server.table.current()) is None, "fronts do not use a tenant's weight"
    server.put(key("k3", revoked_at=1.0), key("k4", models=("m",)), key("new"), peer("gid", 3, "acme"))
    after = server.table.current()
    news = changes(before, after)
    assert news is not None and not news.whole
    assert set(news.keys) == {"hash of k3", "hash of k4", "hash of new"}
    assert news.keys["hash of k3"] is None
    known = {name: one for name, one in (before.keys | news.keys).items() if one is not None}
    assert (known, news.uids, news.gids) == (after.keys, after.uids, after.gids)


def test_rights_sent_by_a_front_are_replaced_by_those_of_the_core() -> None:
    server = Server(
        tenant("acme", highest_class=2), key("k", highest_class=3), tenant("rich", highest_class=0)
    )
    claim = {"highest_class": 0, "context_tokens": None, "scopes": ("inference", "admin")}
    assert server.table.of(Identity(tenant="acme", key_id="k", **claim)) == server.key("k")  # type: ignore[arg-type]
    as_peer = server.table.of(Identity(tenant="acme", **claim))  # type: ignore[arg-type]
    assert (as_peer.highest_class, as_peer.scopes) == (2, ("inference",))
    # A caller whose tenant or key does not exist, or whose key belongs to another tenant, has the rights of
    # an unknown caller.
    for tenant_name, key_id in (("rich", "k"), ("acme", "gone"), ("gone", ""), ("gone", "k")):
        claimed = Identity(tenant=tenant_name, key_id=key_id, **claim)  # type: ignore[arg-type]
        assert server.table.of(claimed) == Identity(tenant=tenant_name, key_id=key_id)


@pytest.mark.parametrize(
    ("asked", "highest", "default", "got"),
    [
        ("", 1, 1, 1),
        ("", 1, 2, 2),
        ("", 2, 1, 2),
        ("auto", 0, 1, 1),
        ("default", 0, 2, 2),
        ("P0", 0, 1, 0),
        ("P0", 1, 1, 1),
        ("priority", 0, 1, 0),
        ("priority", 2, 2, 2),
        ("P3", 0, 0, 3),
        ("flex", 0, 1, 2),
        ("flex", 3, 3, 3),
        ("P9", 1, 1, 1),
    ],
)
def test_a_request_gets_the_class_it_asks_for_but_none_higher_than_allowed(
    asked: str, highest: int, default: int, got: int
) -> None:
    assert service_class(asked, Identity(tenant="t", highest_class=highest, default_class=default)) == got


def test_tenants_share_a_salt_exactly_when_they_are_in_one_group(tmp_path: Any) -> None:
    control = ControlStore(tmp_path / "control.db")
    control.start()
    try:
        for name, group in (("a", "lab"), ("b", "lab"), ("c", None), ("lab", None), ("d", "c")):
            changed: dict[str, object] = {"cache_group": group}
            control.create_tenant(actor="uid:0", name=name, changes=changed).result(60)
        salt = cache_salts(control)
        assert salt("a") == salt("b")
        assert len({salt(name) for name in ("a", "c", "lab", "d", "local", "unknown")}) == 6
        assert cache_salts(control)("a") != salt("a")
    finally:
        control.close()


def test_a_thousand_tenants_and_five_thousand_keys_fit_into_one_small_frame() -> None:
    import msgspec

    tenants = [tenant(f"t{number:04}") for number in range(1000)]
    keys = [
        KeyRecord(
            id=f"key_{number:016x}",
            name="k",
            tenant=f"t{number % 1000:04}",
            prefix="ak-",
            sha256=f"{number:064x}",
            created_at=0.0,
        )
        for number in range(5000)
    ]
    server = Server(*tenants, *keys)
    before = server.table.current()
    encode = msgspec.msgpack.Encoder().encode
    assert len(encode(before)) < 1 << 20
    server.put(msgspec.structs.replace(keys[7], revoked_at=1.0))
    news = changes(before, server.table.current())
    assert news is not None and len(encode(news)) < 1000
    assert msgspec.msgpack.decode(encode(news), type=Identities) == news


def test_deleted_keys_take_no_memory() -> None:
    server = Server(tenant("acme"), key("kept"), key("deleted"))
    server.table.current()
    server.remove(key("deleted"))
    server.table.current()
    assert list(server.table._known) == ["kept"]
