"""Adds and removes replicas of autoscaled models. `appliance.models.autoscaler` makes the decisions. This
module measures the load, checks that there is enough memory and records the changes for operators."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from appliance.background import Background
from appliance.models.autoscaler import Autoscaler, Decision, ModelLoad, ScalingRules
from appliance.models.fit import MemoryShortage
from appliance.models.replica import Replica
from appliance.protocol import ScalingChange, ScalingStatus
from appliance.settings import AutoscalingSettings, ModelSettings
from appliance.traffic.model import ModelTraffic

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_KEPT_CHANGES = 20
_UNKNOWN_LOAD_S = 30.0
"""Assumed load time before the first replica has been loaded."""


class ScaledModels(Protocol):
    """Models with an adjustable number of replicas."""

    def scalable(self) -> Mapping[str, ModelSettings]:
        """Return the settings of all models, except those with a change to their replicas in progress."""

    def of(self, model: str) -> list[Replica]:
        """Return a model's replicas."""

    def begin_change(self, unit: str) -> None:
        """Start or stop replicas until the model has its target number of replicas."""

    async def shortage(self, settings: ModelSettings, count: int) -> MemoryShortage:
        """Return how much memory is missing to run `count` more replicas."""


class _Scaled:
    """An autoscaled model."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        """Target number of replicas."""
        self.scaler = Autoscaler()
        self.load_s = _UNKNOWN_LOAD_S
        self.changes: deque[ScalingChange] = deque(maxlen=_KEPT_CHANGES)
        self.is_changing = False


class ModelScaling:
    """Scales all autoscaled models. All methods must be called on the event loop thread."""

    def __init__(
        self,
        models: ScaledModels,
        traffic: Callable[[], Mapping[str, ModelTraffic]],
        rules: Callable[[], AutoscalingSettings],
        note: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`traffic` returns each model's requests, and `rules` returns the current settings. `note` reports a
        problem to the operator."""
        self._models = models
        self._traffic = traffic
        self._rules = rules
        self._note = note
        self._clock = clock
        self._units: dict[str, _Scaled] = {}
        self._checked_at = float("-inf")
        self._background = Background()

    def check(self) -> None:
        """Add or remove replicas of each model as needed. Call this at least once per second."""
        now = self._clock()
        if now - self._checked_at < _EVERY_S:
            return
        self._checked_at = now
        for unit, settings in self._models.scalable().items():
            if settings.max_replicas is None:
                self._units.pop(unit, None)
                continue
            scaled = self._units.setdefault(unit, _Scaled(settings.replicas))
            if (traffic := self._traffic().get(unit)) is None or scaled.is_changing:
                continue
            load = self._load(unit, scaled, traffic, now)
            decision = scaled.scaler.decide(now, self._rules_of(settings), load)
            if decision is not None:
                scaled.is_changing = True
                self._background.run(self._change(unit, settings, scaled, decision))

    def forget(self, unit: str) -> None:
        """Forget a model that is no longer served."""
        self._units.pop(unit, None)

    def reset(self, unit: str, settings: ModelSettings) -> None:
        """Return to the initial number of replicas, because the model is being unloaded. There may not be
        enough memory for the replicas that were added."""
        if (scaled := self._units.get(unit)) is not None:
            scaled.replicas = settings.replicas
            scaled.scaler.unloaded()

    def count(self, unit: str, settings: ModelSettings) -> int:
        """Return a model's target number of replicas."""
        scaled = self._units.get(unit)
        return settings.within_range(settings.replicas if scaled is None else scaled.replicas)

    def status(self, unit: str, settings: ModelSettings) -> ScalingStatus | None:
        """Return a model's scaling status for operators, or None if its number of replicas is fixed."""
        if settings.max_replicas is None:
            return None
        least, most = settings.replica_range()
        scaled = self._units.get(unit, _Scaled(settings.replicas))
        return ScalingStatus(
            replicas=self.count(unit, settings),
            min_replicas=least,
            max_replicas=most,
            demand=scaled.scaler.forecast.present(self._clock()),
            expected=scaled.scaler.expected.replicas,
            reason=scaled.scaler.expected.reason,
            refusal=scaled.scaler.refusal,
            changes=list(reversed(scaled.changes)),
        )

    def _rules_of(self, settings: ModelSettings) -> ScalingRules:
        rules, (least, most) = self._rules(), settings.replica_range()
        return ScalingRules(least, most, settings.ttft_target_s, rules.cooldown_s, rules.idle_s)

    def _load(self, unit: str, scaled: _Scaled, traffic: ModelTraffic, now: float) -> ModelLoad:
        replicas = self._models.of(unit)
        times = [replica.ready_after_s for replica in replicas if replica.ready_after_s is not None]
        scaled.load_s = max(times, default=scaled.load_s)
        return ModelLoad(
            replicas=scaled.replicas,
            ready=sum(replica.answers for replica in replicas),
            demand=traffic.demand(),
            wait_s=traffic.replica_wait_s(now),
            ttft_s=traffic.ttft.p99_s(now),
            load_s=scaled.load_s,
        )

    async def _change(self, unit: str, settings: ModelSettings, scaled: _Scaled, decision: Decision) -> None:
        try:
            former = scaled.replicas
            wanted, refusal = await self._that_fit(unit, settings, former, decision.replicas)
            if refusal and refusal != scaled.scaler.refusal:
                self._note(unit, f"no replica can be added, although {decision.reason}: {refusal}")
            if wanted != former:
                scaled.scaler.changed(self._clock())
                scaled.changes.append(
                    ScalingChange(at=time.time(), former=former, replicas=wanted, reason=decision.reason)
                )
                log.info("model %s: %d → %d replicas: %s", unit, former, wanted, decision.reason)
                scaled.replicas = wanted
                self._models.begin_change(unit)
            if refusal:
                scaled.scaler.refuse(self._clock(), refusal)
        finally:
            scaled.is_changing = False

    async def _that_fit(
        self, unit: str, settings: ModelSettings, former: int, wanted: int
    ) -> tuple[int, str]:
        """Return how many replicas fit into memory, up to `wanted`, and the reason if fewer fit."""
        refusal = ""
        # Subtract only ready replicas, because starting replicas have not allocated all of their memory yet.
        ready = sum(replica.answers for replica in self._models.of(unit))
        while wanted > former:
            shortage = await self._models.shortage(settings, wanted - min(ready, former))
            if not (found := shortage.reason):
                break
            wanted, refusal = wanted - 1, found
        return wanted, refusal
