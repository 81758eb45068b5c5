"""What screens render: the newest snapshot, the recent past, and the operator's choices that concern all
screens."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.snapshot import Snapshot
from console.glyphs import GlyphSet
from console.history import History
from console.source import ListName, ListRow


@dataclass
class Context:
    """The input of all screens. Screens only read it."""

    snapshot: Snapshot | None = None
    """The newest snapshot, or None before the first one."""
    history: History = field(default_factory=History)
    glyphs: GlyphSet = "braille"
    rows: dict[ListName, list[ListRow]] = field(default_factory=dict)
    """Lists that have been read."""
    row_errors: dict[ListName, str] = field(default_factory=dict)
    """Reasons why a list could not be read."""
    write: bool = False
    """Whether actions are permitted."""
