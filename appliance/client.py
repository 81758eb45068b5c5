"""The admin API client used by the CLI and the console, and the Unix socket connections used by all
clients."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import msgspec

from appliance import calls
from appliance.actions.parameters import CancelRequest, CreateKey, DrainService, ResumeService, RevokeKey
from appliance.calls import AdminError, Call
from appliance.ownership import check_peer, trusted_directory
from appliance.protocol import Configuration, Done, DrainStatus, Key, NewKey, PeerMapping, Tenant
from appliance.protocol.registry import RegisteredModel
from appliance.protocol.status import Status
from appliance.rundir import start_remedy
from appliance.snapshot import Snapshot, UnfinishedRequest

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

__all__ = ["AdminClient", "AdminError", "NotAllowedError", "ServiceNotRunningError", "unix_connection"]

Answer = TypeVar("Answer")

_CONNECT_TIMEOUT_S = 10.0
ACTION_TIMEOUT_S = 30.0
"""Time limit for an action, in seconds. The service responds within 25 s, even if an action has to wait for
the service's database and then fails."""
STREAM_TIMEOUT_S = 20.0
"""Time in seconds after which a stream without data is considered broken. The service sends at least an empty
line every 5 seconds."""


class ServiceNotRunningError(Exception):
    """Raised if no service answers on the socket. The message states the reason and the command that starts
    the service."""


class NoResponseError(ServiceNotRunningError):
    """Raised if the service did not respond to a call that was sent to it. The service may have performed the
    call."""


class NotAllowedError(ServiceNotRunningError):
    """Raised if this user is not allowed to open the socket, so it is unknown whether a service is listening
    on it."""


