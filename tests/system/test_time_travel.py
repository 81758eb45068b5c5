"""Tests of time travel on a real service: a replica is killed under load while a console is open. Every
screen can then be reproduced for each second, both from the service and from an incident file on a machine
without the service. The recorded incident raises one alert."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import pytest

from appliance.actions.parameters import CreateTenant
from appliance.history.block_frames import coarse
from appliance.history.pages import TelemetryColumns
from appliance.snapshot import BlockMap, Snapshot, with_blocks
from console.history import History
from console.lines import plain
from console.live import LiveSource
from console.recordings import RecordedPast
from console.replay import ReplaySource
from console.screens.registry import all_views, alternate_views
from console.session import ConsoleSession
from console.source import SnapshotSource
from console.stored_recording import file_recording, service_recording
from console.timeline import PastState
from tests.console.test_schema import undelivered
from tests.system.commands import run_appliance
from tests.system.service import Service, service
from tests.system.test_deaths import Stream, stream_until

pytestmark = pytest.mark.system

VIEWS = [*all_views(), *alternate_views()]
SCREENS = tuple(view.name for view in VIEWS if not view.required_lists())
"""The screens that show snapshots."""
NOT_RECORDED = {"usage", "keys", "silences"}
"""The screens whose lists are not recorded."""
LISTS = {
    view.name: view.required_lists()
    for view in VIEWS
    if view.required_lists() and view.name not in NOT_RECORDED
}
"""The screens that show recorded lists, with the names of their lists."""
SHOW_BLOCKS = tuple(view.name for view in VIEWS if view.reads_blocks)
"""The screens that show KV blocks. KV blocks are read separately from the snapshots."""
SIZES = ((120, 36), (80, 20))
Frames = dict[float, dict[str, list[str]]]
"""The content of all screens at both sizes, by the time of the snapshot."""
Maps = dict[float, dict[str, BlockMap]]
"""The KV blocks of each replica, by the time of the snapshot."""

_AFTER_RESTART = 5
_MAX_SECONDS = 300

UNKNOWN = {"kv[].hit_rate", "kv[].hit_window_s", "batches[].mixed_step_ms", "batches[].mixed_idle_us"}
"""Fields that have no value while no step contains prompts."""


def bodies(session: ConsoleSession, screens: Sequence[str] = SCREENS) -> dict[str, list[str]]:
    """Return the content of the screens below the header and the tabs."""
    shown = {}
    for name in screens:
        session.run(f"screen {name}")
        for width, height in SIZES:
            rows = session.view.render(session.context, width, height)
            shown[f"{name} {width}x{height}"] = [plain(row) for row in rows]
    return shown


async def watch(running: Service) -> tuple[Frames, Maps, list[Snapshot]]:
    """Show the service and its KV blocks in a console once per second, until the killed replica is ready
    again. Return the screens, the KV blocks and the snapshots."""
    source = LiveSource(running.run_dir, interval_s=1.0)
    source.reads_blocks = True
    session, frames, maps, seen = ConsoleSession(source), Frames(), Maps(), list[Snapshot]()
    pid = after = 0
    try:
        for number in range(_MAX_SECONDS):
            snapshot = await source.next()
            # A recorded map of KV blocks is limited in size, so use the same coarse map here.
            caches = {one.replica: coarse(one.blocks) for one in snapshot.kv if one.blocks is not None}
            session.accept(with_blocks(snapshot, caches))
            frames[snapshot.at], maps[snapshot.at] = bodies(session), caches
            seen.append(msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot))
            replica = snapshot.models[0].replicas[0]
            if not pid and number >= 3 and sum(one.phase == "decode" for one in snapshot.requests) >= 2:
                pid = replica.pids[0]
                os.kill(pid, signal.SIGKILL)
            if pid and replica.restarts and replica.state == "ready":
                after += 1
                if after == _AFTER_RESTART:
                    return frames, maps, seen
        raise AssertionError(f"the replica was not ready again after {_MAX_SECONDS} s")
    finally:
        await source.close()


class LiveSeconds(History):
    """A recorded history without the seconds that the live console did not receive, either because they
    precede the console or because the stream of a busy service skipped them."""

    def __init__(self, times: Collection[float]) -> None:
        super().__init__()
        self._times = times

    def add_columns(self, columns: TelemetryColumns) -> None:
        rows = [row for row, at in enumerate(columns.at) if min(abs(at - one) for one in self._times) < 0.001]
        super().add_columns(
            TelemetryColumns(
                resolution_s=columns.resolution_s,
                at=[columns.at[row] for row in rows],
                metrics={name: [values[row] for row in rows] for name, values in columns.metrics.items()},
            )
        )


async def replay(recording: RecordedPast, live: Frames, maps: Maps) -> tuple[Frames, int]:
    """Replay the recorded samples in a console. Return the content of its screens, and the number of seconds
    in which the recorded KV blocks equal those of the live console. A live console reads KV blocks and
    snapshots separately, so it may show blocks that no sample contains. Screens then show its blocks."""
    times, same = sorted(live), 0
    source, frames = ReplaySource(recording, times[0] + 0.0005), Frames()
    source.history = LiveSeconds(times)
    session = ConsoleSession(source)
    snapshot = await source.next()
    while True:
        assert source.instant is not None and source.instant.resolution_s == 1 and source.instant.details
        session.show_past(PastState(source.instant), source.history)
        frames[snapshot.at] = bodies(session)
        if frames[snapshot.at] == live.get(snapshot.at):
            same += 1
        elif snapshot.at in live:
            snapshot.kv = [msgspec.structs.replace(one, blocks=None) for one in snapshot.kv]
            with_blocks(snapshot, maps[snapshot.at])
            session.show_past(PastState(source.instant), source.history)
            frames[snapshot.at] |= bodies(session, SHOW_BLOCKS)
        if snapshot.at >= times[-1]:
            return frames, same
        snapshot = await source.step(1)


def compare(live: Frames, maps: Maps, recording: RecordedPast) -> None:
    """Assert that the recorded screens equal those of the live console for every second that the live console
    showed."""
    past, same = asyncio.run(replay(recording, live, maps))
    assert set(live) <= set(past), sorted(set(live) - set(past))
    for at, screens in live.items():
        for name, rows in screens.items():
            assert past[at][name] == rows, f"{name} at {at}"
    assert same, "no second shows the blocks that were recorded in it"


async def show_lists(session: ConsoleSession, source: SnapshotSource) -> dict[str, list[str]]:
    """Read the lists, and return the content of the screens that show them."""
    shown = {}
    for screen, names in LISTS.items():
        session.run(f"screen {screen}")
        for name in names:
            session.take_rows(name, await source.rows(name), context=session.context)
        for width, height in SIZES:
            rows = session.view.render(session.context, width, height)
            shown[f"{screen} {width}x{height}"] = [plain(row) for row in rows]
    return shown


async def watch_lists(running: Service) -> tuple[float, dict[str, list[str]]]:
    """Return the time of a snapshot of an idle service, and the content of the screens that show lists. The
    lists are the same before and after that time."""
    source = LiveSource(running.run_dir, interval_s=1.0)
    snapshot = await source.next()

    async def shown() -> dict[str, list[str]]:
        # In a new session, the cursor is on the first row, as in the replay.
        session = ConsoleSession(source)
        session.accept(snapshot)
        return await show_lists(session, source)

    try:
        for _ in range(_MAX_SECONDS):
            before, read_at = await shown(), time.time()
            # A snapshot that was already on its way while the lists were read may lack their newest rows.
            while (snapshot := await source.next()).at <= read_at:
                pass
            after = await shown()
            if without_heading(before) == without_heading(after):
                return snapshot.at, after
        raise AssertionError("the lists of an idle service keep changing")
    finally:
        await source.close()


def without_heading(screens: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the screens without their heading rows, which show values of the snapshot."""
    return {name: rows[1:] for name, rows in screens.items()}


