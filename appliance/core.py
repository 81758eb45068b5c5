"""The core: the process that decides. `serve` puts it together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import resource
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from appliance.admin.callers import Doorkeeper, keys_of
from appliance.admin.operations import Operations
from appliance.admin.server import AdminServer
from appliance.fronts import Dealer
from appliance.identities import IdentityTable
from appliance.listeners import Listener, ListenError, bind_tcp, bind_unix
from appliance.logs import configure_logging
from appliance.messages import ServedModel
from appliance.models.registry import describe
from appliance.models.replicas import Launch
from appliance.rundir import RunDirError, RunDirLock, prepare_directories
from appliance.settings import Fault, Place, Settings, SettingsError
from appliance.switchboard import Switchboard
from engine.client import ReplicaGroup
from store.control import ControlStore
from store.errors import StoreError
from store.requests import RequestLog
from store.schemas import HISTORY
from store.writer import Writer

log = logging.getLogger(__name__)


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit code. Must be called on the main thread."""
    import uvloop

    configure_logging(settings.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (SettingsError, RunDirError, ListenError, StoreError) as error:
        log.error("%s", error)
        return 1
    return 0


async def serve(
    settings: Settings, *, launch: Launch = ReplicaGroup.launch, front_module: str = "appliance.front"
) -> None:
    """Be the service of `settings.run_dir` until SIGTERM or SIGINT, which drain it; a second one hurries.

    Raises RunDirError, SettingsError, ListenError or a StoreError when it cannot start. `launch` and
    `front_module` say what replicas and fronts are made of.
    """
    started_at = time.time()
    stop, hurry = _signals()
    _raise_descriptor_limit()
    with contextlib.ExitStack() as held:
        run_dir, state_dir = Path(settings.run_dir), Path(settings.state_dir)
        prepare_directories(run_dir, state_dir)
        lock = RunDirLock(run_dir, state_dir)
        held.callback(lock.release)

        control = ControlStore(state_dir / "control.db")
        control.start()
        held.callback(control.close)
        history = held.enter_context(_history(state_dir / "history.db"))
        request_log = RequestLog(history)
        request_log.seal_open_rows("the service ended without a word").add_done_callback(_say_sealed)

        switchboard = Switchboard(
            settings,
            _describe_models(settings),
            rows=request_log,
            salt=cache_salts(control),
            clock=time.time,
            identities=IdentityTable(lambda: control.policies, settings.unix),
            launch=launch,
            front_module=front_module,
        )
        listeners = _listen(settings, switchboard.dealer, held)
        admin = AdminServer(settings.admin_socket, settings.unix.admin_mode)
        operations = Operations(settings, switchboard, control, history, [*listeners, admin], started_at)
        await admin.start(operations, Doorkeeper(settings.admin, keys_of(control)))
        try:
            switchboard.start(listeners)
            await stop.wait()
            log.info("stopping: running requests get %g s", settings.drain_grace_s)
        finally:
            await switchboard.drain(settings.drain_grace_s, hurry)
            await admin.stop()
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
def _history(path: Path) -> Iterator[Writer]:
    writer = Writer(path, HISTORY, synchronous="NORMAL")
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


def _describe_models(settings: Settings) -> list[ServedModel]:
    models = []
    for name, model in settings.models.items():
        try:
            models.append(describe(name, model))
        except OSError as error:
            raise SettingsError(
                Fault(
                    place=Place(settings.config_file or "default"),
                    field=f"models.{name}.folder",
                    what=f"models.{name}.folder = {model.folder!r} cannot be used: "
                    f"{error.filename}: {error.strerror}",
                    remedy="name the folder of a Hugging Face checkpoint (config.json, tokenizer.json, "
                    "*.safetensors)",
                )
            ) from error
        log.info("model %s: %s (version %s)", name, model.folder, models[-1].version)
    return models


def _listen(settings: Settings, dealer: Dealer, held: contextlib.ExitStack) -> list[Listener]:
    """The API's sockets, which end with `held`."""
    listeners = [Listener("api", bind_unix(settings.api_socket, settings.unix.api_mode), dealer)]
    held.callback(listeners[0].close)
    if (address := settings.address()) is not None:
        listeners.append(Listener("tcp", bind_tcp(*address), dealer))
        held.callback(listeners[1].close)
    for listener in listeners:
        log.info("%s listens on %s", listener.name, listener.address)
    return listeners


def _say_sealed(sealed: Future[int]) -> None:
    if not sealed.exception() and sealed.result():
        log.warning("%d requests were open when the service last ended: their rows say so", sealed.result())
