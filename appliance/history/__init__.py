"""Reads the recorded past: the service at a past time, figures over time, and incident files."""
