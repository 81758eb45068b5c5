"""Formats alert texts."""

from __future__ import annotations

from appliance.alert_rules import AlertRule
from appliance.monitoring.alerts.conditions import Condition, threshold
from appliance.quantities import of_measure


def filled(rule: AlertRule, condition: Condition) -> str:
    """Return an alert's text with the values filled in."""
    limit = threshold(rule)
    text = rule.description or ("{where}: {text}" if rule.texts else f"{{where}}: {rule.metric} is {{value}}")
    return text.format(
        where=condition.where,
        value=of_measure(condition.value, rule.unit),
        threshold=of_measure(limit, rule.unit),
        text=condition.text,
    )
