"""The served models and their replicas, and how they change while they serve.

What is wanted of a model is its settings. Its replicas are brought there one by one: one that runs with the
wanted settings is left alone, a missing one is started, and one with other settings serves until its
successor is ready, if the memory has room for both; else it is stopped first, and what it had under way goes
on at its successor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from appliance.background import Background
from appliance.core.problems import Problems
from appliance.messages import ServedModel
from appliance.models.fit import why_not_beside
from appliance.models.placement import GpuPlacement, machine_topology
from appliance.models.registry import describe
from appliance.models.replica import Launch, Replica, ReplicaEvents
from appliance.settings import ModelSettings, Settings
from appliance.traffic.request_manager import RequestManager

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05
_STOP_S = 2.0
_TRIES = 3
"""Deaths of a successor before its predecessor stays."""


class Fleet:
    """All models and replicas. All methods belong on the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        served: list[ServedModel],
        *,
        requests: RequestManager,
        events: ReplicaEvents,
        problems: Problems,
        tell: Callable[[], None],
        launch: Launch,
    ) -> None:
        """`tell` is called when there are other models than before, or others answer."""
        self.models = {model.name: model for model in served}
        """As fronts know them."""
        self.replicas: list[Replica] = []
        self.settings = settings
        """Of the service; those of models are followed by `change`."""
        self._wanted = dict(settings.models)
        self._requests = requests
        self._events = events
        self._problems = problems
        self._tell = tell
        self._launch = launch
        self._placement = GpuPlacement(machine_topology())
        self._numbers: dict[str, int] = {}
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._retirements: dict[Replica, asyncio.Task[None]] = {}
        self._given_up: set[str] = set()
        """Models whose wanted settings could not be loaded: they run with the former ones."""
        self._background = Background()
        for model in served:
            requests.add_model(model.name, model.version)
        for name, wanted in self._wanted.items():
            for _ in range(wanted.replicas):
                self._new(name, wanted)

    def start(self) -> None:
        """Start every replica."""
        for replica in self.replicas:
            replica.start()

    async def stop(self) -> None:
        """End every replica."""
        for task in (*self._changes.values(), *self._retirements.values()):
            task.cancel()
        await asyncio.gather(*(replica.stop(_STOP_S) for replica in self.replicas))

    def check(self) -> None:
        """Kill what hangs. To be called about once a second."""
        for replica in self.replicas:
            replica.check()

    def of(self, model: str) -> list[Replica]:
        """The replicas of a model."""
        return [replica for replica in self.replicas if replica.model == model]

    def pinned(self) -> list[str]:
        """The models without which the service has not started."""
        return [name for name in self.models if name in self._wanted and self._wanted[name].pinned]

    # ── what a model's folder and replicas say about it ──

    def look_at_folder(self, replica: Replica) -> None:
        """Its folder may hold other files than it did for the replica's life before: find out."""
        self._background.run(self._describe(replica, replica.lives))

    async def _describe(self, replica: Replica, life: int) -> None:
        try:
            model = await asyncio.to_thread(describe, replica.model, replica.settings)
        except OSError:
            return  # the engine, which reads the same folder, says what is wrong with it
        if replica.lives == life:
            replica.described = model
            if replica.account is not None:
                self.learn(replica)
                self._tell()

    def learn(self, replica: Replica) -> None:
        """What a ready replica and its folder say about their model."""
        known = self.models.get(replica.model)
        if known is None:
            return
        model, info = replica.described or known, replica.info
        if info is not None:
            model = msgspec.structs.replace(
                model, max_model_len=info.max_model_len, vocab_size=info.vocab_size
            )
        if model.version != known.version:
            log.info("model %s: version %s from now on", model.name, model.version)
        self.models[model.name] = model
        self._requests.set_version(model.name, model.version)
        if replica.account is not None:
            replica.account.version = model.version

    # ── changing what is served ──

    def change(self, wanted: dict[str, ModelSettings], served: list[ServedModel]) -> list[str]:
        """Serve these models with these settings from now on; what that means, in words, by model.

        `served` describes at least those that are new. What is as it was is not touched; what could not be
        loaded is tried again.
        """
        described = {model.name: model for model in served}
        former, self._wanted = self._wanted, dict(wanted)
        said = []
        for name in sorted(wanted.keys() | former.keys()):
            if wanted.get(name) == former.get(name) and name not in self._given_up:
                continue
            self._given_up.discard(name)
            if name in wanted and name not in self.models:
                self._take_up(described[name])
            said.append(f"model {name}: {self._plan(name, former.get(name), wanted.get(name))}")
            if (task := self._changes.get(name)) is not None:
                task.cancel()
            self._changes[name] = asyncio.get_running_loop().create_task(self._bring_about(name))
        self._tell()
        return said

    def _plan(self, name: str, former: ModelSettings | None, wanted: ModelSettings | None) -> str:
        if wanted is None:
            return f"is removed; what runs gets {self.settings.drain_grace_s:g} s"
        if former is None:
            return f"is new and loads ({wanted.replicas} replica{'s' if wanted.replicas > 1 else ''})"
        if former == wanted:
            return "its settings, which could not be loaded, are tried again"
        if former.spec("") == wanted.spec(""):
            if former.replicas != wanted.replicas:
                return f"{former.replicas} → {wanted.replicas} replicas"
            return "its replicas stay as they are"
        return "its replicas are replaced one by one"

    def _take_up(self, model: ServedModel) -> None:
        self.models[model.name] = model
        self._requests.resume_admission(model.name)
        if not self._requests.knows(model.name):
            self._requests.add_model(model.name, model.version)
        for replica in self.of(model.name):
            if replica.account is not None:
                self.learn(replica)  # it was about to be removed

    async def _bring_about(self, name: str) -> None:
        """Until the model is as wanted, or cannot be."""
        try:
            while await self._next_step(name):
                pass
        except Exception:
            log.exception("model %s: the change of its settings failed", name)
            self._given_up.add(name)
            self._problems.note(name, "the change of its settings failed: see the log")

    async def _next_step(self, name: str) -> bool:
        """Do one thing; False when nothing is left to do, or can be."""
        for replica in self.of(name):
            if replica.retiring:
                await self._retire(replica)  # the change before this one began it
        wanted = self._wanted.get(name)
        if wanted is None:
            await self._remove(name)
            return False
        serving_first = sorted(self.of(name), key=lambda replica: replica.account is None)
        good = [replica for replica in serving_first if replica.spec == wanted.spec(replica.name)]
        stale = [replica for replica in serving_first if replica not in good]
        if stale and stale[-1].account is None:
            await self._retire(stale[-1])
        elif len(good) > wanted.replicas:
            await self._retire(good[-1])
        elif stale:
            return await self._succeed(stale[0], good, wanted)
        elif len(good) < wanted.replicas:
            self._new(name, wanted).start()
        else:
            return False
        return True

    async def _succeed(self, old: Replica, good: list[Replica], wanted: ModelSettings) -> bool:
        """Put a replica with the wanted settings in the place of `old`. False if that cannot be."""
        if len(good) < wanted.replicas:
            if why_not := await asyncio.to_thread(
                why_not_beside, wanted, self._placement.choose(wanted.tensor_parallel_size)
            ):
                log.warning("%s is stopped before its successor loads: %s", old.name, why_not)
                self._problems.note(old.name, f"it was stopped before its successor loaded: {why_not}")
                await self._retire(old)
                return True
            new = self._new(old.model, wanted)
            log.info("%s takes the place of %s, which serves until then", new.name, old.name)
            new.start()
            good = [*good, new]
        for new in good:
            while new.account is None:
                if new.failure or new.restarts >= _TRIES:
                    self._given_up.add(old.model)
                    self._problems.note(
                        new.name, f"the new settings cannot be loaded, {old.name} stays: {new.last_error}"
                    )
                    await self._retire(new)
                    return False
                await asyncio.sleep(_LOOK_EVERY_S)
        await self._retire(old)
        return True

    async def _retire(self, replica: Replica) -> None:
        """Give it nothing more, let it finish, and end it: to the end, though the change may be overtaken."""
        if (task := self._retirements.get(replica)) is None:
            task = asyncio.get_running_loop().create_task(self._end(replica))
            self._retirements[replica] = task
            task.add_done_callback(lambda _: self._retirements.pop(replica))
        await asyncio.shield(task)

    async def _end(self, replica: Replica) -> None:
        """What it does not finish in time while nobody serves in its place goes on at its successor."""
        replica.retiring = True
        self._tell()
        account = replica.account
        if account is not None:
            self._requests.retire_replica(account)
            alone = not any(other.account for other in self.of(replica.model) if not other.retiring)
            deadline = time.monotonic() + (self.settings.drain_grace_s if alone else float("inf"))
            while (
                self._requests.occupied(account)
                and replica.account is account
                and time.monotonic() < deadline
            ):
                await asyncio.sleep(_LOOK_EVERY_S)
        await replica.stop(_STOP_S)
        self.replicas.remove(replica)
        log.info("%s is gone", replica.name)

    async def _remove(self, name: str) -> None:
        """Serve the model no more."""
        self.models.pop(name, None)
        self._requests.pause_admission(name, f"the model {name!r} is being removed")
        self._tell()
        deadline = time.monotonic() + self.settings.drain_grace_s
        while not self._requests.finished(name) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S)
        self._requests.abort_all(f"the model {name!r} was removed", name)
        for replica in self.of(name):
            await self._retire(replica)
        self._requests.resume_admission(name)
        self._requests.remove_model(name)
        self._changes.pop(name, None)
        log.info("model %s is gone", name)

    def _new(self, model: str, settings: ModelSettings) -> Replica:
        number = self._numbers.get(model, 0)
        self._numbers[model] = number + 1
        replica = Replica(
            model,
            settings,
            f"{model}-{number}",
            self._events,
            run_dir=Path(self.settings.run_dir),
            hang_timeout_s=self.settings.hang_timeout_s,
            load_timeout_s=self.settings.load_timeout_s,
            placement=self._placement,
            launch=self._launch,
        )
        self.replicas.append(replica)
        return replica
