"""Batches: the work of each replica's steps, with a column per time slice."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.snapshot import Batch
from console import units
from console.context import Context
from console.lines import BLANK, Line, Span, clip, heading, line, span
from console.screens.base import View

_STALL_FACTOR = 3.0
"""A slice contains a stall if its longest step took more than this many times as long as its mean decode
step."""


def stalled(batch: Batch) -> bool:
    """Return whether the slice contains a step that delayed the decodes noticeably."""
    if batch.longest_ms is None or not batch.step_ms:
        return False
    return batch.longest_ms > _STALL_FACTOR * batch.step_ms


def shares(batch: Batch) -> tuple[float, float, float] | None:
    """Return the shares of the slice in mixed steps, decode steps and idle time, or None if unknown."""
    if batch.decode_steps is None or batch.mixed_steps is None or batch.span_s <= 0:
        return None
    mixed = batch.mixed_steps * (batch.mixed_step_ms or 0.0) / 1000 / batch.span_s
    decode = batch.decode_steps * (batch.step_ms or 0.0) / 1000 / batch.span_s
    busy = mixed + decode
    scale = 1 / busy if busy > 1 else 1.0
    return mixed * scale, decode * scale, max(0.0, 1 - busy)


class BatchesView(View):
    """The steps of all replicas."""

    name = "batches"
    key = "2"
    title = "Batches"
    short = "Batch"
    help_text = (
        "A column per time slice, newest at the right. Its height is divided into steps with prefill "
        "(bottom), "
        "decode-only steps, and idle time (empty). ! marks a slice with a step that took more than three "
        "times the "
        "mean decode step; left and right move the cursor, and the line below names the request with the "
        "largest chunk."
    )
    figures = (
        "mixed_steps",
        "decode_steps",
        "step_ms",
        "idle_us",
        "steps_running",
        "stall",
        "computed_tokens",
    )

    def __init__(self) -> None:
        super().__init__()
        self.cursor = 0
        """Distance of the cursor from the newest slice."""
        self.replica = 0
        self._replicas = 1

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        names = list(context.history.batches)
        self._replicas = max(1, len(names))
        if not names:
            return [heading("Batches", width), [span("no replica has reported steps", "dim")]]
        each = max(4, min(14, height // len(names)))
        shown = max(1, height // each)
        first = max(0, min(self.replica - shown + 1, len(names) - shown))
        lines: list[Line] = []
        for index in range(first, min(len(names), first + shown)):
            slices = list(context.history.batches[names[index]])
            lines += self._replica(context, slices, width, each, selected=index == self.replica % len(names))
        return lines[:height]

    def facts(self, context: Context) -> list[tuple[str, str, str]]:
        facts = []
        for one in context.snapshot.batches if context.snapshot else []:
            text = f"{one.running} seqs, decode {units.ms(one.step_ms)}, mixed {units.ms(one.mixed_step_ms)}"
            facts.append((one.replica, text, "bad" if stalled(one) else "text"))
        return facts or [("batches", "no replica has reported steps", "dim")]

    def move(self, rows: int) -> None:
        self.replica = max(0, min(self._replicas - 1, self.replica + rows))

    def sideways(self, columns: int) -> None:
        self.cursor = max(0, self.cursor - columns)

    def _replica(
        self, context: Context, slices: list[Batch], width: int, height: int, *, selected: bool
    ) -> list[Line]:
        newest = slices[-1]
        self.cursor = min(self.cursor, max(0, min(len(slices), width) - 1)) if selected else self.cursor
        at = slices[-1 - self.cursor] if selected and self.cursor < len(slices) else newest
        busy = shares(newest)
        note = f"busy {units.percent(None if busy is None else busy[0] + busy[1])}"
        head = heading(newest.replica, width, note)
        if selected:
            head[0] = Span("▸ ", "accent")
        chart = _columns(context, slices[-width:], width, max(1, height - 3))
        lines = [head, *chart, _marks(slices[-width:], width, self.cursor if selected else None)]
        lines.append(_figures(at, newest.at, width, selected and self.cursor > 0))
        return lines if height < 8 else [*lines, BLANK]


def _columns(context: Context, slices: Sequence[Batch], width: int, height: int) -> list[Line]:
    letters = (
        {"prefill": "▒", "decode": "█"} if context.glyphs != "ascii" else {"prefill": "p", "decode": "#"}
    )
    columns = []
    for batch in slices:
        part = shares(batch)
        if part is None:
            columns.append(["unknown"] + [""] * (height - 1))
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
            role = kind if kind in letters else "dim"
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
        role = {"!": "bad", "▲": "accent"}.get(letter, "rule")
        if spans[-1].role == role:
            spans[-1] = Span(spans[-1].text + letter, role)
        else:
            spans.append(Span(letter, role))
    return spans


def _figures(batch: Batch, newest: float, width: int, past: bool) -> Line:
    row = line(span(f"{units.seconds(newest - batch.at)} ago  " if past else "now  ", "accent"))
    row += [
        span(f"{batch.running}", "bold"),
        span("/" + str(batch.max_num_seqs) + " seqs  ", "dim"),
        span(f"{units.count(batch.decode_steps)} decode ", "decode"),
        span(f"{units.ms(batch.step_ms)}  "),
        span(f"{units.count(batch.mixed_steps)} mixed ", "prefill"),
        span(f"{units.ms(batch.mixed_step_ms)}  "),
    ]
    if stalled(batch):
        row.append(span(f"! {units.ms(batch.longest_ms)} {batch.longest_request}  ", "bad"))
    if batch.idle_us is not None:
        row.append(span(f"idle {batch.idle_us:.0f}µs  ", "dim"))
    row.append(
        span(f"prompt {units.short(batch.computed_tokens)}  out {units.short(batch.generated_tokens)}", "dim")
    )
    return clip(row, width)
