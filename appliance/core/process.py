"""The core: the process that decides. `serve` puts it together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable

from appliance.core.service import Service
from appliance.core.state import opened
from appliance.core.systemd import Manager
from appliance.http.sockets import ListenError
from appliance.logs import configure_logging
from appliance.models.replica import Launch
from appliance.rundir import RunDirError
from appliance.settings import Flags, Loaded, SettingsError, read_settings
from engine.client import ReplicaGroup, return_freed_memory
from store.errors import StoreError

log = logging.getLogger(__name__)

COLLECT_AFTER = (50_000, 20, 100)
"""Python looks for cycles of dead objects after so many new ones, for older ones 20 and 100 times less often.
After 700, as by default, it would look at what waits here for every thirtieth request that comes."""


def run(flags: Flags) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit code: 0, 1, or 78 for settings that cannot be used
    (sysexits' EX_CONFIG, so that a service manager need not try again). Must be called on the main thread."""
    import uvloop

    # The service manager's watchdog ends a process that hangs with SIGABRT: its log then says where it hung.
    faulthandler.enable()
    return_freed_memory()

    def read() -> Loaded:
        return read_settings(flags)

    try:
        loaded = read()
        configure_logging(loaded.settings.log_level)
        gc.set_threshold(*COLLECT_AFTER)
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
    stop, hurry = _signals()
    _raise_descriptor_limit()
    async with contextlib.AsyncExitStack() as held:
        held.callback(manager.close)
        state = await held.enter_async_context(opened(loaded.settings, manager))
        service = Service(loaded, reread, state, manager, held, launch, front_module)
        await service.answer_operators()
        try:
            service.start()
            await stop.wait()
        finally:
            await service.stop(hurry)
    log.info("stopped")


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events for the first and the second SIGTERM or SIGINT."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    # Until the service takes it for a reload: what it would read again has just been read.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return stop, hurry


def _raise_descriptor_limit() -> None:
    # A descriptor for each connection on its way to a front; the usual soft limit of 1024 is for select().
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
