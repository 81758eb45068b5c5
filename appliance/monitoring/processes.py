"""Checks for processes that have outlived their service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise

from appliance.monitoring.findings import Finding

_CHILDREN = ("engine.replica", "appliance.front")
_EXIT_S = 5.0
"""How long a service's processes may take to exit after the service stops, in seconds."""


def orphans(service_pid: int | None) -> Iterator[Finding]:
    """Check for ranks and front processes that have outlived their parent. Normally, they exit soon after
    their parent, because the kernel kills them or their channels close."""
    import psutil

    orphaned = []
    for process in psutil.process_iter(["pid", "ppid", "cmdline"]):
        words = process.info["cmdline"] or []
        ours = any(first == "-m" and second in _CHILDREN for first, second in pairwise(words))
        # If the service is process 1 of a container, its children also have parent 1 but are not orphans.
        if ours and process.info["ppid"] == 1 and service_pid != 1 and not _service_is_init():
            orphaned.append(process)
    _, left = psutil.wait_procs(orphaned, timeout=_EXIT_S)
    for process in left:
        pid, command = process.info["pid"], " ".join(process.info["cmdline"][1:3])
        yield Finding(
            area="leftovers",
            subject=f"process {pid}",
            level="problem",
            text=f"process {pid} ({command}) is still running although its service has stopped, "
            "and may occupy memory",
            remedy=f"kill the process: kill -9 {pid}",
        )
    if not left:
        yield Finding(
            area="leftovers",
            subject="processes",
            level="ok",
            text="no rank or front process of a stopped service is still running",
        )


def _service_is_init() -> bool:
    import psutil

    try:
        return any("appliance" in os.path.basename(word) for word in psutil.Process(1).cmdline())
    except psutil.Error:
        return False
