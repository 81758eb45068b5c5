"""Implements `appliance models remove` and `models prune`, which can also delete downloaded files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from appliance.actions import action_of
from appliance.actions.parameters import PruneModels, RemoveModel
from appliance.cli.actions import check_terminal, confirm
from appliance.cli.failure import Failure, as_failure
from appliance.cli.output import Column, print_json, print_table, printable
from appliance.cli.service import admin_client
from appliance.client import AdminClient
from appliance.protocol import Done
from appliance.protocol.registry import PrunedVersions
from appliance.quantities import of_bytes

_PRUNED = (Column("NAME", flexible=True), Column("VERSION", right=True), Column("FOLDER", flexible=True))


class Deleted(msgspec.Struct):
    """A deleted folder of downloaded model files."""

    folder: str
    freed_bytes: int


def remove(run_dir: str | None, parameters: RemoveModel, *, files: bool, yes: bool, as_json: bool) -> None:
    """Remove a model or version from the registry and, if `files` is set, delete its downloaded files."""
    action, target = action_of(parameters), parameters.model
    with admin_client(run_dir) as client:
        folders = _folders_of(client, target) if files else []
        if files:
            _check_downloaded(folders)
        confirm(action, printable(action.target_name(parameters)), yes=yes)
        message = cast(Done, client.act(parameters)).message
        deleted = _delete_unused(client, folders)
    if files:  # the service's message says that the files are kept, so do not print it
        message = f"{target} removed"
    if as_json:
        print_json({"message": message, "deleted": deleted} if files else {"message": message})
        return
    print(printable(message))
    _show_deleted(deleted)


def prune(run_dir: str | None, parameters: PruneModels, *, files: bool, yes: bool, as_json: bool) -> None:
    """Remove all unused versions from the registry and, if `files` is set, delete their downloaded files."""
    deleted: list[Deleted] = []
    if not parameters.dry_run:
        check_terminal(action_of(parameters), "from the registry", yes=yes)
    with admin_client(run_dir) as client:
        found = cast(PrunedVersions, client.act(PruneModels(dry_run=True))).versions
        if found and not as_json:
            rows = [(printable(one.name), str(one.version), printable(one.folder)) for one in found]
            print_table(_PRUNED, rows)
        if found and not parameters.dry_run:
            confirm(action_of(parameters), "from the registry", yes=yes)
            found = cast(PrunedVersions, client.act(parameters)).versions
            if files:
                deleted = _delete_unused(client, [one.folder for one in found])
    if as_json:
        print_json({"versions": found, "deleted": deleted})
    elif not found:
        print("nothing to remove: no version is unused")
    elif not parameters.dry_run:
        print(f"{len(found)} versions removed" if len(found) > 1 else "1 version removed")
        _show_deleted(deleted)


def _folders_of(client: AdminClient, target: str) -> list[str]:
    name, _, version = target.partition("@")
    return [
        one.folder
        for model in client.models()
        if model.name == name
        for one in model.versions
        if version in ("", str(one.version))
    ]


def _check_downloaded(folders: Sequence[str]) -> None:
    """Raise Failure if a folder's files were not downloaded by `models pull`. Called before anything is
    removed."""
    from appliance.hub.cleanup import in_hub_cache

    for folder in folders:
        if not in_hub_cache(Path(folder)):
            raise Failure(
                f"{folder} was not downloaded with models pull, so its files are not deleted: repeat the "
                "command without --files, and delete them yourself"
            )


def _delete_unused(client: AdminClient, folders: Sequence[str]) -> list[Deleted]:
    """Delete the `folders` that `models pull` downloaded and that no model uses."""
    if not folders:
        return []
    from appliance.hub.cleanup import delete_snapshot, in_hub_cache
    from appliance.hub.repository import HubError

    used = {version.folder for model in client.models() for version in model.versions}
    deleted = []
    for folder in dict.fromkeys(folders):
        if folder in used or not in_hub_cache(Path(folder)):
            reason = "another version uses it" if folder in used else "it was not downloaded with models pull"
            print(printable(f"{folder} is kept, because {reason}"), file=sys.stderr)
        elif Path(folder).exists():
            with as_failure(HubError):
                deleted.append(Deleted(folder, delete_snapshot(Path(folder))))
    return deleted


def _show_deleted(deleted: Sequence[Deleted]) -> None:
    for one in deleted:
        print(printable(f"{one.folder} deleted: {of_bytes(one.freed_bytes)} freed"))
