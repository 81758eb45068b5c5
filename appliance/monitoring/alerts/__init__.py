"""Alerts: evaluates rules on the recorded measurements, groups alerts by their cause, and notifies
operators."""
