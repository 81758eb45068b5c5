"""The admin client: what the CLI and the console ask the running service, over `admin.sock`."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from appliance.actions import CancelRequest, CreateKey, DrainService, ResumeService, RevokeKey, action_of
from appliance.protocol import (
    Configuration,
    Done,
    DrainStatus,
    ErrorBody,
    InFlight,
    Key,
    NewKey,
    Peer,
    Status,
    Tenant,
)

if TYPE_CHECKING:
    import httpx

Answer = TypeVar("Answer")

_ACTION_TIMEOUT_S = 30.0
"""The service answers every action that waits for its database within 25 s, with success or failure."""


class ServiceNotRunningError(Exception):
    """Nobody answers on the admin socket."""


class NotAllowedError(ServiceNotRunningError):
    """This user may not open the admin socket: whether somebody answers there is not known."""


class AdminError(Exception):
    """The service refused; `status` is the HTTP status code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminClient:
    """Calls the service of one run directory. Use as a context manager; not thread-safe.

    Every call raises ServiceNotRunningError when nobody answers there, AdminError when the service refuses.
    """

    def __init__(self, run_dir: str | Path, timeout_s: float = 10.0, key: str | None = None) -> None:
        """`key`, of scope admin or read, is for users who are no operators."""
        self.socket = Path(run_dir) / "admin.sock"
        self._timeout_s = timeout_s
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http: httpx.Client | None = None

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def status(self) -> Status:
        """What the service is and does."""
        return self._call("GET", "/status", Status)

    def in_flight(self) -> list[InFlight]:
        """Requests that have not ended, oldest first."""
        return self._call("GET", "/requests", list[InFlight])

    def keys(self) -> list[Key]:
        """All keys, revoked ones too."""
        return self._call("GET", "/keys", list[Key])

    def tenants(self) -> list[Tenant]:
        """All tenants."""
        return self._call("GET", "/tenants", list[Tenant])

    def peers(self) -> list[Peer]:
        """Users and groups of the box that need no key."""
        return self._call("GET", "/peers", list[Peer])

    def configuration(self) -> Configuration:
        """The settings that hold, and where each was said."""
        return self._call("GET", "/config", Configuration)

    def create_key(self, name: str, tenant: str = "default", expires_at: float | None = None) -> NewKey:
        """Make a bearer key; its secret is in the answer and nowhere else."""
        return self._expect(CreateKey(name=name, tenant=tenant, expires_at=expires_at), NewKey)

    def revoke_key(self, key_id: str) -> Done:
        """Make a key worthless, for good."""
        return self._expect(RevokeKey(id=key_id), Done)

    def drain(self, drain: DrainService) -> DrainStatus:
        """Begin a drain; `status().drains` tells how it gets on."""
        return self._expect(drain, DrainStatus)

    def resume(self, resume: ResumeService) -> Done:
        """Leave off or end a drain."""
        return self._expect(resume, Done)

    def cancel_request(self, request_id: str) -> Done:
        """End a request now."""
        return self._expect(CancelRequest(request_id=request_id), Done)

    def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        """Do the action whose parameters these are (`appliance.actions`)."""
        return self._expect(parameters, action_of(parameters).result)

    def _expect(self, parameters: msgspec.Struct, result: type[Answer]) -> Answer:
        name = action_of(parameters).name
        try:
            body = msgspec.json.encode(parameters)
        except UnicodeEncodeError as error:
            # A command line's bytes need not be UTF-8.
            raise AdminError(400, f"{name}: {error.object!r} is not UTF-8 text: write it as such") from error
        return self._call("POST", f"/actions/{name}", result, body)

    def _call(self, method: str, path: str, result: Any, body: bytes | None = None) -> Any:
        import httpx  # 100 ms: not for those who only want the types

        if self._http is None:
            transport = httpx.HTTPTransport(uds=str(self.socket))
            self._http = httpx.Client(
                transport=transport, base_url="http://admin", timeout=self._timeout_s, headers=self._headers
            )
        headers = {"content-type": "application/json"} if body is not None else None
        timeout_s = self._timeout_s if body is None else max(self._timeout_s, _ACTION_TIMEOUT_S)
        try:
            response = self._http.request(method, path, content=body, headers=headers, timeout=timeout_s)
        except httpx.ConnectError as error:
            raise self._explained(error) from error
        except httpx.TransportError as error:
            raise ServiceNotRunningError(
                f"the service behind {self.socket} did not answer {method} {path} "
                f"({error or type(error).__name__}): see its log"
                + ("" if body is None else ", and whether it was done: appliance audit list")
            ) from error
        if response.is_success:
            return msgspec.json.decode(response.content, type=result)
        try:
            message = msgspec.json.decode(response.content, type=ErrorBody).message
        except msgspec.DecodeError:
            message = f"{self.socket} answered {method} {path} with status {response.status_code}"
        raise AdminError(response.status_code, message)

    def _explained(self, error: Exception) -> ServiceNotRunningError:
        remedy = "start it with 'appliance serve', or name its run directory with --run-dir"
        if not os.path.lexists(self.socket) and os.access(self.socket.parent, os.X_OK):
            return ServiceNotRunningError(f"no service runs here ({self.socket} does not exist): {remedy}")
        if "Permission" in str(error):
            return NotAllowedError(
                f"{self.socket} may not be opened by uid {os.geteuid()}: use the service's user, root, or an "
                f"operator of [admin] in the settings"
            )
        return ServiceNotRunningError(f"no service answers on {self.socket} ({error}): {remedy}")
