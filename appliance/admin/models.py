"""Adds, loads, swaps and removes models for operators."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.actions import action_of
from appliance.actions.parameters import (
    AddModel,
    LoadModel,
    PinModel,
    PruneModels,
    RemoveModel,
    RetryModel,
    RollbackModel,
    SetAlias,
    SetDefaultModel,
    SleepModel,
    UnloadModel,
    UnpinModel,
    WakeModel,
)
from appliance.admin.effects import Effect, committed, done
from appliance.admin.model_states import ModelStates
from appliance.background import Background
from appliance.models.front_routes import FrontRoutes
from appliance.models.load_errors import LoadError
from appliance.models.manager import ModelManager
from appliance.models.manifest import read_manifest
from appliance.models.on_demand import OnDemand
from appliance.models.operations import ModelOperations
from appliance.models.preflight import problem_of
from appliance.models.preflight_process import Check
from appliance.models.routing import Routing
from appliance.models.unit_names import split_target
from appliance.models.version_swaps import VersionSwaps
from appliance.protocol import Done
from appliance.protocol.registry import AddedVersion, PrunedVersion, PrunedVersions, VersionStatus
from appliance.settings import Place, Settings, SettingsError
from appliance.settings.convert import Converter
from store.audit import Actor
from store.errors import ConflictError, UnknownModelError
from store.models import ModelRecord, VersionRecord
from store.registry import ModelRegistry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,127}")


@dataclass(kw_only=True)
class ModelAdmin:
    """Performs operators' actions on models. Models declared in the settings can only be changed there."""

    states: ModelStates
    registry: ModelRegistry
    operations: ModelOperations
    swaps: VersionSwaps
    on_demand: OnDemand
    manager: ModelManager
    routing: Routing
    fronts: FrontRoutes
    check: Check
    """Runs all checks on a model. Blocks, so it must not be called on the event loop thread."""
    settings: Callable[[], Settings]
    declared_in: Callable[[str], str]
    """Returns the settings file or command-line flag that declares a model, or an empty string."""
    _background: Background = field(default_factory=Background, init=False)

    # ── add and remove ──

    async def add(self, actor: Actor, asked: AddModel) -> Effect:
        """Add a version. Raises ValueError, SettingsError or ManifestError if the folder or the settings
        cannot be used."""
        self._check_name(asked.name)
        if asked.name in self.registry.current.aliases:
            raise ConflictError(f"{asked.name!r} is an alias: choose another name, or delete the alias first")
        if not os.path.isabs(asked.folder):
            raise ValueError(f"folder = {asked.folder!r} is not an absolute path: use the full path")
        _check_settings(asked.name, asked.folder, asked.settings)
        self._check_fallback(asked)
        warnings = await self._check(asked)
        files = await asyncio.to_thread(read_manifest, asked.folder)
        added = await committed(
            self.registry.add_version(
                actor=actor, model=asked.name, folder=asked.folder, files=files, settings=asked.settings
            )
        )
        self.fronts.publish_configuration()
        return Effect(AddedVersion(name=added.model, version=added.version, warnings=warnings))

    def _check_fallback(self, asked: AddModel) -> None:
        fallback = asked.settings.get("fallback")
        known = self.routing.names() - {asked.name}
        if fallback is not None and fallback not in known:
            raise ValueError(
                f"fallback = {fallback!r} does not name another model or alias; available names: "
                f"{', '.join(sorted(known)) or 'none'}"
            )

    async def _check(self, asked: AddModel) -> list[str]:
        """Check the checkpoint files and return warnings. Raises ValueError if the checkpoint cannot be
        served."""
        settings = self.operations.settings_of(asked.folder, asked.settings)
        [findings] = (await asyncio.to_thread(self.check, {asked.name: settings})).values()
        if (problem := problem_of(findings)) is not None:
            raise ValueError(str(problem))
        return [str(finding) for finding in findings if finding.level == "warning"]

    async def remove(self, actor: Actor, asked: RemoveModel) -> Effect:
        """Remove a model or a version from the registry. Raises ConflictError if it is loaded or in use."""
        name, version = split_target(asked.model)
        self.check_declared(name, "removed")
        for record in self.registry.current.versions_of(name):
            if version in (None, record.version) and self.states.is_loaded(record.unit):
                raise ConflictError(
                    f"{record.unit} is loaded; unload it first with: appliance models unload {record.unit}"
                )
        for record in self.registry.current.versions_of(name):
            if version in (None, record.version):
                await self._withdraw(record)
        await self._delete(actor, name, version)
        self.fronts.publish_configuration()
        return done(f"{asked.model} removed; its files are kept")

    async def prune(self, actor: Actor, asked: PruneModels) -> Effect:
        """Remove all unused versions from the registry."""
        pruned = [one for one in self.registry.current.versions.values() if not self._is_named(one)]
        if not asked.dry_run:
            for one in pruned:
                await self._withdraw(one)
                await self._delete(actor, one.model, one.version)
            self.fronts.publish_configuration()
        return Effect(
            PrunedVersions(
                versions=[
                    PrunedVersion(name=one.model, version=one.version, folder=one.folder) for one in pruned
                ]
            )
        )

    async def _delete(self, actor: Actor, model: str, version: int | None) -> None:
        """Remove a model, or one of its versions, from the registry."""
        for record in await committed(self.registry.remove(actor=actor, model=model, version=version)):
            self.operations.forget_failure(record.unit)

    async def _withdraw(self, record: VersionRecord) -> None:
        """Make the front processes refuse requests for a version that is not loaded."""
        self.manager.retirements.unreturned.pop(record.unit, None)
        if record.unit in self.routing.usable:
            await self.operations.unload(record, 0.0)

    def _is_named(self, record: VersionRecord) -> bool:
        """Return whether a version is in use or can be reached by a name other than NAME@VERSION."""
        registry = self.registry.current
        model, unit = registry.models[record.model], record.unit
        return (
            record.version in (model.default_version, model.previous_version)
            or any(alias.target == unit for alias in registry.aliases.values())
            or any(unit in split.weights for split in registry.splits.values())
            or any(unit == shadow.target for shadow in registry.shadows.values())
            or self.states.is_loaded(unit)
            or bool(self.declared_in(record.model))
        )

    # ── load and unload ──

    async def load(self, actor: Actor, asked: LoadModel) -> Effect:
        """Load a version, or a model that the settings declare but do not require. Raises
        UnknownModelError, ConflictError for a required model, or LoadError if the model cannot be loaded."""
        declared = self.settings().models.get(asked.model)
        if declared is not None and not declared.required:
            load = self.on_demand.load_declared(asked.model)
            return await self._perform(load, lambda: self.states.declared_status(asked.model), asked.wait)
        record = self._record(asked.model, "loaded")
        load = self.on_demand.load(record)
        return await self._perform(load, lambda: self.states.status(record), asked.wait)

    async def unload(self, actor: Actor, asked: UnloadModel) -> Effect:
        """Unload a version."""
        record = self._record(asked.model, "unloaded")
        unload = self.on_demand.unload(record, asked.grace_s)
        return await self._perform(unload, lambda: self.states.status(record), asked.wait)

    async def sleep(self, actor: Actor, asked: SleepModel) -> Effect:
        """Put a version to sleep. Raises LoadError if the version is not loaded or cannot be put to sleep."""
        record = self._record(asked.model, "put to sleep")
        sleep = self.operations.sleep(record, asked.grace_s)
        return await self._perform(sleep, lambda: self.states.status(record), asked.wait)

    async def wake(self, actor: Actor, asked: WakeModel) -> Effect:
        """Wake a version. Raises LoadError if the version is not asleep or cannot be woken."""
        record = self._record(asked.model, "woken")
        parked = self.manager.is_parked_asleep(record.unit)
        wake = self.on_demand.load(record) if parked else self.operations.wake(record)
        return await self._perform(wake, lambda: self.states.status(record), asked.wait)

    async def _perform(
        self, operation: Awaitable[None], status: Callable[[], VersionStatus], wait: bool
    ) -> Effect:
        """Start an operation and, if `wait` is true, wait until it has finished. Raises LoadError if the
        operation is refused immediately. If the operation fails later and `wait` is false, the list of models
        shows the failure.
        """
        before = status()
        task = asyncio.ensure_future(operation)
        await asyncio.sleep(0)
        if wait or task.done():
            await asyncio.shield(task)
        else:
            self._background.run(_finish(task))
        after = status()
        return Effect(after, {"state": before.state}, {"state": after.state})

    async def retry(self, actor: Actor, asked: RetryModel) -> Effect:
        """Immediately start a model's replicas that have failed or are waiting to restart. Raises
        UnknownModelError, or ConflictError if there are no such replicas."""
        unit = asked.model
        if not self.manager.is_declared(unit):
            unit = self._record(unit, "retried").unit
        before = self.states.state(unit)
        if not (replicas := self.manager.retry(unit)):
            if before[0] in ("available", "failed"):
                raise ConflictError(
                    f"{unit} is not loaded; load it with: appliance models load {asked.model}"
                )
            raise ConflictError(f"{unit} is {before[0]}, and none of its replicas is waiting to start")
        return Effect(
            Done(message=f"starting {', '.join(replicas)}"), {"state": before[0]}, {"state": "loading"}
        )

    async def pin(self, actor: Actor, asked: PinModel) -> Effect:
        """Keep a version loaded until it is unpinned."""
        return await self._set_pinned(actor, asked, pinned=True)

    async def unpin(self, actor: Actor, asked: UnpinModel) -> Effect:
        """Allow a version to be unloaded again."""
        return await self._set_pinned(actor, asked, pinned=False)

    async def _set_pinned(self, actor: Actor, asked: PinModel | UnpinModel, *, pinned: bool) -> Effect:
        action = action_of(asked).name
        record = self._record(asked.model, "pinned" if pinned else "unpinned")
        await committed(
            self.registry.set_pinned(
                actor=actor, action=action, model=record.model, version=record.version, pinned=pinned
            )
        )
        return done(f"{record.unit} is {'pinned' if pinned else 'no longer pinned'}")

    # ── default version and aliases ──

    async def set_default(self, actor: Actor, asked: SetDefaultModel) -> Effect:
        """Make a version the default. Raises LoadError if it cannot be loaded."""
        name, version = split_target(asked.model)
        if version is None:
            raise ValueError(f"model = {asked.model!r} does not name a version: write NAME@VERSION")
        return await self._swap(actor, asked, name, version)

    async def rollback(self, actor: Actor, asked: RollbackModel) -> Effect:
        """Make the previous default version the default again."""
        self.check_declared(asked.name, "rolled back")
        version = self._model(asked.name).previous_version
        if asked.name in self.registry.current.splits:
            raise ConflictError(
                f"the requests for {asked.name!r} are split; end the split with 'appliance models split "
                f"{asked.name} --clear' or 'appliance models default NAME@VERSION'"
            )
        if version is None:
            raise ConflictError(f"model {asked.name!r} has had no other default version since it was added")
        return await self._swap(actor, asked, asked.name, version)

    async def _swap(
        self, actor: Actor, asked: SetDefaultModel | RollbackModel, name: str, version: int
    ) -> Effect:
        action = action_of(asked).name
        wanted = self._record(f"{name}@{version}", "given another default version")
        former = self._record(name, "")
        registry = self.registry
        if former == wanted and name not in registry.current.splits:
            return Effect(self.states.status(wanted))

        def commit() -> Awaitable[ModelRecord]:
            return committed(registry.set_default(actor=actor, action=action, model=name, version=version))

        await asyncio.shield(
            asyncio.ensure_future(self.swaps.set_default(former, wanted, commit, asked.grace_s))
        )
        return Effect(self.states.status(wanted))

    async def alias(self, actor: Actor, asked: SetAlias) -> Effect:
        """Set or delete an alias. Raises ConflictError if the name is already in use, or if the alias is in
        use and the new target is not loaded."""
        registry = self.registry
        if asked.target is None:
            await committed(registry.delete_alias(actor=actor, name=asked.name))
            await self.fronts.routed()
            return done(f"alias {asked.name} deleted")
        self._check_name(asked.name)
        if asked.name in registry.current.models:
            raise ConflictError(f"{asked.name!r} is the name of a model: choose another name for the alias")
        if not self.declared_in(asked.target):
            unit = self._record(asked.target, "").unit
            if self.routing.unit_of(asked.name) and unit not in self.routing.usable:
                raise ConflictError(
                    f"alias {asked.name!r} is in use, but {asked.target} is not loaded; load it first with: "
                    f"appliance models load {asked.target}"
                )
        await committed(registry.set_alias(actor=actor, name=asked.name, target=asked.target))
        await self.fronts.routed()
        return done(f"alias {asked.name} now refers to {asked.target}")

    # ── checks ──

    def _check_name(self, name: str) -> None:
        self.check_declared(name, "changed")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"name = {name!r} is not a valid model name: use 1 to 128 letters, digits and ._:/+- and "
                "begin with a letter or digit"
            )

    def check_declared(self, name: str, changed: str) -> None:
        """Raise ConflictError if the settings declare the model. `changed` is a past participle, such
        as "loaded", that describes the refused change in the error message."""
        if place := self.declared_in(name):
            raise ConflictError(
                f"model {name!r} is declared in {place}, so it cannot be {changed} with this command; "
                "change the declaration there and run: appliance config reload"
            )

    def _model(self, name: str) -> ModelRecord:
        models = self.registry.current.models
        if name in models:
            return models[name]
        model, _, version = name.rpartition("@")
        if model in models:
            raise UnknownModelError(f"{name!r}: {version!r} is not a number: {self._versions(model)}")
        remedy = "list the models with 'appliance models list'"
        if _NAME.fullmatch(name):
            remedy = f"add it with 'appliance models add {name}=FOLDER', or {remedy}"
        raise UnknownModelError(f"the registry has no model {name!r}: {remedy}")

    def _versions(self, model: str) -> str:
        known = self.registry.current.versions_of(model)
        return f"available versions: {', '.join(str(one.version) for one in known)}"

    def _record(self, target: str, changed: str) -> VersionRecord:
        """Return the version with this NAME or NAME@VERSION. Raises UnknownModelError, or ConflictError if
        the settings declare the model. `changed` has the same meaning as in `check_declared`."""
        name, version = split_target(target)
        for declared in (target, name):
            self.check_declared(declared, changed)
        model, registry = self._model(name), self.registry.current
        record = registry.versions.get((name, model.default_version if version is None else version))
        if record is None:
            raise UnknownModelError(f"model {name!r} has no version {version}; {self._versions(name)}")
        return record


async def _finish(operation: Awaitable[None]) -> None:
    """Wait for an operation whose caller has already received a response."""
    with contextlib.suppress(LoadError):  # `Routing.failures` keeps the reason
        await operation


def _check_settings(name: str, folder: str, settings: Mapping[str, Any]) -> None:
    """Check a version's settings. Raises SettingsError if a setting does not exist or is invalid."""
    path = ("models", name)
    converter = Converter({path: Place("models add")}, "models add")
    if "folder" in settings:
        converter.add(
            (*path, "folder"), "folder is not a setting of a version", "use the folder parameter instead"
        )
    template = settings.get("chat_template")
    if isinstance(template, str) and not os.path.isabs(template):
        description = f"chat_template = {template!r} is not an absolute path"
        converter.add((*path, "chat_template"), description, "use the full path")
    converter.settings({"models": {name: {**settings, "folder": folder}}})
    if converter.faults:
        raise SettingsError(*converter.faults)
