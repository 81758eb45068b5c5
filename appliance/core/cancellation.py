"""Cancels requests on behalf of operators and drains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from appliance.channel.identity import Identity
from appliance.models.manager import ModelManager
from appliance.traffic.request_manager import RequestManager

_ENGINE_CANCEL_S = 2.0
"""A front that fails to cancel a request within this many seconds is considered hung, and the core cancels
the request in the engine."""


@dataclass
class RequestCanceller:
    """Cancels requests through their fronts, or in the engine if a front does not respond."""

    requests: RequestManager
    models: ModelManager

    def cancel(self, request_id: str, message: str) -> bool:
        """Cancel a request and send `message` to its client. Return False if no request has this id."""
        if not self.requests.abort(request_id, message):
            return False
        asyncio.get_running_loop().call_later(_ENGINE_CANCEL_S, self.models.cancel, request_id)
        return True

    def cancel_matching(self, matches: Callable[[Identity], bool], message: str) -> int:
        """Cancel all requests from matching callers and return their number."""
        in_flight = self.requests.state.in_flight
        ids = [request.request_id for request in in_flight.values() if matches(request.first.identity)]
        return sum([self.cancel(request_id, message) for request_id in ids])
