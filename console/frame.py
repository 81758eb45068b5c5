"""The frame around every screen: header, tabs, drain banner, body and footer. A frame is a list of lines that
`console.app` shows and `console.top` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from appliance.snapshot import Snapshot
from console import units
from console.context import Context
from console.help import help_lines
from console.keys import key_of
from console.lines import BLANK, Line, Span, cells, clip, fit, line, span, spread, width_of, wrap
from console.roles import Role
from console.screens.base import MIN_HEIGHT, MIN_WIDTH, View
from console.screens.panels import STATE_ROLES
from console.screens.table import TableView
from console.timeline import PastState, badge_text, timeline_lines

_RESTARTED_S = 60.0
"""How long the RESTARTED badge is shown, in seconds."""
_MIN_SCREEN = (20, 5)
_MIN_TABS_HEIGHT = 8
"""Minimum terminal height at which the tabs are shown."""
_MAX_MESSAGE_ROWS = 4
_IMPORTANT_KEYS = ("help", "quit", "command", "actions", "variant")
"""Commands shown in the footer even if the terminal is too narrow to show all commands."""


@dataclass
class FrameState:
    """The values that the console's frame shows around the screen."""

    context: Context
    view: View
    views: Sequence[View]
    label: str
    demo: bool = False
    now: float = 0.0
    stale_s: float | None = None
    """Age of the snapshot if it is stale, otherwise None."""
    error: str = ""
    """Why the source cannot deliver snapshots, or an empty string."""
    restarted_at: float | None = None
    paused: bool = False
    past: PastState | None = None
    """The displayed past state, or None if the console is live."""
    help: bool = False
    help_scroll: int = 0
    message: str = ""
    message_role: Role = "text"
    footer: bool = True
    small: bool = False
    """Whether the terminal was too small for panels when the frame was last drawn."""
    badges: list[str] = field(default_factory=list)
    frozen: tuple[tuple[View, int, int], list[Line]] | None = None
    """In jump mode: the screen, the terminal's size and the screen's lines when jump mode began. Rows and
    letters stay in place until the operator types a letter."""

    @property
    def has_panels(self) -> bool:
        """Whether the screen shows panels or a table, rather than a list of facts, which has no cursor."""
        return not self.small or isinstance(self.view, TableView)


def frame(state: FrameState, width: int, height: int) -> list[Line]:
    """Return all of the terminal's lines."""
    state.small = width < MIN_WIDTH or height < MIN_HEIGHT
    top = [_header(state, width)]
    if not state.small or height >= _MIN_TABS_HEIGHT:
        top.append(_tabs(state, width))
    if not state.small and state.past is not None and state.footer:
        top += timeline_lines(state.past, width, state.context.glyphs)
    top += _banners(state, width)
    bottom = _footer(state, width) if state.footer else []
    space = max(0, height - len(top) - len(bottom))
    body = _frozen(state, width, height, space) if state.context.jumping else _body(state, width, space)
    body = body[:space]
    lines = [*top, *body, *[BLANK] * (space - len(body)), *bottom]
    return [clip(one, width) for one in lines[:height]]


def _frozen(state: FrameState, width: int, height: int, space: int) -> list[Line]:
    """Return the screen's lines in jump mode. They change only if the terminal's size changes."""
    drawn = (state.view, width, height)
    if state.frozen is None or state.frozen[0] != drawn:
        state.frozen = drawn, _body(state, width, space)
    return state.frozen[1]


def _body(state: FrameState, width: int, height: int) -> list[Line]:
    if height <= 0 or width < _MIN_SCREEN[0]:
        return []
    if state.help:
        lines = help_lines(state.view, width, state.context.keys)
        state.help_scroll = max(0, min(state.help_scroll, len(lines) - height))
        return lines[state.help_scroll : state.help_scroll + height]
    if state.context.snapshot is None:
        reason = state.error or "waiting for data from the service"
        return [BLANK, *wrap(reason, width - 4, "bad" if state.error else "dim", "  ")]
    if state.small:
        return state.view.small(state.context, width, height)
    return state.view.render(state.context, width, height)


