"""Metrics for monitoring systems. The package `families` declares all metrics; the other modules collect and
export their values."""
