"""Tests of the browser console, using an HTTP client instead of a browser."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator

import aiohttp
import pytest

from console.web import MAX_TABS, ConsoleServer
from tests.system.service import APPLIANCE

pytestmark = pytest.mark.system
WAIT_S = 120.0


@contextlib.contextmanager
def web_console(*flags: str) -> Iterator[str]:
    """Run `appliance console --web` until the block ends, and yield the address that it prints."""
    process = subprocess.Popen(
        [APPLIANCE, "console", "--web", *flags, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}", line)
    assert found is not None, line
    yield found[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with web_console("--demo") as address:
        yield address


def base(address: str) -> str:
    return address.partition("/?")[0]


async def frames(socket: aiohttp.ClientWebSocketResponse, text: str) -> str:
    """Read frames until they contain the text. Return everything that was read."""
    shown = ""
    async with asyncio.timeout(WAIT_S):
        while text not in shown:
            message = await socket.receive()
            assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), message
            if message.type is aiohttp.WSMsgType.BINARY:
                shown += message.data.decode(errors="replace")
    return shown


def test_with_the_token_frames_are_live_keys_navigate_and_no_action_is_accepted(address: str) -> None:
    async def visit() -> None:
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as browser:
            async with browser.get(address) as page:
                assert page.status == 200 and "token" not in str(page.url)
                assert "default-src 'self'" in page.headers["Content-Security-Policy"]
                assert "textual.js" in await page.text()
            url = base(address).replace("http", "ws") + "/ws?width=120&height=40"
            async with browser.ws_connect(url, origin=base(address)) as socket:
                await frames(socket, "Tokens per second")
                await frames(socket, "output")  # the displayed values change, so more frames follow
                await socket.send_json(["stdin", "4"])
                await frames(socket, "REQUEST")
                await socket.send_json(["stdin", "X"])
                await frames(socket, "this console is read-only")
                await socket.send_json(["stdin", "q"])

    asyncio.run(visit())


@pytest.mark.parametrize("path", ["/", "/?token=wrong", "/ws", "/static/js/textual.js", "/download/x"])
def test_without_the_token_everything_is_refused(address: str, path: str) -> None:
    async def visit() -> None:
        async with aiohttp.ClientSession() as browser, browser.get(base(address) + path) as page:
            assert page.status == 403
            assert "missing or wrong token" in await page.text()

    asyncio.run(visit())


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}]
)
def test_other_hosts_and_origins_are_refused_even_with_the_token(
    address: str, headers: dict[str, str]
) -> None:
    async def visit() -> None:
        async with aiohttp.ClientSession() as browser, browser.get(address, headers=headers) as page:
            assert page.status == 403 and "token" not in await page.text()

    asyncio.run(visit())


def test_the_number_of_tabs_is_bounded() -> None:
    async def visit() -> None:
        server = ConsoleServer(["true"], 0)
        runner, url = await server.start()
        server._tabs = MAX_TABS
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            async with browser.get(url) as page:
                assert page.status == 200
            async with browser.get(base(url) + "/ws") as answer:
                assert answer.status == 503 and f"{MAX_TABS} consoles are open" in await answer.text()
        await runner.cleanup()

    asyncio.run(visit())


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--write"], "always read-only"), (["--replay", "x"], "leave out --replay")],
)
def test_a_console_in_the_browser_is_always_read_only(flags: list[str], message: str) -> None:
    done = subprocess.run(
        [APPLIANCE, "console", "--web", "--demo", *flags],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 2 and message in done.stderr


def test_a_port_in_use_is_named(address: str) -> None:
    port = base(address).rpartition(":")[2]
    done = subprocess.run(
        [APPLIANCE, "console", "--web", "--demo", "--port", port], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1 and f"127.0.0.1:{port}" in done.stderr and "--port" in done.stderr
