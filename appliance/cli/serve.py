"""`appliance serve`: loads the settings, and runs the core in this process."""

from __future__ import annotations

from appliance.settings import Flags


def serve(flags: Flags) -> int:
    """Run the service until it is told to stop. Return its exit code."""
    from appliance.core.process import run

    return run(flags)
