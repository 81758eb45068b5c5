"""`appliance drain`: begins a drain and shows how it gets on."""

from __future__ import annotations

import sys
import time

from appliance.actions import DrainService, ResumeService, action_of
from appliance.cli.actions import confirm
from appliance.cli.output import is_terminal, of_count, of_seconds, print_json, printable
from appliance.cli.service import admin_client
from appliance.cli.times import span_s
from appliance.client import AdminClient
from appliance.protocol import DrainStatus

_EVERY_S = 0.5
_LINE_EVERY_S = 10.0
"""Where nobody watches, one line in so long is enough."""
INTERRUPTED = 130
"""As shells say it of a command that Ctrl-C ended."""


def drain(
    run_dir: str | None,
    *,
    model: str | None,
    grace: str,
    queue: bool,
    wait: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Begin it, and (`wait`) follow it to its end; the exit code."""
    parameters = DrainService(model=model, grace_s=span_s(grace, "--grace"), queue=queue)
    if not yes:
        confirm(action_of(parameters), _name(model))
    with admin_client(run_dir) as client:
        status = client.drain(parameters)
        if not wait:
            print_json(status) if as_json else print(line(status))
            return 0
        try:
            last = _Watch(client, status).to_the_end()
        except KeyboardInterrupt:
            return _interrupted(client, model)
    if last is None:
        print(f"{_name(model)} was resumed meanwhile", file=sys.stderr)
        return 1
    print_json(last) if as_json else print(line(last))
    return 1 if last.ended else 0


class _Watch:
    """Follows a drain, in one line that changes, or in a line now and then."""

    def __init__(self, client: AdminClient, status: DrainStatus) -> None:
        self._client = client
        self._status = status
        self._live = is_terminal(sys.stderr)
        self._said_at = 0.0

    def to_the_end(self) -> DrainStatus | None:
        """The last status; None when somebody resumed service."""
        status: DrainStatus | None = self._status
        try:
            while status is not None and status.state != "drained":
                self._say(line(status))
                time.sleep(_EVERY_S)
                drains = self._client.status().drains
                status = next((one for one in drains if one.model == self._status.model), None)
        finally:
            if self._live:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return status

    def _say(self, text: str) -> None:
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._said_at >= _LINE_EVERY_S:
            self._said_at = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def line(status: DrainStatus) -> str:
    """A drain in a line."""
    facts = [f"{status.running:,} running", f"{status.queued:,} queued"]
    if status.queue:
        facts.append(f"{status.held:,} held for later")
    if status.state == "drained":
        facts = [f"after {of_seconds(status.elapsed_s)}", *facts[2:]]
        if status.ended:
            facts.append(f"{of_count(status.ended)} requests were ended when the grace was over")
    elif status.running or status.queued:
        facts.append(f"about {of_count(status.tokens_left)} tokens left")
        eta = "unknown" if status.eta_s is None else of_seconds(status.eta_s)
        left = of_seconds(max(0.0, status.grace_s - status.elapsed_s))
        facts.append(f"done in {eta}, grace ends in {left}")
    return f"{_name(status.model)} {status.state}: {', '.join(facts)}"


def _interrupted(client: AdminClient, model: str | None) -> int:
    """Ctrl-C: the drain goes on unless the person says otherwise."""
    client.close()  # an answer may have been on its way
    name, option = _name(model), "" if model is None else f" --model {model}"
    try:
        answer = ""
        if is_terminal(sys.stdin):
            print("Leave off the drain and take requests again? [y/N] ", end="", file=sys.stderr, flush=True)
            answer = sys.stdin.readline().strip().lower()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    if answer in ("y", "yes"):
        print(printable(client.resume(ResumeService(model=model)).message), file=sys.stderr)
        return 1
    print(f"{name} drains on; take it back with: appliance resume{option}", file=sys.stderr)
    return INTERRUPTED


def _name(model: str | None) -> str:
    return "the service" if model is None else f"model {printable(model)}"