async def replay_lists(recording: RecordedPast, at: float) -> dict[str, list[str]]:
    """Return the replayed screens that show lists, at a recorded time. The result is empty if that time has
    not been recorded yet."""
    source = ReplaySource(recording, at + 0.0005)
    session = ConsoleSession(source)
    if (await source.next()).at != at or source.instant is None:
        return {}
    session.show_past(PastState(source.instant), source.history)
    return await show_lists(session, source)


def export(running: Service, path: Path, since: float) -> str:
    age = f"{time.time() - since:.0f}s"
    done = running.run("history", "export", str(path), "--since", age)
    assert done.returncode == 0, done.stderr
    return done.stdout


def raised_alerts(path: Path) -> list[str]:
    """Evaluate the built-in alert rules on a recording, and return the rules that raise an alert."""
    done = run_appliance("alerts", "test", "built-in", "--on", path, "--json")
    assert done.returncode == 0, done.stderr
    return [one["rule"] for one in json.loads(done.stdout)["transitions"] if one["event"] == "raised"]


def found(frames: Frames, screen: str, wanted: Callable[[str], bool]) -> bool:
    return any(wanted(row) for screens in frames.values() for row in screens[f"{screen} 120x36"])


def test_replayed_screens_of_a_replicas_death_equal_the_live_screens(tmp_path: Path) -> None:
    path = tmp_path / "incident.db"
    # A forked replica can be ready again before any sample shows that it was down.
    with service(kind=Service) as running:
        running.act(CreateTenant(name="witness"))
        began = time.time()
        Stream(running, max_tokens=8).join(120)
        stop = threading.Event()
        clients = [threading.Thread(target=stream_until, args=(stop, running), daemon=True) for _ in range(6)]
        for client in clients:
            client.start()
        live, maps, seen = asyncio.run(watch(running))
        stop.set()
        missing = undelivered(seen, ("batches[].", "kv[].", "models[].", "queue.", "latency."))
        assert missing <= UNKNOWN
        assert found(live, "models", lambda row: "restarting" in row or "loading" in row)
        assert found(live, "requests", lambda row: "D decode" in row)

        assert found(live, "kv", lambda row: "1 cell = " in row)
        running.wait_until(
            lambda: not any(database["lag_rows"] for database in running.status()["databases"]),
            60,
            "the newest sample to be recorded",
        )
        compare(live, maps, service_recording(running.run_dir, None))
        for client in clients:
            client.join(120)
        running.wait_until(lambda: not running.status()["queue"]["running"], 120, "the end of the requests")
        idle_at, idle = asyncio.run(watch_lists(running))
        assert any("witness" in row for row in idle["audit 120x36"])
        assert any("SIGKILL" in row for row in idle["logs 120x36"])
        assert any("length" in row for row in idle["finished 120x36"])

        def recorded() -> bool:
            # Log lines and audit rows are written to the databases in the background.
            return asyncio.run(replay_lists(service_recording(running.run_dir, None), idle_at)) == idle

        running.wait_until(recorded, 60, "the lists in the recording")
        printed = export(running, path, since=began - 60)
        assert "samples" in printed and "log lines" in printed
    # The service has stopped and its databases are deleted.
    assert not running.state_dir.exists()
    recording = file_recording(path)
    compare(live, maps, recording)
    assert without_heading(asyncio.run(replay_lists(recording, idle_at))) == without_heading(idle)
    # On a busy machine, other rules may apply too, for example because a front reports late.
    raised = set(raised_alerts(path))
    assert "replica-down" in raised and not raised & {"replica-failed", "replica-crash-loop", "model-failed"}
    top = run_appliance("top", "--replay", path, "--screen", "requests")
    assert top.returncode == 0 and "HISTORY" in top.stdout, top.stderr
