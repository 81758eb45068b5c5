"""`appliance top`: one frame of the console's overview as text, or one object as JSON. Textual is not
loaded."""

from __future__ import annotations

import asyncio

import msgspec

from appliance.snapshot import Snapshot
from console.context import Context
from console.frame import FrameState, frame
from console.history import History
from console.lines import plain
from console.replay import ReplaySource
from console.screens.registry import all_views
from console.source import SnapshotSource
from console.timeline import PastState


def read(source: SnapshotSource) -> tuple[Snapshot, History]:
    """Return a snapshot and its history. A live source is read twice and the second snapshot is returned,
    because rates need two snapshots. Raises SourceError."""

    async def both() -> tuple[Snapshot, History]:
        history = History()
        try:
            if isinstance(source, ReplaySource):
                return await source.next(), source.history
            source.reads_blocks = True
            for _ in range(2):
                snapshot = await source.next()
                history.add(snapshot)
            return snapshot, history
        finally:
            await source.close()

    return asyncio.run(both())


def top_json(source: SnapshotSource) -> bytes:
    """Return the snapshot as JSON."""
    snapshot, _ = read(source)
    return msgspec.json.format(msgspec.json.encode(snapshot), indent=2)


def top_lines(source: SnapshotSource, screen: str, width: int, height: int) -> list[str]:
    """Return the lines of a screen, without trailing empty lines."""
    snapshot, history = read(source)
    views = all_views()
    instant = source.instant if isinstance(source, ReplaySource) else None
    state = FrameState(
        context=Context(snapshot=snapshot, history=history),
        view=next(view for view in views if view.name == screen),
        views=views,
        label=source.label,
        demo=source.kind == "demo",
        now=snapshot.at,
        past=None if instant is None else PastState(instant),
        footer=False,
    )
    lines = [plain(line) for line in frame(state, width, height)]
    while lines and not lines[-1]:
        lines.pop()
    return lines
