"""Reads the recorded history: the service state at a given time, measurements over time, and incident
files."""
