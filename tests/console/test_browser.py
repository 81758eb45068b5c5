"""Tests of the console in a real browser."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from appliance import calls
from appliance.client import AdminClient
from appliance.pages import AuditQuery
from tests.console.browser import CHROMIUM, Browser
from tests.console.test_web import base, web_console
from tests.system.service import CALL_TIMEOUT_S, service

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


def test_chromium_shows_live_frames_and_performs_no_action(tmp_path: Path) -> None:
    """Try every way to perform an action: a key, the command line, the action menu and the palette."""
    refused = "this console is read-only"

    async def visit(address: str) -> None:
        async with Browser(tmp_path) as browser:
            await browser.open(address)
            await browser.shows("Tokens per second")
            # The displayed values keep changing, so frames continue to arrive without a key press.
            await browser.until(lambda: len(browser.received) > 2000, "more frames")
            overview = await browser.picture()
            await browser.press("4")
            await browser.shows("REQUEST")
            requests = await browser.picture()
            assert requests != overview
            location = await browser.call("Runtime.evaluate", expression="location.href")
            assert "token" not in str(location["result"]["value"])
            await browser.press("X")
            await browser.shows(refused)
            await browser.press(":")
            await browser.shows("ype a command")  # The cursor covers the first letter.
            await browser.write("drain --queue")
            await browser.shows(refused)
            await browser.press("7")
            await browser.shows("TENANT")
            await browser.press("a")
            await browser.shows("tenants.suspend")
            await browser.press("Enter")
            await browser.shows(refused)
            await browser.press("p", control=True)
            await browser.shows("ype to search")
            for key in "Suspend tenant":
                await browser.press(key)
            await browser.shows("No matches found")
            if folder := os.environ.get("KEEP_SCREENSHOTS"):
                (Path(folder) / "browser-overview.png").write_bytes(overview)
                (Path(folder) / "browser-requests.png").write_bytes(requests)
                (Path(folder) / "browser-palette.png").write_bytes(await browser.picture())
            await browser.press("Escape")
            await browser.shows("TENANT")  # Closing the palette redraws the screen.
            await browser.press("4")
            await browser.shows("REQUEST")
            # The page does not load anything from other servers.
            hosts = {url.split("/")[2] for url in browser.status if url.startswith("http")}
            assert hosts == {base(address).split("/")[2]}

    with service() as running, AdminClient(running.run_dir, CALL_TIMEOUT_S) as client:

        def state() -> tuple[object, ...]:
            status = client.status()
            return status.state, status.drains, client.tenants(), client.call(calls.audit(AuditQuery()))

        before = state()
        with web_console("--run-dir", str(running.run_dir)) as address:
            asyncio.run(visit(address))
        assert state() == before
