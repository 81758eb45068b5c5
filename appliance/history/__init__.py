"""Reads the recorded history: the service at one time, measurements over time, and incident files."""
