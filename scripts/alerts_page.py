#!/usr/bin/env python
"""Writes the tables in docs/alerts.md from the built-in rules and the rule fields.

Usage: scripts/alerts_page.py [--check]

With --check, nothing is written, and the exit code is 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from appliance.alert_rules import BUILT_IN, AlertRule, AlertSink  # noqa: E402
from appliance.monitoring.alerts.conditions import clear_value  # noqa: E402
from appliance.quantities import of_duration, of_measure  # noqa: E402
from scripts.field_tables import (  # noqa: E402
    accepted_values,
    default_value,
    field_docstrings,
    one_line,
    row,
    write_or_check,
)

PAGE = ROOT / "docs" / "alerts.md"
FIRST = "## The built-in rules"
"""The first generated heading. Everything above it is written by hand."""


def page(former: str) -> str:
    """Return the page with regenerated tables. The text above the first generated heading stays unchanged."""
    parts = [former.partition(FIRST)[0].rstrip(), "", FIRST, ""]
    parts += ["| rule | raised when | why | next step |", "| --- | --- | --- | --- |"]
    for rule in BUILT_IN:
        cells = (
            f"`{rule.name}` ({rule.severity})",
            _condition(rule),
            rule.reason,
            rule.remedy.format(remedy="as given for the problem", tenant="TENANT", model="MODEL"),
        )
        parts.append(row(cells))
    parts += ["", "## Fields of `[[alerts.rules]]`", "", *_fields(AlertRule)]
    parts += ["", "## Fields of `[[alerts.sinks]]`", "", *_fields(AlertSink)]
    return "\n".join(parts) + "\n"


def _condition(rule: AlertRule) -> str:
    metric = f"`{rule.metric}`" + (f" / `{rule.per}`" if rule.per else "")
    if rule.texts:
        condition = f"{metric} is {', '.join(f'`{text}`' for text in rule.texts)}"
    else:
        limit = rule.above if rule.above is not None else rule.below
        side = "≥" if rule.above is not None else "≤"
        window = of_duration(rule.window_s)
        measure = {
            "value": metric,
            "rate": f"{metric} per second over {window}",
            "change": f"change of {metric} within {window}",
            "deviation": f"deviation of {metric} from its mean over {window}",
            "time_to": f"time until {metric} is {rule.target:g}, extrapolated from its trend over {window}",
        }[rule.measure]
        clear = of_measure(clear_value(rule), rule.unit)
        condition = f"{measure} {side} {of_measure(limit, rule.unit)}, until {clear}"
    if rule.at_least is not None:
        condition += f", if {metric} ≥ {rule.at_least:g}"
    return condition + (f", for {of_duration(rule.for_s)}" if rule.for_s else "")


def _fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    yield "| field | value | if omitted | |"
    yield "| --- | --- | --- | --- |"
    texts = field_docstrings(kind)
    for field, shape in zip(
        msgspec.structs.fields(kind), msgspec.inspect.type_info(kind).fields, strict=True
    ):
        meaning = one_line(texts[field.name])
        yield row((f"`{field.name}`", accepted_values(shape.type), default_value(field), meaning))


if __name__ == "__main__":
    sys.exit(write_or_check([PAGE], page, __doc__ or ""))
