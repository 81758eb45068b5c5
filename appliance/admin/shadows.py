"""The admin action that sets up shadow traffic: a share of the requests for one name is copied to another
model or version."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.actions.parameters import ShadowModel
from appliance.admin.effects import Effect, committed, done
from appliance.admin.model_states import ModelStates
from appliance.admin.splits import complete_target
from appliance.models.front_routes import FrontRoutes
from appliance.models.routing import Routing
from appliance.protocol.registry import RegisteredModel, ShadowStatus, ShadowTimes
from appliance.traffic.shadows import MeasureSum, ShadowResults
from store.audit import Actor
from store.errors import ConflictError, UnknownModelError
from store.registry import ModelRegistry


@dataclass(kw_only=True)
class ShadowAdmin:
    """Starts and ends shadow traffic and reads its results."""

    registry: ModelRegistry
    routing: Routing
    fronts: FrontRoutes
    states: ModelStates
    results: ShadowResults

    async def shadow(self, actor: Actor, asked: ShadowModel) -> Effect:
        """Start or end shadow traffic for a name. Raises UnknownModelError if the name or the target does not
        exist, and ConflictError if the target is not loaded or already answers requests for the name."""
        name, routing = asked.name, self.routing
        target = None
        if asked.target is not None:
            if name not in routing.names():
                raise UnknownModelError(
                    f"there is no model or alias {name!r}; list them with: appliance models list"
                )
            target = complete_target(self.registry.current, routing, name, asked.target)
            unit = routing.target_unit(target)
            if unit == routing.unit_of(name):
                raise ConflictError(
                    f"{target} already answers the requests for {name!r}: choose another target"
                )
            if not routing.answers(unit):
                raise ConflictError(
                    f"{target} is not loaded; load it first with: appliance models load {unit} --wait"
                )
        await committed(self.registry.set_shadow(actor=actor, name=name, target=target, share=asked.share))
        self.results.end(name)
        await self.fronts.routed()
        if target is None:
            return done(f"requests for {name} are no longer copied")
        return done(f"{asked.share:.1%} of the requests for {name} are copied to {target}")

    def shown(self) -> list[RegisteredModel]:
        """Return all models, with the results of their shadow traffic."""
        models = self.states.all()
        for model in models:
            model.shadows = [shadow for name in (model.name, *model.aliases) for shadow in self._of(name)]
        return models

    def _of(self, name: str) -> list[ShadowStatus]:
        shadow = self.registry.current.shadows.get(name)
        if shadow is None:
            return []
        sums = self.results.of(name, self.routing.target_unit(shadow.target))
        return [
            ShadowStatus(
                name=name,
                target=shadow.target,
                share=shadow.share,
                compared=sums.compared,
                dropped=sums.dropped,
                failed=sums.failed,
                original=_means(sums.originals, sums.compared),
                copy=_means(sums.copies, sums.compared),
                greedy=sums.greedy,
                agreement=sums.equal_tokens / sums.greedy_tokens if sums.greedy_tokens else None,
            )
        ]


def _means(sums: MeasureSum, count: int) -> ShadowTimes | None:
    if not count:
        return None
    return ShadowTimes(
        ttft_ms=sums.ttft_s * 1e3 / count, e2e_ms=sums.e2e_s * 1e3 / count, tokens=sums.tokens / count
    )
