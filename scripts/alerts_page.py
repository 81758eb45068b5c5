#!/usr/bin/env python
"""Writes the tables of docs/alerts.md from the built-in rules and the fields of a rule.

Usage: scripts/alerts_page.py [--check]

With --check, nothing is written, and the exit code is 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from appliance.alert_rules import BUILT_IN, AlertRule, AlertSink
from appliance.alert_rules.reasons import REASONS
from appliance.monitoring.alerts.conditions import clear_value
from appliance.monitoring.alerts.texts import of_duration, of_measure
from scripts.configuration_page import _default, _sentence, _type, _words_of_fields, write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "alerts.md"
FIRST = "## The built-in rules"
"""The first generated heading. The text above it is written by hand."""


def page(former: str) -> str:
    """Return the whole page. The text above the first generated heading is left unchanged."""
    parts = [former.partition(FIRST)[0].rstrip(), "", FIRST, ""]
    parts += ["| rule | raised when | why | next step |", "| --- | --- | --- | --- |"]
    for rule in BUILT_IN:
        cells = (
            f"`{rule.name}` ({rule.severity})",
            _condition(rule),
            REASONS[rule.name],
            rule.remedy if rule.remedy != "{remedy}" else "as given for the problem",
        )
        parts.append(_row(cells))
    parts += ["", "## Fields of `[[alerts.rules]]`", "", *_fields(AlertRule)]
    parts += ["", "## Fields of `[[alerts.sinks]]`", "", *_fields(AlertSink)]
    return "\n".join(parts) + "\n"


def _condition(rule: AlertRule) -> str:
    figure = f"`{rule.figure}`" + (f" / `{rule.per}`" if rule.per else "")
    if rule.texts:
        condition = f"{figure} is {', '.join(f'`{text}`' for text in rule.texts)}"
    else:
        limit = rule.above if rule.above is not None else rule.below
        side = "≥" if rule.above is not None else "≤"
        window = of_duration(rule.window_s)
        measure = {
            "value": figure,
            "rate": f"{figure} per second over {window}",
            "change": f"change of {figure} within {window}",
            "deviation": f"deviation of {figure} from its mean of {window}",
            "time_to": f"time until {figure} is {rule.target:g}, by its trend of {window}",
        }[rule.measure]
        clear = of_measure(clear_value(rule), rule.unit)
        condition = f"{measure} {side} {of_measure(limit, rule.unit)}, until {clear}"
    if rule.at_least is not None:
        condition += f", if {figure} ≥ {rule.at_least:g}"
    return condition + (f", for {of_duration(rule.for_s)}" if rule.for_s else "")


def _fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    yield "| field | value | without it | |"
    yield "| --- | --- | --- | --- |"
    said = _words_of_fields(kind)
    for field, shape in zip(
        msgspec.structs.fields(kind), msgspec.inspect.type_info(kind).fields, strict=True
    ):
        yield _row((f"`{field.name}`", _type(shape.type), _default(field), _sentence(said[field.name])))


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page, __doc__ or ""))
