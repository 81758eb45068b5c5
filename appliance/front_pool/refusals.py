"""Decides when to report that a front is refusing clients: at most once a minute for each reason."""

from __future__ import annotations

import time
from collections.abc import Iterator

from appliance.channel.front_messages import FrontReport

MANY_DENIALS = 100
"""A problem is reported if this many requests within a minute lack a valid key. Clients that are merely
misconfigured send fewer."""
_MINUTE_S = 60.0


_REFUSALS = {
    "refused_connections": (
        "connections are refused because the limit of {max_connections:,} connections, or the limit for one "
        "tenant, has been reached; raise limits.max_connections, the number of front processes, or the "
        "open file limit (ulimit -n)"
    ),
    "evicted_connections": (
        "the number of connections without a valid key has reached limits.max_unauthenticated_connections; "
        "each new one replaces the oldest connection from the address with the most connections"
    ),
    "cut_off_connections": (
        "connections were closed because their clients did not read the responses; the log of this front "
        "process lists client addresses"
    ),
    "unreceived_connections": (
        "connections cannot be received because too many files are open, so they wait or are given to "
        "another front process; raise the open file limit (ulimit -n)"
    ),
    "refused_bodies": (
        "requests are refused because the bodies of unfinished requests use too much memory; see "
        "limits.max_tenant_body_bytes and limits.max_front_body_bytes"
    ),
    "refused_heads": (
        "requests are refused because the headers of unfinished requests use too much memory; clients are "
        "sending very large headers slowly"
    ),
    "refused_prompts": (
        "requests are refused because their tenants have too many prompts in progress; the request log names "
        "the tenants (appliance requests)"
    ),
}
"""Problem reports about refused clients, keyed by the name of a counter in `FrontReport`. A problem is
reported when its counter has grown."""


class RefusalWatch:
    """Compares consecutive reports from one front process to find problems to report."""

    def __init__(self) -> None:
        self._last = FrontReport()
        self._told_at: dict[str, float] = {}
        self._minute_began = 0.0
        self._denials_before = 0

    def problems(self, report: FrontReport) -> Iterator[str]:
        """Return the problems that have occurred since the front's last report."""
        now = time.monotonic()
        for reason, text in self._refusals(report, now):
            if now - self._told_at.get(reason, -_MINUTE_S) >= _MINUTE_S:
                self._told_at[reason] = now
                yield text
        self._last = report

    def _refusals(self, report: FrontReport, now: float) -> Iterator[tuple[str, str]]:
        last = self._last
        for name, text in _REFUSALS.items():
            if getattr(report, name) > getattr(last, name):
                yield name, text.format(max_connections=report.max_connections)
        if now - self._minute_began > _MINUTE_S:
            self._minute_began = now
            self._denials_before = last.unauthenticated
        if report.unauthenticated - self._denials_before >= MANY_DENIALS:
            yield (
                "denials",
                f"at least {MANY_DENIALS} requests within a minute had no valid key; the log of this front "
                "process lists client addresses",
            )
