"""Alerts: evaluates rules on recorded measurements, groups alerts by their cause, and notifies operators."""
