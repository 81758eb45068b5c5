"""Builds the tables in docs/alerts.md from the built-in rules and the rule fields."""

from __future__ import annotations

import msgspec

from appliance.alert_rules import BUILT_IN, AlertRule
from appliance.monitoring.alerts.conditions import clear_value
from appliance.quantities import of_duration, of_measure
from scripts.field_tables import accepted_values, default_value, field_docstrings, one_line, table


def rule_table() -> str:
    """Return the table of the built-in rules."""
    return table(
        ("rule", "raised when", "reason", "next step"),
        (
            (
                f"`{rule.name}` ({rule.severity})",
                _condition(rule),
                rule.reason,
                rule.remedy.format(remedy="as given for the problem", tenant="TENANT", model="MODEL"),
            )
            for rule in BUILT_IN
        ),
    )


def field_table(kind: type[msgspec.Struct]) -> str:
    """Return the table of a struct's fields."""
    texts, shapes = field_docstrings(kind), msgspec.inspect.type_info(kind).fields
    return table(
        ("field", "value", "if omitted", ""),
        (
            (
                f"`{field.name}`",
                accepted_values(shape.type),
                default_value(field),
                one_line(texts[field.name]),
            )
            for field, shape in zip(msgspec.structs.fields(kind), shapes, strict=True)
        ),
    )


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