class AdminClient:
    """Calls the service in one run directory. Use it as a context manager. Not thread-safe.

    Every call can raise three errors: ServiceNotRunningError if no service answers, AdminError if the service
    refuses the call, and UntrustedError if an untrusted user might be answering in place of the service
    (`appliance.ownership`).
    """

    def __init__(self, run_dir: str | Path, timeout_s: float = 10.0, key: str | None = None) -> None:
        """`key` must have the `read` or `admin` scope; operators need no key."""
        self.socket = Path(run_dir) / "admin.sock"
        self._timeout_s = timeout_s
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: no connection stays open between calls."""

    def status(self) -> Status:
        """Return the service's state."""
        return self.call(calls.STATUS)

    def in_flight(self) -> list[UnfinishedRequest]:
        """Return the unfinished requests, oldest first."""
        return self.call(calls.IN_FLIGHT)

    def keys(self) -> list[Key]:
        """Return all keys, including revoked keys."""
        return self.call(calls.KEYS)

    def tenants(self) -> list[Tenant]:
        """Return all tenants."""
        return self.call(calls.TENANTS)

    def peers(self) -> list[PeerMapping]:
        """Return the local users and groups that need no key."""
        return self.call(calls.PEERS)

    def models(self) -> list[RegisteredModel]:
        """Return the models in the settings and in the registry, with their versions."""
        return self.call(calls.MODELS)

    def configuration(self) -> Configuration:
        """Return the settings in effect and the source of each."""
        return self.call(calls.CONFIGURATION)

    def create_key(self, name: str, tenant: str = "default", expires_at: float | None = None) -> NewKey:
        """Create a bearer key. Only this call returns the key's secret."""
        return self.call(calls.act(CreateKey(name=name, tenant=tenant, expires_at=expires_at)))

    def revoke_key(self, key_id: str) -> Done:
        """Revoke a key permanently."""
        return self.call(calls.act(RevokeKey(id=key_id)))

    def drain(self, drain: DrainService) -> DrainStatus:
        """Begin a drain. `status().drains` reports its progress."""
        return self.call(calls.act(drain))

    def resume(self, resume: ResumeService) -> Done:
        """Cancel a drain, or accept requests again after a completed drain."""
        return self.call(calls.act(resume))

    def cancel_request(self, request_id: str) -> Done:
        """Cancel a request."""
        return self.call(calls.act(CancelRequest(request_id=request_id)))

    def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        """Perform the action with these parameters (`appliance.actions`)."""
        return self.call(calls.act(parameters))

    def call(self, call: Call[Answer]) -> Answer:
        """Make an admin API call and return its result."""
        with self._sent(call, call_timeout_s(call, self._timeout_s)) as response:
            content = response.read()
        return call.decode(response.status, content, str(self.socket))

    def follow(self, call: Call[Answer]) -> Iterator[Answer]:
        """Make a streaming call and yield values until the service ends the stream."""
        with self._sent(call, STREAM_TIMEOUT_S) as response:
            if response.status != 200:
                call.decode(response.status, response.read(), str(self.socket))
            while line := response.readline():
                if (value := call.decode_line(line, str(self.socket))) is not None:
                    yield value

    def snapshots(self, hz: int = 2) -> Iterator[Snapshot]:
        """Yield snapshots of the service, `hz` times a second, until the service ends the stream."""
        from appliance.events.frames import SnapshotAssembler

        assembler = SnapshotAssembler()
        for frame in self.follow(calls.events(hz)):
            yield assembler.add(frame)

    @contextlib.contextmanager
    def _sent(self, call: Call[Answer], timeout_s: float | None) -> Iterator[HTTPResponse]:
        """Send an admin API call and yield its response. Leaving the `with` block closes the connection."""
        # Import http.client only here, because the import takes 20 ms and some callers need only the types.
        import http.client

        headers = dict(self._headers)
        if call.body is not None:
            headers["content-type"] = "application/json"
        # Open a new connection for each call: the service closes idle connections, and could do so just as a
        # request is sent.
        connection = unix_connection(self.socket, timeout_s)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise not_running(self.socket, error) from error
            connection.request(call.method, call.path, call.body, headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise no_response(self.socket, call, error) from error
        finally:
            connection.close()


def call_timeout_s(call: Call[Answer], timeout_s: float) -> float | None:
    """Return the time limit for a call, or None if the service itself enforces one. `timeout_s` is the
    client's limit for ordinary calls."""
    if call.is_long:
        return None
    return timeout_s if call.body is None else max(timeout_s, ACTION_TIMEOUT_S)


def unix_connection(path: Path, timeout_s: float | None) -> HTTPConnection:
    """Return an unopened HTTP connection to the service's socket at `path`. `timeout_s` limits each wait for
    data; None means no limit.

    The connection's `connect` method raises OSError if no process is listening, and UntrustedError unless the
    run directory and the process behind the socket belong to users whom the caller trusts
    (`appliance.ownership`).
    """
    import http.client

    class UnixConnection(http.client.HTTPConnection):
        def connect(self) -> None:
            uids = trusted_directory(path.parent, "--run-dir")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # A blocking connect waits while the socket's backlog is full. After settimeout(), it would
                # fail immediately.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_CONNECT_TIMEOUT_S))
                sock.connect(os.fspath(path))
                check_peer(sock, uids)
                sock.settimeout(timeout_s)
            except BaseException:
                sock.close()
                raise
            self.sock = sock

    return UnixConnection("appliance")


def not_running(path: Path, error: OSError) -> ServiceNotRunningError:
    """Return an error that says why the socket at `path` cannot be used and what to do about it."""
    if isinstance(error, PermissionError):
        return NotAllowedError(
            f"permission denied for uid {os.geteuid()} on {path}: run as root, as the service's user or "
            "as an operator listed under [admin] in the settings"
        )
    if isinstance(error, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
        return ServiceNotRunningError(f"no service is running at {path}: {start_remedy(path.parent)}")
    return ServiceNotRunningError(
        f"no service is responding at {path} ({error.strerror or error}): {start_remedy(path.parent)}"
    )


def no_response(path: Path, call: Call[Answer], error: Exception) -> NoResponseError:
    """Return the error for a call that got no response from the socket at `path`."""
    return NoResponseError(
        f"the service on {path} did not respond to {call.method} {call.path} "
        f"({error or type(error).__name__}); see its log"
        + (
            ""
            if call.body is None
            else "; to see whether the action was performed, run: appliance audit list"
        )
    )


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
