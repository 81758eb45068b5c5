"""Tests of replays from a history database and from an incident file. The screens must look as they did live
in the recorded seconds."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from appliance.history.block_frames import coarse
from appliance.history.incident_export import export_incident
from appliance.history.sources import FilePast, PastError
from appliance.snapshot import Snapshot
from console.fake import FIXED_TIME
from console.lines import plain
from console.replay import ReplaySource
from console.screens.registry import all_views
from console.session import ConsoleSession
from console.source import ListName, SourceError
from console.stored_recording import StoredRecording, file_recording
from console.timeline import PastState
from store.control import ControlStore
from tests.audit_trail import forge
from tests.console.frames import SIZES, source
from tests.console.recorded import fake_seconds, record

_SECONDS = 40
_SCREENS = tuple(view.name for view in all_views() if not view.required_lists())
"""The screens that show snapshots. `tests/system/test_time_travel.py` also compares the other screens."""


@pytest.fixture(scope="module")
def seconds() -> list[Snapshot]:
    return fake_seconds(_SECONDS)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory, seconds: list[Snapshot]) -> Path:
    return record(tmp_path_factory.mktemp("past") / "history.db", seconds)


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory, history: Path) -> Path:
    """Return an incident file that contains the second half of the history."""
    path = tmp_path_factory.mktemp("elsewhere") / "incident.db"
    past = FilePast(history)
    export_incident(past, FIXED_TIME + _SECONDS / 2, FIXED_TIME + _SECONDS + 1, path)
    past.close()
    return path


def bodies(session: ConsoleSession, size: tuple[int, int]) -> dict[str, list[str]]:
    """Return the bodies of all screens that show snapshots, without the parts that differ between the live
    service and its recorded history."""
    shown = {}
    for name in _SCREENS:
        session.run(f"screen {name}")
        width, height = size
        shown[name] = [plain(row) for row in session.view.render(session.context, width, height - 5)]
    return shown


def live_bodies(seconds: list[Snapshot], size: tuple[int, int]) -> list[dict[str, list[str]]]:
    session, found = ConsoleSession(source()), []
    for one in seconds:
        # A recorded map has a limited number of cells.
        caches = []
        for cache in one.kv:
            assert cache.blocks is not None
            caches.append(msgspec.structs.replace(cache, blocks=coarse(cache.blocks)))
        session.accept(msgspec.structs.replace(one, kv=caches))
        found.append(bodies(session, size))
    return found


def replayed_bodies(path: Path, count: int, size: tuple[int, int]) -> list[dict[str, list[str]]]:
    async def play() -> list[dict[str, list[str]]]:
        recording = file_recording(path)
        replay, found = ReplaySource(recording, FIXED_TIME + 1.5 + _SECONDS - count), []
        session = ConsoleSession(replay)
        await replay.next()
        for number in range(count):
            if number:
                await replay.step(1)
            assert replay.instant is not None
            session.show_past(PastState(replay.instant), replay.history)
            found.append(bodies(session, size))
        await recording.close()
        return found

    return asyncio.run(play())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_every_replayed_second_has_the_screens_of_the_recorded_second(
    seconds: list[Snapshot], history: Path, size: tuple[int, int]
) -> None:
    live = live_bodies(seconds, size)

    past = replayed_bodies(history, _SECONDS, size)
    for number, (one, other) in enumerate(zip(live, past, strict=True)):
        assert other == one, f"second {number}"


def test_an_incident_file_has_the_same_screens_on_another_machine(history: Path, incident: Path) -> None:
    count = _SECONDS // 2 - 1
    alone, whole = (replayed_bodies(path, count, (120, 40)) for path in (incident, history))
    for one, other in zip(alone, whole, strict=True):
        for name in set(_SCREENS) - {"overview", "batches", "gpus"}:
            assert one[name] == other[name]
        # In the incident file, the charts begin at the start of the slice, so only the last ten lines must be
        # equal.
        assert one["overview"][-10:] == other["overview"][-10:]


def test_a_file_begins_with_its_incident_and_a_history_with_its_newest_sample(
    history: Path, incident: Path
) -> None:
    async def first(path: Path) -> float:
        replay = ReplaySource(file_recording(path))
        at = (await replay.next()).at
        await replay.close()
        return at - FIXED_TIME

    assert asyncio.run(first(incident)) == pytest.approx(_SECONDS / 2, abs=1.0)
    assert asyncio.run(first(history)) == pytest.approx(_SECONDS, abs=1.0)


def test_stepping_ends_at_both_ends_and_playing_skips_gaps(tmp_path: Path) -> None:
    seconds = fake_seconds(30)
    for one in seconds[25:]:
        one.at += 200.0
    path = record(tmp_path / "history.db", [*seconds[:5], *seconds[25:]])

    async def walk() -> None:
        replay = ReplaySource(file_recording(path), seconds[3].at)
        await replay.next()
        for expected in (4, 25):
            assert (await replay.step(1)).at == pytest.approx(seconds[expected].at, abs=0.001)
        assert (await replay.step(-1)).at == pytest.approx(seconds[4].at, abs=0.001)
        replay.speed = 10
        assert (await replay.play()).at == pytest.approx(seconds[25].at, abs=0.001)
        for _ in range(4):
            await replay.step(1)
        with pytest.raises(SourceError, match="newest"):
            await replay.step(1)
        await replay.seek(seconds[0].at)
        with pytest.raises(SourceError, match="oldest"):
            await replay.step(-1)
        with pytest.raises(SourceError, match="nothing was recorded at"):
            await replay.seek(seconds[15].at + 100.0)
        assert replay.instant is not None and replay.instant.at == pytest.approx(seconds[0].at, abs=0.001)
        await replay.close()

    asyncio.run(walk())


def test_playing_is_as_fast_as_chosen(history: Path, seconds: list[Snapshot]) -> None:
    async def play() -> list[float]:
        replay = ReplaySource(file_recording(history), seconds[0].at + 0.001, interval_s=0.5)
        await replay.next()
        found = []
        for speed in (1, 1, 10, 10):
            replay.speed = speed
            found.append((await replay.play()).at - seconds[0].at)
        await replay.close()
        return found

    assert asyncio.run(play()) == pytest.approx([0, 1, 6, 11], abs=0.001)


def test_the_charts_of_a_step_back_end_at_the_displayed_time(history: Path, seconds: list[Snapshot]) -> None:
    async def walk() -> None:
        replay = ReplaySource(file_recording(history), seconds[-1].at + 0.001)
        await replay.next()
        assert len(replay.history.points) == _SECONDS
        await replay.seek(seconds[9].at + 0.001)
        assert len(replay.history.points) == 10
        assert replay.history.points[-1].at == pytest.approx(seconds[9].at, abs=0.001)
        assert all(len(slices) == 10 for slices in replay.history.batches.values())
        await replay.close()

    asyncio.run(walk())


def test_any_second_opens_in_under_300_ms(history: Path, seconds: list[Snapshot]) -> None:
    """The limit applies to an otherwise idle machine, so the test measures CPU time, and only the fastest of
    several attempts counts."""

    async def opened() -> float:
        replay = ReplaySource(file_recording(history), seconds[5].at)
        taken = []
        for second in (9, 20, 31, 12, 38):
            began = time.process_time()
            await replay.seek(seconds[second].at + 0.001)
            taken.append(time.process_time() - began)
        await replay.close()
        return min(taken)

    assert asyncio.run(opened()) < 0.3


def test_history_cannot_be_changed(history: Path) -> None:
    from appliance.actions.parameters import ResumeService

    replay = ReplaySource(file_recording(history))
    with pytest.raises(SourceError, match="which cannot be changed"):
        asyncio.run(replay.act(ResumeService()))


def test_a_list_that_is_not_recorded_says_where_it_can_be_found(history: Path) -> None:
    async def read() -> None:
        replay = ReplaySource(file_recording(history))
        await replay.next()
        for name, reason in (
            ("logs", "journal"),
            ("settings", "does not include"),
            ("silences", "keys and silences changed"),
            ("audit", "control.db"),
        ):
            with pytest.raises(SourceError, match=reason):
                await replay.rows(name)  # type: ignore[arg-type]
        await replay.close()

    asyncio.run(read())


def audit_screen(path: Path) -> str:
    """Return the screen Audit of a file as text, in a terminal of 100 columns."""
    replay = ReplaySource(file_recording(path))

    async def read() -> str:
        session = ConsoleSession(replay)
        session.accept(await replay.next())
        session.run("screen audit")
        try:
            session.take_rows("audit", await replay.rows("audit"))
        except SourceError as error:
            session.take_rows("audit", (), str(error))
        await replay.close()
        return " ".join(plain(row).strip() for row in session.view.render(session.context, 100, 30))

    return asyncio.run(read())


def test_an_incident_file_without_actions_in_its_period_says_so(incident: Path, tmp_path: Path) -> None:
    path = tmp_path / "incident.db"
    shutil.copy(incident, path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM incident WHERE name LIKE 'without %'")
        connection.commit()
    shown = audit_screen(path)
    assert "this incident file contains no actions from its start (" in shown
    assert "the service recorded none in this period" in shown
    assert "chain of the service:" in shown and "no actions have been recorded" not in shown


def test_an_incident_file_says_why_the_export_could_not_read_the_actions(incident: Path) -> None:
    shown = audit_screen(incident)
    assert "no operators' actions, because the export could not read them: " in shown
    assert "control.db does not exist" in shown and "no actions have been recorded" not in shown


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "no recorded history"), (b"x" * 5000, "not a database")]
)
def test_a_file_that_is_not_a_recording_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=reason):
        file_recording(path)
    with pytest.raises(SourceError, match="is not a file"):
        file_recording(tmp_path / "missing.db")


@pytest.mark.parametrize("change", ["DELETE FROM incident", "UPDATE incident SET value = 'x'"])
def test_an_incident_file_without_a_valid_start_time_is_refused(
    incident: Path, tmp_path: Path, change: str
) -> None:
    path = tmp_path / "incident.db"
    shutil.copy(incident, path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"{change} WHERE name = 'since'")
        connection.commit()
    with pytest.raises(SourceError, match=r"incident\.db has no valid start time .*: export it again"):
        file_recording(path)


@pytest.mark.parametrize(
    ("change", "list_name"),
    [
        ("UPDATE telemetry_details SET document = x'00'", None),
        ("UPDATE incident_lines SET document = '{\"level\": 1}'", "logs"),
        ("UPDATE incident_actions SET document = '{\"actor\": 1}'", "audit"),
    ],
)
def test_a_file_that_another_version_wrote_is_refused_without_ending_the_console(
    incident: Path, tmp_path: Path, change: str, list_name: ListName | None
) -> None:
    """The console handles a SourceError. Any other error would end it."""
    path = tmp_path / "incident.db"
    shutil.copy(incident, path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM incident WHERE name LIKE 'without %'")
        connection.execute("INSERT INTO incident_lines (at, number, document) VALUES (0, 1, '{}')")
        connection.execute("INSERT INTO incident_actions (at, seq, document) VALUES (0, 1, '{}')")
        connection.execute(change)
        connection.commit()

    async def read() -> None:
        replay = ReplaySource(file_recording(path))
        if list_name is not None:
            await replay.next()
        with pytest.raises(SourceError, match="different format"):
            await (replay.next() if list_name is None else replay.rows(list_name))
        await replay.close()

    asyncio.run(read())


def test_a_slice_without_samples_or_too_long_is_refused(history: Path, tmp_path: Path) -> None:
    past, path = FilePast(history), tmp_path / "incident.db"
    for since, until, reason in (
        (0.0, 1000.0, "nothing was recorded in this time span"),
        (0.0, 100_000.0, "at most 24 h"),
        (9.0, 9.0, "ends before it begins"),
    ):
        with pytest.raises(PastError, match=reason):
            export_incident(past, since, until, path)
    assert list(tmp_path.iterdir()) == []
    past.close()


def test_an_action_whose_time_was_tampered_with_is_exported_and_does_not_hide_the_timeline(
    history: Path, tmp_path: Path
) -> None:
    shutil.copy(history, tmp_path)
    control = ControlStore(tmp_path / "control.db")
    control.start()
    control.trail.conclude("uid:0", "drain", {}, "ok").result(60)
    control.close()
    at = datetime.fromtimestamp(FIXED_TIME + 10, UTC).isoformat()
    forge(tmp_path, f"UPDATE audit SET at = '{at}?'")
    past = FilePast(tmp_path / history.name)
    done = export_incident(past, FIXED_TIME, FIXED_TIME + 60, tmp_path / "incident.db")
    assert (done.actions, done.notes[0][:17]) == (1, "without log lines")
    timeline = asyncio.run(StoredRecording(past).timeline(FIXED_TIME, FIXED_TIME + 60))
    assert len(timeline.values) == _SECONDS and (timeline.marks, timeline.note) == ([], "")
    past.close()


def test_a_recording_wraps_any_source(history: Path) -> None:
    recording = StoredRecording(FilePast(history))
    timeline = asyncio.run(recording.timeline(FIXED_TIME, FIXED_TIME + 60))
    assert len(timeline.values) == _SECONDS and "control.db" in timeline.note
    asyncio.run(recording.close())
