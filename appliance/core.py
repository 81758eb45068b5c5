"""The core: the process that decides. `serve` puts it together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import hashlib
import hmac
import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from appliance.admin.callers import Doorkeeper, keys_of
from appliance.admin.operations import Operations
from appliance.admin.server import AdminServer
from appliance.admin.status import service_version
from appliance.appliers import appliers
from appliance.contents import ContentKeeper
from appliance.housekeeping import Housekeeper
from appliance.identities import IdentityTable
from appliance.listeners import Doors, ListenError
from appliance.logs import configure_logging
from appliance.models.registry import describe_models
from appliance.models.replicas import Launch
from appliance.notifier import Notifier
from appliance.protocol import SocketStatus
from appliance.quota_levels import LevelKeeper
from appliance.reload import Reloader
from appliance.rundir import RunDirError, RunDirLock, prepare_directories
from appliance.settings import Flags, Loaded, SettingsError, read_settings
from appliance.switchboard import Switchboard
from appliance.systemd import Manager
from appliance.traffic.quotas import Quotas
from appliance.watch.metrics.counting import CountedRows
from appliance.watch.metrics.scrape import Scraper
from appliance.watch.metrics.server import MetricsServer
from appliance.watch.metrics.tenants import ShownTenants
from engine.client import ReplicaGroup
from store.control import ControlStore
from store.errors import StoreError
from store.migrations import Schema
from store.quotas import QuotaLog
from store.requests import RequestLog
from store.schemas import CONTENTS, HISTORY
from store.writer import Writer

log = logging.getLogger(__name__)


def run(flags: Flags) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit code: 0, 1, or 78 for settings that cannot be used
    (sysexits' EX_CONFIG, so that a service manager need not try again). Must be called on the main thread."""
    import uvloop

    # The service manager's watchdog ends a process that hangs with SIGABRT: its log then says where it hung.
    faulthandler.enable()

    def read() -> Loaded:
        return read_settings(flags)

    try:
        loaded = read()
        configure_logging(loaded.settings.log_level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(loaded, reread=read, manager=Manager()))
    except SettingsError as error:
        print(f"appliance: {error}", file=sys.stderr)
        return os.EX_CONFIG
    except (RunDirError, ListenError, StoreError) as error:
        log.error("%s", error)
        return 1
    return 0


async def serve(
    loaded: Loaded,
    *,
    reread: Callable[[], Loaded],
    manager: Manager,
    launch: Launch = ReplicaGroup.launch,
    front_module: str = "appliance.front",
) -> None:
    """Be the service of the settings' run directory until SIGTERM or SIGINT, which drain it; a second one
    hurries. SIGHUP applies what `reread` finds.

    Raises RunDirError, SettingsError, ListenError or a StoreError when it cannot start. `manager` is the
    service manager that started the process; `launch` and `front_module` say what replicas and fronts are
    made of.
    """
    started_at, settings = time.time(), loaded.settings
    stop, hurry = _signals()
    manager.tell(STATUS="starting: opening the databases")
    _raise_descriptor_limit()
    with contextlib.ExitStack() as held:
        run_dir, state_dir = Path(settings.run_dir), Path(settings.state_dir)
        prepare_directories(run_dir, state_dir)
        lock = RunDirLock(run_dir, state_dir)
        held.callback(lock.release)

        control = ControlStore(state_dir / "control.db", spool_folder=run_dir)
        control.start()
        held.callback(control.close)
        history = held.enter_context(_database(state_dir / "history.db", HISTORY))
        contents = held.enter_context(_database(state_dir / "contents.db", CONTENTS))
        request_log = RequestLog(history)
        request_log.seal_open_rows("the service ended without a word").add_done_callback(_say_sealed)

        quotas = Quotas(time.monotonic)
        levels = LevelKeeper(quotas, QuotaLog(history))
        kept = ContentKeeper(contents, lambda: control.policies, lambda: switchboard.settings.log)
        held.callback(kept.close)
        counted = CountedRows(
            request_log, ShownTenants(settings.metrics.tenants, lambda: control.policies.tenants)
        )
        identities = IdentityTable(lambda: control.policies, settings.unix)
        switchboard = Switchboard(
            settings,
            describe_models(loaded),
            rows=counted,
            salt=cache_salts(control),
            clock=time.time,
            quotas=quotas,
            identities=identities,
            keep=kept.keep,
            launch=launch,
            front_module=front_module,
        )
        switchboard.tell_identities()
        levels.restore(history.path)
        doors = Doors(manager.sockets, settings, switchboard.dealer)
        held.callback(doors.close)
        doorkeeper = Doorkeeper(settings.admin, keys_of(control))
        admin = AdminServer(settings.admin_socket, settings.unix.admin_mode, doors.admin)
        scrape = Scraper(
            counted,
            switchboard,
            control,
            [history, contents],
            doors,
            version=service_version(),
            started_at=started_at,
        )
        metrics = MetricsServer(scrape)
        reloader = Reloader(
            loaded,
            reread,
            switchboard,
            [doors, metrics],
            appliers(switchboard, identities, doorkeeper, admin, counted.tenants),
        )
        metrics.change(settings, metrics.prepare(settings))

        def sockets() -> list[SocketStatus]:
            return [*(listener.status() for listener in doors.listeners), admin.status(), *metrics.status()]

        operations = Operations(
            switchboard, control, [history, contents], kept, reloader, sockets, scrape, started_at
        )
        await admin.start(operations, doorkeeper)
        notifier = Notifier(
            manager, switchboard, lambda: max(control.stalled_s, history.stalled_s, contents.stalled_s)
        )
        held.callback(notifier.close)
        housekeeper = Housekeeper(control, history, kept, lambda: switchboard.settings.log)
        try:
            switchboard.start(doors.listeners)
            levels.start()
            notifier.start()
            housekeeper.start()
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, operations.hang_up)
            await stop.wait()
            log.info("stopping: running requests get %g s", switchboard.settings.drain_grace_s)
        finally:
            notifier.begin_stop()
            await switchboard.stop(hurry)
            levels.close()
            await metrics.stop()
            await admin.stop()
            await housekeeper.stop()
    log.info("stopped")


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events for the first and the second SIGTERM or SIGINT."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    return stop, hurry


def _raise_descriptor_limit() -> None:
    # A descriptor for each connection on its way to a front; the usual soft limit of 1024 is for select().
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _database(path: Path, schema: Schema) -> Iterator[Writer]:
    writer = Writer(path, schema, synchronous="NORMAL")
    writer.start()
    try:
        yield writer
    finally:
        writer.close()


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


def _say_sealed(sealed: Future[int]) -> None:
    if not sealed.exception() and sealed.result():
        log.warning("%d requests were open when the service last ended: their rows say so", sealed.result())
