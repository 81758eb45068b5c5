"""Implements `appliance drain`, which starts a drain and shows its progress."""

from __future__ import annotations

import sys
import time

from appliance.actions import action_of
from appliance.actions.parameters import DrainService, ResumeService
from appliance.cli.actions import confirm
from appliance.cli.output import (
    is_terminal,
    of_count,
    of_seconds,
    print_json,
    printable,
    shorten,
    terminal_width,
)
from appliance.cli.service import admin_client
from appliance.client import AdminClient
from appliance.protocol import DrainStatus

_EVERY_S = 0.5
_LINE_EVERY_S = 10.0
"""Interval between progress lines, in seconds, if standard error is not a terminal."""
_DOES = {"announced": "reports not ready", "draining": "is draining", "drained": "is drained"}
_CTRL_C_CELLS = 3
"""Columns left free for the ^C that the terminal echoes, because a line that wraps cannot be overwritten."""
INTERRUPTED = 130
"""Exit code that shells use for a command stopped by Ctrl-C."""


def drain(
    run_dir: str | None,
    parameters: DrainService,
    *,
    wait: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Start a drain and return the exit code. If `wait` is set, show its progress until it has ended."""
    action, model = action_of(parameters), parameters.model
    confirm(action, printable(action.target_name(parameters)), yes=yes)
    with admin_client(run_dir) as client:
        status = client.drain(parameters)
        if not wait:
            print_json(status) if as_json else print(line(status))
            return 0
        try:
            last = _Watch(client, status, as_json).to_the_end()
        except KeyboardInterrupt:
            return _interrupted(client, model)
    if last is None:
        print(f"{_name(model)}: the drain was cancelled by another operator", file=sys.stderr)
        return 1
    print_json(last, line=True) if as_json else print(line(last))
    return 1 if last.ended else 0


class _Watch:
    """Shows a drain's progress: on a terminal as a line that is updated, otherwise as a new line every 10 s,
    or as lines of JSON."""

    def __init__(self, client: AdminClient, status: DrainStatus, as_json: bool) -> None:
        self._client = client
        self._status = status
        self._as_json = as_json
        self._live = is_terminal(sys.stderr) and not as_json
        self._said_at = 0.0

    def to_the_end(self) -> DrainStatus | None:
        """Show the progress until the drain ends. Return the final status, or None if an operator resumed the
        service."""
        status: DrainStatus | None = self._status
        try:
            while status is not None and status.state != "drained":
                self._say(status)
                time.sleep(_EVERY_S)
                drains = self._client.status().drains
                status = next((one for one in drains if one.model == self._status.model), None)
        finally:
            if self._live:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return status

    def _say(self, status: DrainStatus) -> None:
        if self._as_json:
            print_json(status, line=True)
        elif self._live:
            text = shorten(line(status), (terminal_width(sys.stderr) or 80) - _CTRL_C_CELLS)
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._said_at >= _LINE_EVERY_S:
            self._said_at = time.monotonic()
            print(line(status), file=sys.stderr, flush=True)


def line(status: DrainStatus) -> str:
    """Format a drain's progress as one line of text."""
    held = [f"{of_count(status.held)} held until service resumes"] if status.queue else []
    if status.state == "drained":
        facts = [f"took {of_seconds(status.elapsed_s)}", *held]
        if status.ended:
            facts.append(
                f"{of_count(status.ended)} requests did not finish within the grace period and were stopped"
            )
    else:
        facts = [f"{of_count(status.running)} running", f"{of_count(status.queued)} queued", *held]
        if status.running or status.queued:
            facts.append(f"ETA {'unknown' if status.eta_s is None else of_seconds(status.eta_s)}")
            facts.append(f"grace left {of_seconds(status.grace_left_s)}")
            facts.append(f"about {of_count(status.tokens_left)} tokens left to generate")
    return f"{_name(status.model)} {_DOES[status.state]}: {', '.join(facts)}"


def _interrupted(client: AdminClient, model: str | None) -> int:
    """After Ctrl-C, ask whether to cancel the drain. If the answer is no, the drain continues."""
    name, option = _name(model), "" if model is None else f" --model {model}"
    try:
        answer = ""
        if is_terminal(sys.stdin):
            print("Cancel the drain and accept requests again? [y/N] ", end="", file=sys.stderr, flush=True)
            answer = sys.stdin.readline().strip().lower()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    if answer in ("y", "yes"):
        print(printable(client.resume(ResumeService(model=model)).message), file=sys.stderr)
        return 1
    print(f"{name} is still draining; cancel the drain with: appliance resume{option}", file=sys.stderr)
    return INTERRUPTED


def _name(model: str | None) -> str:
    return "the service" if model is None else f"model {printable(model)}"
