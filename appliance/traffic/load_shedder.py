"""Load shedding: decides which requests to refuse during overload, in what order, and when to stop
refusing."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.traffic.rules import QueueRules
from store.fields import CLASS_NAMES

CALM, REFUSE_BACKGROUND, DROP_BACKGROUND, REFUSE_BATCH, REFUSE_INTERACTIVE = range(5)
"""The load-shedding steps. P2 and P1 requests are refused only if they would wait longer than their class's
limit."""

_DONE = (
    "",
    "new P3 requests are refused",
    "new and waiting P3 requests are refused",
    "P3 requests are refused, as are P2 requests that would wait too long",
    "P3 requests are refused, as are P2 and P1 requests that would wait too long",
)
_MAX_STEP = (REFUSE_INTERACTIVE, REFUSE_INTERACTIVE, REFUSE_BATCH)
"""For each of the classes P0, P1 and P2, the highest load-shedding step that an overload of the class can
cause."""
_RELIEVED = 0.5
"""An overload ends when all waiting times are below this fraction of their overload limits."""


class LoadShedder:
    """Decides which requests to refuse. Every `overload_s` seconds, load shedding advances one step if there
    is an overload, and goes back one step otherwise."""

    def __init__(self) -> None:
        self.step = CALM
        self._reason = ""
        self._direction = 0
        self._since = 0.0
        """Time at which an overload last began or ended, or the step last changed."""

    @property
    def reason(self) -> str:
        """The cause of the overload, and which requests are being refused. Empty if there is no overload."""
        return f"{self._reason}: {_DONE[self.step]}" if self.step else ""

    def observe(self, rules: QueueRules, now: float, waits_s: Sequence[float | None]) -> None:
        """Update the load-shedding step. `waits_s` holds each class's predicted waiting time for a request
        arriving now, or None if unknown."""
        goal, relieved = CALM, True
        for number, given_up in enumerate(_MAX_STEP):
            wait_s, most_s = waits_s[number], rules.overload * rules.target_s(number)
            if wait_s is None:
                continue
            if wait_s > most_s and goal < given_up:
                goal = given_up
                name = CLASS_NAMES[number]
                self._reason = (
                    f"the service is overloaded because {name} requests would wait {wait_s:.1f} s "
                    f"(limit: {most_s:g} s)"
                )
            relieved = relieved and wait_s <= _RELIEVED * most_s
        over = self.step > goal and (goal > CALM or relieved)
        direction = 1 if self.step < goal else -1 if over else 0
        if direction != self._direction:
            self._direction, self._since = direction, now
        elif direction and now - self._since >= rules.overload_s:
            self.step += direction
            self._since = now

    def refuses(self, request_class: int, wait_s: float | None, rules: QueueRules) -> bool:
        """True if load shedding refuses a new request of the given class with a predicted waiting time of
        `wait_s`."""
        if request_class >= len(_MAX_STEP):
            return self.step >= REFUSE_BACKGROUND
        if not request_class or self.step < _MAX_STEP[request_class]:
            return False
        return wait_s is not None and wait_s > rules.overload * rules.target_s(request_class)
