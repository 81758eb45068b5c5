"""Decides how many replicas a model should have, between a minimum and a maximum.

The decision is a pure function of the load over time: this module reads no clock and starts no replicas.
Replicas are added as soon as the expected load requires them, and removed one at a time once the load has
been low for a while.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from appliance.models.demand import Demand, DemandForecast

TARGET_USE = 0.7
"""Replicas are added until the expected demand uses no more than this share of each replica."""
LOW_USE = 0.5
"""A replica is removed only if the load of the remaining replicas would then be below this share. The gap to
`TARGET_USE` keeps small load changes from removing a replica and adding it back."""
_LATE_SHARE = 0.5
"""A replica is added when the waiting time or the time to first token exceeds this share of the target."""
_LATE_USE = 0.3
"""Late first tokens trigger scaling only if the demand uses at least this share of each replica. At lower
demand, they are caused by long prompts, and another replica would not help."""
_AHEAD_S = 30.0
"""The load is predicted this many seconds beyond a new replica's startup time."""
REFUSED_S = 60.0
"""How long to wait before trying again to add a replica that did not fit into memory."""


class ScalingRules(NamedTuple):
    """Limits and targets for a model's number of replicas."""

    min_replicas: int
    max_replicas: int
    ttft_target_s: float
    """Target time to first token."""
    cooldown_s: float
    """Time allowed for a change in the number of replicas to take effect. During this time, no replica is
    removed, and none is added because of late requests."""
    idle_s: float
    """How long the load must have been low before a replica is removed."""


class ModelLoad(NamedTuple):
    """A model's current load."""

    replicas: int
    """Target number of replicas."""
    ready: int
    """Number of ready replicas."""
    demand: float
    """The number of replicas that the load would fully occupy."""
    wait_s: float
    """The oldest request's waiting time or a new request's expected waiting time, whichever is longer."""
    ttft_s: float | None
    """99th percentile of recent times to first token, or None if there were no requests."""
    load_s: float
    """Time from starting a replica until it is ready."""


class Decision(NamedTuple):
    """A change to the number of replicas."""

    replicas: int
    reason: str


class Autoscaler:
    """Decides one model's number of replicas. All times are in seconds on one monotonic clock."""

    def __init__(self) -> None:
        self.forecast = DemandForecast()
        self.expected = Demand(0.0, "")
        """The expected demand on which the latest decision was based."""
        self.refusal = ""
        """Why no replica can be added; empty if one can. Cleared before the next attempt."""
        self._changed_at = -math.inf
        self._refused_at = -math.inf
        self._needs: deque[tuple[float, float]] = deque()
        """(time, expected demand) pairs from the last `idle_s` seconds. A pair is dropped once a later pair
        has an equal or higher demand."""
        self._since: float | None = None
        """Time of the first call to `decide` since the model was loaded."""

    def refuse(self, now: float, reason: str) -> None:
        """Record that no additional replica can be started, and why."""
        self.refusal, self._refused_at = reason, now

    def changed(self, now: float) -> None:
        """Record a change in the number of replicas."""
        self._changed_at, self.refusal = now, ""

    def unloaded(self) -> None:
        """Record that the model is being unloaded. The load from before then removes no replica later."""
        self._since = None
        self._needs.clear()

    def decide(self, now: float, rules: ScalingRules, load: ModelLoad) -> Decision | None:
        """Return the change in the number of replicas that is due, or None. Call this once per second. After
        making the change, call `changed`; if the change is impossible, call `refuse`."""
        if now - self._refused_at >= REFUSED_S:
            self.refusal = ""
        self.forecast.add(now, load.demand)
        self.expected = self.forecast.expected(now, load.load_s + _AHEAD_S)
        self._remember(now, rules.idle_s)
        if not rules.min_replicas <= load.replicas <= rules.max_replicas:
            limit = "min_replicas" if load.replicas < rules.min_replicas else "max_replicas"
            wanted = min(max(load.replicas, rules.min_replicas), rules.max_replicas)
            return Decision(wanted, f"{limit} is {wanted}")
        more = self._more(now, rules, load)
        if more is not None or now - self._changed_at < rules.cooldown_s:
            return more
        return self._late(now, rules, load) or self._fewer(now, rules, load)

    def _more(self, now: float, rules: ScalingRules, load: ModelLoad) -> Decision | None:
        """Return the decision to add the replicas required by the expected demand, or None if there are
        enough."""
        needed = min(math.ceil(self.expected.replicas / TARGET_USE), rules.max_replicas)
        if needed <= load.replicas or now - self._refused_at < REFUSED_S:
            return None
        return Decision(needed, self.expected.reason)

    def _late(self, now: float, rules: ScalingRules, load: ModelLoad) -> Decision | None:
        """If requests are late, return the decision to add one replica, unless one is already being
        started."""
        full = load.replicas >= rules.max_replicas or load.ready < load.replicas
        if full or now - self._refused_at < REFUSED_S:
            return None
        target_s, late_s = rules.ttft_target_s, _LATE_SHARE * rules.ttft_target_s
        if load.wait_s > late_s:
            reason = f"requests wait {load.wait_s:.1f} s, but the TTFT target is {target_s:g} s"
        elif (load.ttft_s or 0.0) > late_s and load.demand >= _LATE_USE * load.replicas:
            reason = f"the p99 TTFT is {load.ttft_s:.1f} s, and the target is {target_s:g} s"
        else:
            return None
        return Decision(load.replicas + 1, reason)

    def _fewer(self, now: float, rules: ScalingRules, load: ModelLoad) -> Decision | None:
        if load.replicas <= rules.min_replicas or load.ready < load.replicas or self._since is None:
            return None
        highest = self._needs[0][1]
        if now - self._since < rules.idle_s or highest > LOW_USE * (load.replicas - 1):
            return None
        return Decision(
            load.replicas - 1, f"for {rules.idle_s:g} s, the load has needed at most {highest:.1f} replicas"
        )

    def _remember(self, now: float, idle_s: float) -> None:
        if self._since is None:
            self._since = now
        while self._needs and self._needs[-1][1] <= self.expected.replicas:
            self._needs.pop()
        self._needs.append((now, self.expected.replicas))
        while self._needs[0][0] < now - idle_s:
            self._needs.popleft()
