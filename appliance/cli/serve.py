"""`appliance serve`: settings, then the core in this process."""

from __future__ import annotations

from appliance.cli.failure import told
from appliance.settings import Flags, SettingsError, load_settings


def serve(flags: Flags) -> int:
    """Run the service until it is told to stop; its exit code. Raises Failure for settings that cannot be
    used."""
    with told(SettingsError):
        settings = load_settings(flags)
    from appliance.core import run

    return run(settings)
