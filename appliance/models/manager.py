"""The model manager: manages the served models and their replicas, and changes both while the service is
running.

              Controller (start, check, stop), Reloader (change), RequestCanceller (cancel)
                  │
                  ▼
             ModelManager ──► Replica ──► engine.client.ReplicaGroup (its processes)
                  │              │
                  │              └──► ReplicaConnections (ReplicaEvents)
                  ▼                     ▼
    RequestManager (models and replicas to which requests may go), FrontChannels (FrontPool), publish()

The settings define how many replicas a model has and how they run. When the settings change, the replicas are
changed one by one. A replica that already runs with the wanted settings stays, and a missing replica is
started. A replica with other settings serves until its successor is ready, if there is enough memory for
both. Otherwise it is stopped first, and its requests continue on its successor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from appliance.background import Background
from appliance.channel.served_models import ServedModel
from appliance.models.cgroups import ReplicaCgroups, descendants
from appliance.models.changes import describe_change
from appliance.models.fit import MemoryShortage, shortage_beside, shortage_to_wake
from appliance.models.freed_memory import find_held
from appliance.models.manifest import find_problem
from appliance.models.placement import GpuPlacement, machine_topology
from appliance.models.replica import FilesCheck, Launch, Preflight, Replica
from appliance.models.replica_connections import FrontChannels, ReplicaConnections
from appliance.models.residency import DRAIN_S
from appliance.models.restarts import Restarts
from appliance.models.scaling import ModelScaling
from appliance.models.unit_sleep import UnitSleep
from appliance.protocol import ScalingStatus
from appliance.settings import ModelSettings, Settings
from appliance.traffic.request_manager import RequestManager

log = logging.getLogger(__name__)

_POLL_S = 0.05
_STOP_S = 2.0
_RETURNED_AGAIN_S = 30.0
"""Interval between checks of whether memory that an unload did not return has since been returned."""
_MAX_FAILED_LOADS = 2
"""Number of failed starts after which a registered version is considered impossible to load. A second start
is attempted, because the first one also fails if another process has not freed its memory yet."""
_MAX_FAILED_STARTS = 3
"""If a successor fails to start this many times, the previous replica is kept."""


class ModelManager:
    """All models and replicas. All methods must be called on the event loop's thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        served: list[ServedModel],
        *,
        requests: RequestManager,
        channels: FrontChannels,
        publish: Callable[[], None],
        note: Callable[[str, str], None],
        launch: Launch,
        preflight: Preflight,
        files_check: FilesCheck,
        broken: Mapping[str, str],
    ) -> None:
        """Create the manager without starting any replicas.

        - `settings` returns the settings in effect.
        - `publish` is called when the list of served models or the readiness of a model may have changed.
        - `note` reports a problem (its location and description) to the operator.
        - `preflight` checks a model's files.
        - `files_check` compares the files of a registered version with its manifest.
        - `broken` maps each model whose files have a problem to that problem.
        """
        self.models = {model.name: model for model in served}
        """The models that are loaded or being loaded, as the fronts know them. The keys are units of loading:
        the names of models in the settings, and NAME@VERSION for versions in the registry."""
        self.replicas: list[Replica] = []
        self.unreturned: dict[str, str] = {}
        """Description of the memory that is still held after a unit was unloaded, by unit."""
        self._settings = settings
        self._declared = dict(settings().models)
        """The models in the settings."""
        self._wanted = dict(self._declared)
        """The settings of every unit that should be loaded."""
        self._requests = requests
        self._publish = publish
        self._note = note
        self._launch = launch
        self._preflight = preflight
        self._files_check = files_check
        self._broken = broken
        self._placement = GpuPlacement(machine_topology())
        self._cgroups = ReplicaCgroups(descendants)
        self._background = Background()
        self._numbers: dict[str, int] = {}
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._retirements: dict[Replica, asyncio.Task[None]] = {}
        self._grace_s: dict[str, float] = {}
        """Grace period for the requests of a unit that is being unloaded, if it differs from the settings."""
        self._parked: dict[str, float] = {}
        """Units without replicas, or with sleeping replicas, whose requests wait until the unit is loaded or
        woken. The value is the event loop's time until which running requests may finish."""
        self._keep_asleep: set[str] = set()
        """Parked units whose replicas sleep instead of being stopped."""
        self._sleep_changes: dict[str, asyncio.Task[None]] = {}
        """Tasks that put the replicas of a unit to sleep or wake them. They are not interrupted."""
        self._given_up: set[str] = set()
        """Models whose new settings could not be loaded. They run with the previous settings."""
        self.connections = ReplicaConnections(self.models, self.failure, requests, channels, publish, note)
        self._scaling = ModelScaling(
            self, lambda: requests.state.models, lambda: settings().autoscaling, note
        )
        self.sleeping = UnitSleep(self.of, self.connections.update, publish)
        """Puts the replicas of a unit to sleep, and wakes them."""
        for model in served:
            requests.add_model(model.name, model.version)
        for name, wanted in self._wanted.items():
            if not wanted.required and name not in broken:
                self._parked[name] = 0.0  # `OnDemand` loads the model if it fits.
                continue
            for _ in range(self._scaling.count(name, wanted)):
                self._new(name, wanted)

    def start(self) -> None:
        """Start every replica, except the replicas of models whose files have a problem."""
        for replica in self.replicas:
            if problem := self._broken.get(replica.model):
                replica.refuse(problem)
            else:
                replica.start()

    async def stop(self) -> None:
        """Stop every replica."""
        tasks = (self._changes.values(), self._retirements.values(), self._sleep_changes.values())
        for task in [task for one in tasks for task in one]:
            task.cancel()
        await asyncio.gather(*(replica.stop(_STOP_S) for replica in self.replicas))

    def check(self) -> None:
        """Kill replicas that hang, and add and remove replicas as the load requires. Must be called a few
        times per second."""
        for replica in self.replicas:
            replica.check()
        self._scaling.check()

    def of(self, model: str) -> list[Replica]:
        """Return the replicas of a model."""
        return [replica for replica in self.replicas if replica.model == model]

    def unusable(self, model: str) -> str:
        """Return the reason why no replica of the model can start until an operator corrects the model's
        files or settings. Return an empty string if a replica can start, or if one has ever been ready."""
        replicas = self.of(model)
        if model in self.connections.was_ready or not replicas:
            return ""
        return replicas[0].failure if all(replica.bad_checkpoint for replica in replicas) else ""

    def required(self) -> list[str]:
        """Return the models that must be ready for the service to be ready."""
        return [name for name, model in self.models.items() if model.required]

    def is_declared(self, name: str) -> bool:
        """Return whether the settings contain the model."""
        return name in self._declared

    def fallback(self, unit: str) -> str:
        """Return the name of the model that answers requests if the unit cannot; empty if there is none."""
        wanted = self._wanted.get(unit)
        return "" if wanted is None else wanted.fallback or ""

    def failure(self, unit: str) -> str:
        """Return the reason why no replica of the unit can start, or an empty string."""
        replicas = self.of(unit)
        return replicas[0].failure if replicas and all(replica.failure for replica in replicas) else ""

    def remedy(self, unit: str) -> str:
        """Return the operator's remedy for the unit's `failure`, or an empty string."""
        return next((replica.remedy for replica in self.of(unit) if replica.remedy), "")

    def retry(self, unit: str) -> list[str]:
        """Start those replicas of the unit that are waiting for their next start, and return their names."""
        return [replica.name for replica in self.of(unit) if replica.retry()]

    def set_timeouts(self) -> None:
        """Apply the time limits in the settings after which a replica is killed."""
        for replica in self.replicas:
            replica.hang_timeout_s = self._settings().hang_timeout_s
            replica.load_timeout_s = self._settings().load_timeout_s

    def cancel(self, request_id: str) -> None:
        """Cancel a request on the replicas that are running it."""
        accounts = self._requests.state.accounts_of(request_id)
        for replica in self.replicas:
            if replica.account in accounts and replica.group is not None:
                replica.group.cancel_request(request_id)

    # ── changing the served models ──

    def change(self, wanted: dict[str, ModelSettings], served: list[ServedModel]) -> list[str]:
        """Serve these models with these settings from now on. Returns a description of each change. `served`
        must contain descriptions of all new models.

        Models whose settings have not changed are left as they are, but settings that could not be loaded
        before are tried again.
        """
        described = {model.name: model for model in served}
        former, self._declared = self._declared, dict(wanted)
        self._wanted = {name: one for name, one in self._wanted.items() if name not in former} | wanted
        changes = []
        for name in sorted(wanted.keys() | former.keys()):
            if wanted.get(name) == former.get(name) and name not in self._given_up:
                continue
            self._given_up.discard(name)
            if name in wanted and wanted[name].required:
                self._parked.pop(name, None)
            if name in wanted and name not in self.models:
                self._add(described[name])
            elif name in wanted:
                self._redescribe(name, wanted[name], described.get(name))
            grace_s, running = self._settings().drain_grace_s, len(self.of(name))
            change = describe_change(former.get(name), wanted.get(name), running, grace_s)
            changes.append(f"model {name}: {change}")
            self._begin_change(name)
        self._publish()
        return changes

    def _redescribe(self, name: str, wanted: ModelSettings, described: ServedModel | None) -> None:
        """Apply those settings of a model that do not require new replicas. `described` is the model's
        description under these settings if a text setting has changed, otherwise None."""
        known = msgspec.structs.replace(self.models[name], required=wanted.required)
        if described is not None and described.folder == known.folder:
            known = msgspec.structs.replace(
                known,
                version=described.version,
                chat_template=described.chat_template,
                sampling=described.sampling,
            )
            self._requests.set_version(name, known.version)
            for replica in self.of(name):
                if replica.spec == wanted.spec(replica.name):
                    replica.settings, replica.described = wanted, None
                    if replica.account is not None:
                        replica.account.version = known.version
        self.models[name] = known

    def load(self, unit: ServedModel, settings: ModelSettings) -> None:
        """Load a registered version. `loaded` and `load_failure` report the result."""
        self._wanted[unit.name] = settings
        self._parked.pop(unit.name, None)
        self._add(unit)
        self._begin_change(unit.name)
        self._publish()

    def introduce(self, unit: ServedModel, settings: ModelSettings) -> None:
        """Accept requests for a registered version without loading it."""
        self.load(unit, settings)
        self._parked[unit.name] = 0.0

    def park(self, unit: str, *, asleep: bool = False) -> None:
        """Release the memory of a unit, but keep accepting requests for it. Running requests have `DRAIN_S`
        to finish; those that take longer continue when the unit is loaded again. The replicas are stopped.
        With `asleep`, they are put to sleep, unless a request takes longer or a replica cannot sleep."""
        self._parked[unit] = asyncio.get_running_loop().time() + DRAIN_S
        self._keep_asleep.discard(unit)
        if asleep:
            self._keep_asleep.add(unit)
        self._begin_change(unit)

    def unpark(self, unit: str) -> None:
        """Load or wake a unit that was introduced or parked. `loaded` and `load_failure` report the
        result."""
        self._parked.pop(unit, None)
        self._begin_change(unit)

    async def end_sleep(self, unit: str) -> None:
        """If the unit is parked asleep, stop its replicas, and return when they have stopped. The unit stays
        parked, and can then be loaded on other GPUs."""
        if self.is_parked_asleep(unit):
            log.info("unloading %s: its GPUs do not have enough memory to wake it", unit)
            self.park(unit)
            await asyncio.wait([self._changes[unit]])

    async def stay_asleep(self, unit: str) -> bool:
        """If the unit is parked asleep, or is going to sleep because it is parked, end the parking without
        waking it: only `sleeping.wake` then wakes it. The unit must have no requests. Return whether it
        sleeps."""
        while unit in self._parked and unit in self._keep_asleep and not self._changes[unit].done():
            await asyncio.wait([self._changes[unit]])
        if not self.is_parked_asleep(unit):
            return False
        del self._parked[unit]
        self._keep_asleep.discard(unit)
        self._publish()
        return True

    def is_parked_asleep(self, unit: str) -> bool:
        """Return whether the unit is parked and all its replicas sleep."""
        kept = unit in self._parked and unit in self._keep_asleep
        replicas = self.of(unit) if kept else []
        return bool(replicas) and all(replica.sleeping.asleep for replica in replicas)

    def parked_host_bytes(self) -> dict[str, int]:
        """Return the amount of host memory that holds the weights of each unit that sleeps, or is going to
        sleep, because it is parked."""
        return {
            unit: sum(replica.status().weight_bytes for replica in self.of(unit))
            for unit in self._keep_asleep & self._parked.keys()
        }

    def is_parked(self, unit: str) -> bool:
        """Return whether the unit accepts requests although it has no replicas that are awake, or soon will
        have none."""
        return unit in self._parked

    def settings_of(self, unit: str) -> ModelSettings | None:
        """Return the settings of a unit that is loaded, parked or being loaded, or None for other units."""
        return self._wanted.get(unit)

    def loaded(self, unit: str) -> bool:
        """Return whether all replicas of the unit are ready."""
        wanted = self._wanted.get(unit)
        ready = [replica for replica in self.of(unit) if replica.answers]
        return wanted is not None and len(ready) >= self._scaling.count(unit, wanted)

    def load_failure(self, unit: str) -> str:
        """Return the reason why the unit cannot be loaded, or an empty string if it may still become
        ready."""
        for replica in self.of(unit):
            if replica.sleeping.asleep:
                continue
            if replica.failure or replica.failed_starts >= _MAX_FAILED_LOADS:
                return replica.failure or replica.last_error
        return ""

    async def unload(self, unit: str, grace_s: float) -> None:
        """Stop accepting requests for the unit, let its requests finish within `grace_s`, and stop its
        replicas. Replicas that do not stop in time are killed."""
        if unit not in self._wanted:
            return
        del self._wanted[unit]
        self._grace_s[unit] = grace_s
        self._begin_change(unit)
        await asyncio.wait([self._changes[unit]])

    @property
    def load_timeout_s(self) -> float:
        """Time limit in seconds for the check of a model's files, and for a load without progress."""
        return self._settings().load_timeout_s

    def finished(self, unit: str) -> bool:
        """Return whether all requests for the unit have finished."""
        return self._requests.state.finished(unit)

    async def shortage(self, settings: ModelSettings, count: int | None = None) -> MemoryShortage:
        """Return how much more memory `count` replicas with these settings need alongside the running
        replicas. By default, `count` is the number of replicas with which the model is loaded."""
        limit_gb = self._settings().on_demand.memory_gb
        if not self.replicas and limit_gb is None:
            return MemoryShortage()  # the replica itself reports why it cannot load
        others = [replica.settings for replica in self.replicas if not replica.sleeping.asleep]
        return await asyncio.to_thread(
            lambda: shortage_beside(
                settings,
                self._placement.choose(settings.tensor_parallel_size),
                settings.replica_range()[0] if count is None else count,
                others=others,
                limit_bytes=None if limit_gb is None else int(limit_gb * 1e9),
            )
        )

    async def shortage_of(self, unit: str, settings: ModelSettings) -> MemoryShortage:
        """Return how much more memory is needed to load the unit or, if it is parked asleep, to wake it."""
        replicas = self.of(unit)
        if not self.is_parked_asleep(unit) or any(replica.group is None for replica in replicas):
            return await self.shortage(settings)
        needs = [
            (one.gpus or range(one.spec.tensor_parallel_size), one.sleeping.freed_bytes) for one in replicas
        ]
        return await asyncio.to_thread(shortage_to_wake, needs)

    async def why_not_beside(self, settings: ModelSettings, count: int = 1) -> str:
        """Return the reason why `count` replicas with these settings cannot run alongside the running
        replicas, or an empty string if they can."""
        return (await self.shortage(settings, count)).why

    # ── replicas by load (ScaledModels) ──

    def scalable(self) -> dict[str, ModelSettings]:
        """Return the settings of every unit, except units that are asleep or whose replicas are changing."""
        changing = {unit for unit, task in self._changes.items() if not task.done()}
        asleep = {replica.model for replica in self.replicas if replica.sleeping.begun}
        units = self.models.keys() - changing - asleep - self._parked.keys()
        return {unit: one for unit, one in self._wanted.items() if unit in units}

    def begin_change(self, unit: str) -> None:
        """Start and stop replicas until the unit has its target number of replicas."""
        if unit in self._wanted:
            self._begin_change(unit)

    def scaling(self, unit: str) -> ScalingStatus | None:
        """Return a unit's scaling status, or None if its number of replicas is fixed."""
        wanted = self._wanted.get(unit)
        return None if wanted is None else self._scaling.status(unit, wanted)

    def _begin_change(self, name: str) -> None:
        if (task := self._changes.get(name)) is not None:
            task.cancel()
        self._changes[name] = asyncio.get_running_loop().create_task(self._apply(name))

    def _add(self, model: ServedModel) -> None:
        self.models[model.name] = model
        self._requests.resume_admission(model.name)
        if model.name not in self._requests.state.models:
            self._requests.add_model(model.name, model.version)
        for replica in self.of(model.name):
            if replica.account is not None:
                self.connections.learn(replica)  # an earlier change had begun to remove the model

    async def _apply(self, name: str) -> None:
        """Change a model's replicas step by step until they match the settings or no further change is
        possible."""
        try:
            while await self._next_step(name):
                pass
        except Exception:
            log.exception("model %s: applying the new settings failed", name)
            self._given_up.add(name)
            self._note(name, "applying the new settings failed: see the log for the cause")

    async def _next_step(self, name: str) -> bool:
        """Take one step towards the wanted replicas. Return whether another step may be possible."""
        if (sleep_change := self._sleep_changes.get(name)) is not None:
            await asyncio.wait([sleep_change])
        wanted = self._wanted.get(name)
        by_load = wanted is not None and wanted.max_replicas is not None
        for replica in self.of(name):
            if replica.retiring and not by_load:
                await self._retire(replica)  # an earlier change had begun to retire the replica
        if wanted is None:
            await self._remove(name)
            return False
        if name in self._parked:
            if any(replica.spec != wanted.spec(replica.name) for replica in self.of(name)):
                self._keep_asleep.discard(name)  # The replicas would sleep with outdated settings.
            if name in self._keep_asleep and not self.is_parked_asleep(name):
                await self._uninterrupted(name, self._put_to_sleep(name))
            if not self.is_parked_asleep(name):
                self._keep_asleep.discard(name)
                await asyncio.gather(*(self._retire(replica) for replica in self.of(name)))
            return False
        self._keep_asleep.discard(name)
        if any(replica.sleeping.begun for replica in self.of(name)):
            await self._uninterrupted(name, self._wake(name))
            return True
        staying = [replica for replica in self.of(name) if not replica.retiring]
        serving_first = sorted(staying, key=lambda replica: replica.account is None)
        current = [replica for replica in serving_first if replica.spec == wanted.spec(replica.name)]
        outdated = [replica for replica in serving_first if replica not in current]
        if outdated and outdated[-1].account is None:
            await self._retire(outdated[-1])
        elif len(current) > self._scaling.count(name, wanted):
            retirement = self._begin_retirement(current[-1])
            # With autoscaling, do not wait, so that a new replica can start if the load grows again.
            if not by_load:
                await asyncio.shield(retirement)
        elif outdated:
            return await self._replace(outdated[0], current, wanted)
        elif len(current) < self._scaling.count(name, wanted):
            # The files were checked before the first replica was started, but may have changed since then.
            changed = ""
            if current:
                changed = await find_problem(
                    lambda: self._files_check(name), wanted.folder, self.load_timeout_s
                )
            added = self._new(name, wanted)
            if changed:
                added.refuse(changed)
            else:
                added.start()
        else:
            return False
        return True

    async def _replace(self, old: Replica, current: list[Replica], wanted: ModelSettings) -> bool:
        """Replace a replica with one that has the wanted settings. Return False if the settings cannot be
        loaded."""
        if len(current) < self._scaling.count(old.model, wanted):
            if why_not := await self.why_not_beside(wanted):
                log.warning("%s is stopped before its replacement loads: %s", old.name, why_not)
                self._note(old.name, f"stopped before its replacement loaded: {why_not}")
                await self._retire(old)
                return True
            new = self._new(old.model, wanted)
            log.info("%s is loading to replace %s, which keeps serving until then", new.name, old.name)
            new.start()
            current = [*current, new]
        for new in current:
            while new.account is None:
                if new.failure or new.failed_starts >= _MAX_FAILED_STARTS:
                    self._given_up.add(old.model)
                    self._note(
                        new.name,
                        f"the new settings cannot be loaded, so {old.name} keeps running: {new.last_error}",
                    )
                    await self._retire(new)
                    return False
                await asyncio.sleep(_POLL_S)
        await self._retire(old)
        return True

    async def _uninterrupted(self, name: str, change: Coroutine[Any, Any, None]) -> None:
        """Put the replicas of a unit to sleep, or wake them. A later change to the unit does not interrupt
        this method, but waits until it has finished."""
        task = self._sleep_changes[name] = asyncio.get_running_loop().create_task(change)
        task.add_done_callback(lambda _: self._sleep_changes.pop(name, None))
        await asyncio.shield(task)

    async def _put_to_sleep(self, name: str) -> None:
        """Let the replicas of a parked unit finish their requests, and put them to sleep if they can. They
        get no new requests until `_wake` is called, even if they cannot sleep."""
        self.sleeping.begin(name)
        accounts = [replica.account for replica in self.of(name) if replica.account is not None]

        def occupied() -> bool:
            return any(map(self._requests.state.occupied, accounts))

        await _poll(lambda: not occupied(), self._drain_left_s(name))
        problem = "its requests take longer" if occupied() else await self.sleeping.sleep(name)
        if problem:
            log.info("%s does not sleep: %s", name, problem)
        else:
            log.info("%s is asleep; its next request wakes it", name)

    async def _wake(self, name: str) -> None:
        """Wake the replicas of a unit. If they cannot wake, stop them, so that they are loaded again."""
        replicas = self.of(name)
        ended = any(replica.sleeping.asleep and replica.group is None for replica in replicas)
        problem = "its processes have ended" if ended else await self.sleeping.wake(name)
        if problem:
            log.info("%s is loaded again instead of being woken: %s", name, problem)
            await asyncio.gather(*(self._retire(replica) for replica in replicas))
        elif all(replica.answers for replica in replicas):
            log.info("%s is awake", name)

    def _drain_left_s(self, name: str) -> float:
        """Return how much time, in seconds, the running requests of a parked unit have left to finish."""
        return max(0.0, self._parked.get(name, 0.0) - asyncio.get_running_loop().time())

    async def _retire(self, replica: Replica) -> None:
        """Stop sending requests to the replica, let it finish its requests, and stop it. A later change does
        not interrupt this method."""
        await asyncio.shield(self._begin_retirement(replica))

    def _begin_retirement(self, replica: Replica) -> asyncio.Task[None]:
        """Start retiring a replica, unless its retirement has already begun. Return the task."""
        if (task := self._retirements.get(replica)) is None:
            replica.retiring = True
            task = asyncio.get_running_loop().create_task(self._finish_and_end(replica))
            self._retirements[replica] = task
            task.add_done_callback(lambda _: self._retirements.pop(replica))
        return task

    async def _finish_and_end(self, replica: Replica) -> None:
        self._publish()
        account = replica.account
        if account is not None:
            self.connections.update(replica)
            # If no other replica serves the model, any requests not finished within the grace period continue
            # on the successor.
            alone = not any(other.account for other in self.of(replica.model) if not other.retiring)
            grace_s = self._settings().drain_grace_s if alone else None
            grace_s = self._drain_left_s(replica.model) if replica.model in self._parked else grace_s
            await _poll(
                lambda: not self._requests.state.occupied(account) or replica.account is not account, grace_s
            )
            self._requests.preempt(account)
        pids = [] if replica.group is None else list(replica.group.pids)
        try:
            await replica.stop(_STOP_S)
            if why := await find_held(pids):
                log.warning("%s: %s", replica.name, why)
                self._note(replica.name, why)
                self.unreturned[replica.model] = why
                self._background.run(self._until_returned(replica.model, why, pids))
        finally:
            self.replicas.remove(replica)
        log.info("%s ended", replica.name)

    async def _until_returned(self, unit: str, why: str, pids: list[int]) -> None:
        """Wait until the unit's memory has been returned, then remove the unit from `unreturned`."""
        while self.unreturned.get(unit) == why:
            await asyncio.sleep(_RETURNED_AGAIN_S)
            if not await find_held(pids):
                if self.unreturned.get(unit) == why:
                    del self.unreturned[unit]
                log.info("the memory of %s was returned", unit)
                return

    async def _remove(self, name: str) -> None:
        """Stop serving a model."""
        self.models.pop(name, None)
        self._parked.pop(name, None)
        self._keep_asleep.discard(name)
        self._requests.pause_admission(name, f"model {name!r} is being removed")
        self._publish()
        grace_s = self._grace_s.pop(name, self._settings().drain_grace_s)
        await _poll(lambda: self._requests.state.finished(name), grace_s)
        self._requests.abort_all(f"model {name!r} was removed", name)
        for replica in self.of(name):
            await self._retire(replica)
        self._requests.resume_admission(name)
        self._requests.remove_model(name)
        self._changes.pop(name, None)
        self._scaling.forget(name)
        log.info("model %s removed", name)

    def _new(self, model: str, settings: ModelSettings) -> Replica:
        self.unreturned.pop(model, None)
        number = self._numbers.get(model, 0)
        self._numbers[model] = number + 1
        service = self._settings()
        replica = Replica(
            model,
            settings,
            f"{model}-{number}",
            self.connections,
            run_dir=Path(service.run_dir),
            hang_timeout_s=service.hang_timeout_s,
            load_timeout_s=service.load_timeout_s,
            placement=self._placement,
            preflight=self._preflight,
            files_check=self._files_check,
            cgroups=self._cgroups,
            restarts=Restarts(lambda: self._settings().restarts),
            launch=self._launch,
        )
        self.replicas.append(replica)
        return replica


async def _poll(done: Callable[[], bool], timeout_s: float | None) -> None:
    """Wait until `done` returns true, for at most `timeout_s` (None means no limit)."""
    deadline = asyncio.get_running_loop().time() + (float("inf") if timeout_s is None else timeout_s)
    while not done() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_S)
