"""Batches: the contents of each replica's steps, with one column per time slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from appliance.snapshot import STALL_FACTOR, Batch, Stall
from console import units
from console.context import Context
from console.glyphs import chart as bars
from console.glyphs import rounded_up
from console.lines import BLANK, Line, Span, clip, fit, heading, line, span, spread, titles
from console.roles import Role
from console.screens.base import JUMP_LETTERS, Fact, Table, View, table

_GUTTER = 6
"""Width of the labels to the left of the charts."""
_MIN_ROWS, _MAX_ROWS = 6, 24
"""Minimum and maximum number of lines per replica."""
_STALL_ROWS = 5
"""Number of lines given to the newest stalls on a tall terminal."""


def stalled(batch: Batch) -> bool:
    """Return whether a step in the time slice noticeably delayed the decodes."""
    if batch.longest_ms is None or not batch.step_ms:
        return False
    return batch.longest_ms > STALL_FACTOR * batch.step_ms


def shares(batch: Batch) -> tuple[float, float, float] | None:
    """Return the shares of the slice's time spent in mixed steps, in decode steps and idle, or None if they
    are unknown."""
    if batch.decode_steps is None or batch.mixed_steps is None or batch.span_s <= 0:
        return None
    mixed = batch.mixed_steps * (batch.mixed_step_ms or 0.0) / 1000 / batch.span_s
    decode = batch.decode_steps * (batch.step_ms or 0.0) / 1000 / batch.span_s
    busy = mixed + decode
    scale = 1 / busy if busy > 1 else 1.0
    return mixed * scale, decode * scale, max(0.0, 1 - busy)


class BatchesView(View):
    """The screen that shows all replicas' steps."""

    name = "batches"
    key = "2"
    title = "Batches"
    short = "Batch"
    can_jump = True
    can_zoom = True
    help_text = (
        "One column per second, newest on the right; in older history, one column per 10 s or 60 s. Each "
        "column shows the share of time spent in steps with prefill (bottom), in decode-only steps "
        "and idle (empty). Steps with prefill take up at least one row, even if their share is smaller. "
        "While a replica reports no steps, for example during a restart, its columns are unknown. The line "
        "below the chart shows the running sequences. ! marks a stall: a step that took more than three "
        "times as long as the mean decode step. Left and right move the cursor, which then stays on its "
        "column as newer columns arrive. For a stall, the bottom line names the request with the largest "
        "prefill chunk; {open} shows it. {zoom} shows only the selected replica."
    )
    explanations = (
        "mixed_steps",
        "decode_steps",
        "step_ms",
        "idle_us",
        "steps_running",
        "busy",
        "stall",
        "computed_tokens",
        "stall_time",
        "stall_mean",
        "stall_decodes",
        "stall_prompt",
        "replica",
        "stall_request",
    )

    def __init__(self) -> None:
        super().__init__()
        self.cursor = 0
        """The cursor's distance from the newest slice, in slices. At 0, the cursor follows the newest
        slice."""
        self._second: int | None = None
        """Unix time, in whole seconds, of the slice under the cursor, or None if the cursor follows the
        newest slice."""
        self._seconds: list[int] = []
        """Unix times, in whole seconds, of the selected replica's displayed slices, oldest first."""
        self.replica = 0
        self._replicas = 1
        self._shown = range(0)
        """Indices of the displayed replicas."""
        self._request = ""
        """Id of the request that caused the longest step in the slice under the cursor."""

    @property
    def hints(self) -> tuple[tuple[str, str], ...]:
        """Commands shown in the footer."""
        return (
            ("move left", "older"),
            ("move right", "newer"),
            ("move down", "replica"),
            ("open", "request"),
            ("zoom", "all replicas" if self.zoomed else "zoom"),
        )

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        names = _existing(context)
        self._replicas = max(1, len(names))
        self._request = ""
        if not names:
            return [heading("Batches", width), [span("no replica has reported steps", "dim")]]
        self.replica %= len(names)
        each = self._height_of_each(len(names), height)
        shown = 1 if self.zoomed else max(1, (height - 1) // each)
        first = max(0, min(self.replica - shown + 1, len(names) - shown))
        self._shown = range(first, min(len(names), first + shown))
        lines: list[Line] = [_legend(context, width)]
        for letter, index in zip(JUMP_LETTERS, self._shown, strict=False):
            slices = list(context.history.batches[names[index]])
            panel = self._replica(context, slices, width, each, selected=index == self.replica)
            if context.jumping:
                panel[0][0] = Span(f"{letter} ", "tab")
            lines += panel
        if not self.zoomed and height - len(lines) >= 3:
            lines += _stalls(context, width, height - len(lines))
        return lines[:height]

    def _height_of_each(self, replicas: int, height: int) -> int:
        """Return the number of lines per replica."""
        if self.zoomed:
            return height - 1
        space = height - 1 - (_STALL_ROWS if height >= 30 else 0)
        return max(_MIN_ROWS, min(_MAX_ROWS, space // replicas))

    def facts(self, context: Context) -> list[Fact]:
        facts: list[Fact] = []
        for one in context.snapshot.batches if context.snapshot else []:
            text = f"{units.counted(one.running, 'seq')}, decode {units.ms(one.step_ms)}"
            text += f", mixed {units.ms(one.mixed_step_ms)}"
            facts.append((one.replica, text, "bad" if stalled(one) else "text"))
        return facts or [("batches", "no replica has reported steps", "dim")]

    def export(self, context: Context) -> Table:
        return table(
            _newest_stalls(context),
            *("at", "replica", "ms", "mean_ms", "decodes", "prompt_tokens", "request", "tenant"),
        )

    def move(self, rows: int) -> None:
        self.replica = max(0, min(self._replicas - 1, self.replica + rows))

    def sideways(self, columns: int) -> None:
        self.cursor = max(0, min(self.cursor - columns, len(self._seconds) - 1))
        self._second = self._seconds[-1 - self.cursor] if self.cursor else None

    def jump(self, number: int) -> bool:
        if number >= len(self._shown):
            return False
        self.replica = self._shown[number]
        return True

    def request(self, context: Context) -> str:
        return self._request

    def _follow(self, visible: Sequence[Batch]) -> None:
        """Keep the cursor on its slice as newer slices arrive. Once the slice is out of view, the cursor
        stays at the edge."""
        self._seconds = [int(one.at) for one in visible]
        if self._second is not None:
            newer = sum(second > self._second for second in self._seconds)
            self.cursor = min(newer, len(visible) - 1)

    def _replica(
        self, context: Context, slices: list[Batch], width: int, height: int, *, selected: bool
    ) -> list[Line]:
        newest, size = slices[-1], width - _GUTTER
        visible = slices[-size:]
        at = newest
        if selected:
            self._follow(visible)
            at = visible[-1 - self.cursor]
            self._request = stall.request if (stall := _stall(context, at)) is not None else ""
        busy = shares(newest)
        if stopped := _stopped(context, newest.replica):
            note = stopped
        else:
            note = f"{newest.running}/{newest.max_num_seqs} seqs"
            if newest.waiting:
                note += f" · {newest.waiting} waiting"
            note += f" · busy {units.percent(None if busy is None else 1 - busy[2])}"
        head = heading(newest.replica, width, note)
        if selected:
            head[0] = Span("▸ ", "accent")
        spaced = height > 8
        rows = max(1, height - 4 - spaced)
        chart = _columns(context, visible, size, rows)
        labels = ["100%", *[""] * (rows - 2), "0%"] if rows > 1 else ["busy"]
        most = max(batch.running for batch in visible)
        running = bars(
            [None if shares(batch) is None else batch.running for batch in visible],
            size,
            1,
            "ascii" if context.glyphs == "ascii" else "block",
            "accent",
            rounded_up(most),
        )[0]
        lines = [
            head,
            *([span(f"{label:>5} ", "dim"), *row] for label, row in zip(labels, chart, strict=True)),
        ]
        lines.append([span(" " * _GUTTER), *_marks(visible, size, self.cursor if selected else None)])
        lines.append([span(" seqs ", "label"), *running])
        lines.append(_stats(context, at, newest.at, width, selected and self.cursor > 0))
        return [*lines, BLANK] if spaced else lines


def _existing(context: Context) -> list[str]:
    """Return the replicas whose steps are known, except those of unloaded models."""
    snapshot = context.snapshot
    if snapshot is None:
        return []
    existing = {one.name for model in snapshot.models for one in model.replicas}
    existing |= {one.replica for one in snapshot.batches}
    return [name for name in context.history.batches if name in existing]


def _stopped(context: Context, name: str) -> str:
    """Return a replica's state if the replica reports no steps, otherwise an empty string."""
    snapshot = context.snapshot
    if snapshot is None or any(one.replica == name for one in snapshot.batches):
        return ""
    states = [one.state for model in snapshot.models for one in model.replicas if one.name == name]
    return f"{states[0] if states else 'absent'}: no steps reported"


def _legend(context: Context, width: int) -> Line:
    letters = _letters(context)
    row = line(
        span(f"{letters['prefill']} ", "prefill"),
        span("steps with prefill (at least 1 row)  ", "dim"),
        span(f"{letters['decode']} ", "decode"),
        span("decode-only steps  ", "dim"),
        span("! ", "bad"),
        span("step over 3 × mean", "dim"),
    )
    step_s = context.history.step_s
    column = "one column per " + ("second" if step_s == 1 else f"{step_s:g} s")
    return spread(row, [span(column, "dim")] if width >= 100 or step_s > 1 else [], width)


def _letters(context: Context) -> dict[str, str]:
    return {"prefill": "▒", "decode": "█"} if context.glyphs != "ascii" else {"prefill": "p", "decode": "#"}


def _columns(context: Context, slices: Sequence[Batch], width: int, height: int) -> list[Line]:
    letters = _letters(context)
    columns: list[list[Literal["prefill", "decode", "unknown", ""]]] = []
    for batch in slices:
        part = shares(batch)
        if part is None:
            columns.append(["" if row else "unknown" for row in range(height)])
            continue
        mixed, decode = round(part[0] * height), round((part[0] + part[1]) * height)
        if part[0] > 0 and mixed == 0:
            mixed = 1
        columns.append(
            ["prefill" if row < mixed else "decode" if row < decode else "" for row in range(height)]
        )
    lines = []
    pad = width - len(columns)
    for row in reversed(range(height)):
        spans: Line = [Span(" " * pad)] if pad else []
        for column in columns:
            kind = column[row]
            letter = letters.get(kind, "┄" if kind == "unknown" else " ")
            role: Role = kind if kind == "prefill" or kind == "decode" else "dim"
            if spans and spans[-1].role == role:
                spans[-1] = Span(spans[-1].text + letter, role)
            else:
                spans.append(Span(letter, role))
        lines.append(spans)
    return lines


def _marks(slices: Sequence[Batch], width: int, cursor: int | None) -> Line:
    text = ["!" if stalled(batch) else "─" for batch in slices]
    if cursor is not None and cursor < len(text):
        text[-1 - cursor] = "▲"
    spans: Line = [Span("─" * (width - len(text)), "rule")]
    for letter in text:
        role: Role = "bad" if letter == "!" else "accent" if letter == "▲" else "rule"
        if spans[-1].role == role:
            spans[-1] = Span(spans[-1].text + letter, role)
        else:
            spans.append(Span(letter, role))
    return spans


def _stats(context: Context, batch: Batch, newest: float, width: int, past: bool) -> Line:
    row = line(span(f"-{units.seconds(newest - batch.at)} " if past else "now ", "accent"))
    row += [
        span(f"{units.count(batch.decode_steps)} decode ", "decode"),
        span(f"{units.ms(batch.step_ms)}  "),
        span(f"{units.count(batch.mixed_steps)} mixed ", "prefill"),
        span(f"{units.ms(batch.mixed_step_ms)}  "),
    ]
    if stalled(batch):
        stall = _stall(context, batch)
        cause = units.UNKNOWN if stall is None else _cause(stall)
        row.append(span(f"! {units.ms(batch.longest_ms)} {cause}  ", "bad"))
    prompt, output = units.short(batch.computed_tokens), units.short(batch.generated_tokens)
    row += [
        span("idle ", "label"),
        span(f"{units.us(batch.idle_us)}  "),
        span("tokens: prompt ", "label"),
        span(f"{prompt}, ", "dim"),
        span("out ", "label"),
        span(output, "dim"),
    ]
    return clip(row, width)


def _stall(context: Context, batch: Batch) -> Stall | None:
    """Return the longest known stall in the slice."""
    stalls = context.snapshot.stalls if context.snapshot else []
    inside = [
        one for one in stalls if one.replica == batch.replica and batch.at - batch.span_s < one.at <= batch.at
    ]
    return max(inside, key=lambda one: one.ms, default=None)


def _cause(stall: Stall) -> str:
    if not stall.request:
        return "no prompt"
    return f"{stall.request} ({stall.tenant or units.UNKNOWN})"


def _newest_stalls(context: Context) -> list[Stall]:
    return list(reversed(context.snapshot.stalls)) if context.snapshot else []


def _stalls(context: Context, width: int, height: int) -> list[Line]:
    """Return as many of the replicas' newest stalls as fit."""
    found = _newest_stalls(context)
    measured = any(slices[-1].longest_ms is not None for slices in context.history.batches.values())
    lines = [heading("Stalls", width, "all replicas, newest first" if found or measured else units.UNKNOWN)]
    if not found:
        return [*lines, [span("no stalls", "dim")]]
    columns = (("time", -16), ("step", 8), ("mean", 10), ("decodes", 9), ("prompt", 8), ("", 2))
    lines.append(clip(titles(*columns, ("replica", -21), ("request with the largest chunk", -30)), width))
    for one in found[: height - 2]:
        lines.append(
            clip(
                [
                    span(f"{units.short_date(one.at):<16}"),
                    span(f"{units.ms(one.ms):>8}  ", "bad"),
                    span(f"{units.ms(one.mean_ms):>8}  {one.decodes:>7}  {one.prompt_tokens:>6}  ", "dim"),
                    span(f"{fit(one.replica, 20)} ", "bold"),
                    span(_cause(one)),
                ],
                width,
            )
        )
    return lines
