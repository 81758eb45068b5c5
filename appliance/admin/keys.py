"""Lists, creates, changes, rotates and revokes keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from appliance.actions.parameters import CreateKey, RevokeKey, RotateKey, SetKey
from appliance.admin.effects import Effect, committed, done
from appliance.admin.tenants import CancelRequests, Usage, changes, requests_after
from appliance.protocol import Key, NewKey
from store.audit import Actor
from store.control import ControlStore, CreatedKey
from store.policies import KeyFields, KeyRecord


@dataclass(kw_only=True)
class KeyAdmin:
    """Lists and changes keys for operators. Changes reach the front processes before the operator receives
    the response."""

    control: ControlStore
    usage: Usage
    publish: Callable[[], None]
    """Makes changed keys take effect in the queue and the front processes."""
    cancel: CancelRequests

    def list(self) -> list[Key]:
        """Return all keys, including revoked and expired ones, oldest first."""
        return [self._shown(record) for record in self.control.list_keys()]

    async def create(self, actor: Actor, asked: CreateKey) -> Effect:
        """Create a key. Like all methods that change keys, raises ValueError for an invalid change and
        StoreError if the database fails."""
        fields = changes(asked, KeyFields)
        name = str(fields.pop("name"))
        created = await committed(
            self.control.create_key(actor=actor, name=name, tenant=asked.tenant, **fields)
        )
        self.publish()
        return Effect(_new_key(created))

    async def set(self, actor: Actor, asked: SetKey) -> Effect:
        """Change the given fields of a key."""
        fields = changes(asked, KeyFields)
        change = await committed(self.control.set_key(actor=actor, key_id=asked.id, changes=fields))
        self.publish()
        assert isinstance(change.after, KeyRecord)
        return Effect(self._shown(change.after))

    async def rotate(self, actor: Actor, asked: RotateKey) -> Effect:
        """Replace a key with a new one."""
        rotated = await committed(
            self.control.rotate_key(
                actor=actor, key_id=asked.id, overlap_s=asked.overlap_s, expires_at=asked.expires_at
            )
        )
        self.publish()
        return Effect(_new_key(rotated.created, rotated.former))

    async def revoke(self, actor: Actor, asked: RevokeKey) -> Effect:
        """Revoke a key."""
        await committed(self.control.revoke_key(actor=actor, key_id=asked.id))
        self.publish()
        key = self.control.policies.keys[asked.id]
        cancelled = None
        if asked.cancel:
            cancelled = self.cancel(
                lambda identity: identity.key_id == asked.id, "the key used for this request was revoked"
            )
        return done(f"key {key.id} ({key.name}) revoked; {requests_after(cancelled)}")

    def _shown(self, record: KeyRecord) -> Key:
        fields = {name: getattr(record, name) for name in KeyFields.__struct_fields__}
        return Key(**fields, usage=self.usage("key", record.id))


def _new_key(created: CreatedKey, former: KeyRecord | None = None) -> NewKey:
    record = created.record
    return NewKey(
        id=record.id,
        key=created.key,
        name=record.name,
        tenant=record.tenant,
        expires_at=record.expires_at,
        replaces=former.id if former is not None else None,
        replaced_until=former.expires_at if former is not None else None,
    )
