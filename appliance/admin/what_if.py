"""Predicts the effect of new limits by replaying the last few minutes' requests, without changing
anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.actions import ACTIONS, Action
from appliance.actions.parameters import SetTenant
from appliance.admin.bodies import AdminRequestError, error_answer, json_answer, read_parameters
from appliance.admin.tenants import changes
from appliance.history.forecasts import QuotaForecast
from appliance.http.openapi import Operation
from appliance.protocol import ErrorBody
from appliance.scopes import ScopedRoute
from appliance.traffic.recent import KEPT_S
from appliance.traffic.rules import QueueRules
from appliance.traffic.simulated_replica import speed_of
from appliance.traffic.state import TrafficState
from appliance.traffic.what_if import ReplayError, ReplayInput, replay_apart
from store.policies import KeyFields, KeyRecord, Policies, TenantRecord
from store.rules import check_key, check_tenant
from store.tenants import replaced

_ERRORS = dict.fromkeys((400, 401, 403, 404, 409, 503), ErrorBody)


class WhatIfError(AdminRequestError):
    """Raised if the effect of new limits cannot be predicted."""


class WhatIf:
    """Predicts the effect of new limits. Only one replay runs at a time."""

    def __init__(
        self, traffic: TrafficState, policies: Callable[[], Policies], rules: Callable[[], QueueRules]
    ) -> None:
        self._traffic = traffic
        self._policies = policies
        self._rules = rules
        self._running = False

    async def forecast(self, asked: msgspec.Struct) -> QuotaForecast:
        """Predict the effect of the limits in an action's parameters. Raises WhatIfError if no prediction is
        possible."""
        try:
            changed = self._changed(asked)
            given = self._input(changed)
        except ValueError as error:
            raise WhatIfError(400, str(error)) from error
        except LookupError as error:
            raise WhatIfError(404, str(error.args[0])) from error
        if self._running:
            raise WhatIfError(409, "another replay is running: try again when it has finished")
        self._running = True
        try:
            return await asyncio.to_thread(replay_apart, given)
        except ReplayError as error:
            raise WhatIfError(503, str(error)) from error
        finally:
            self._running = False

    def _changed(self, asked: Any) -> TenantRecord | KeyRecord:
        policies = self._policies()
        if isinstance(asked, SetTenant):
            if (tenant := policies.tenants.get(asked.name)) is None:
                raise LookupError(
                    f"there is no tenant {asked.name!r}; list the tenants with: appliance tenants list"
                )
            tenant = replaced(tenant, changes(asked, TenantRecord))
            check_tenant(tenant)
            return tenant
        if (key := policies.keys.get(asked.id)) is None:
            raise LookupError(f"there is no key {asked.id!r}; list the keys with: appliance keys list")
        key = replaced(key, changes(asked, KeyFields))
        check_key(key, time.time())
        return key

    def _input(self, changed: TenantRecord | KeyRecord) -> ReplayInput:
        now, state, policies = time.time(), self._traffic, self._policies()
        since, levels = state.recent.start(now - KEPT_S)
        accounts = [account for model in state.models.values() for account in model.accounts]
        speeds = [speed for account in accounts if (speed := speed_of(account)) is not None]
        return ReplayInput(
            since=since,
            until=now,
            requests=state.recent.requests(state.in_flight.values()),
            replicas=speeds,
            rules=self._rules(),
            tenants=list(policies.tenants.values()),
            keys=list(policies.keys.values()),
            levels=levels,
            changed_tenants=[changed] if isinstance(changed, TenantRecord) else [],
            changed_keys=[changed] if isinstance(changed, KeyRecord) else [],
        )


def what_if_routes(what_if: WhatIf) -> list[ScopedRoute]:
    """Return the routes that predict the effect of new tenant or key limits."""
    return [_route(what_if, action) for action in ACTIONS if action.changes_fields]


def _route(what_if: WhatIf, action: Action) -> ScopedRoute:
    async def answer(request: Request) -> Response:
        try:
            asked = await read_parameters(request, action.name, action.parameters)
            return json_answer(await what_if.forecast(asked))
        except AdminRequestError as error:
            return error_answer(error.status, str(error))

    operation = Operation(
        "Replay the last few minutes' requests with different limits, without changing anything",
        body=action.parameters,
        answer=QuotaForecast,
        errors=_ERRORS,
    )
    return ScopedRoute("POST", f"/what-if/{action.name}", answer, wanted="read", operation=operation)
