"""Serves the console to browsers with textual-serve (`appliance console --web`). Each browser tab gets its
own console process, which is always read-only. The server listens only on the loopback interface. Clients
need a random token: it is part of the printed address, and the browser then keeps it in a cookie. Requests
with a foreign `Host` or `Origin` are refused, so that other web pages cannot reach the console through the
browser.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from textual_serve.server import Server

MAX_TABS = 8
"""Maximum number of concurrent consoles, each in its own process."""
_COOKIE = "appliance-console"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ADDRESS = "127.0.0.1"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebError(RuntimeError):
    """Raised if the server cannot start. The message says what to do."""


class ConsoleServer(Server):
    """Serves consoles to browsers that present the token."""

    def __init__(self, command: list[str], port: int) -> None:
        """`command` starts a console for one tab. With port 0, the operating system chooses a free port."""
        super().__init__(shlex.join(command), host=_ADDRESS, port=port, title="appliance console")
        self.token = secrets.token_urlsafe(32)
        self._tabs = 0

    async def start(self) -> tuple[web.AppRunner, str]:
        """Start listening. Return the runner, which can stop the server, and the address including the token.
        Raises WebError if the server cannot start."""
        runner = web.AppRunner(await self._make_app(), access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, _ADDRESS, self.port)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise WebError(
                f"cannot listen on {_ADDRESS}:{self.port} ({error.strerror}): choose another port with --port"
            ) from error
        port = runner.addresses[0][1]
        return runner, f"http://{_ADDRESS}:{port}/?token={self.token}"

    async def on_startup(self, app: web.Application) -> None:
        """Do nothing. The base class would print a message."""

    async def _make_app(self) -> web.Application:
        app: web.Application = await super()._make_app()
        app.middlewares.append(self._guard)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reject requests without the token."""
        if request.url.host not in _LOOPBACK:
            return _refused(f"the host {request.host!r} is not this machine: use {_ADDRESS}")
        origin = request.headers.get("origin")
        if origin not in (None, f"http://{request.host}"):
            return _refused("requests from other web pages are refused")
        given = request.query.get("token")
        if given is not None and self._is_token(given) and request.path == "/":
            # The cookie keeps the token out of the browser's history.
            response = web.HTTPSeeOther("/")
            response.set_cookie(_COOKIE, self.token, httponly=True, samesite="Strict")
            raise response
        if not self._is_token(request.cookies.get(_COOKIE, "")):
            return _refused("missing or wrong token: open the address printed by appliance console --web")
        answer = await handler(request)
        if not answer.prepared:
            answer.headers["Content-Security-Policy"] = _policy(request.host)
            answer.headers["Referrer-Policy"] = "no-referrer"
        return answer

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())

    async def handle_index(self, request: web.Request) -> Any:
        """Return the page. Its URLs use the address by which the browser reached this server."""
        self.public_url = f"http://{request.host}"
        return await super().handle_index(request)

    async def handle_websocket(self, request: web.Request) -> Any:
        """Connect a browser tab to a new console."""
        if self._tabs >= MAX_TABS:
            return web.Response(status=503, text=f"{MAX_TABS} consoles are open: close one of their tabs")
        self._tabs += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._tabs -= 1


def serve(options: list[str], port: int) -> int:
    """Serve consoles until Ctrl+C is pressed. `options` are passed to `console.web_session`. Raises WebError
    if the server cannot start."""
    server = ConsoleServer([sys.executable, "-m", "console.web_session", *options], port)

    async def run() -> None:
        runner, address = await server.start()
        print(f"read-only console at {address}\npress Ctrl+C to stop it", flush=True)
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, ended.set)
        await ended.wait()
        await runner.cleanup()

    asyncio.run(run())
    return 0


def _refused(reason: str) -> web.Response:
    return web.Response(status=403, text=f"{reason}\n")


def _policy(host: str) -> str:
    """Return a Content-Security-Policy that keeps the page from loading anything from other servers."""
    return (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; "
        f"img-src 'self' data:; font-src 'self' data:; connect-src 'self' ws://{host}; frame-ancestors 'none'"
    )
