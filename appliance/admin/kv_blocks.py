"""Reads the states of all replicas' KV blocks, for an admin API route and for the recorded history. Replicas
report block states only on request. Replicas are queried up to once per second while an operator uses the
route, and otherwise every few seconds, for the history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response

from appliance.admin.bodies import json_answer
from appliance.admin.log_routes import answered
from appliance.http.openapi import Operation
from appliance.models.replica import Replica
from appliance.protocol import ErrorBody
from appliance.scopes import ScopedRoute
from appliance.snapshot import BlockMap, ReplicaBlocks
from appliance.traffic.state import TrafficState
from engine.rank_messages import BlockUse

RECORDED_EVERY_S = 10.0
"""Interval, in seconds, at which KV block states are requested for the history while no operator is using the
admin API route."""


class BlockMaps:
    """Reads the states of all replicas' KV blocks. Must be used on the event loop thread."""

    def __init__(self, replicas: Callable[[], Iterable[Replica]], traffic: TrafficState) -> None:
        self._replicas = replicas
        self._traffic = traffic
        self._maps: dict[str, tuple[BlockUse, BlockMap]] = {}
        """Each replica's latest block state, and the block map built from it."""

    async def read(self) -> list[ReplicaBlocks]:
        """Return the block maps of all responding replicas."""
        replicas = list(self._replicas())
        found = await asyncio.gather(*(replica.blocks.read() for replica in replicas))
        return [
            ReplicaBlocks(replica=replica.name, blocks=self._map(replica, use))
            for replica, use in zip(replicas, found, strict=True)
            if use is not None
        ]

    def recent(self) -> dict[str, BlockMap]:
        """Return each replica's latest known KV block map, without waiting. If a map is older than
        `RECORDED_EVERY_S`, request a new one. The same object is returned until a newer state arrives."""
        replicas = list(self._replicas())
        found = {
            replica.name: self._map(replica, use)
            for replica in replicas
            if (use := replica.blocks.recent(RECORDED_EVERY_S)) is not None
        }
        self._maps = {name: one for name, one in self._maps.items() if name in found}
        return found

    def _map(self, replica: Replica, use: BlockUse) -> BlockMap:
        known = self._maps.get(replica.name)
        if known is not None and known[0] is use:
            return known[1]
        in_flight = self._traffic.in_flight
        made = BlockMap(
            states=use.states,
            owners=use.owners,
            ages=use.ages,
            stride=use.stride,
            requests=[one.request_id for one in use.requests],
            tenants=[
                request.tenant if (request := in_flight.get(one.request_id)) is not None else ""
                for one in use.requests
            ],
            request_blocks=[one.blocks for one in use.requests],
            preemptions=[one.preemptions for one in use.requests],
        )
        self._maps[replica.name] = use, made
        return made


def kv_blocks_route(maps: BlockMaps) -> ScopedRoute:
    """Return the route that reads the KV block states."""

    async def show(request: Request) -> Response:
        return json_answer(await maps.read())

    operation = Operation(
        "Return the state, owner and age of each replica's KV blocks",
        answer=list[ReplicaBlocks],
        description="Each replica is queried at most once per second. Byte arrays are base64-encoded.",
        errors=dict.fromkeys((401, 403, 503), ErrorBody),
    )
    return ScopedRoute("GET", "/kv-blocks", answered(show), wanted="read", operation=operation)
