"""Finding the service that a command is about."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.failure import Failure, told

if TYPE_CHECKING:
    from appliance.client import AdminClient


SYSTEM_RUN_DIR = Path("/run/appliance")
"""Of a service that systemd runs."""
_SOCKET = "admin.sock"


def find_run_dir(flag: str | None, config: str | None = None) -> Path:
    """The run directory: the flag's, the settings file's, the default, or that of the box's own service.

    Reads nothing else of the settings: a model's folder that went away must not keep an operator from the
    service that runs.
    """
    from appliance.settings import default_run_dir

    named = flag or _from_file("run_dir", config)
    if named:
        return Path(named).absolute()
    own = Path(default_run_dir()).absolute()
    return SYSTEM_RUN_DIR if _SOCKET in _names(SYSTEM_RUN_DIR) - _names(own) else own


def find_state_dir(flag: str | None, run_dir: Path, config: str | None = None) -> Path:
    """The state directory: the flag's, the one of the service that has or last had `run_dir`, the settings
    file's, or the default."""
    from appliance.rundir import last_holder
    from appliance.settings import default_state_dir

    if flag:
        return Path(flag).absolute()
    if (holder := last_holder(run_dir)) is not None:
        return Path(holder.state_dir)
    return Path(_from_file("state_dir", config) or default_state_dir()).absolute()


@contextmanager
def admin_client(run_dir: str | None) -> Iterator[AdminClient]:
    """The admin client of the service in `run_dir`, whose failures are told. It shows the key of
    `$APPLIANCE_ADMIN_KEY`, which those need who are no operators."""
    from appliance.client import AdminClient, AdminError, NotAllowedError, ServiceNotRunningError

    found = find_run_dir(run_dir)
    with AdminClient(found, key=os.environ.get("APPLIANCE_ADMIN_KEY") or None) as client:
        try:
            yield client
        except NotAllowedError as error:
            raise Failure(str(error)) from error
        except ServiceNotRunningError as error:
            raise Failure(_not_running(client.socket, found, str(error))) from error
        except AdminError as error:
            raise Failure(str(error)) from error


def not_there(socket: Path, run_dir: Path) -> str:
    """What to say when nobody listens on `socket`."""
    return f"no service answers at {socket}; start one with: appliance serve --run-dir {run_dir}"


def may_not(path: Path) -> str:
    """What to say when this user is kept from `path`."""
    return f"{path} may not be opened by uid {os.geteuid()}: use the service's user, or root"


def _not_running(socket: Path, run_dir: Path, why: str) -> str:
    # The client knows more than "nobody is there" when the socket exists but may not be opened, or answers
    # badly.
    absent = not os.path.lexists(socket) or "refused" in why.lower()
    return not_there(socket, run_dir) if absent else why


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _from_file(name: str, config: str | None) -> str | None:
    from appliance.settings import SettingsError, find_config, read_tables

    with told(SettingsError):
        path = find_config(config)
    try:
        value = read_tables(path).values.get(name)
    except SettingsError as error:
        raise Failure(f"{error}: mend it, or name the directory with --{name.replace('_', '-')}") from error
    return value if isinstance(value, str) else None