def _header(state: FrameState, width: int) -> Line:
    snapshot = state.context.snapshot
    left = line(span(" appliance ", "title"))
    if snapshot is not None:
        left += [
            span(f"{snapshot.host.name} " if snapshot.host.name else "", "bold"),
            span(snapshot.state, STATE_ROLES.get(snapshot.state, "text")),
            span(f" · up {units.seconds(snapshot.uptime_s)}", "dim"),
            span(f" · {snapshot.version}", "dim"),
        ]
    right = [Span(" "), *_badges(state)]
    if state.past is None:
        at = state.now if snapshot is None else snapshot.at
        right += [span(f" {units.clock(at)} ", "bold" if state.stale_s is None else "bad")]
    if width_of(left) + width_of(right) < width - 4:
        left.append(span(f" · {state.label}", "dim"))
    return spread(left, right, width)


def _badges(state: FrameState) -> Line:
    snapshot = state.context.snapshot
    badges: Line = []

    def add(text: str, role: Role, action: str = "") -> None:
        badges.append(span(f" {text} ", role, action))
        badges.append(Span(" "))

    past = state.past
    if past is not None and past.playing:
        add(f"PLAY x{past.speed}", "badge_good", "pause")
    if past is None and state.paused:
        add("PAUSED", "badge", "pause")
    if state.stale_s is not None:
        add(f"STALE {units.seconds(state.stale_s)}", "badge_bad")
    seen = state.restarted_at is not None and state.now - state.restarted_at < _RESTARTED_S
    if seen if past is None else past.restarted:
        add("RESTARTED", "badge")
    if snapshot is not None:
        firing = sum(one.state == "firing" for one in snapshot.alerts)
        if firing:
            add(f"{firing} ALERT{'S' if firing > 1 else ''}", "badge_bad", "screen 8")
    for badge in state.badges:
        add(badge, "badge")
    if state.demo:
        add("DEMO", "badge")
    if past is not None:
        add(badge_text(past), "badge_bad", "time")
    elif state.context.write:
        add("WRITE", "badge_bad")
    else:
        badges.append(span("read-only ", "dim"))
    return badges


def _tabs(state: FrameState, width: int) -> Line:
    shown = next((view for view in state.views if view.key == state.view.key), state.view)
    views = state.views if shown in state.views else [*state.views, shown]

    def tabs(title: str) -> Line:
        spans: Line = [Span(" ")]
        for view in views:
            action, key, text = f"screen {view.key}", _key_of_view(state, view), getattr(view, title)
            if view is shown:
                spans.append(span(f" {key} {text} ", "tab", action))
            else:
                spans += [span(f" {key}", "key", action), span(f" {text} ", "text", action)]
        return spans

    wide = tabs("title")
    if width_of(wide) <= width:
        return wide
    # Narrow terminals omit the spaces around the titles.
    spans: Line = []
    for view in views:
        action, key = f"screen {view.key}", _key_of_view(state, view)
        if view is shown:
            spans.append(span(f"{key} {view.short}", "tab", action))
        else:
            spans += [span(key, "key", action), span(f" {view.short}", "text", action)]
        spans.append(Span(" "))
    if width_of(spans) <= width + 1:
        return spans
    # Very narrow terminals show only the current tab's title.
    spans = []
    for view in views:
        action, key = f"screen {view.key}", _key_of_view(state, view)
        title = span(f"{key} {view.short}", "tab", action) if view is shown else span(key, "key", action)
        spans += [title, Span("  ")]
    if width_of(spans) <= width + 2:
        return spans
    return [span(f"{_key_of_view(state, shown)} {shown.short}", "tab")]


def _key_of_view(state: FrameState, view: View) -> str:
    """Return the name of the key that opens a screen."""
    return key_of(state.context.keys, f"screen {view.key}" if view in state.views else view.name)


def _banners(state: FrameState, width: int) -> list[Line]:
    lines: list[Line] = []
    snapshot = state.context.snapshot
    if state.error and snapshot is not None and state.past is None:
        lines += _banner(f" {state.error}", [], width, "badge_bad")
    if snapshot is not None:
        can_act = state.context.write and state.past is None
        can_act = can_act and not any(one.stopping for one in snapshot.drains)
        key = key_of(state.context.keys, "act resume") if can_act else ""
        lines += _drains(snapshot, width, key)
    return lines


