"""`appliance top`: one frame of a console screen as text, or one snapshot as JSON. Textual is not loaded."""

from __future__ import annotations

import asyncio

import msgspec

from console.context import Context
from console.frame import FrameState, frame
from console.lines import plain
from console.replay import ReplaySource
from console.screens.base import View
from console.screens.registry import all_views
from console.source import SnapshotSource, SourceError
from console.timeline import PastState


def read(source: SnapshotSource, view: View | None = None) -> Context:
    """Read a screen's input: a snapshot, its history, and the lists that the screen shows. A live source is
    read twice, and the second snapshot is returned, because rates need two snapshots. Raises SourceError if
    the snapshot or a required list cannot be read."""

    async def reading() -> Context:
        context = Context()
        try:
            if isinstance(source, ReplaySource):
                context.snapshot, context.history = await source.next(), source.history
            else:
                source.reads_blocks = True
                for _ in range(2):
                    context.snapshot = await source.next()
                    context.history.add(context.snapshot)
            for name in () if view is None else view.lists():
                try:
                    context.rows[name] = await source.rows(name)
                except SourceError as error:
                    if view is not None and name in view.required_lists():
                        raise
                    context.row_errors[name] = str(error)
            return context
        finally:
            await source.close()

    return asyncio.run(reading())


def top_json(source: SnapshotSource) -> bytes:
    """Return the snapshot as JSON."""
    snapshot = read(source).snapshot
    return msgspec.json.format(msgspec.json.encode(snapshot), indent=2)


def top_lines(source: SnapshotSource, screen: str, width: int, height: int) -> list[str]:
    """Return a screen's lines, without trailing empty lines."""
    views = all_views()
    view = next(view for view in views if view.name == screen)
    context = read(source, view)
    instant = source.instant if isinstance(source, ReplaySource) else None
    state = FrameState(
        context=context,
        view=view,
        views=views,
        label=source.label,
        demo=source.kind == "demo",
        now=0.0 if context.snapshot is None else context.snapshot.at,
        past=None if instant is None else PastState(instant),
        footer=False,
    )
    lines = [plain(line) for line in frame(state, width, height)]
    while lines and not lines[-1]:
        lines.pop()
    return lines
