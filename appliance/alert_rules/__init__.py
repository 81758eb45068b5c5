"""Alert rules: their format in the settings, the built-in rules, and the rules in effect.

The settings import this package, and all parts of the product import the settings. Therefore, this package
imports no other part of the product. `appliance.monitoring.alerts` evaluates the rules.
"""

from appliance.alert_rules.builtin import BUILT_IN
from appliance.alert_rules.effective import cycle, effective_rules, rule_set_faults
from appliance.alert_rules.fields import (
    SEVERITIES,
    AlertRule,
    AlertSink,
    faults_of_rule,
    faults_of_sink,
)

__all__ = [
    "BUILT_IN",
    "SEVERITIES",
    "AlertRule",
    "AlertSink",
    "cycle",
    "effective_rules",
    "faults_of_rule",
    "faults_of_sink",
    "rule_set_faults",
]
