"""The simulated service's log. Its lines describe the simulation, worded as in a real service's log."""

from __future__ import annotations

import zlib
from collections import deque

from appliance.pages import LineLevel
from appliance.protocol import precision
from console.simulation import Simulation
from console.source import MAX_ROWS, ListRow

_MIN_PAUSE_S, _PAUSES_S = 40, 80
"""Interval between log lines about denied requests, in seconds: the minimum, and the range of the
pseudorandom amount added to it."""


class FakeLog:
    """The newest log lines."""

    def __init__(self, simulation: Simulation) -> None:
        self.lines: deque[ListRow] = deque(maxlen=MAX_ROWS)
        """The log lines, oldest first."""
        self._simulation = simulation
        self._number = 0
        self._denied_at = simulation.now + _MIN_PAUSE_S
        """When the next line about denied requests is due."""
        start = simulation.started
        for socket in ("api", "admin"):
            text = f"listening on {socket}: /run/appliance/{socket}.sock (opened by the service manager)"
            self.write(start + 0.1, "core", "listeners", text)
        for number in (1, 2):
            self.write(start + 0.4, "core", "front", f"front-{number} is ready")
        for replica in sorted(simulation.replicas, key=lambda one: one.load_seconds):
            devices = ", ".join(f"cuda:{gpu}" for gpu in replica.gpus)
            text = (
                f"{replica.name} was ready after {replica.load_seconds:.1f} s: "
                f"{precision('bfloat16', 'fp8', 'fp8')} on {devices}, {replica.max_num_seqs} slots, "
                f"{replica.blocks} KV blocks"
            )
            self.write(start + 0.5 + replica.load_seconds, "core", "replica", text)
        models = len({replica.model for replica in simulation.replicas})
        for number in (1, 2):
            text = f"serving {models} model{'' if models == 1 else 's'}"
            self.write(self.lines[-1].at or start, f"front-{number}", "process", text)
        self.write(self.lines[-1].at or start, "core", "pool", "ready: all models can answer requests")

    def write(self, at: float, process: str, area: str, text: str, level: LineLevel = "info") -> None:
        """Add a line."""
        self._number += 1
        self.lines.append(
            ListRow(id=str(self._number), at=at, level=level, actor=process, subject=area, text=text)
        )

    def advance(self) -> None:
        """Add lines about requests that the front processes have denied since the previous call."""
        while self._simulation.now >= self._denied_at:
            number = zlib.crc32(f"{self._denied_at - self._simulation.started:.0f}".encode())
            text = (
                f"requests without a valid key or permitted user were denied: {1 + number % 3} within 5 s, "
                f"the latest from 10.0.3.{9 + number % 20}"
            )
            self.write(self._denied_at, f"front-{1 + number % 2}", "counted_log", text, "warning")
            self._denied_at += _MIN_PAUSE_S + number % _PAUSES_S
