"""What must last: the service's directories and databases, opened and closed together."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from appliance.rundir import RunDirLock, prepare_directories
from appliance.settings import Settings
from store.control import ControlStore
from store.migrations import Schema
from store.requests import RequestLog
from store.schemas import CONTENTS, HISTORY
from store.writer import Writer

log = logging.getLogger(__name__)


class State(NamedTuple):
    """The databases of one service."""

    control: ControlStore
    """Tenants, keys, mapped users, the audit chain."""
    history: Writer
    """Of `history.db`: the request log and what is left of quotas."""
    contents: Writer
    """Of `contents.db`: the prompts and answers that are kept."""
    requests: RequestLog

    @property
    def stalled_s(self) -> float:
        """For how long the slowest disk has not answered."""
        return max(self.control.stalled_s, self.history.stalled_s, self.contents.stalled_s)


@contextlib.contextmanager
def opened(settings: Settings) -> Iterator[State]:
    """The state of the settings' directories, which are this service's alone meanwhile. Rows that a former
    service left open are sealed. Raises RunDirError or a StoreError."""
    run_dir, state_dir = Path(settings.run_dir), Path(settings.state_dir)
    prepare_directories(run_dir, state_dir)
    with contextlib.ExitStack() as held:
        lock = RunDirLock(run_dir, state_dir)
        held.callback(lock.release)
        control = ControlStore(state_dir / "control.db", spool_folder=run_dir)
        control.start()
        held.callback(control.close)
        history = held.enter_context(_database(state_dir / "history.db", HISTORY))
        contents = held.enter_context(_database(state_dir / "contents.db", CONTENTS))
        requests = RequestLog(history)
        requests.seal_open_rows("the service ended without a word").add_done_callback(_say_sealed)
        yield State(control, history, contents, requests)


def cache_salts(control: ControlStore) -> Callable[[str], str]:
    """The prefix cache's salt of a tenant, which those share that are in one cache group; nobody can guess
    it, and it is another one after each start."""
    secret = secrets.token_bytes(32)

    def salt(name: str) -> str:
        tenant = control.policies.tenants.get(name)
        group = tenant.cache_group if tenant is not None else None
        # A group may be called like a tenant that is not in it.
        owner = f"tenant {name}" if group is None else f"group {group}"
        return hmac.new(secret, owner.encode(), hashlib.sha256).hexdigest()[:32]

    return salt


@contextlib.contextmanager
def _database(path: Path, schema: Schema) -> Iterator[Writer]:
    writer = Writer(path, schema, synchronous="NORMAL")
    writer.start()
    try:
        yield writer
    finally:
        writer.close()


def _say_sealed(sealed: Future[int]) -> None:
    if not sealed.exception() and sealed.result():
        log.warning("%d requests were open when the service last ended: their rows say so", sealed.result())
