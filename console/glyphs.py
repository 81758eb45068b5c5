"""Bars and charts drawn with characters. The three glyph sets differ in resolution and font support: braille
and block need a font that contains these characters; ascii works everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from console.lines import Line, Span
from console.roles import Role

GlyphSet = Literal["braille", "block", "ascii"]
GLYPH_SETS: tuple[GlyphSet, ...] = ("braille", "block", "ascii")

_PARTS = {"braille": "█▓▒", "block": "█▓▒", "ascii": "#=+"}
"""Characters for a bar's parts, from left to right, so that parts are distinguishable without colour."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*#@"
_LEFT = (0x00, 0x40, 0x44, 0x46, 0x47)
_RIGHT = (0x00, 0x80, 0xA0, 0xB0, 0xB8)
_SCALE = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
_UNKNOWN = {"braille": "┄", "block": "┄", "ascii": "?"}

Values = Sequence[float | None]


def bar(parts: Sequence[tuple[float, Role]], width: int, glyphs: GlyphSet) -> Line:
    """Return a horizontal bar. `parts` contains up to three fractions of the width, with their roles, from
    left to right."""
    if width <= 0:
        return []
    empty = "-" if glyphs == "ascii" else "░"
    result: Line = []
    done, total = 0, 0.0
    for index, (fraction, role) in enumerate(parts):
        total = min(1.0, total + max(0.0, fraction))
        end = round(total * width)
        # Show at least one character for each non-empty part.
        if fraction > 0 and end == done and done < width:
            end = done + 1
        letter = _PARTS[glyphs][index]
        if end > done:
            result.append(Span(letter * (end - done), role))
            done = end
    if done < width:
        result.append(Span(empty * (width - done), "track"))
    return result


def bar_legend(names: Sequence[str], glyphs: GlyphSet) -> str:
    """Return a bar's legend: the name of each part, with its character."""
    return ", ".join(f"{letter} {name}" for letter, name in zip(_PARTS[glyphs], names, strict=False))


def unknown_bar(width: int) -> Line:
    """Return a bar for an unknown value."""
    return [Span("·" * max(0, width), "track")]


def meter(fraction: float | None, width: int, glyphs: GlyphSet, role: Role | None = None) -> Line:
    """Return a bar for one fraction. If `role` is None, it is derived from the fraction."""
    if fraction is None:
        return unknown_bar(width)
    return bar([(fraction, role or level(fraction))], width, glyphs)


def level(fraction: float | None, warn: float = 0.8, bad: float = 0.95) -> Role:
    """Return the role for a utilisation: good, warn or bad."""
    if fraction is None:
        return "dim"
    return "bad" if fraction >= bad else "warn" if fraction >= warn else "good"


def per_cell(glyphs: GlyphSet) -> int:
    """Return the number of values in one chart column."""
    return 2 if glyphs == "braille" else 1


def chart(
    values: Values,
    width: int,
    height: int,
    glyphs: GlyphSet,
    role: Role,
    top: float | None = None,
    *,
    phase: int = 0,
) -> list[Line]:
    """Return a chart of the newest values, with the newest at the right edge. `top` is the value at the upper
    edge; by default, it is the largest value, rounded up. Unknown values are shown as gaps, and times before
    the first value are left empty. `phase` is the index of the newest value. With `phase`, the same two
    values keep sharing a braille character as the chart moves. The whole chart is then redrawn only for every
    second value."""
    columns = per_cell(glyphs)
    size = width * columns - phase % columns
    shown = list(values)[-size:] if size else []
    known = [value for value in shown if value is not None]
    top = rounded_up(max(known, default=0.0)) if top is None else top
    steps = height * (4 if glyphs == "braille" else 8)
    marks = [None if value is None else _steps(value, top, steps) for value in shown]
    missing = size - len(marks)
    marks += [-1] * (width * columns - size)
    rows = []
    for row in reversed(range(height)):
        letters = []
        for cell in range(width):
            pair = [
                (-1 if index < 0 else marks[index])
                for index in (cell * columns - missing + offset for offset in range(columns))
            ]
            letters.append(_letter(pair, row, glyphs))
        rows.append([Span("".join(letters), role)])
    return rows


def rounded_up(value: float) -> float:
    """Round up to the next value in the series 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15 …, so that a chart's scale
    rarely changes."""
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in _SCALE if value <= step * power * (1 + 1e-9))


def _steps(value: float, top: float, steps: int) -> int:
    if top <= 0 or value <= 0:
        return 0
    return max(1, min(steps, round(value / top * steps)))


def _letter(pair: Sequence[int | None], row: int, glyphs: GlyphSet) -> str:
    """Return the character of one chart cell. In `pair`, -1 means a time before the first value, and None an
    unknown value."""
    if all(mark is None for mark in pair):
        return _UNKNOWN[glyphs] if row == 0 else " "
    if all(mark == -1 for mark in pair):
        return " "
    if glyphs == "braille":
        left, right = (max(0, min(4, (mark or 0) - row * 4)) for mark in pair)
        return chr(0x2800 + _LEFT[left] + _RIGHT[right]) if left or right else " "
    mark = pair[0] or 0
    filled = max(0, min(8, mark - row * 8))
    return (_BLOCKS if glyphs == "block" else _ASCII)[filled]
