"""Metrics of the whole service, of the core process, and of the logs of all processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from appliance.monitoring.metrics.metric import Metric

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ServiceSource(NamedTuple):
    """The values of the service-wide metrics."""

    ready: bool
    draining: bool
    """Whether the whole service is draining or drained."""
    problems: int
    held: int
    """Number of requests held by a drain."""
    connections: Mapping[str, int]
    """Number of connections accepted by each listener."""
    version: str
    started_at: float


def _cpu_seconds(source: ServiceSource) -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _resident_bytes(source: ServiceSource) -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


# fmt: off
SERVICE = (
    Metric("gauge", "appliance_info", "",
           "Always 1. The version label gives the running version.",
           lambda s: {s.version: 1}, ("version",)),
    Metric("gauge", "appliance_ready", "",
           "1 if every model can answer requests, as reported by /health/ready.",
           lambda s: int(s.ready)),
    Metric("gauge", "appliance_draining", "",
           "1 while the whole service is draining or drained.",
           lambda s: int(s.draining)),
    Metric("counter", "appliance_problems_total", "",
           "Problems since startup, for example crashed processes and unreadable files. The service "
           "status lists the details.",
           lambda s: s.problems),
    Metric("counter", "appliance_connections_total", "",
           "Accepted connections, by listening socket.",
           lambda s: s.connections, ("listener",)),
    Metric("gauge", "appliance_held_requests", "requests",
           "Requests held by a drain until service resumes.",
           lambda s: s.held),
)
PROCESS = (
    Metric("counter", "process_cpu_seconds_total", "seconds",
           "CPU time used by the core process.",
           _cpu_seconds),
    Metric("gauge", "process_resident_memory_bytes", "bytes",
           "Resident memory of the core process.",
           _resident_bytes),
    Metric("gauge", "process_start_time_seconds", "seconds",
           "Start time of the core process, in unix seconds.",
           lambda s: s.started_at),
)
LOGS = (
    Metric("counter", "appliance_log_dropped_lines_total", "lines",
           "Log lines dropped because standard error was not read.",
           lambda lines: lines),
)
# fmt: on
