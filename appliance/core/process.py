"""The core process: reads the settings, opens the state, and runs the service until signalled to stop."""

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

from appliance.core.readiness import Readiness
from appliance.core.service import Service
from appliance.core.state import opened
from appliance.core.systemd import Manager
from appliance.host.logs import configure_logging
from appliance.http.sockets import ListenError
from appliance.models.preflight import problem_of
from appliance.models.preflight_process import MODEL_CHECKS, ModelChecks
from appliance.models.registry import model_faults
from appliance.models.replica import Launch
from appliance.rundir import RunDirError
from appliance.settings import Flags, Loaded, SettingsError, read_settings
from engine.client import ReplicaGroup, return_freed_memory
from store.errors import StoreError

log = logging.getLogger(__name__)

_CHECK_S = 0.25
"""Interval, in seconds, at which startup checks whether any model can be served."""
COLLECT_AFTER = (50_000, 20, 100)
"""Python garbage collector thresholds. New objects are scanned after this many allocations, the middle
generation after 20 such scans, and the oldest generation after 100 scans of the middle one. With the default
of 700 allocations, all waiting requests would be scanned once for every thirty arriving requests."""


class StartError(Exception):
    """Raised if no model can be served until an operator fixes a problem. The message lists the problems."""


def run(flags: Flags) -> int:
    """Run the service until SIGTERM or SIGINT and return the exit code: 0, 1, or 78 for invalid settings.
    Exit code 78 (EX_CONFIG in sysexits.h) tells a service manager not to restart the service. Must be called
    on the main thread."""
    import uvloop

    # The service manager's watchdog kills a hung process with SIGABRT. Python then logs a stack trace that
    # shows where it hung.
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
    except StartError as error:
        log.error("%s", error)
        return os.EX_CONFIG
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
    checks: ModelChecks = MODEL_CHECKS,
) -> None:
    """Run the service. The first SIGTERM or SIGINT drains it, and the second stops it immediately. SIGHUP
    applies the settings that `reread` returns. Raises RunDirError, SettingsError, ListenError or StoreError
    if the service cannot start.

    `manager` is the service manager that started the process. `launch` starts replicas, `front_module` is the
    Python module to run as a front, and `checks` verifies the models' files; tests replace these three.
    """
    stop, hurry = _signals()
    _raise_descriptor_limit()
    async with contextlib.AsyncExitStack() as held:
        held.callback(manager.close)
        reasons: list[str] = []
        held.push(lambda kind, error, trace: _tell_end(manager, str(error) if error else "".join(reasons)))
        manager.tell(STATUS="starting: checking the models' files")
        broken = await manager.wait_for(lambda: _broken_models(loaded, checks))
        state = await held.enter_async_context(opened(loaded.settings, manager))
        service = Service(loaded, reread, state, manager, held, launch, front_module, checks, broken)
        await service.answer_operators()
        try:
            service.start()
            await _until_stopped(stop, service.readiness)
        finally:
            reasons.append(service.readiness.reason())
            await service.stop(hurry)
    log.info("stopped")


async def _until_stopped(stop: asyncio.Event, readiness: Readiness) -> None:
    """Wait until `stop` is set. Raises StartError if no model has answered requests yet and all have problems
    that only an operator can correct."""
    while not stop.is_set() and not readiness.serves():
        if reason := readiness.permanent_problems():
            raise StartError(f"no model can be served: {reason}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _CHECK_S)
    await stop.wait()


def _tell_end(manager: Manager, reason: str) -> None:
    """Tell the service manager why the service was not ready. This status remains visible after the process
    has exited."""
    if reason:
        manager.tell(STATUS=f"stopped: {reason}")


def _broken_models(loaded: Loaded, checks: ModelChecks) -> dict[str, str]:
    """Return the models with faulty files, mapped to their problems. Raises SettingsError if none of the
    models can be served."""
    models = loaded.settings.models
    findings = checks.files(models)
    for warning in model_faults(loaded, findings, "warning"):
        log.warning("%s", warning)
    faults = model_faults(loaded, findings)
    if models and len(faults) == len(models):
        raise SettingsError(*faults)
    for fault in faults:
        log.error("%s", fault)
    return {name: str(found) for name in models if (found := problem_of(findings[name])) is not None}


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Install signal handlers and return two events. The first SIGTERM or SIGINT sets the first event, and
    the next one sets the second event."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    # Ignore SIGHUP until the service can reload. Nothing is lost, because the settings have just been read.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return stop, hurry


def _raise_descriptor_limit() -> None:
    # Every connection being passed to a front occupies a file descriptor. The usual soft limit of 1024 exists
    # only for select(), which this process does not use.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
