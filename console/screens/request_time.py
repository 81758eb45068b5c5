"""A bar with a legend that shows how long a request spent in the queue, in prefill and in decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from console import units
from console.lines import Line, Span, heading, span
from console.roles import Role

PhaseName = Literal["queue", "prefill", "decode"]

_LOOKS: dict[PhaseName, tuple[str, Role]] = {
    "queue": ("░", "warn"),
    "prefill": ("▒", "prefill"),
    "decode": ("█", "decode"),
}
"""The character that represents each phase on screen, and the role that determines its style."""


class Part(NamedTuple):
    """One phase of a request."""

    name: PhaseName
    seconds: float


def time_lines(title: str, total_s: float | None, parts: Sequence[Part], width: int) -> list[Line]:
    """Return a bar that shows a request's phases and their durations. The heading shows `total_s`."""
    top = heading(title, width, units.UNKNOWN if total_s is None else _duration(total_s))
    if not parts:
        return [top, [span("the phases of this request are unknown", "dim")]]
    # The clocks of two processes can differ by a few microseconds, so a duration can be negative.
    lengths = [max(0.0, part.seconds) for part in parts]
    whole = sum(lengths) or 1.0
    bar: Line = []
    legend: Line = []
    for part, length in zip(parts, lengths, strict=True):
        letter, role = _LOOKS[part.name]
        bar.append(Span(letter * max(1, round(length / whole * (width - len(parts)))), role))
        legend += [span(f"{part.name} ", role), span(_duration(length), "bold"), Span("   ")]
    return [top, bar, legend]


def _duration(seconds: float) -> str:
    return units.ms(seconds * 1000) if seconds < 60 else units.seconds(seconds)
