"""The model manager: keeps the list of served models, and starts and stops their replicas.

              Controller (start, check, stop), Reloader (change), RequestCanceller (cancel)
                  │
                  ▼
             ModelManager ──► UnitChanges, ReplicaRetirements
                  │              │
                  │              ▼
                  │           Replica ──► engine.client.ReplicaGroup (its processes)
                  │              │
                  │              └──► ReplicaConnections (ReplicaEvents)
                  ▼                     ▼
    RequestManager (models and replicas to which requests may go), FrontChannels (FrontPool), publish()

The settings define how many replicas a model has and how they run. A unit is what is loaded as a whole: a
model in the settings or one version of a registered model. The model manager knows which units should be
loaded, and with which settings. `appliance.models.unit_changes` starts and stops replicas accordingly, and
`appliance.models.retirement` retires replicas that are no longer needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec

from appliance.background import wait_until
from appliance.channel.served_models import ServedModel
from appliance.models.changes import describe_change
from appliance.models.fit import MemoryShortage, shortage_beside, shortage_to_wake
from appliance.models.parking import Parked
from appliance.models.placement import GpuPlacement, machine_topology
from appliance.models.replica import Launch, Replica
from appliance.models.replica_connections import FrontChannels, ReplicaConnections
from appliance.models.replica_factory import ReplicaFactory
from appliance.models.replica_status import replica_remedy
from appliance.models.residency import DRAIN_S
from appliance.models.retirement import STOP_S, ReplicaRetirements
from appliance.models.scaling import ModelScaling
from appliance.models.start_checks import FilesCheck, Preflight, StartChecks
from appliance.models.unit_changes import UnitChanges
from appliance.models.unit_sleep import UnitSleep
from appliance.protocol import ScalingStatus
from appliance.settings import ModelSettings, Settings
from appliance.traffic.request_manager import RequestManager

log = logging.getLogger(__name__)

_MAX_FAILED_LOADS = 2
"""Loading a registered version fails after this many failed starts. A second attempt is worthwhile, because
the first one may have failed only because another process had not freed its memory yet."""


class ModelManager:
    """All models and replicas. All methods must be called on the event loop thread."""

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

        - `settings` is a function that returns the current settings.
        - `publish` is called when the served models or a model's readiness may have changed.
        - `note` reports a problem (its location and description) to the operator.
        - `preflight` checks a model's files.
        - `files_check` compares a registered version's files with its manifest.
        - `broken` maps models with faulty files to their problems.
        """
        self.models = {model.name: model for model in served}
        """The models that are loaded or being loaded, as known to the fronts. Keys are model names from the
        settings, or NAME@VERSION for versions in the registry."""
        self.replicas: list[Replica] = []
        self._settings = settings
        self._declared = dict(settings().models)
        """The models in the settings."""
        self._wanted = dict(self._declared)
        """The settings of every model and version that should be loaded."""
        self._requests = requests
        self._publish = publish
        self._broken = broken
        self._placement = GpuPlacement(machine_topology())
        self._grace_s: dict[str, float] = {}
        """Grace periods, in seconds, of models that are being unloaded, if they differ from the configured
        one."""
        self._parked: dict[str, Parked] = {}
        self._returning: set[str] = set()
        """Models that were parked and are being loaded or woken."""
        self.on_removed: Callable[[str], None] = lambda name: None
        """Called when a model is no longer served."""
        self.connections = ReplicaConnections(self.models, self.failure, requests, channels, publish, note)
        checks = StartChecks(preflight, files_check)
        self._factory = ReplicaFactory(settings, self.connections, self._placement, checks, launch)
        self.sleeping = UnitSleep(self.of, self.connections.update, publish)
        """Puts all of a model's replicas to sleep or wakes them."""
        self.retirements = ReplicaRetirements(
            self.replicas,
            self._parked,
            lambda: settings().drain_grace_s,
            requests=requests,
            update=self.connections.update,
            publish=publish,
            note=note,
        )
        self._scaling = ModelScaling(
            self, lambda: requests.state.models, lambda: settings().autoscaling, note
        )
        self._changes = UnitChanges(
            self,
            self._parked,
            traffic=requests.state,
            scaling=self._scaling,
            sleeping=self.sleeping,
            retirements=self.retirements,
            checks=checks,
            new_replica=self._new,
            remove=self._remove,
            note=note,
        )
        for model in served:
            requests.add_model(model.name, model.version)
        for name, wanted in self._wanted.items():
            if not wanted.required and name not in broken:
                self._parked[name] = Parked()  # `OnDemand` loads the model later if it fits into memory.
                continue
            for _ in range(self._scaling.count(name, wanted)):
                self._new(name, wanted)

    def start(self) -> None:
        """Start every replica, except those of models with faulty files."""
        for replica in self.replicas:
            if problem := self._broken.get(replica.model):
                replica.refuse(problem)
            else:
                replica.start()

    async def stop(self) -> None:
        """Stop every replica."""
        self._changes.stop()
        self.retirements.stop()
        await asyncio.gather(*(replica.stop(STOP_S) for replica in self.replicas))

    def check(self) -> None:
        """Kill hung replicas, and add or remove replicas as the load requires. Call this a few times per
        second."""
        for replica in self.replicas:
            replica.check()
        self._scaling.check()

    def of(self, model: str) -> list[Replica]:
        """Return a model's replicas."""
        return [replica for replica in self.replicas if replica.model == model]

    def unusable(self, model: str) -> str:
        """Return why no replica of the model can start until an operator corrects its files or settings.
        Return an empty string if a replica can start, or if the model has ever had a ready replica."""
        replicas = self.of(model)
        if model in self.connections.was_ready or not replicas:
            return ""
        return replicas[0].failure if all(replica.bad_checkpoint for replica in replicas) else ""

    def required(self) -> list[str]:
        """Return the models that must be ready before the service is ready."""
        return [name for name, model in self.models.items() if model.required]

    def is_declared(self, name: str) -> bool:
        """Return whether the settings contain the model."""
        return name in self._declared

    def fallback(self, unit: str) -> str:
        """Return the name of this model's fallback model, or an empty string if it has none."""
        wanted = self._wanted.get(unit)
        return "" if wanted is None else wanted.fallback or ""

    def failure(self, unit: str) -> str:
        """Return why no replica of the model can start, or an empty string if one can."""
        replicas = self.of(unit)
        return replicas[0].failure if replicas and all(replica.failure for replica in replicas) else ""

    def remedy(self, unit: str) -> str:
        """Return the remedy for the model's `failure`, or an empty string if there is none."""
        return next(filter(None, map(replica_remedy, self.of(unit))), "")

    def retry(self, unit: str) -> list[str]:
        """Immediately start the model's replicas that are waiting to be restarted. Return the names of these
        replicas."""
        return [replica.name for replica in self.of(unit) if replica.retry()]

    def set_timeouts(self) -> None:
        """Apply the configured time limits after which unresponsive replicas are killed."""
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
        """Serve these models with these settings from now on. Return a description of each change. `served`
        must describe all new models. Models with unchanged settings are left alone, but settings that
        previously failed to load are retried.
        """
        described = {model.name: model for model in served}
        former, self._declared = self._declared, dict(wanted)
        self._wanted = {name: one for name, one in self._wanted.items() if name not in former} | wanted
        changes = []
        for name in sorted(wanted.keys() | former.keys()):
            if wanted.get(name) == former.get(name) and name not in self._changes.given_up:
                continue
            self._changes.given_up.discard(name)
            if name in wanted and wanted[name].required:
                self._parked.pop(name, None)
            if name in wanted and name not in self.models:
                self._add(described[name])
            elif name in wanted:
                self._redescribe(name, wanted[name], described.get(name))
            grace_s, running = self._settings().drain_grace_s, len(self.of(name))
            change = describe_change(former.get(name), wanted.get(name), running, grace_s)
            changes.append(f"model {name}: {change}")
            self._changes.begin(name)
        self._publish()
        return changes

    def _redescribe(self, name: str, wanted: ModelSettings, described: ServedModel | None) -> None:
        """Apply the model settings that take effect without replacing replicas. `described` is the model's
        new description if a setting used by the fronts has changed, otherwise None."""
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
        self._changes.begin(unit.name)
        self._publish()

    def introduce(self, unit: ServedModel, settings: ModelSettings) -> None:
        """Accept requests for a registered version without loading it."""
        self.load(unit, settings)
        self._parked[unit.name] = Parked()

    def park(self, unit: str, *, asleep: bool = False) -> None:
        """Release a model's memory, but keep accepting requests for it. Running requests have `DRAIN_S` to
        finish; any that take longer continue once the model is reloaded. By default, the model's replicas are
        stopped. If `asleep` is set, they are put to sleep instead, unless a request takes longer or a replica
        cannot sleep.
        """
        self._parked[unit] = Parked(asyncio.get_running_loop().time() + DRAIN_S, asleep)
        self._changes.begin(unit)

    def unpark(self, unit: str) -> None:
        """Load or wake a model that accepts requests without being loaded. `loaded` and `load_failure` report
        the result. The caller must then call `returned`."""
        self._parked.pop(unit, None)
        self._returning.add(unit)
        self._changes.begin(unit)

    def returned(self, unit: str) -> None:
        """Record that loading or waking the model has succeeded or failed."""
        self._returning.discard(unit)

    async def end_sleep(self, unit: str) -> None:
        """If the model is parked and asleep, stop its replicas and wait until they have stopped. The model
        stays parked and can then be loaded on different GPUs."""
        if self.is_parked_asleep(unit):
            log.info("unloading %s: its GPUs do not have enough memory to wake it", unit)
            self.park(unit)
            await self._changes.ended(unit)

    async def stay_asleep(self, unit: str) -> bool:
        """If the model is parked and either asleep or going to sleep, unpark it but leave it asleep. After
        that, only `sleeping.wake` can wake it. The model must have no requests. Return whether it is
        asleep."""
        while self._is_to_sleep(unit) and self._changes.in_progress(unit):
            await self._changes.ended(unit)
        if not self.is_parked_asleep(unit):
            return False
        del self._parked[unit]
        self._publish()
        return True

    def is_parked_asleep(self, unit: str) -> bool:
        """Return whether the model is parked and all its replicas are asleep."""
        replicas = self.of(unit) if self._is_to_sleep(unit) else []
        return bool(replicas) and all(replica.sleeping.asleep for replica in replicas)

    def parked_host_bytes(self) -> dict[str, int]:
        """Return the host memory occupied by the weights of each parked model that is asleep or going to
        sleep."""
        return {
            unit: sum(replica.weight_bytes for replica in self.of(unit))
            for unit, parked in self._parked.items()
            if parked.asleep
        }

    def _is_to_sleep(self, unit: str) -> bool:
        """Return whether the model is parked and its replicas are asleep or going to sleep."""
        parked = self._parked.get(unit)
        return parked is not None and parked.asleep

    def is_parked(self, unit: str) -> bool:
        """True if the model accepts requests even though it has no awake replicas, or will soon have none."""
        return unit in self._parked

    def accepts_early(self, unit: str) -> bool:
        """True if the model accepts requests even though it is not in memory: it is parked, or it was parked
        and is now being loaded or woken."""
        return unit in self._parked or unit in self._returning

    def settings_of(self, unit: str) -> ModelSettings | None:
        """Return the settings of a model that is loaded, parked or being loaded, or None for any other
        model."""
        return self._wanted.get(unit)

    def loaded(self, unit: str) -> bool:
        """Return whether all of the model's replicas are ready."""
        wanted = self._wanted.get(unit)
        ready = [replica for replica in self.of(unit) if replica.answers]
        return wanted is not None and len(ready) >= self._scaling.count(unit, wanted)

    def load_failure(self, unit: str) -> str:
        """Return why the model cannot be loaded, or an empty string if it may still become ready."""
        for replica in self.of(unit):
            if replica.sleeping.asleep:
                continue
            if replica.failure or replica.failed_starts >= _MAX_FAILED_LOADS:
                return replica.failure or replica.last_error
        return ""

    async def unload(self, unit: str, grace_s: float) -> None:
        """Stop accepting requests for the model, allow its requests `grace_s` seconds to finish, and stop its
        replicas. Replicas that do not stop in time are killed."""
        if unit not in self._wanted:
            return
        del self._wanted[unit]
        self._grace_s[unit] = grace_s
        self._changes.begin(unit)
        await self._changes.ended(unit)

    @property
    def load_timeout_s(self) -> float:
        """Time limit in seconds for checking a model's files, and for a load that makes no progress."""
        return self._settings().load_timeout_s

    async def shortage(self, settings: ModelSettings, count: int | None = None) -> MemoryShortage:
        """Return how much memory is missing to run `count` more replicas with these settings alongside the
        running replicas. By default, `count` is the number of replicas that a load would start."""
        limit_gb = self._settings().on_demand.memory_gb
        if not self.replicas and limit_gb is None:
            return MemoryShortage()  # the replica itself reports why it cannot load the model
        others = [replica.settings for replica in self.replicas if not replica.sleeping.asleep]
        return await asyncio.to_thread(
            lambda: shortage_beside(
                settings,
                self._placement.choose(settings.tensor_parallel_size),
                settings.within_range(settings.replicas) if count is None else count,
                others=others,
                limit_bytes=None if limit_gb is None else int(limit_gb * 1e9),
            )
        )

    async def shortage_of(self, unit: str, settings: ModelSettings) -> MemoryShortage:
        """Return how much memory is missing to load the model, or to wake it if it is parked and asleep."""
        replicas = self.of(unit)
        if not self.is_parked_asleep(unit) or any(replica.group is None for replica in replicas):
            return await self.shortage(settings)
        needs = [
            (one.resources.gpus or range(one.spec.tensor_parallel_size), one.sleeping.freed_bytes)
            for one in replicas
        ]
        return await asyncio.to_thread(shortage_to_wake, needs)

    # ── autoscaling (ScaledModels) ──

    def scalable(self) -> dict[str, ModelSettings]:
        """Return the settings of all models, except those that are asleep or have a change to their replicas
        in progress."""
        asleep = {replica.model for replica in self.replicas if replica.sleeping.begun}
        units = self.models.keys() - asleep - self._parked.keys()
        return {
            unit: one
            for unit, one in self._wanted.items()
            if unit in units and not self._changes.in_progress(unit)
        }

    def begin_change(self, unit: str) -> None:
        """Start or stop replicas until the model has its target number of replicas."""
        if unit in self._wanted:
            self._changes.begin(unit)

    def scaling(self, unit: str) -> ScalingStatus | None:
        """Return a model's scaling status, or None if its number of replicas is fixed."""
        wanted = self._wanted.get(unit)
        return None if wanted is None else self._scaling.status(unit, wanted)

    def _add(self, model: ServedModel) -> None:
        self.models[model.name] = model
        self._requests.resume_admission(model.name)
        if model.name not in self._requests.state.models:
            self._requests.add_model(model.name, model.version)
        for replica in self.of(model.name):
            if replica.account is not None:
                self.connections.learn(replica)  # an earlier change had begun to remove the model

    async def _remove(self, name: str) -> None:
        """Stop serving a model."""
        self.models.pop(name, None)
        self._parked.pop(name, None)
        self.on_removed(name)
        self._requests.pause_admission(name, f"model {name!r} is being removed")
        self._publish()
        grace_s = self._grace_s.pop(name, self._settings().drain_grace_s)
        await wait_until(lambda: self._requests.state.finished(name), grace_s)
        self._requests.abort_all(f"model {name!r} was removed", name)
        for replica in self.of(name):
            await self.retirements.retire(replica)
        self._requests.resume_admission(name)
        self._requests.remove_model(name)
        self._scaling.forget(name)
        log.info("model %s removed", name)

    def _new(self, model: str, settings: ModelSettings) -> Replica:
        self.retirements.unreturned.pop(model, None)
        replica = self._factory.create(model, settings)
        self.replicas.append(replica)
        return replica
