"""Changes registered models' default versions at run time. A swap makes a different version its model's
default. The new version is loaded alongside the old one. Once all fronts route the model's names to the new
version, it answers every new request. The old version finishes its requests and is unloaded. If there is not
enough memory for both versions, requests wait in the fronts while the old version is unloaded and the new one
is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from appliance.models.front_routes import FrontRoutes
from appliance.models.load_errors import LoadError, MemoryShortageError
from appliance.models.manager import ModelManager
from appliance.models.operations import ModelOperations
from appliance.models.routing import Routing
from store.models import VersionRecord
from store.registry import ModelRegistry

log = logging.getLogger(__name__)

Commit = Callable[[], Any]
"""Stores the new default version. Returns an awaitable."""


class VersionSwaps:
    """Changes default versions. All methods must be called on the event loop thread."""

    def __init__(
        self,
        registry: ModelRegistry,
        operations: ModelOperations,
        manager: ModelManager,
        routing: Routing,
        fronts: FrontRoutes,
        note: Callable[[str, str], None],
    ) -> None:
        """`note` reports a problem to the operator."""
        self._registry = registry
        self._operations = operations
        self._manager = manager
        self._routing = routing
        self._fronts = fronts
        self._note = note
        self._swapping: set[str] = set()

    async def set_default(
        self, former: VersionRecord, wanted: VersionRecord, commit: Commit, grace_s: float
    ) -> None:
        """Make `wanted` its model's default version. When this method returns, every new request goes to the
        new version. If the model is not loaded, the new version is not loaded either. `commit` stores the
        change. The previous version has `grace_s` seconds to finish its requests. Raises LoadError and passes
        on errors from `commit`. If this method raises, the previous version is still the default."""
        name = wanted.model
        if name in self._swapping:
            raise LoadError(
                f"the default version of model {name!r} is already being changed: try again later"
            )
        self._swapping.add(name)
        try:
            await self._set_default(former, wanted, commit, grace_s)
        finally:
            self._swapping.discard(name)

    async def _set_default(
        self, former: VersionRecord, wanted: VersionRecord, commit: Commit, grace_s: float
    ) -> None:
        old, new = former.unit, wanted.unit
        was_loaded = new in self._routing.usable
        if old in self._operations.loads:
            raise LoadError(f"{old} is being loaded: wait until it is ready, or unload it first")
        served = (old, self._routing.unit_of(wanted.model))
        if any(unit in self._routing.usable and not self._manager.is_parked(unit) for unit in served):
            try:
                await self._operations.load(wanted)
            except MemoryShortageError:
                await self._swap_in_place(former, wanted, commit, grace_s)
                return
        try:
            await commit()
        except BaseException:
            if not was_loaded and new in self._routing.usable:
                self._operations.begin_unload(wanted, 0.0)
            raise
        await self._fronts.routed()
        log.info("%s is the default of model %s", new, wanted.model)
        if old in self._routing.usable and not self._routing.names_of(old):
            self._operations.begin_unload(former, grace_s)

    async def _swap_in_place(
        self, former: VersionRecord, wanted: VersionRecord, commit: Commit, grace_s: float
    ) -> None:
        """Swap two versions when only one of them fits into memory. Requests for the model wait in the fronts
        until one of the versions is loaded."""
        name, old = wanted.model, former.unit
        aliases = self._registry.current.aliases.values()
        if names := [alias.name for alias in aliases if alias.target == old]:
            raise LoadError(
                f"there is not enough memory for two versions, and alias {names[0]!r} refers to {old}: "
                "change the alias first"
            )
        log.info("unloading %s before another version of %s is loaded", old, name)
        self._routing.held.add(name)
        try:
            await self._operations.unload(former, grace_s)
            try:
                await self._operations.load(wanted)
                await commit()
            except BaseException:
                await self._return_to(former, wanted)
                raise
        finally:
            self._routing.held.discard(name)
            await self._fronts.routed()

    async def _return_to(self, former: VersionRecord, wanted: VersionRecord) -> None:
        """Reload the previous version after a failed swap."""
        if wanted.unit in self._routing.usable:
            await self._operations.unload(wanted, 0.0)
        try:
            await self._operations.load(former)
        except LoadError as error:
            self._note(former.unit, f"not reloaded: {error}")
