"""Reads the recorded history: the service at one time, figures over time, and incident files."""
