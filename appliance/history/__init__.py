"""Reads the recorded history: the state of the service at a given time, measurements over time, and incident
files."""
