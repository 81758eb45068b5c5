"""Tests of finished requests and usage data from every kind of source."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from appliance import calls
from appliance.pages import NamedRequest, UsageQuery, UsageRow
from console import units
from console.app import ConsoleApp
from console.fake import FIXED_TIME
from console.lines import plain
from console.live import LiveSource
from console.replay import ReplaySource
from console.screens.finished import FinishedView
from console.screens.request_time import Part, time_lines
from console.screens.usage import UsageView
from console.source import UnsupportedListError
from console.stored_recording import file_recording
from store.requests import RequestLog, RequestRow
from store.schemas import HISTORY
from store.writer import Writer
from tests.console.frames import SIZES, session, source
from tests.console.pilots import console, press, run, shown, until
from tests.console.recorded import fake_seconds, record
from tests.core.conftest import read_answer, running_core


def test_v_switches_between_unfinished_and_finished_requests_under_the_same_key() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4", "v")
        await until(pilot, lambda: "Finished requests" in shown(app) and " stop " in shown(app))
        await press(pilot, "enter")
        await until(pilot, lambda: "Time from arrival to completion" in shown(app))
        await press(pilot, "escape", "v")
        await until(pilot, lambda: app.session.view.name == "requests")
        await press(pilot, "colon", *"finished", "enter")
        await until(pilot, lambda: app.session.view.name == "finished")
        await press(pilot, "4")
        await until(pilot, lambda: app.session.view.name == "requests")
        await press(pilot, "v", "tab")
        await until(pilot, lambda: app.session.view.name == "gpus")
        await press(pilot, "7", "v")
        await until(pilot, lambda: "Usage 168" in shown(app))

    run(steps, console())


def test_a_request_that_was_cancelled_is_among_the_finished_requests() -> None:
    fake = source()
    fake.step()
    sim = fake.simulation
    while not sim.queue:
        sim._arrive(sim.now)
    running = next(request for replica in sim.replicas for request in replica.running)
    waiting = {one.id for one in sim.queue} | {running.id}
    for request_id in waiting:
        assert sim.cancel(request_id)
    rows = asyncio.run(fake.rows("finished"))
    assert all(isinstance(row, NamedRequest) for row in rows)
    cancelled = {row.request_id for row in rows if getattr(row, "finish_reason", "") == "cancelled"}
    assert cancelled == waiting
    assert not waiting & {one.request_id for one in fake.step().requests}


def test_finished_requests_are_filtered_sorted_marked_and_exported() -> None:
    made = session()
    made.run("screen finished")
    view = made.view
    assert isinstance(view, FinishedView)
    made.run("filter result:length generated_tokens>100")
    made.run("sort duration_s")
    made.lines(120, 40)
    rows = view.ordered(made.context)
    assert 0 < len(rows) < len(view.rows(made.context))
    assert all(row.finish_reason == "length" and row.generated_tokens > 100 for row in rows)
    durations = [row.e2e_ms or 0.0 for row in rows]
    assert durations == sorted(durations, reverse=True)
    made.run("mark")
    assert made.copied().splitlines()[1].startswith(rows[0].request_id)
    assert len(made.export("csv").splitlines()) == len(rows) + 1


def test_the_bar_of_a_request_is_divided_by_the_lengths_of_its_parts() -> None:
    parts = [Part("queue", 1.0), Part("prefill", 0.5), Part("decode", 2.5)]
    top, bar, legend = time_lines("Time", 4.0, parts, 83)
    assert plain(top).endswith("4.00s ─")
    assert plain(bar) == "░" * 20 + "▒" * 10 + "█" * 50
    assert plain(legend) == "queue 1.00s   prefill 500ms   decode 2.50s"
    assert "unknown" in plain(time_lines("Time", None, [], 83)[1])


def test_an_error_is_shown_with_its_status_and_its_text() -> None:
    made = session()
    row = NamedRequest(
        request_id="r",
        created_at=FIXED_TIME,
        finished_at=FIXED_TIME + 1,
        endpoint="/v1/completions",
        status=429,
        finish_reason="error",
        error="tokens_per_minute is exhausted",
        sequence=1,
        state="ended",
        double_ends=0,
    )
    made.take_rows("finished", [row])
    made.run("screen finished")
    assert any("429 error" in plain(line) for line in made.lines(120, 40))
    assert "1 failed" in plain(made.lines(120, 40)[2])
    made.run("open")
    assert any("tokens_per_minute is exhausted" in plain(line) for line in made.lines(120, 40))


def test_the_usage_sums_the_rows_that_match_the_filter() -> None:
    made = session()
    first = UsageRow(
        day="2026-09-20",
        tenant="a",
        key_id="",
        requests=3,
        failed=1,
        prompt_tokens=40,
        cached_tokens=10,
        output_tokens=7,
        cost=1.5,
    )
    second = UsageRow(
        day="2026-09-21",
        tenant="b",
        key_id="k",
        requests=5,
        failed=0,
        prompt_tokens=60,
        cached_tokens=0,
        output_tokens=8,
    )
    made.take_rows("usage", [first, second])
    made.run("screen usage")
    view = made.view
    assert isinstance(view, UsageView)
    assert view.note(made.context) == "7 days · 100 prompt and 15 output tokens · cost 1.50"
    made.run("filter tenant:b")
    assert view.note(made.context) == "7 days · 60 prompt and 8 output tokens"
    assert any(plain(line).rstrip().endswith(" --") for line in made.lines(120, 40))


def test_no_action_concerns_a_row_of_the_usage() -> None:
    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "7", "v")
        await until(pilot, lambda: "Usage 168" in shown(app))
        await press(pilot, "Q")
        await until(pilot, lambda: "select a tenant first" in shown(app))

    run(steps, console(write=True))


def _end(log: RequestLog, name: str, arrived: float, ended: float) -> None:
    log.end(
        RequestRow(
            request_id=name,
            created_at=FIXED_TIME + arrived,
            finished_at=FIXED_TIME + ended,
            endpoint="/v1/completions",
            status=200,
            finish_reason="stop",
        )
    )


def test_history_shows_the_requests_that_had_finished_by_the_displayed_time(tmp_path: Path) -> None:
    path = record(tmp_path / "history.db", fake_seconds(30))
    writer = Writer(path, HISTORY, synchronous="NORMAL")
    writer.start()
    log = RequestLog(writer)
    for number in range(1100):
        # These requests arrived before the displayed time and finished after it. They fill the first page of
        # the log.
        _end(log, f"later-{number}", 10 + number / 1000, 25)
    _end(log, "before", 5, 12)
    _end(log, "after", 16, 20)
    writer.close()

    async def names(at: float) -> list[str]:
        replay = ReplaySource(file_recording(path), FIXED_TIME + at)
        await replay.next()
        rows = await replay.rows("finished")
        with pytest.raises(UnsupportedListError, match="per day"):
            await replay.rows("usage")
        await replay.close()
        return [row.request_id for row in rows if isinstance(row, NamedRequest)]

    assert asyncio.run(names(15.5)) == ["before"]
    assert len(asyncio.run(names(28.5))) == 500


@pytest.mark.system
def test_a_service_and_its_file_have_the_same_finished_requests(tmp_path: Path) -> None:
    with running_core(tmp_path) as service:
        for _ in range(2):
            read_answer(service.connect("m 3"))

        async def live() -> tuple[list[NamedRequest], list[UsageRow]]:
            reader = LiveSource(service.run_dir)
            found: list[NamedRequest] = []
            for _ in range(600):
                found = [row for row in await reader.rows("finished") if isinstance(row, NamedRequest)]
                if len(found) == 2:
                    break
                await asyncio.sleep(0.1)
            used = [row for row in await reader.rows("usage") if isinstance(row, UsageRow)]
            assert await reader.rows("usage") is await reader.rows("usage")
            await reader.close()
            return found, used

        found, used = asyncio.run(live())
        assert len(found) == 2 and all(row.billed_tokens == 3 for row in found)
        assert used == service.admin.call(calls.usage(UsageQuery())).rows
        assert sum(row.output_tokens for row in used) == 6
        path = service.state_dir / "history.db"

        async def stored() -> list[NamedRequest]:
            recording = file_recording(path)
            rows = await recording.rows("finished", max(row.finished_at or 0.0 for row in found))
            await recording.close()
            return [row for row in rows if isinstance(row, NamedRequest)]

        assert asyncio.run(stored()) == found


@pytest.mark.parametrize("size", SIZES)
def test_requests_and_stalls_of_an_earlier_day_show_their_date(size: tuple[int, int]) -> None:
    made = session(steps=240, interval_s=1.0)
    snapshot = made.context.snapshot
    assert snapshot is not None and snapshot.stalls
    earlier = snapshot.at - 3 * 86_400
    first, *others = made.context.rows_of("finished", NamedRequest)
    made.take_rows("finished", [msgspec.structs.replace(first, finished_at=earlier), *others])
    made.run("screen finished")
    made.view.reverse = False  # type: ignore[attr-defined]
    assert any(units.short_date(earlier) in plain(row) for row in made.lines(*size))
    if size[1] >= 40:
        stalls = [msgspec.structs.replace(one, at=earlier) for one in snapshot.stalls]
        made.context.snapshot = msgspec.structs.replace(snapshot, stalls=stalls)
        made.run("screen batches")
        assert any(plain(row).startswith(units.short_date(earlier)) for row in made.lines(*size))
