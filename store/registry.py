"""The model registry: reads and changes the models, versions, aliases and splits in `control.db`. Reads need
no I/O, because all records are kept in memory."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from store import records
from store.audit import Actor
from store.control import ControlStore
from store.control_schema import CONTROL
from store.database import reading
from store.errors import ConflictError, UnknownModelError
from store.models import (
    AliasRecord,
    ModelFile,
    ModelRecord,
    Registry,
    ShadowRecord,
    SplitRecord,
    VersionRecord,
)


class ModelRegistry:
    """A service's model registry. As in `ControlStore`, methods that make changes return a future. Safe to
    call from any thread."""

    def __init__(self, control: ControlStore) -> None:
        """`control` must have been started. Raises `StoreError` if the records cannot be read."""
        self._control = control
        self.current = read_registry(control.path)
        """All current records. Every change replaces this object."""

    # ── versions ──

    def add_version(
        self,
        *,
        actor: Actor | str,
        model: str,
        folder: str,
        files: tuple[ModelFile, ...],
        settings: Mapping[str, Any],
    ) -> Future[VersionRecord]:
        """Add a version of a model. The first version creates the model and becomes its default version."""
        now = time.time()

        def apply(connection: sqlite3.Connection) -> VersionRecord:
            known = records.find(connection, ModelRecord, model)
            number = 1 if known is None else known.next_version
            if known is None:
                records.insert(
                    connection,
                    ModelRecord(name=model, created_at=now, default_version=1, next_version=2),
                )
            else:
                records.update(connection, msgspec.structs.replace(known, next_version=number + 1))
            version = VersionRecord(
                model=model,
                version=number,
                created_at=now,
                folder=folder,
                files=files,
                settings=dict(settings),
            )
            records.insert(connection, version)
            return version

        params = {"name": model, "folder": folder, "settings": dict(settings)}
        return self._change(
            actor, "models.add", params, apply, lambda added: (None, {"version": added.version})
        )

    def remove(self, *, actor: Actor | str, model: str, version: int | None) -> Future[list[VersionRecord]]:
        """Remove a version of a model or, if `version` is None, all versions. Removing the last version also
        removes the model. The future returns the removed versions.

        The future raises UnknownModelError if there is no such version. It raises ConflictError if an alias,
        split or shadow refers to a version to be removed, or if the version is the default of a model that
        has other versions.
        """

        def apply(connection: sqlite3.Connection) -> list[VersionRecord]:
            known, every = (
                _model(connection, model),
                records.select(connection, VersionRecord, "model = ?", model),
            )
            removed = every if version is None else [_version(connection, model, version)]
            removes_all = len(removed) == len(every)
            names = {f"{model}@{one.version}" for one in removed} | ({model} if removes_all else set())
            if aliases := [
                one.name for one in records.select(connection, AliasRecord) if one.target in names
            ]:
                raise ConflictError(
                    f"alias {aliases[0]!r} points to a version that would be removed",
                    "change or delete the alias first",
                )
            for split in records.select(connection, SplitRecord):
                if names & split.weights.keys() and not (removes_all and split.name == model):
                    raise ConflictError(
                        f"the split of {split.name!r} includes a version that would be removed; change the "
                        f"split first, or end it with: appliance models split {split.name} --clear"
                    )
            for shadow in records.select(connection, ShadowRecord):
                if shadow.target in names and not (removes_all and shadow.name == model):
                    raise ConflictError(
                        f"the shadow of {shadow.name!r} uses a version that would be removed; end the "
                        f"shadow first with: appliance models shadow {shadow.name} --clear"
                    )
            if known.default_version == version and not removes_all:
                raise ConflictError(
                    f"version {version} is the default of model {model!r}",
                    "make another version the default first",
                )
            for one in removed:
                records.delete(connection, one)
            if removes_all:
                _end_split(connection, model)
                _end_shadow(connection, model)
                records.delete(connection, known)
            elif known.previous_version == version:
                records.update(connection, msgspec.structs.replace(known, previous_version=None))
            return removed

        params = {"name": model, "version": version}
        return self._change(
            actor,
            "models.remove",
            params,
            apply,
            lambda removed: ({"folders": [one.folder for one in removed]}, None),
        )

    def set_default(
        self, *, actor: Actor | str, action: str, model: str, version: int
    ) -> Future[ModelRecord]:
        """Make a version the default of its model and end any split of the model's requests. The future
        raises UnknownModelError if there is no such version."""
        before: dict[str, object] = {}

        def apply(connection: sqlite3.Connection) -> ModelRecord:
            known = _model(connection, model)
            _version(connection, model, version)
            before["default_version"] = known.default_version
            if (split := _end_split(connection, model)) is not None:
                before["split"] = split.weights
            if known.default_version == version:
                return known
            changed = msgspec.structs.replace(
                known, default_version=version, previous_version=known.default_version
            )
            records.update(connection, changed)
            return changed

        return self._change(
            actor,
            action,
            {"name": model, "version": version},
            apply,
            lambda _: (before, {"default_version": version}),
        )

    def set_pinned(
        self, *, actor: Actor | str, action: str, model: str, version: int, pinned: bool
    ) -> Future[VersionRecord]:
        """Set whether a version stays loaded once it has been loaded (the `pinned` setting). The future
        raises UnknownModelError if there is no such version."""
        before: list[bool] = []

        def apply(connection: sqlite3.Connection) -> VersionRecord:
            known = _version(connection, model, version)
            before[:] = [bool(known.settings.get("pinned", False))]
            others = {name: value for name, value in known.settings.items() if name != "pinned"}
            settings = others | ({"pinned": True} if pinned else {})
            changed = msgspec.structs.replace(known, settings=settings)
            records.update(connection, changed)
            return changed

        return self._change(
            actor,
            action,
            {"name": model, "version": version},
            apply,
            lambda _: ({"pinned": before[0]}, {"pinned": pinned}),
        )

    def set_loaded(self, model: str, version: int, loaded: bool) -> Future[Registry]:
        """Record whether a version is to be reloaded when the service restarts. This change has no audit row,
        because the action that loads or unloads the version is already audited. Does nothing if the version
        has been removed."""

        def apply(connection: sqlite3.Connection) -> Registry:
            found = records.find(connection, VersionRecord, model, version)
            if found is not None and (found.loaded_at is not None) != loaded:
                changed = msgspec.structs.replace(found, loaded_at=time.time() if loaded else None)
                records.update(connection, changed)
            return _read(connection)

        def remember(registry: Registry) -> None:
            self.current = registry

        return self._control.write(apply, remember)

    # ── aliases ──

    def set_alias(self, *, actor: Actor | str, name: str, target: str) -> Future[AliasRecord | None]:
        """Create or change an alias. The future returns the alias as it was before, or None if it is new."""
        alias = AliasRecord(name=name, target=target, created_at=time.time())

        def apply(connection: sqlite3.Connection) -> AliasRecord | None:
            former = records.find(connection, AliasRecord, name)
            if former is None:
                records.insert(connection, alias)
            else:
                records.update(connection, msgspec.structs.replace(former, target=target))
            return former

        return self._change(
            actor,
            "models.alias",
            {"name": name, "target": target},
            apply,
            lambda former: (None if former is None else {"target": former.target}, {"target": target}),
        )

    def delete_alias(self, *, actor: Actor | str, name: str) -> Future[AliasRecord]:
        """Delete an alias. The future raises UnknownModelError if there is no such alias."""

        def apply(connection: sqlite3.Connection) -> AliasRecord:
            alias = records.find(connection, AliasRecord, name)
            if alias is None:
                raise UnknownModelError(
                    f"there is no alias {name!r}", "list the models and aliases with: appliance models list"
                )
            _end_split(connection, name)
            _end_shadow(connection, name)
            records.delete(connection, alias)
            return alias

        return self._change(
            actor, "models.alias", {"name": name}, apply, lambda alias: ({"target": alias.target}, None)
        )

    # ── splits ──

    def set_split(
        self, *, actor: Actor | str, name: str, weights: Mapping[str, float] | None
    ) -> Future[SplitRecord | None]:
        """Split the requests for a name by `weights` or, if `weights` is None, end the split. The future
        returns the previous split, or raises UnknownModelError if there is no split to end."""

        def apply(connection: sqlite3.Connection) -> SplitRecord | None:
            former = _end_split(connection, name)
            if weights is not None:
                split = SplitRecord(name=name, weights=dict(weights), created_at=time.time())
                records.insert(connection, split)
            elif former is None:
                raise UnknownModelError(
                    f"{name!r} has no split; list the models and their splits with: appliance models list"
                )
            return former

        params = {"name": name, "weights": None if weights is None else dict(weights)}
        return self._change(
            actor,
            "models.split",
            params,
            apply,
            lambda former: (
                None if former is None else {"weights": former.weights},
                None if weights is None else {"weights": dict(weights)},
            ),
        )

    # ── shadows ──

    def set_shadow(
        self, *, actor: Actor | str, name: str, target: str | None, share: float
    ) -> Future[ShadowRecord | None]:
        """Start a shadow, which copies a share of the requests for a name to `target`. If `target` is None,
        end the name's shadow. The future returns the previous shadow, or raises UnknownModelError if there is
        no shadow to end."""
        wanted: dict[str, object] = {"target": target, "share": share}

        def apply(connection: sqlite3.Connection) -> ShadowRecord | None:
            former = _end_shadow(connection, name)
            if target is not None:
                shadow = ShadowRecord(name=name, target=target, share=share, created_at=time.time())
                records.insert(connection, shadow)
            elif former is None:
                raise UnknownModelError(
                    f"{name!r} has no shadow; show the model's details with: appliance models show {name}"
                )
            return former

        return self._change(
            actor,
            "models.shadow",
            {"name": name, **(wanted if target is not None else {})},
            apply,
            lambda former: (
                None if former is None else {"target": former.target, "share": former.share},
                None if target is None else wanted,
            ),
        )

    # ── shared by all changes ──

    def _change(
        self,
        actor: Actor | str,
        action: str,
        params: Mapping[str, object],
        apply: Callable[[sqlite3.Connection], Any],
        values: Callable[[Any], tuple[Mapping[str, object] | None, Mapping[str, object] | None]],
    ) -> Future[Any]:
        """Apply and audit a change, then update the in-memory records after the commit."""
        after: list[Registry] = []

        def apply_and_read(connection: sqlite3.Connection) -> Any:
            outcome = apply(connection)
            after[:] = [_read(connection)]
            return outcome

        def remember(_: Any) -> None:
            self.current = after[0]

        return self._control.change(
            actor=actor,
            action=action,
            params=params,
            apply=apply_and_read,
            after_commit=remember,
            values=values,
        )


def read_registry(path: Path) -> Registry:
    """Read all registry records from the file at `path`, through a read-only connection. Raises `StoreError`
    on failure."""
    with reading(path, CONTROL) as connection:
        return _read(connection)


def _read(connection: sqlite3.Connection) -> Registry:
    return Registry(
        records.select(connection, ModelRecord),
        records.select(connection, VersionRecord),
        records.select(connection, AliasRecord),
        records.select(connection, SplitRecord),
        records.select(connection, ShadowRecord),
    )


def _end_split(connection: sqlite3.Connection, name: str) -> SplitRecord | None:
    """Delete the split for a name and return it. Returns None if there is none."""
    split = records.find(connection, SplitRecord, name)
    if split is not None:
        records.delete(connection, split)
    return split


def _end_shadow(connection: sqlite3.Connection, name: str) -> ShadowRecord | None:
    """Delete the shadow for a name and return it. Returns None if there is none."""
    shadow = records.find(connection, ShadowRecord, name)
    if shadow is not None:
        records.delete(connection, shadow)
    return shadow


def _model(connection: sqlite3.Connection, name: str) -> ModelRecord:
    found = records.find(connection, ModelRecord, name)
    if found is None:
        raise UnknownModelError(
            f"the registry has no model {name!r}", "list the models with: appliance models list"
        )
    return found


def _version(connection: sqlite3.Connection, model: str, version: int) -> VersionRecord:
    found = records.find(connection, VersionRecord, model, version)
    if found is None:
        known = records.select(connection, VersionRecord, "model = ?", model)
        raise UnknownModelError(
            f"model {model!r} has no version {version}",
            f"available versions: {', '.join(str(one.version) for one in known)}",
        )
    return found
