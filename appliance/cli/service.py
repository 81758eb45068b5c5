"""Finds and connects to the service that a command applies to, and finds its state directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.failure import Failure, as_failure

if TYPE_CHECKING:
    from appliance.client import AdminClient

_SOCKET = "admin.sock"


def find_run_dir(flag: str | None, config: str | None = None) -> Path:
    """Return the run directory given by the flag or the settings file. If neither is given, return the first
    of these directories in which a service is running:

    - the caller's private run directory ($RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR),
    - /run/appliance,
    - the caller's directory in /tmp, if the caller owns it.

    If no service is running in any of them, return /run/appliance if systemd knows the unit, otherwise the
    default of `appliance serve`. Only this setting is read, so operators can reach the running service even
    if a different setting, such as a model folder, is invalid.
    """
    from appliance.rundir import SYSTEM_RUN_DIR, unit_is_installed
    from appliance.settings import default_run_dir

    named = flag or _from_file("run_dir", config)
    if named:
        return Path(named).absolute()
    own = Path(default_run_dir()).absolute()
    tried = [SYSTEM_RUN_DIR, own] if own.parent == Path("/tmp") else [own, SYSTEM_RUN_DIR]
    for path in tried:
        if _has_service(path):
            return path
    return SYSTEM_RUN_DIR if unit_is_installed() else own


def find_state_dir(flag: str | None, run_dir: Path, config: str | None = None) -> Path:
    """Return the state directory named by the first of these sources: the flag, the service that uses or last
    used `run_dir`, the settings file, the default. The service records its state directory in a file in the
    run directory. Raises UntrustedError if the run directory's owner is not trusted.
    """
    from appliance.ownership import trusted_directory
    from appliance.rundir import SYSTEM_RUN_DIR, SYSTEM_STATE_DIR, last_holder, unit_is_installed
    from appliance.settings import default_state_dir

    if flag:
        return Path(flag).absolute()
    trusted_directory(run_dir, "--run-dir")
    if (holder := last_holder(run_dir)) is not None:
        return Path(holder.state_dir)
    if named := _from_file("state_dir", config):
        return Path(named).absolute()
    if run_dir == SYSTEM_RUN_DIR and unit_is_installed():
        return SYSTEM_STATE_DIR
    return Path(default_state_dir()).absolute()


def check_databases(state_dir: Path, run_dir: Path | None, *names: str) -> None:
    """Check the owner of a state directory and of the databases that a command opens in it. Raises
    UntrustedError unless the owner is root, the caller, or the owner of `run_dir`.
    """
    from appliance.ownership import check_database, trusted_state

    uids = trusted_state(state_dir, run_dir)
    for name in names:
        check_database(state_dir / name, uids)


@contextmanager
def admin_client(run_dir: str | None) -> Iterator[AdminClient]:
    """Open an admin API client for the service in `run_dir`. The client's errors are converted to
    Failures."""
    from appliance.client import AdminClient, AdminError, ServiceNotRunningError

    with AdminClient(find_run_dir(run_dir), key=admin_key()) as client:
        try:
            yield client
        except (ServiceNotRunningError, AdminError) as error:
            raise Failure(str(error)) from error


def is_forwarded(run_dir: Path) -> bool:
    """Return True if the directory contains a service's socket but no other trace of a service on this
    machine. Such a socket was probably forwarded from the machine that has the service's files. Raises
    UntrustedError if the directory's owner is not trusted."""
    from appliance.ownership import trusted_directory
    from appliance.rundir import SYSTEM_RUN_DIR, last_holder, unit_is_installed

    trusted_directory(run_dir, "--run-dir")
    if run_dir == SYSTEM_RUN_DIR and unit_is_installed():
        return False  # systemd creates the sockets before the first start of the service
    return os.path.lexists(run_dir / _SOCKET) and last_holder(run_dir) is None


def service_or_files(run_dir: Path) -> AdminClient | None:
    """Return a client for the service in `run_dir`. Returns None, so that the files are read instead, if no
    service is running. Also returns None if the caller is not permitted to use the admin API and has set no
    key, because the caller may still be able to read the files. Raises Failure if the directory contains only
    a socket, which was probably forwarded from another machine: the files on this machine would
    belong to a different service.
    """
    from appliance import calls
    from appliance.client import AdminClient, AdminError, ServiceNotRunningError

    client = AdminClient(run_dir, key=admin_key())
    try:
        client.call(calls.PEERS)
    except (ServiceNotRunningError, AdminError) as error:
        if isinstance(error, AdminError) and (error.status != 403 or admin_key() is not None):
            raise Failure(str(error)) from error
        if is_forwarded(run_dir):
            raise Failure(
                f"{error}. No service on this machine uses {run_dir}, so its files are on another machine: "
                "check the forwarded socket, or use --state-dir to name a folder that contains the files"
            ) from error
        return None
    return client


def admin_key() -> str | None:
    """Return the key in $APPLIANCE_ADMIN_KEY, which all callers except operators need. Raises Failure if the
    key cannot be sent in an HTTP header."""
    key = os.environ.get("APPLIANCE_ADMIN_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise Failure(
            "$APPLIANCE_ADMIN_KEY contains characters that are not allowed in a key: copy the key again"
        )
    return key


def _has_service(path: Path) -> bool:
    """Return True if the directory contains a service's socket and the caller trusts the directory's
    owner."""
    from appliance.ownership import UntrustedError, trusted_directory

    try:
        trusted_directory(path, "--run-dir")
        return os.path.lexists(path / _SOCKET)
    except UntrustedError:
        return False


def _from_file(name: str, config: str | None) -> str | None:
    from appliance.settings import SettingsError, find_config, read_tables

    with as_failure(SettingsError):
        path = find_config(config)
    try:
        value = read_tables(path).values.get(name)
    except SettingsError as error:
        raise Failure(
            f"{error}: fix the settings, or set the directory with --{name.replace('_', '-')}"
        ) from error
    return value if isinstance(value, str) else None
