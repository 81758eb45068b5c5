"""Defines explanations of fields and metrics, and names for the usual time windows."""

from __future__ import annotations

from typing import NamedTuple


class Explanation(NamedTuple):
    """Explains a field or metric."""

    title: str
    unit: str
    window: str
    """The period that the value covers: "now", "since start", or a time window."""
    text: str
    source: str
    """The Prometheus metric or admin API field that provides the value."""


NOW, SLICE, MINUTE = "now", "since the last update", "last 60 s"
SECOND, STEPS = "1 s (one column)", "since the replica's last report; Batches: 1 s (one column)"
RATE, START, LIFE = "last 10 s", "since start", "the request so far"
DAY, REQUEST_OR_DAY = "1 day (UTC)", "a request, or 1 day (UTC)"