def _drains(snapshot: Snapshot, width: int, key: str) -> list[Line]:
    """Return a banner for each drain. `key` is the name of the key that ends the drain, or an empty string.
    If there are several drains, the key offers a choice."""
    lines = []
    description = "to resume" if len(snapshot.drains) == 1 else "to resume one"
    remedy = [span(f" press {key} {description} ", "badge", "act resume")] if key else []
    for one in snapshot.drains:
        name = "SERVICE" if one.model is None else f"MODEL {one.model}"
        if one.state == "drained":
            facts = [f"took {units.seconds(one.elapsed_s)}"]
            if one.ended:
                facts.append(f"{units.counted(one.ended, 'request')} cancelled after the grace period")
        else:
            facts = [
                f"{one.running:,} running",
                f"{one.queued:,} queued",
                f"ETA {units.seconds(one.eta_s)}",
                f"grace left {units.seconds(one.grace_left_s)}",
            ]
        if one.queue:
            facts.append(f"{one.held:,} held")
        announced = one.state == "announced"
        state = "STOPPING" if one.stopping else "DRAIN ANNOUNCED" if announced else one.state.upper()
        effect = "are still accepted" if announced else "wait" if one.queue else "are refused"
        text = f" {name} {state}: {', '.join([*facts, f'new requests {effect}'])}"
        lines += _banner(text, remedy, width, "badge")
    return lines


def _banner(text: str, remedy: Line, width: int, role: Role) -> list[Line]:
    """Return a banner with the remedy at the right. Long texts continue on the lines below."""
    space = max(_MIN_SCREEN[0], width - width_of(remedy))
    first, *others = wrap(text, space, role, " ")
    lines = [[span(fit(first[0].text, space), role), *remedy]]
    rest = wrap(" ".join(one[0].text for one in others), width, role, " ")
    lines += [[span(fit(one[0].text, width), role)] for one in rest]
    return [clip(one, width) for one in lines]


def _footer(state: FrameState, width: int) -> list[Line]:
    """Return the message, on several lines if it is long, or the key hints if there is no message."""
    if state.message:
        one = [span(f" {state.message}", state.message_role)]
        fits = width_of(one) <= width
        return [one] if fits else wrap(state.message, width, state.message_role, " ")[:_MAX_MESSAGE_ROWS]
    spans: Line = [Span(" ")]
    table, view = state.context.keys, state.view
    if state.help:
        hints = [("move down", "scroll"), ("back", "close help")]
    else:
        hints = [*view.hints] if state.has_panels else []
        if state.has_panels and (view.alternate or view.variants):
            hints.append(("variant", view.alternate or f"view: {view.variant}"))
        if state.context.write:
            hints.append(("actions", "actions"))
    present = state.past is None
    common = [(key.command, key.footer if present else key.past) for key in table]
    common = [one for one in common if one[1]]
    common.sort(key=lambda one: one[0] not in ("help", "quit"))
    # While viewing history, time-navigation keys take precedence over the screen's own keys.
    ordered = [*common[:1], *hints, *common[1:]] if present else [*common, *hints]
    keys = [(key_of(table, command), text, command) for command, text in ordered]
    important = _IMPORTANT_KEYS if present else ()
    for name, text, command in _fitting([key for key in keys if key[0]], important, width):
        spans += [
            Span("  " if len(spans) > 1 else ""),
            span(name, "key", command),
            span(f" {text}", "dim", command),
        ]
    return [spans]


def _fitting(
    keys: Sequence[tuple[str, str, str]], important: Sequence[str], width: int
) -> list[tuple[str, str, str]]:
    """Return the footer keys that fit in this width, giving priority to the commands in `important`. Each key
    is a (name, text, command) tuple."""
    left, fitting = width + 1, set[int]()  # The first key has no spaces before it.
    for index in sorted(range(len(keys)), key=lambda one: keys[one][2] not in important):
        name, text, _ = keys[index]
        size = len("  ") + cells(f"{name} {text}")
        if size <= left:
            left -= size
            fitting.add(index)
    return [key for index, key in enumerate(keys) if index in fitting]
