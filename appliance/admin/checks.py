"""Admin API routes for checks that take seconds: verifying the audit chain and running `appliance doctor`.
Both require the `read` scope."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from appliance.admin.bodies import error_answer
from appliance.http.openapi import Operation
from appliance.monitoring.check_process import Check, CheckInput
from appliance.monitoring.findings import Examination
from appliance.pages import ChainReport
from appliance.protocol import ErrorBody
from appliance.scopes import ScopedRoute
from appliance.settings import Settings
from engine.client import module_command, module_environment

MAX_CHECK_S = 120.0
"""Time limit for a check, in seconds."""
FINDINGS_KEPT_S = 30.0
"""How long a finished check's findings are reused, in seconds."""
_ERRORS = dict.fromkeys((401, 403, 503), ErrorBody)
_COMMANDS: dict[Check, str] = {"audit": "appliance audit verify", "findings": "appliance doctor"}
"""The commands that run the same checks without the service."""


class CheckError(Exception):
    """Raised if a check fails or takes too long."""


class CheckRunner:
    """Runs checks in separate processes, one at a time. A caller who requests a check that is already running
    or waiting gets the result of that run. Must be used on the event loop thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        module: str = "appliance.monitoring.check_process",
        limit_s: float = MAX_CHECK_S,
    ) -> None:
        """`module` is the Python module to run in the process. `limit_s` is the time limit per check, in
        seconds."""
        self._settings = settings
        self._module = module
        self._limit_s = limit_s
        self._turn = asyncio.Lock()
        self._running: dict[Check, asyncio.Task[bytes]] = {}
        self._findings: bytes | None = None
        self._findings_at = 0.0
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def close(self) -> None:
        """Kill any running check, because the service cannot exit while one is running."""
        with self._starting:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    async def verify(self) -> bytes:
        """Verify the audit chain and return the report as JSON. Raises CheckError if the check cannot run or
        takes too long."""
        return await self._shared("audit")

    async def findings(self) -> bytes:
        """Return the findings of `appliance doctor`, at most 30 s old, as JSON. Raises CheckError if the
        check cannot run or takes too long."""
        if self._findings is None or time.monotonic() - self._findings_at >= FINDINGS_KEPT_S:
            self._findings = await self._shared("findings")
            self._findings_at = time.monotonic()
        return self._findings

    async def _shared(self, check: Check) -> bytes:
        task = self._running.get(check)
        if task is None:
            task = self._running[check] = asyncio.create_task(self._checked(check))
            task.add_done_callback(lambda _: self._running.pop(check))
        # If one caller disconnects, the check must continue for the others.
        return await asyncio.shield(task)

    async def _checked(self, check: Check) -> bytes:
        settings = self._settings()
        given = CheckInput(
            check=check,
            run_dir=settings.run_dir,
            state_dir=settings.state_dir,
            config=settings.config_file or None,
        )
        async with self._turn:
            return await asyncio.to_thread(self._in_process, given)

    def _in_process(self, given: CheckInput) -> bytes:
        """Run a check in a new process and return the process's output. Raises CheckError if it cannot run or
        takes too long."""
        elsewhere = f"run {_COMMANDS[given.check]} on the service's machine"
        try:
            with self._starting:
                if self._closed:
                    raise CheckError("the service is stopping")
                self._process = subprocess.Popen(
                    module_command(self._module),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=module_environment(),
                )
            with self._process as process:
                try:
                    output, errors = process.communicate(msgspec.json.encode(given), self._limit_s)
                except subprocess.TimeoutExpired as error:
                    process.kill()
                    raise CheckError(
                        f"the check took longer than {self._limit_s:g} s: {elsewhere}"
                    ) from error
        except OSError as error:
            raise CheckError(f"the check could not be started ({error}): {elsewhere}") from error
        if process.returncode != 0:
            lines = errors.decode(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line), f"exit code {process.returncode}")
            raise CheckError(f"the check failed ({reason}): {elsewhere}")
        return output


def examination_routes(checks: CheckRunner) -> list[ScopedRoute]:
    """Return the routes that run the checks."""

    def route(
        path: str, check: Callable[[], Any], answer: Any, summary: str, description: str
    ) -> ScopedRoute:
        async def show(request: Request) -> Response:
            try:
                return Response(await check(), media_type="application/json")
            except CheckError as error:
                return error_answer(503, str(error))

        operation = Operation(summary, answer=answer, description=description, errors=_ERRORS)
        return ScopedRoute("GET", path, show, wanted="read", operation=operation)

    return [
        route(
            "/audit/verify",
            checks.verify,
            ChainReport,
            "Verify the audit chain against the chain heads recorded in the state directory",
            "Verification runs in a separate process and may take seconds. "
            "Concurrent callers share the result of one run.",
        ),
        route(
            "/findings",
            checks.findings,
            Examination,
            "Return the findings of `appliance doctor` on the service's machine",
            f"The checks run in a separate process and may take seconds. Findings may be up to "
            f"{FINDINGS_KEPT_S:g} s old.",
        ),
    ]
