"""Implements `appliance console` and `appliance top`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.cli.console_commands import Theme
from appliance.cli.failure import CommandLineError, as_failure
from appliance.cli.output import is_terminal
from appliance.cli.service import admin_key, find_run_dir
from appliance.cli.times import moment

if TYPE_CHECKING:
    from console.source import SnapshotSource

_UNLIMITED = (120, 200)
"""Size of a frame, in columns and lines, when standard output is not a terminal."""


def open_console(
    run_dir: str | None,
    *,
    demo: bool,
    replay: str | None,
    write: bool,
    theme: Theme | None,
    keys: str | None = None,
    web: bool = False,
    port: int = 0,
    mouse: bool = True,
) -> int:
    """Run the console until the operator quits. Return the exit code."""
    chosen: Theme = theme or ("mono" if os.environ.get("NO_COLOR") else "dark")
    if web:
        if not mouse:
            raise CommandLineError("--no-mouse applies only to terminals: leave it out with --web")
        return _serve(run_dir, demo=demo, replay=replay, write=write, theme=chosen, keys=keys, port=port)
    _check_streams()
    from console.run import run

    source = _source(run_dir, demo=demo, replay=replay, at=None, write=write)
    return run(source, write=write, theme=chosen, keys=keys, mouse=mouse)


def _check_streams() -> None:
    """Raise CommandLineError unless standard input, standard output and standard error are all terminals."""
    streams = {"input": sys.stdin, "output": sys.stdout, "error": sys.stderr}
    others = [f"standard {name}" for name, stream in streams.items() if not is_terminal(stream)]
    if others:
        verb = "is" if len(others) == 1 else "are"
        raise CommandLineError(
            f"the console needs a terminal, but {' and '.join(others)} {verb} redirected or closed: run it "
            "without redirections, or use appliance top, which prints a single frame"
        )


def _serve(
    run_dir: str | None,
    *,
    demo: bool,
    replay: str | None,
    write: bool,
    theme: Theme,
    keys: str | None,
    port: int,
) -> int:
    if write:
        raise CommandLineError("--web is always read-only: leave out --write")
    if replay is not None:
        raise CommandLineError("--web shows a running service: leave out --replay")
    from console.web import WebError, serve

    source = ["--demo"] if demo else ["--run-dir", str(find_run_dir(run_dir).absolute())]
    with as_failure(WebError):
        named = [] if keys is None else ["--keys", str(Path(keys).absolute())]
        return serve([*source, "--theme", theme, *named], port)


def print_frame(
    run_dir: str | None, *, screen: str, demo: bool, replay: str | None, at: str | None, as_json: bool
) -> None:
    """Print one frame of the console. Raises Failure if the service does not answer."""
    from console.source import SourceError
    from console.top import top_json, top_lines

    source = _source(run_dir, demo=demo, replay=replay, at=at, write=False)
    with as_failure(SourceError):
        if as_json:
            print(top_json(source).decode())
            return
        width, height = shutil.get_terminal_size(_UNLIMITED) if is_terminal(sys.stdout) else _UNLIMITED
        for line in top_lines(source, screen, width, height - 1):
            print(line)


def _source(
    run_dir: str | None, *, demo: bool, replay: str | None, at: str | None, write: bool
) -> SnapshotSource:
    past = replay is not None or at is not None
    if demo and past:
        raise CommandLineError("the demo has no recorded history: leave out --demo, or --replay and --at")
    if demo:
        from console.fake import FakeSource

        return FakeSource()
    if past:
        return _past(run_dir, replay, at)
    from console.live import LiveSource

    return LiveSource(find_run_dir(run_dir), write=write, key=admin_key())


def _past(run_dir: str | None, replay: str | None, at: str | None) -> SnapshotSource:
    from console.replay import ReplaySource
    from console.source import SourceError
    from console.stored_recording import file_recording, service_recording

    begin = None if at is None else moment(at, "--at", ahead=False)
    with as_failure(SourceError):
        recording = (
            file_recording(Path(replay).absolute())
            if replay is not None
            else service_recording(find_run_dir(run_dir), admin_key())
        )
    return ReplaySource(recording, begin)
