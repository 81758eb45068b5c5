"""Metrics for monitoring systems. `families` declares all metrics; the other modules collect and export their
values."""
