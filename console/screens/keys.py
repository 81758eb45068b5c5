"""Keys: all tenants' API keys, and the local users and groups that need no key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from appliance.actions import Action, TargetKind
from appliance.protocol import Key, PeerMapping
from console import units
from console.context import Context
from console.fingerprints import peer_name
from console.lines import BLANK, Line, fact_lines, span
from console.screens.table import TableColumn, TableView
from console.screens.tenants import limit_lines
from console.source import ListName

_KINDS = {"uid": "user", "gid": "group"}
_USABLE = ("valid", "mapped", "settings")


class CallerRow(NamedTuple):
    """A row of the screen: a key, or the mapping of a local user or group to a tenant."""

    caller: Key | PeerMapping
    now: float
    """Time of the newest snapshot, in unix seconds."""

    @property
    def id(self) -> str:
        """The key's id, or the name that commands use for the user or group."""
        return self.caller.id if isinstance(self.caller, Key) else peer_name(self.caller)

    @property
    def name(self) -> str:
        """The key's name, or a description of the user or group."""
        if isinstance(self.caller, Key):
            return self.caller.name
        if self.caller.kind == "any":
            return "any other local user"
        return f"local {_KINDS[self.caller.kind]} {self.caller.number}"

    @property
    def state(self) -> str:
        """The key's state, or the mapping's source."""
        if isinstance(self.caller, PeerMapping):
            return self.caller.source
        if self.caller.revoked_at is not None:
            return "revoked"
        return "valid" if self.caller.valid_at(self.now) else "expired"

    @property
    def expires_at(self) -> float | None:
        """When the key expires, in unix seconds, or None if never."""
        return self.caller.expires_at if isinstance(self.caller, Key) else None

    @property
    def expires(self) -> str:
        """When the key expires, as text."""
        return "never" if self.expires_at is None else units.date(self.expires_at)

    @property
    def scopes(self) -> str:
        """The permissions of the key or mapping."""
        return ", ".join(self.caller.scopes) if isinstance(self.caller, Key) else "inference"


class KeysView(TableView[CallerRow]):
    """The screen that lists keys, and local users and groups."""

    name = "keys"
    key = "7"
    title = "Keys"
    short = "Tenants"
    alternate = "tenants"
    help_text = (
        "All tenants' API keys, and the local users and groups that need no key. Press {actions} to choose "
        "an action for the selected key or mapping, and {variant} to see the tenants."
    )
    target: TargetKind = "key"
    sorted_by = "tenant"
    empty = "no keys and no local users"
    columns = (
        TableColumn("name", "NAME", 18, lambda r: r.name, right=False, flexible=True, role=lambda r: "bold"),
        TableColumn("id", "ID", 14, lambda r: r.id, right=False),
        TableColumn("tenant", "TENANT", 14, lambda r: r.caller.tenant, right=False),
        TableColumn(
            "state",
            "STATE",
            9,
            lambda r: r.state,
            right=False,
            role=lambda r: "dim" if r.state in _USABLE else "bad",
        ),
        TableColumn(
            "expires_at", "EXPIRES", 19, lambda r: r.expires_at, lambda r: r.expires, right=False, unit="time"
        ),
        TableColumn(
            "scopes",
            "SCOPES",
            18,
            lambda r: r.scopes,
            right=False,
            drop=1,
            role=lambda r: "dim",
        ),
    )
    explanations = (
        *("caller_name", "caller_id", "caller_tenant", "caller_state", "expires_at", "scopes"),
        *("caller_created", "caller_limits"),
    )

    def lists(self) -> tuple[ListName, ...]:
        return ("callers",)

    def rows(self, context: Context) -> Sequence[CallerRow]:
        now = context.snapshot.at if context.snapshot else 0.0
        callers: list[Key | PeerMapping] = [*context.rows_of("callers", Key)]
        callers += context.rows_of("callers", PeerMapping)
        return [CallerRow(one, now) for one in callers]

    def id_of(self, row: CallerRow) -> str:
        return row.id

    def accepts(self, action: Action) -> bool:
        return action.target in ("key", "peer", "tenant")

    def targets(self, action: Action, context: Context) -> list[str]:
        """Return the ids of the selected keys or mappings or, for an action on tenants, the tenants of the
        selected rows."""
        selected = set(self.selected(context))
        rows = [row for row in self.ordered(context) if row.id in selected]
        if action.target == "tenant":
            return list(dict.fromkeys(row.caller.tenant for row in rows))
        kind = Key if action.target == "key" else PeerMapping
        return [row.id for row in rows if isinstance(row.caller, kind)]

    def has_target(self, name: str, context: Context) -> bool:
        return any(name in (row.id, row.caller.tenant) for row in self.rows(context))

    def title_of(self, row: CallerRow) -> str:
        return f"{row.name} ({row.id})"

    def describe(self, row: CallerRow, context: Context, width: int) -> list[Line]:
        facts = [
            ("tenant", row.caller.tenant),
            ("state", row.state),
            ("created", units.date(row.caller.created_at)),
            ("expires", row.expires),
            ("scopes", row.scopes),
        ]
        lines = [*fact_lines(facts, width), BLANK]
        if isinstance(row.caller, Key):
            limits = limit_lines(row.caller.usage, width, context.glyphs)
            lines += limits or [[span("no limits beyond the tenant's", "dim")]]
        return lines
