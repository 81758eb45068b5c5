"""Implements `appliance models pull`, which downloads a model from a hub and adds it to the service."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import cast

import msgspec

from appliance.actions.parameters import AddModel
from appliance.cli.drain import INTERRUPTED
from appliance.cli.failure import Failure, as_failure
from appliance.cli.models import REGISTRY
from appliance.cli.output import print_json, printable
from appliance.cli.progress import ByteProgress
from appliance.cli.results import print_added
from appliance.cli.service import admin_client, find_run_dir, find_state_dir
from appliance.hub.cache import as_owner
from appliance.hub.pull import Pulled, pull_model
from appliance.hub.repository import HubError, Reference, hub_from_environment, parse_reference
from appliance.ownership import trusted_state
from appliance.protocol.registry import AddedVersion
from appliance.quantities import of_bytes
from appliance.rundir import SYSTEM_STATE_DIR, start_remedy

CACHE = "hub"
"""Name of the hub cache's folder in the state directory."""


def pull(
    reference: str,
    *,
    name: str | None,
    add: bool,
    cache_dir: str | None,
    run_dir: str | None,
    as_json: bool,
) -> int:
    """Download a model and, with `add`, add it to the registry. Return the exit code."""
    with as_failure(HubError):
        wanted = parse_reference(reference)
        model = name or wanted.name
        if add:
            _check_name(run_dir, model)
        pulled = _download(wanted, cache_folder(cache_dir, run_dir))
    if pulled is None:
        return INTERRUPTED
    added = _add(run_dir, model, pulled.folder) if add else None
    if as_json:
        print_json((msgspec.to_builtins(added) if added else {}) | msgspec.to_builtins(pulled))
        return 0
    print(printable(f"{pulled.folder}: {pulled.files} files, {of_bytes(pulled.bytes)}"))
    if added is not None:
        print_added(added)
    return 0


def _download(wanted: Reference, folder: Path) -> Pulled | None:
    """Download a model, showing the progress. Return None if the user interrupts the download."""
    progress = ByteProgress(wanted.repository)
    try:
        return pull_model(hub_from_environment(), wanted, folder, progress, _check_architecture)
    except KeyboardInterrupt:
        progress.close()
        print(
            "interrupted: the files downloaded so far are kept; run the same command again to resume",
            file=sys.stderr,
        )
        return None
    finally:
        progress.close()


def _check_name(run_dir: str | None, name: str) -> None:
    """Before a download, check that the service is running and will accept the model's name. Raises Failure
    otherwise."""
    with admin_client(run_dir) as client:
        for model in client.models():
            if model.name == name and model.source != REGISTRY:
                raise Failure(f"model {name!r} is {model.source}: choose another name with --name")
            if name in model.aliases:
                raise Failure(f"{name!r} is an alias of {model.name!r}: choose another name with --name")


def _add(run_dir: str | None, name: str, folder: str) -> AddedVersion:
    """Register the folder as a version of the model, unless the model already has a version with this folder.
    Raises Failure if the service refuses the action."""
    try:
        with admin_client(run_dir) as client:
            for model in client.models():
                for version in model.versions:
                    if model.name == name and version.folder == folder:
                        return AddedVersion(name=name, version=version.version)
            return cast(AddedVersion, client.act(AddModel(name=name, folder=folder)))
    except Failure as error:
        raise Failure(f"{error} (the files are in {folder})") from error


def cache_folder(flag: str | None, run_dir: str | None) -> Path:
    """Return the hub cache, creating it if necessary. The hub cache is the folder named by the flag,
    $HF_HUB_CACHE or $HF_HOME, or else a folder in the service's state directory."""
    if flag:
        folder = Path(flag).absolute()
    elif os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME"):
        from huggingface_hub.constants import HF_HUB_CACHE

        folder = Path(HF_HUB_CACHE).absolute()
    else:
        folder = _state_folder(find_run_dir(run_dir))
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(_not_writable(folder, error.strerror or str(error))) from error
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise Failure(_not_writable(folder, f"no write permission for uid {os.geteuid()}"))
    return folder


def _state_folder(run: Path) -> Path:
    state = find_state_dir(None, run)
    trusted_state(state, run)
    if state == SYSTEM_STATE_DIR and not state.is_dir():
        raise Failure(f"{state} does not exist: {start_remedy(run)}")
    folder = state / CACHE
    try:
        if not folder.exists():
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            with as_owner(state):
                folder.mkdir()
                # All operators may write to the cache, and the service's user may read from it. Other users
                # cannot enter the state directory.
                folder.chmod(0o2775)
    except OSError as error:
        raise Failure(_not_writable(folder, error.strerror or str(error))) from error
    return folder


def _not_writable(folder: Path, reason: str) -> str:
    return (
        f"{folder} cannot be written ({reason}): run the command as root, or choose another folder with "
        "--cache-dir"
    )


def _check_architecture(folder: Path) -> None:
    """Raise HubError if the engine does not support the model."""
    from engine import sizing

    try:
        sizing.read_config(str(folder))
    except Exception as error:  # The engine's error message says what is wrong with the configuration.
        raise HubError(f"{error}. The weights were not downloaded") from error
