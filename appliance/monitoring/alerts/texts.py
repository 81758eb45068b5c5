"""Formats alert texts."""

from __future__ import annotations

import shlex

from appliance.alert_rules import AlertRule
from appliance.alert_rules.fields import NAMED_IN_REMEDY
from appliance.monitoring.alerts.conditions import Condition, threshold
from appliance.monitoring.alerts.selection import Scope
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


def next_step(rule: AlertRule, remedy: str, scope: Scope) -> str:
    """Return an alert's next step with the names of objects filled in, quoted for a shell. `remedy` is the
    remedy given by the object that the alert concerns. If `scope` does not contain exactly one object of a
    kind, a placeholder such as MODEL replaces the name."""
    names = {}
    for kind in NAMED_IN_REMEDY:
        found = [name for one, name in scope if one == kind]
        names[kind] = shlex.quote(found[0]) if len(found) == 1 else kind.upper()
    return rule.remedy.format(remedy=remedy, **names)
