"""Loads, unloads, puts to sleep and wakes versions of registered models.

Loading a version takes four steps: its files are compared with the manifest, its replicas are started, every
front reads its tokenizer, and model names begin to resolve to the version (`Routing.usable`). If a step
fails, running models are not affected.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from appliance.background import Background, in_own_thread, wait_until
from appliance.channel.served_models import ServedModel
from appliance.models.front_routes import FrontRoutes
from appliance.models.load_errors import LoadError, MemoryShortageError, not_loaded, outcome
from appliance.models.manager import ModelManager
from appliance.models.manifest import difference, find_problem, not_checked
from appliance.models.registry import describe
from appliance.models.restarts import StartTimer, Watch
from appliance.models.routing import Routing
from appliance.settings import ModelSettings
from appliance.traffic.state import TrafficState
from store.models import VersionRecord
from store.registry import ModelRegistry

log = logging.getLogger(__name__)

_POLL_S = 0.02
_FRONTS_WITHIN_S = 120.0
"""Time limit for the fronts to read a newly loaded model's tokenizer."""


class ModelOperations:
    """Operations on registered versions. All methods must be called on the event loop thread."""

    def __init__(
        self,
        registry: ModelRegistry,
        manager: ModelManager,
        traffic: TrafficState,
        routing: Routing,
        fronts: FrontRoutes,
        note: Callable[[str, str], None],
        model_flags: Mapping[str, Any],
    ) -> None:
        """`note` reports a problem to the operator. `model_flags` holds command-line options, which are the
        defaults for the settings of all versions."""
        self._registry = registry
        self.draining: set[str] = set()
        """Versions that are finishing their requests before being unloaded or put to sleep."""
        self.asleep: set[str] = set()
        """Loaded versions that are asleep and have released their memory."""
        self.loads: dict[str, asyncio.Task[None]] = {}
        """Versions that operators' commands are loading."""
        self.sleeps: dict[str, asyncio.Task[None]] = {}
        """Versions that are finishing their requests before they go to sleep."""
        self.wakes: dict[str, asyncio.Task[None]] = {}
        """Versions that are being woken."""
        self._introductions: dict[str, asyncio.Task[None]] = {}
        """Versions whose tokenizers the fronts are reading, so that requests can wait for a load."""
        self.on_repair: Callable[[str], None] = lambda unit: None
        """Called when the files of a version that failed to load have changed."""
        self._watches: dict[str, StartTimer] = {}
        """Timers that watch the files of versions that failed to load."""
        self._manager = manager
        self._traffic = traffic
        self._routing = routing
        self._fronts = fronts
        self._note = note
        self._model_flags = dict(model_flags)
        self._unloads: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()
        """Versions whose requests have finished and whose replicas are being stopped."""
        self._one_at_a_time = asyncio.Lock()
        """A lock that is held while a version is being loaded, so that two loads cannot claim the same free
        memory."""
        self._background = Background()
        routing.sleeps = lambda unit: unit in self.asleep or unit in self.sleeps

    # ── start and stop ──

    def restore(self) -> None:
        """Reload the versions that were loaded when the service stopped."""
        for record in self._registry.current.versions.values():
            if record.loaded_at is not None:
                self._background.run(self._restore(record))

    def stop(self) -> None:
        """Cancel all operations in progress."""
        for tasks in (self.loads, self._unloads, self.sleeps, self.wakes, self._introductions):
            for task in tasks.values():
                task.cancel()
        for watch in self._watches.values():
            watch.stop()

    async def _restore(self, record: VersionRecord) -> None:
        unit = record.unit
        if self._manager.is_declared(record.model):
            self._note(unit, "not loaded: the settings declare a model with the same name")
            return
        try:
            await self.load(record)
        except LoadError as error:
            self._note(unit, f"not loaded: {error}")

    # ── failures ──

    def note_failure(self, record: VersionRecord, reason: str) -> None:
        """Record that the version could not be loaded. Call `on_repair` as soon as the version's files
        change."""
        unit = record.unit
        self.forget_failure(unit)
        self._routing.failures[unit] = reason
        self._watches[unit] = watch = StartTimer()
        changed = Watch(record.folder, lambda: log.info("%s: the model's files have changed", unit))
        watch.start(math.inf, lambda: self.on_repair(unit), changed)

    def forget_failure(self, unit: str) -> None:
        """Forget that the version could not be loaded."""
        self._routing.failures.pop(unit, None)
        if (watch := self._watches.pop(unit, None)) is not None:
            watch.stop()

    # ── load ──

    async def load(self, record: VersionRecord) -> None:
        """Load a version and return when every front can send requests to it. If the version is its model's
        default or a target of the model's split, requests for the model wait during the load, unless another
        target can answer them. If the version is already being loaded, wait for that load. If it is asleep,
        wake it. Raises LoadError if the version cannot be loaded."""
        unit = record.unit
        if unit in self.asleep or unit in self.sleeps:
            await self.wake(record)
            return
        if (unloading := self._unloads.get(unit)) is not None:
            if unit not in self._ending:
                await self._keep(record, unloading)
                return
            await asyncio.wait([unloading])
        if (introduction := self._introductions.get(unit)) is not None:
            await asyncio.wait([introduction])
        if unit in self._routing.usable:
            if self._manager.accepts_early(unit):
                await outcome(self._shared(self.loads, unit, lambda: self._reload(record)), unit)
                return
            if not self._manager.failure(unit):
                return
            # The version's replicas have failed since it was loaded. Reload it from scratch.
            self._routing.usable.discard(unit)
            await self._manager.unload(unit, 0.0)
        task = self._shared(self.loads, unit, lambda: self._load(record))
        await self._hold_until(task, record)

    def _shared(
        self,
        tasks: dict[str, asyncio.Task[None]],
        unit: str,
        begin: Callable[[], Coroutine[Any, Any, None]],
    ) -> asyncio.Task[None]:
        """Return the version's task in `tasks`, creating it with `begin()` if necessary."""
        if (task := tasks.get(unit)) is None:
            task = tasks[unit] = asyncio.get_running_loop().create_task(begin())
            task.add_done_callback(lambda _: tasks.pop(unit, None))
        return task

    async def _hold_until(self, task: asyncio.Task[None], record: VersionRecord) -> None:
        """Forget that a version has failed, and wait for a task that makes it usable. If the version is its
        model's default version or a target of the model's split, requests for the model wait in the meantime.
        Raises the task's exception, or LoadError if the task is cancelled."""
        registry, unit = self._registry.current, record.unit
        self.forget_failure(unit)
        split = registry.splits.get(record.model)
        answers = registry.models[record.model].default_version == record.version or (
            split is not None and unit in split.weights
        )
        if answers:
            self._routing.held.add(record.model)
            self._fronts.publish_configuration()
        try:
            await asyncio.wait([task])
        finally:
            if answers:
                self._routing.held.discard(record.model)
                await self._fronts.routed()
        await outcome(task, unit)

    async def _keep(self, record: VersionRecord, unloading: asyncio.Task[None]) -> None:
        """Keep a version that was about to be unloaded and resume routing requests to it."""
        unloading.cancel()
        await asyncio.wait([unloading])
        self._routing.usable.add(record.unit)
        await self._store_loaded(record, True)
        await self._fronts.routed()

    async def _load(self, record: VersionRecord) -> None:
        unit = record.unit
        settings = self.settings_of(record.folder, record.settings)
        try:
            async with self._one_at_a_time:
                await self._start(record, settings)
        except BaseException as error:
            await self._manager.unload(unit, 0.0)
            if isinstance(error, LoadError) and not isinstance(error, MemoryShortageError):
                self.note_failure(record, str(error))
                log.warning("%s could not be loaded: %s", unit, error)
            raise
        self._routing.usable.add(unit)
        await self._store_loaded(record, True)
        log.info("%s is loaded", unit)
        await self._fronts.routed()

    async def _reload(self, record: VersionRecord) -> None:
        """Load or wake a parked version. If it is already being loaded on demand, wait for that load."""
        if self._manager.is_parked(record.unit):
            await self._check_memory(record.unit, self.settings_of(record.folder, record.settings))
        await self.bring_back(record.unit)
        await self._store_loaded(record, True)

    async def _start(self, record: VersionRecord, settings: ModelSettings) -> None:
        """Start a version's replicas and wait until they and the fronts are ready. Raises LoadError if the
        version cannot be loaded."""
        served = await self._described(record, settings)
        await self._check_memory(record.unit, settings)
        self._manager.load(served, settings)
        await self._until_loaded(record.unit)
        await self._fronts_ready(record.unit)

    async def _described(self, record: VersionRecord, settings: ModelSettings) -> ServedModel:
        """Compare a version's files with the manifest and return the version's description for the fronts.
        Raises LoadError if the files differ or cannot be read."""
        await self._check_files(record)
        limit_s = self._manager.load_timeout_s
        try:
            return await in_own_thread(lambda: describe(record.unit, settings), limit_s)
        except TimeoutError as error:
            raise LoadError(not_checked(record.folder, limit_s)) from error
        except OSError as error:
            raise LoadError(f"{error.filename} cannot be read ({error.strerror})") from error

    async def _check_files(self, record: VersionRecord) -> None:
        """Raise LoadError if a version's files differ from the manifest stored when the version was added."""
        problem = await find_problem(
            lambda: difference(record.folder, record.files), record.folder, self._manager.load_timeout_s
        )
        if problem:
            raise LoadError(problem)

    async def _check_memory(self, unit: str, settings: ModelSettings) -> None:
        """Raise MemoryShortageError if the model does not fit into memory. If the model is asleep and only
        GPUs other than its own have enough memory, stop its replicas, so that it can be loaded on those
        GPUs."""
        manager = self._manager
        refusal = (await manager.shortage_of(unit, settings)).reason
        if refusal and manager.is_parked_asleep(unit) and not (await manager.shortage(settings)).reason:
            await manager.end_sleep(unit)
        elif refusal:
            raise MemoryShortageError(
                f"{unit} does not fit alongside the models that are loaded: {refusal}; unload another model "
                "first with: appliance models unload"
            )

    async def _fronts_ready(self, unit: str) -> None:
        """Wait until every front has read the version's tokenizer. Raises LoadError if a front cannot."""
        in_time = await self._fronts.applied(_FRONTS_WITHIN_S)
        if reason := self._fronts.problem_with(unit):
            raise LoadError(f"{unit} could not be loaded: {reason}")
        if not in_time:
            raise LoadError(f"the front processes did not read {unit}'s tokenizer in {_FRONTS_WITHIN_S:g} s")

    def settings_of(self, folder: str, settings: Mapping[str, Any]) -> ModelSettings:
        """Return a version's settings, with the command-line options as defaults."""
        values = {"required": False} | self._model_flags | dict(settings) | {"folder": folder}
        return msgspec.convert(values, ModelSettings)

    # ── load on demand ──

    async def introduce(self, record: VersionRecord) -> None:
        """Accept requests for a version without loading it. The fronts read its tokenizer, and its requests
        wait in the queue. If the fronts are already reading the tokenizer, wait until they have done so.
        Raises LoadError if the version cannot be served."""
        unit = record.unit
        if (unloading := self._unloads.get(unit)) is not None:
            await asyncio.wait([unloading])
        if unit in self._routing.usable or unit in self.loads or self._routing.sleeps(unit):
            return
        await outcome(self._shared(self._introductions, unit, lambda: self._introduce(record)), unit)

    async def _introduce(self, record: VersionRecord) -> None:
        unit, settings = record.unit, self.settings_of(record.folder, record.settings)
        try:
            self._manager.introduce(await self._described(record, settings), settings)
            await self._fronts_ready(unit)
        except BaseException:
            await self._manager.unload(unit, 0.0)
            raise
        self._routing.usable.add(unit)
        await self._fronts.routed()

    async def load_declared(self, unit: str) -> None:
        """Load an optional model from the settings and return when it is ready. Raises LoadError if the load
        fails."""
        settings = self._manager.settings_of(unit)
        if settings is not None and self._manager.is_parked(unit):
            await self._check_memory(unit, settings)
        try:
            await self.bring_back(unit)
        except LoadError as error:
            self._routing.failures[unit] = str(error)
            raise
        self.forget_failure(unit)
        self._fronts.publish_configuration()

    async def bring_back(self, unit: str) -> None:
        """Load or wake a model that accepts requests without being loaded. If this fails, raise LoadError and
        leave the model unloaded, without sleeping replicas. However, replicas of a model in the settings that
        are waiting for its files to be corrected keep waiting."""
        record = self._routing.version_of(unit)
        async with self._one_at_a_time:
            try:
                if record is not None:
                    await self._check_files(record)
                self._manager.unpark(unit)
                await self._until_loaded(unit)
            except BaseException:
                repairs_itself = record is None and self._manager.failure(unit)
                if unit in self._manager.models and not repairs_itself:
                    self._manager.park(unit)
                raise
            finally:
                self._manager.returned(unit)

    # ── unload ──

    async def unload(self, record: VersionRecord, grace_s: float) -> None:
        """Stop routing requests to a version, allow its requests `grace_s` seconds to finish, and unload it.
        Any operation in progress on the version is cancelled."""
        unit = record.unit
        self.forget_failure(unit)
        for tasks in (self.loads, self.sleeps, self.wakes):
            if (task := tasks.get(unit)) is not None:
                task.cancel()
                await asyncio.wait([task])
        if unit in self.asleep:
            self.asleep.discard(unit)
            self.draining.add(unit)
            try:
                await self._manager.unload(unit, 0.0)
            finally:
                self.draining.discard(unit)
        if unit in self._routing.usable:
            self.begin_unload(record, grace_s)
        if (unloading := self._unloads.get(unit)) is not None:
            await asyncio.wait([unloading])
        await self._store_loaded(record, False)

    def begin_unload(self, record: VersionRecord, grace_s: float) -> asyncio.Task[None]:
        """Stop routing requests to a usable version and return a task that unloads the version."""
        unit = record.unit
        self._routing.usable.discard(unit)
        self.draining.add(unit)
        task = asyncio.get_running_loop().create_task(self._drain(record, grace_s))
        self._unloads[unit] = task

        def ended(_: object) -> None:
            self.draining.discard(unit)
            self._ending.discard(unit)
            self._unloads.pop(unit, None)

        task.add_done_callback(ended)
        return task

    async def _drain(self, record: VersionRecord, grace_s: float) -> None:
        """Wait until no request uses the version, then unload it."""
        unit = record.unit
        await self._fronts.routed()
        await self._store_loaded(record, False)
        await self._finish_requests(unit, grace_s)
        self._ending.add(unit)
        await self._manager.unload(unit, 0.0)
        log.info("%s is unloaded", unit)

    async def _finish_requests(self, unit: str, grace_s: float) -> bool:
        """Wait up to `grace_s` seconds for the version's requests to finish. Return whether they have."""

        def finished() -> bool:
            return not self._fronts.prepares(unit) and self._traffic.finished(unit)

        await wait_until(finished, grace_s)
        return finished()

    # ── sleep and wake ──

    async def sleep(self, record: VersionRecord, grace_s: float) -> None:
        """Stop routing requests to a loaded version, allow its requests `grace_s` seconds to finish, and
        release its memory. A version that is being woken is put to sleep afterwards. A version that is
        already asleep or going to sleep for a different reason is treated as if this command had put it to
        sleep. Raises LoadError if the version is not loaded or stays awake."""
        unit = record.unit
        if (waking := self.wakes.get(unit)) is not None:
            await asyncio.wait([waking])
        if unit in self.asleep:
            return
        parked = self._manager.is_parked(unit) and unit not in self._manager.parked_host_bytes()
        if unit not in self.sleeps and (parked or unit not in self._routing.usable):
            raise not_loaded(unit)
        task = self._shared(self.sleeps, unit, lambda: self._sleep(record, grace_s))
        await outcome(task, unit)

    async def finish_sleep(self, unit: str) -> None:
        """If the version is going to sleep, wait until it has fallen asleep or failed to do so."""
        if (task := self.sleeps.get(unit)) is not None:
            await asyncio.wait([task])

    async def _sleep(self, record: VersionRecord, grace_s: float) -> None:
        unit = record.unit
        self._routing.usable.discard(unit)
        self.draining.add(unit)
        try:
            await self._fronts.routed()
            if not await self._finish_requests(unit, grace_s):
                raise LoadError(f"{unit} stays awake: its requests did not finish within {grace_s:g} s")
            if not await self._manager.stay_asleep(unit):
                if self._manager.is_parked(unit):
                    raise not_loaded(unit)
                problem = await self._manager.sleeping.sleep(unit)
                if problem and not await self._manager.sleeping.wake(unit):
                    raise LoadError(f"{unit} stays awake: {problem}")
        except BaseException:
            self._routing.usable.add(unit)
            self._fronts.publish_configuration()
            raise
        finally:
            self.draining.discard(unit)
        self.asleep.add(unit)
        await self._store_loaded(record, False)
        log.info("%s is asleep", unit)

    async def wake(self, record: VersionRecord) -> None:
        """Restore a sleeping version's memory and return when every front can send requests to it. A version
        that is going to sleep is kept awake. Raises MemoryShortageError if there is not enough memory; the
        version then stays asleep. Raises LoadError for other problems; the version is then unloaded."""
        unit = record.unit
        if (sleeping := self.sleeps.get(unit)) is not None:
            await self._stay_awake(unit, sleeping)
        if unit in self._routing.usable and not self._manager.is_parked(unit):
            return
        if unit not in self.asleep:
            raise LoadError(f"{unit} is not asleep; load it with: appliance models load {unit}")
        await self._hold_until(self._shared(self.wakes, unit, lambda: self._wake(record)), record)

    async def _stay_awake(self, unit: str, sleeping: asyncio.Task[None]) -> None:
        """If the version is going to sleep but its requests are still running, cancel the operation.
        Otherwise, wait for it to complete."""
        if not self._traffic.finished(unit):
            sleeping.cancel()
        await asyncio.wait([sleeping])
        await self._fronts.routed()

    async def _wake(self, record: VersionRecord) -> None:
        unit = record.unit
        async with self._one_at_a_time:
            if problem := await self._manager.sleeping.wake(unit):
                raise MemoryShortageError(f"{unit} stays asleep: {problem}")
            try:
                await self._until_loaded(unit)
            except BaseException as error:
                self.asleep.discard(unit)
                await self._manager.unload(unit, 0.0)
                if isinstance(error, LoadError):
                    self.note_failure(record, str(error))
                raise
        self.asleep.discard(unit)
        self._routing.usable.add(unit)
        await self._store_loaded(record, True)
        log.info("%s is awake", unit)
        await self._fronts.routed()

    async def _until_loaded(self, unit: str) -> None:
        """Wait until all of the version's replicas are ready. Raises LoadError if they cannot become
        ready."""
        while not self._manager.loaded(unit):
            if reason := self._manager.load_failure(unit):
                raise LoadError(f"{unit} could not be loaded: {reason}")
            if unit not in self._manager.models or self._manager.is_parked(unit):
                raise LoadError(f"{unit} was unloaded while it was being loaded")
            await asyncio.sleep(_POLL_S)

    async def _store_loaded(self, record: VersionRecord, loaded: bool) -> None:
        try:
            await asyncio.wrap_future(self._registry.set_loaded(record.model, record.version, loaded))
        except Exception as error:
            # The version itself has been loaded or unloaded. Failing to store this affects only the next
            # start of the service.
            self._note(record.unit, f"its state could not be stored: {error}")
