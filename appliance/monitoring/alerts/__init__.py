"""Alerts: evaluates rules on the recorded figures, groups alerts by their cause, and notifies operators."""
