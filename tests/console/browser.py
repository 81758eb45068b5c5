"""A headless Chromium browser, controlled through the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_LIMIT_S = 120.0
_KEY_CODES = {"Enter": 13, "Escape": 27}


class Browser:
    """One tab. Use it as an asynchronous context manager."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self._folder = folder
        self._command = [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
            *("--window-size=1100,800", f"--user-data-dir={folder}", "about:blank"),
        ]
        self.received = ""
        """The text that the page has received over WebSockets."""
        self.status: dict[str, int] = {}
        """The HTTP status of each address that the tab has requested."""
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Browser:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = self._folder / "DevToolsActivePort"
        await self.until(lambda: port_file.exists() and port_file.read_text().count("\n"), "Chromium's port")
        port = port_file.read_text().split("\n")[0]
        self._http = aiohttp.ClientSession()
        pages: list[dict[str, Any]] = []
        while not pages:
            await asyncio.sleep(0.1)
            async with self._http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [one for one in await answer.json() if one["type"] == "page"]
        self._socket = await self._http.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        await self.call("Network.enable")
        await self.call("Page.enable")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._http.close()
        self._process.terminate()
        await asyncio.to_thread(self._process.wait, 60)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Network.responseReceived":
                response = event["params"]["response"]
                self.status[response["url"]] = response["status"]
            elif event["method"] == "Network.webSocketFrameReceived":
                frame = event["params"]["response"]
                if frame["opcode"] == 2:
                    self.received += base64.b64decode(frame["payloadData"]).decode(errors="replace")

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        event = await asyncio.wait_for(answer, _LIMIT_S)
        assert "error" not in event, event
        result: dict[str, Any] = event["result"]
        return result

    async def open(self, address: str) -> None:
        """Open a page."""
        await self.call("Page.navigate", url=address)

    async def press(self, key: str, *, control: bool = False) -> None:
        """Focus the terminal in the page and press a key: one that types a character, Enter or Escape."""
        focus = "document.querySelector('textarea').focus()"
        await self.call("Runtime.evaluate", expression=focus)
        pressed: dict[str, Any] = {"key": key}
        if key in _KEY_CODES or control:
            # The terminal in the page recognises these keys by their codes.
            pressed["windowsVirtualKeyCode"] = _KEY_CODES.get(key) or ord(key.upper())
            pressed["modifiers"] = 2 if control else 0
            await self.call("Input.dispatchKeyEvent", type="rawKeyDown", **pressed)
        else:
            await self.call("Input.dispatchKeyEvent", type="keyDown", text=key, **pressed)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def write(self, text: str) -> None:
        """Type the text, and press Enter."""
        for key in (*text, "Enter"):
            await self.press(key)

    async def text(self) -> str:
        """Return the visible text of the page."""
        result = await self.call("Runtime.evaluate", expression="document.body?.innerText ?? ''")
        return str(result["result"]["value"])

    async def picture(self) -> bytes:
        """Return a screenshot as PNG data."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])

    async def shows(self, text: str) -> None:
        """Wait until the page has received the text, then discard all text received so far."""
        await self.until(lambda: text in self.received, repr(text))
        self.received = ""

    async def until(self, condition: Callable[[], object], description: str) -> None:
        """Wait for a condition."""
        for _ in range(int(_LIMIT_S / 0.1)):
            if condition():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"timed out waiting for {description}: {self.received[-2000:]}")
