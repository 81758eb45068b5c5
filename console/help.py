"""A screen's help: keys, fields and metrics, with units and windows."""

from __future__ import annotations

import re
from collections.abc import Iterable

from console.explanations import EXPLANATIONS, FRAME
from console.keys import KeyTable, key_of, shown_name
from console.lines import BLANK, Line, beside, clip, heading, line, span, wrap
from console.screens.base import View
from console.screens.table import TableView

_NAME_WIDTH = 18
_KEY = re.compile(r"\{(\w+)\}")
"""Matches a placeholder in a screen's help text: a command name, which is replaced by the command's key."""


def help_lines(view: View, width: int, keys: KeyTable) -> list[Line]:
    """Return a screen's help. `keys` contains the commands with the operator's key assignments."""
    doc = _KEY.sub(lambda found: key_of(keys, found[1]), " ".join((view.help_text or "").split()))
    closing = key_of(keys, "back") or key_of(keys, "help")
    lines = [
        heading(f"Help: {view.title}", width, f"{closing} to close" if closing else ""),
        *wrap(doc, width, "bold"),
        BLANK,
    ]
    lines += [heading("Fields and metrics", width, "unit · window · source")]
    lines += _explained(view.explanations, width)
    lines += [BLANK, heading("Header, banners and timeline", width, "unit · window · source")]
    lines += _explained(FRAME, width)
    if isinstance(view, TableView):
        names = ", ".join(column.names[0] for column in view.columns)
        lines += [BLANK, heading("Filter", width, key_of(keys, "filter"))]
        lines += wrap(
            "Rows must match all terms, separated by spaces: text and field:text (contains the text), "
            'field=text (equals the text; field="two words" if it has spaces), !field:text and '
            "!field=text (all other rows), field>100, field<=2.5k, field>350ms; >100 applies to the column "
            "that the table is sorted by. "
            f"Fields: {names}.",
            width,
        )
    group = ""
    for key in keys:
        if not key.keys:
            continue
        if key.group != group:
            group = key.group
            lines += [BLANK, heading(f"Keys: {group.lower()}", width)]
        names = " ".join(shown_name(one) for one in key.keys)
        lines.append(line(*clip([span(names, "key")], _NAME_WIDTH), span(key.title)))
    return lines


def _explained(names: Iterable[str], width: int) -> list[Line]:
    """Return the explanations of the named fields and metrics."""
    lines: list[Line] = []
    for name in dict.fromkeys(names):
        explanation = EXPLANATIONS[name]
        title = wrap(explanation.title, _NAME_WIDTH - 1, "accent")
        notes = " · ".join(
            part for part in (explanation.unit, explanation.window, explanation.source) if part
        )
        text_width = width - _NAME_WIDTH
        body = [*wrap(explanation.text, text_width), *wrap(notes, text_width, "dim")]
        lines += beside(title, body, _NAME_WIDTH, text_width, 0)
    return lines
