"""Keeps the most recent problems for the status report and counts how often each has occurred."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict

from appliance.protocol.status import Problem

log = logging.getLogger(__name__)

_KEPT = 50


class Problems:
    """The most recent problems. A problem that occurs repeatedly is listed only once."""

    def __init__(self) -> None:
        self.total = 0
        """Number of problems since startup, including repetitions."""
        self._problems: OrderedDict[tuple[str, str], Problem] = OrderedDict()

    def note(self, where: str, description: str) -> None:
        """Log and store a problem. `where` is its location, such as a front, replica or socket."""
        log.warning("%s: %s", where, description)
        self.total += 1
        known = self._problems.pop((where, description), None)
        count = known.count + 1 if known else 1
        self._problems[(where, description)] = Problem(
            at=time.time(), where=where, description=description, count=count
        )
        if len(self._problems) > _KEPT:
            self._problems.popitem(last=False)

    def recent(self) -> list[Problem]:
        """Return the stored problems, most recent first."""
        return list(reversed(self._problems.values()))
