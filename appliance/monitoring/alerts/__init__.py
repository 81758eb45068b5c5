"""Alerts: rules are evaluated on the recorded figures, alerts are grouped by their cause, and operators are
told."""
