"""Formats the texts of alerts."""

from __future__ import annotations

import math

from appliance.alert_rules import AlertRule
from appliance.monitoring.alerts.conditions import Condition, threshold
from appliance.quantities import of_bytes


def filled(rule: AlertRule, condition: Condition) -> str:
    """Return the text of an alert."""
    limit = threshold(rule)
    text = rule.what or ("{where}: {text}" if rule.texts else f"{{where}}: {rule.figure} is {{value}}")
    return text.format(
        where=condition.where,
        value=of_measure(condition.value, rule.unit),
        threshold=of_measure(limit, rule.unit),
        text=condition.text,
    )


def of_measure(value: float | None, unit: str) -> str:
    """Format a measure with its unit."""
    if value is None:
        return "unknown"
    if math.isinf(value):
        return "never"
    match unit:
        case "%":
            return f"{value:.0%}"
        case "bytes":
            return of_bytes(int(value))
        case "s":
            return of_duration(value)
        case "/s":
            return f"{value:.3g}/s"
        case _:
            number = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
            return f"{number} {unit}".rstrip()


def of_duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
