"""The log of a rank's process, in the line format of the service's logs (`appliance.logs`)."""

from __future__ import annotations

import logging
import sys
import time


def configure_logging(name: str) -> None:
    """Send this process's log, including Python's warnings, to standard error: UTC time, level, `name`,
    message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RankLogFormatter(name))
    logging.getLogger().handlers[:] = [handler]
    logging.captureWarnings(True)


class RankLogFormatter(logging.Formatter):
    """Formats lines as `2026-11-20T23:16:01.123Z WARNING demo-0 rank 1: message`."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {name.replace('%', '%%')}: %(message)s",
            "%Y-%m-%dT%H:%M:%S",
        )

    @staticmethod
    def converter(seconds: float | None = None) -> time.struct_time:
        return time.gmtime(seconds)
