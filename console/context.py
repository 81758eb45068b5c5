"""The screens' input: the newest snapshot, recent history, and the operator's choices that apply to all
screens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from appliance.pages import ChainReport
from appliance.snapshot import Snapshot
from console.glyphs import GlyphSet
from console.history import History
from console.keys import KEYS, KeyTable
from console.source import ListName, Row

RowT = TypeVar("RowT", bound=Row)


class Compared(NamedTuple):
    """The snapshot at one of the two times being compared."""

    snapshot: Snapshot
    resolution_s: int

    @property
    def at(self) -> float:
        """The snapshot's time, in unix seconds."""
        return self.snapshot.at


@dataclass
class Context:
    """The input for all screens. Screens do not modify it."""

    snapshot: Snapshot | None = None
    """The newest snapshot, or None if none has arrived yet."""
    history: History = field(default_factory=History)
    glyphs: GlyphSet = "braille"
    keys: KeyTable = KEYS
    """The commands, with the operator's key assignments."""
    rows: dict[ListName, Sequence[Row]] = field(default_factory=dict)
    """Rows of the lists that have been read, keyed by list name."""
    row_errors: dict[ListName, str] = field(default_factory=dict)
    """Error messages for the lists that could not be read, keyed by list name."""
    chain: ChainReport | str | None = None
    """The result of the latest audit chain verification, a message if there is no result, or None if no
    verification was requested."""
    compared: Compared | None = None
    """The snapshot at the first of the two times being compared, or None if no first time has been chosen."""
    jumping: bool = False
    """Whether jump mode is active. Rows and panels then show letters, and the next key jumps to one of
    them."""
    write: bool = False
    """Whether actions are permitted."""
    is_past: bool = False
    """Whether the snapshot and the lists show a past state."""
    incident_since: float | None = None
    """Start of the period that the open incident file covers, in unix seconds. None if no incident file is
    open."""

    def rows_of(self, name: ListName, kind: type[RowT]) -> list[RowT]:
        """Return the rows (of type `kind`) of the list `name`, or no rows if the list has not been read."""
        return [row for row in self.rows.get(name, ()) if isinstance(row, kind)]
