"""Small servers on Unix sockets that stand in for the APIs that the CLI calls. Tests control their
answers."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec

from appliance.protocol import AuditHead, Contents, Done, ErrorBody, Key, NewKey, PeerMapping, Tenant
from appliance.protocol.status import Status
from store.policies import Quota


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # some tests disconnect deliberately


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Any

    def do_GET(self) -> None:
        self.service.get(self)

    def do_POST(self) -> None:
        self.service.post(self, self.rfile.read(int(self.headers.get("content-length", 0))))

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *words: object) -> None:
        pass

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Service:
    def __init__(self, path: Path) -> None:
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = _Server(str(path), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class AdminService(_Service):
    """An admin API that keeps its keys in memory."""

    def __init__(self, path: Path, status: Status) -> None:
        self.status = status
        self.keys: list[Key] = []
        self.tenants: list[Tenant] = []
        self.peers: list[PeerMapping] = []
        self.authorization: str | None = None
        """The Authorization header of the latest request."""
        self.actions: list[tuple[str, Any]] = []
        self.contents: Contents | None = None
        self.head: AuditHead | None = None
        super().__init__(path)

    def get(self, handler: _Handler) -> None:
        self.authorization = handler.headers.get("authorization")
        shown = {
            "/status": self.status,
            "/keys": self.keys,
            "/tenants": self.tenants,
            "/peers": self.peers,
            "/alerts": [],
            "/silences": [],
        }
        handler.answer(msgspec.json.encode(shown[handler.path]))

    def post(self, handler: _Handler, body: bytes) -> None:
        name = handler.path.removeprefix("/actions/")
        parameters = json.loads(body)
        self.actions.append((name, parameters))
        if name == "keys.create":
            result: Any = NewKey(
                id="key_1",
                key="ak-secret",
                name=parameters["name"],
                tenant=parameters["tenant"],
                expires_at=parameters.get("expires_at"),
            )
        elif name == "keys.rotate":
            result = NewKey(
                id="key_2",
                key="ak-fresh",
                name="ci",
                tenant="acme",
                replaces=parameters["id"],
                replaced_until=1.79e9,
            )
        elif name == "keys.set":
            result = self.keys[0]
        elif name in ("tenants.create", "tenants.set"):
            result = a_tenant(parameters["name"])
        elif name == "requests.show":
            result = self.contents
        elif name == "backup.begin":
            result = self.head
        elif parameters.get("id") == "key_0":
            handler.answer(msgspec.json.encode(ErrorBody(message="no key has id 'key_0'")), 404)
            return
        else:
            result = Done(message=f"{name} is done")
        handler.answer(msgspec.json.encode(result))


def a_tenant(name: str, **fields: Any) -> Tenant:
    """Return a tenant with default values, except for `fields`."""
    known: dict[str, Any] = {
        "built_in": False,
        "created_at": 1.79e9,
        "suspended_at": None,
        "weight": 1.0,
        "highest_class": 1,
        "default_class": 1,
        "default_max_tokens": None,
        "cache_group": None,
        "log_policy": "metadata",
        "log_days": None,
        "quota": Quota(),
        "keys": 0,
        "peers": 0,
        **fields,
    }
    return Tenant(name=name, **known)


class ApiService(_Service):
    """An API with two models. The test supplies each answer, chunk by chunk."""

    def __init__(self, path: Path) -> None:
        self.asked: list[dict[str, Any]] = []
        self.script: Callable[[_Handler], None] = lambda handler: stream(handler, *spoken("Hello."))
        self.client_left = threading.Event()
        self.ready: tuple[bytes, int] = (b'{"status": "ready", "reason": null}', 200)
        super().__init__(path)

    def get(self, handler: _Handler) -> None:
        if handler.path == "/health/ready":
            handler.answer(*self.ready)
        else:
            models = [{"id": name, "object": "model"} for name in ("demo", "other")]
            handler.answer(json.dumps({"object": "list", "data": models}).encode())

    def post(self, handler: _Handler, body: bytes) -> None:
        self.asked.append(json.loads(body))
        try:
            self.script(handler)
        except (BrokenPipeError, ConnectionResetError):
            self.client_left.set()


def stream(handler: _Handler, *chunks: bytes) -> None:
    """Write each item as one chunk of the response, and end the response."""
    open_stream(handler)
    for chunk in chunks:
        write_chunk(handler, chunk)
    handler.wfile.write(b"0\r\n\r\n")


def open_stream(handler: _Handler) -> None:
    handler.send_response(200)
    handler.send_header("content-type", "text/event-stream")
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()


def write_chunk(handler: _Handler, chunk: bytes) -> None:
    handler.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
    handler.wfile.flush()


def delta(text: str | None = None, finish_reason: str | None = None) -> bytes:
    """Return one event of a streamed chat completion."""
    choice = {
        "index": 0,
        "delta": {} if text is None else {"content": text},
        "finish_reason": finish_reason,
    }
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    """Return the event with the token counts."""
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


def spoken(*texts: str) -> list[bytes]:
    """Return the events of a complete answer."""
    return [*map(delta, texts), delta(None, "stop"), usage(len(texts)), b"data: [DONE]\n\n"]
