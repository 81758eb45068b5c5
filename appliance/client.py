"""Clients of the running service: the admin client of the CLI and the console, and the connection used by all
clients of the service's Unix sockets."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from appliance.actions import CancelRequest, CreateKey, DrainService, ResumeService, RevokeKey, action_of
from appliance.ownership import check_peer, trusted_directory
from appliance.protocol import (
    Configuration,
    Done,
    DrainStatus,
    ErrorBody,
    InFlight,
    Key,
    NewKey,
    PeerMapping,
    Status,
    Tenant,
)
from appliance.rundir import start_remedy

if TYPE_CHECKING:
    from http.client import HTTPConnection

Answer = TypeVar("Answer")

_ACTION_TIMEOUT_S = 30.0
"""Time limit for an action. The service responds to every action that waits for its database within 25 s,
even if the action fails."""


class ServiceNotRunningError(Exception):
    """Raised if no service answers on the socket. The message says why, and how to start the service."""


class NotAllowedError(ServiceNotRunningError):
    """Raised if this user may not open the socket, so the caller cannot tell whether a service is listening
    on it."""


class AdminError(Exception):
    """Raised if the service refuses the call. `status` is the HTTP status code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminClient:
    """Calls the service of one run directory. Use as a context manager. Not thread-safe.

    Every call raises ServiceNotRunningError if no service answers, AdminError if the service refuses the
    call, and UntrustedError if a user who is not trusted might answer in place of the service
    (`appliance.ownership`).
    """

    def __init__(self, run_dir: str | Path, timeout_s: float = 10.0, key: str | None = None) -> None:
        """`key` needs the `read` or `admin` scope. Only users who are not operators need a key."""
        self.socket = Path(run_dir) / "admin.sock"
        self._timeout_s = timeout_s
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing, because no connection stays open between calls."""

    def status(self) -> Status:
        """Return the state of the service."""
        return self._call("GET", "/status", Status)

    def in_flight(self) -> list[InFlight]:
        """Return the requests that have not ended, oldest first."""
        return self._call("GET", "/requests", list[InFlight])

    def keys(self) -> list[Key]:
        """Return all keys, including revoked keys."""
        return self._call("GET", "/keys", list[Key])

    def tenants(self) -> list[Tenant]:
        """Return all tenants."""
        return self._call("GET", "/tenants", list[Tenant])

    def peers(self) -> list[PeerMapping]:
        """Return the local users and groups that need no key."""
        return self._call("GET", "/peers", list[PeerMapping])

    def configuration(self) -> Configuration:
        """Return the settings in effect and the source of each."""
        return self._call("GET", "/config", Configuration)

    def create_key(self, name: str, tenant: str = "default", expires_at: float | None = None) -> NewKey:
        """Create a bearer key. Its secret is returned only here."""
        return self._expect(CreateKey(name=name, tenant=tenant, expires_at=expires_at), NewKey)

    def revoke_key(self, key_id: str) -> Done:
        """Revoke a key permanently."""
        return self._expect(RevokeKey(id=key_id), Done)

    def drain(self, drain: DrainService) -> DrainStatus:
        """Begin a drain. `status().drains` reports its progress."""
        return self._expect(drain, DrainStatus)

    def resume(self, resume: ResumeService) -> Done:
        """Cancel a drain, or accept requests again after a completed drain."""
        return self._expect(resume, Done)

    def cancel_request(self, request_id: str) -> Done:
        """Cancel a request."""
        return self._expect(CancelRequest(request_id=request_id), Done)

    def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        """Perform the action that these parameters belong to (`appliance.actions`)."""
        return self._expect(parameters, action_of(parameters).result)

    def _expect(self, parameters: msgspec.Struct, result: type[Answer]) -> Answer:
        name = action_of(parameters).name
        try:
            body = msgspec.json.encode(parameters)
        except UnicodeEncodeError as error:
            # The bytes of a command line are not necessarily UTF-8.
            raise AdminError(400, f"{name}: {error.object!r} is not UTF-8 text: write it in UTF-8") from error
        return self._call("POST", f"/actions/{name}", result, body)

    def _call(self, method: str, path: str, result: Any, body: bytes | None = None) -> Any:
        # Imported here because the import takes 20 ms, and some callers need only the types.
        import http.client

        headers = dict(self._headers)
        if body is not None:
            headers["content-type"] = "application/json"
        # Each call opens a new connection, because the service closes idle connections, possibly while a
        # request is in flight.
        timeout_s = self._timeout_s
        if body is not None and timeout_s is not None:
            timeout_s = max(timeout_s, _ACTION_TIMEOUT_S)
        connection = unix_connection(self.socket, timeout_s)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise not_running(self.socket, error) from error
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServiceNotRunningError(
                f"the service on {self.socket} did not respond to {method} {path} "
                f"({error or type(error).__name__}); see its log"
                + (
                    ""
                    if body is None
                    else "; whether the action was performed is shown by: appliance audit list"
                )
            ) from error
        finally:
            connection.close()
        if 200 <= response.status < 300:
            try:
                return msgspec.json.decode(content, type=result)
            except msgspec.DecodeError as error:
                raise AdminError(
                    response.status,
                    f"{self.socket} responded to {method} {path} with a response that this version of "
                    f"the command cannot read ({error}): after an update, restart the service",
                ) from error
        try:
            message = msgspec.json.decode(content, type=ErrorBody).message
        except msgspec.DecodeError:
            message = f"{self.socket} responded to {method} {path} with status {response.status}"
        raise AdminError(response.status, message)


def unix_connection(path: Path, timeout_s: float | None, connect_timeout_s: float = 10.0) -> HTTPConnection:
    """Return an HTTP connection to the service's socket at `path`. The connection is not yet open.

    `connect` raises UntrustedError unless the run directory and the process behind the socket belong to users
    whom the caller trusts (`appliance.ownership`), and OSError if nothing is listening. `timeout_s` limits
    each wait for the answer; None means no limit.
    """
    import http.client

    class UnixConnection(http.client.HTTPConnection):
        def connect(self) -> None:
            uids = trusted_directory(path.parent, "--run-dir")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # A blocking connect waits while the backlog is full. With settimeout(), it would fail
                # immediately.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(connect_timeout_s))
                sock.connect(os.fspath(path))
                check_peer(sock, uids)
                sock.settimeout(timeout_s)
            except BaseException:
                sock.close()
                raise
            self.sock = sock

    return UnixConnection("appliance")


def not_running(path: Path, error: OSError) -> ServiceNotRunningError:
    """Return an error that explains why nothing can be sent to the socket at `path`, with the remedy."""
    if isinstance(error, PermissionError):
        return NotAllowedError(
            f"permission denied for uid {os.geteuid()} on {path}: run as root, as the service's user or "
            "as an operator listed under [admin] in the settings"
        )
    if isinstance(error, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
        return ServiceNotRunningError(f"no service is running at {path}: {start_remedy(path.parent)}")
    return ServiceNotRunningError(
        f"no service responds at {path} ({error.strerror or error}): {start_remedy(path.parent)}"
    )


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
