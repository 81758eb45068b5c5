"""The service's persistent state: its directories and databases, which are opened and closed together."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from appliance.core.systemd import Manager
from appliance.rundir import LockHolder, RunDirLock, prepare_directories
from appliance.settings import Settings
from store.control import ControlStore
from store.registry import ModelRegistry
from store.requests import RequestLog
from store.schemas import CONTENTS, HISTORY
from store.writer import Writer

log = logging.getLogger(__name__)


class State(NamedTuple):
    """All of a service's databases."""

    control: ControlStore
    """Stores tenants, keys, mapped users and the audit chain."""
    registry: ModelRegistry
    """Stores the registered models, their versions and aliases."""
    history: Writer
    """Writes to `history.db`, which contains the request log and the quota levels."""
    contents: Writer
    """Writes to `contents.db`, which contains stored prompts and answers."""
    requests: RequestLog
    former: LockHolder | None
    """The service that previously used the run directory, or None."""

    @property
    def stalled_s(self) -> float:
        """How many seconds the slowest writer has been waiting for the disk."""
        return max(self.control.stalled_s, self.history.stalled_s, self.contents.stalled_s)


@contextlib.asynccontextmanager
async def opened(settings: Settings, manager: Manager) -> AsyncIterator[State]:
    """Open the state in the directories named by the settings and lock the directories for this service.
    Request log rows left open by an earlier run are closed. Raises RunDirError or StoreError if a directory
    or database cannot be opened. A migration, a recovery or a slow disk can delay startup for a long time, so
    the service manager is told to keep waiting, and the service's status shows which database is being
    opened.
    """
    held = contextlib.ExitStack()
    state = await manager.wait_for(lambda: held.enter_context(_opened(settings, manager)))
    try:
        yield state
    finally:
        await manager.wait_for(held.close)


@contextlib.contextmanager
def _opened(settings: Settings, manager: Manager) -> Iterator[State]:
    run_dir, state_dir = Path(settings.run_dir), Path(settings.state_dir)
    prepare_directories(run_dir, state_dir)
    with contextlib.ExitStack() as held:
        lock = RunDirLock(run_dir, state_dir)
        held.callback(lock.release)
        control = ControlStore(state_dir / "control.db")
        history = Writer(state_dir / "history.db", HISTORY, synchronous="NORMAL")
        contents = Writer(state_dir / "contents.db", CONTENTS, synchronous="NORMAL")
        databases: tuple[ControlStore | Writer, ...] = (control, history, contents)
        _warn_missing(control.path, [history.path, contents.path])
        for database in databases:
            manager.tell(STATUS=f"starting: opening {database.path}")
            database.start()
            held.callback(database.close)
            held.callback(manager.tell, STATUS=f"stopped: closing {database.path}")
        requests = RequestLog(history)
        requests.seal_open_rows("the service ended unexpectedly").add_done_callback(_log_sealed)
        yield State(control, ModelRegistry(control), history, contents, requests, lock.former)


def _warn_missing(control: Path, others: list[Path]) -> None:
    """Warn about missing databases if the control database shows that the service has run before."""
    if not _has_bytes(control):
        return  # On the first startup, no database is missing.
    for path in others:
        if not _has_bytes(path):
            log.warning(
                "%s is missing or empty although %s already has data: creating an empty database; "
                "to keep the previous contents, stop the service and restore a backup",
                path,
                control.name,
            )


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def cache_salts(control: ControlStore) -> Callable[[str], str]:
    """Return a function that returns a tenant's salt for the prefix cache. Tenants in the same cache group
    share a salt. New salts, which cannot be guessed, are chosen each time the service starts."""
    secret = secrets.token_bytes(32)

    def salt(name: str) -> str:
        tenant = control.policies.tenants.get(name)
        group = tenant.cache_group if tenant is not None else None
        # The prefix ensures that a cache group does not share its salt with a tenant of the same name.
        owner = f"tenant {name}" if group is None else f"group {group}"
        return hmac.new(secret, owner.encode(), hashlib.sha256).hexdigest()[:32]

    return salt


def _log_sealed(sealed: Future[int]) -> None:
    if not sealed.exception() and sealed.result():
        log.warning(
            "%d requests were unfinished when the service last stopped; their rows are marked as interrupted",
            sealed.result(),
        )
