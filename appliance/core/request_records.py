"""The components that record requests: their callers' identities, the quotas they use, their rows in the
request log, and their stored texts."""

from __future__ import annotations

import contextlib
import time

from appliance.core.contents import ContentKeeper
from appliance.core.quota_levels import LevelKeeper
from appliance.core.reload import LiveSettings
from appliance.core.state import State
from appliance.front_pool.identities import IdentityRegistry
from appliance.monitoring.ended import EndedRequests
from appliance.monitoring.metrics.counting import CountedRows
from appliance.monitoring.metrics.tenants import ShownTenants
from appliance.traffic.quotas import Quotas
from store.quotas import QuotaLog


class RequestRecords:
    """The components that record requests."""

    def __init__(self, settings: LiveSettings, state: State, held: contextlib.AsyncExitStack) -> None:
        """The `held` exit stack closes everything that the constructor opens."""
        control = state.control
        self.identities = IdentityRegistry(lambda: control.policies, settings.current.unix)
        self.quotas = Quotas(time.monotonic)
        self.levels = LevelKeeper(self.quotas, QuotaLog(state.history))
        self.contents = ContentKeeper(state.contents, lambda: control.policies, lambda: settings.current.log)
        held.callback(self.contents.close)
        self.ended = EndedRequests(state.requests, lambda name: name in control.policies.tenants)
        shown = ShownTenants(settings.current.metrics.tenants, lambda: control.policies.tenants)
        self.counted = CountedRows(self.ended, shown)
