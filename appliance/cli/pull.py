"""Implements `appliance models pull`, which downloads a model from a hub and adds it to the service."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from appliance.cli.drain import INTERRUPTED
from appliance.cli.failure import Failure, as_failure
from appliance.cli.output import print_json, printable
from appliance.cli.progress import ByteProgress
from appliance.cli.service import find_run_dir, find_state_dir
from appliance.hub.cache import as_owner
from appliance.hub.pull import pull_model
from appliance.hub.repository import HubError, hub_from_environment, parse_reference
from appliance.ownership import trusted_state
from appliance.quantities import of_bytes
from appliance.rundir import SYSTEM_STATE_DIR, start_remedy

CACHE = "hub"
"""The hub cache in the state directory."""


def pull(reference: str, *, cache_dir: str | None, run_dir: str | None, as_json: bool) -> int:
    """Download a model. Returns the exit code."""
    with as_failure(HubError):
        wanted = parse_reference(reference)
        progress = ByteProgress(wanted.repository)
        try:
            pulled = pull_model(
                hub_from_environment(),
                wanted,
                cache_folder(cache_dir, run_dir),
                progress,
                _check_architecture,
            )
        except KeyboardInterrupt:
            print(
                "interrupted: the received files are kept, and the same command continues from there",
                file=sys.stderr,
            )
            return INTERRUPTED
        finally:
            progress.close()
    if as_json:
        print_json(pulled)
    else:
        print(printable(f"{pulled.folder}: {pulled.files} files, {of_bytes(pulled.bytes)}"))
    return 0


def cache_folder(flag: str | None, run_dir: str | None) -> Path:
    """Return the hub cache, and create it if necessary: the folder given by the flag, $HF_HUB_CACHE or
    $HF_HOME, otherwise the folder in the service's state directory."""
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
                # All operators may pull, and the service's user may read. Others cannot enter the state
                # directory.
                folder.chmod(0o2775)
    except OSError as error:
        raise Failure(_not_writable(folder, error.strerror or str(error))) from error
    return folder


def _not_writable(folder: Path, why: str) -> str:
    return (
        f"{folder} cannot be written ({why}): run the command as root, or choose another folder with "
        "--cache-dir"
    )


def _check_architecture(folder: Path) -> None:
    """Raise HubError if the engine does not support the model."""
    from engine import sizing

    try:
        sizing.read_config(str(folder))
    except Exception as error:  # The engine's message says what is wrong with the configuration.
        raise HubError(f"{error}. The weights were not downloaded") from error
